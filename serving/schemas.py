"""Prepares JSON schemas for llguidance, and refuses schemas that llguidance would misread.

llguidance makes answers match a schema, with a few exceptions. In these cases, we change the schema so that every
answer still matches the original schema, or we refuse the schema:

- llguidance reads numbers as float64, which cannot represent every integer beyond 2^53. It also reads many numbers with
  more than 15 digits as a neighbor of the right float64.
- It resolves references by `$id`, and therefore confuses two tools that use the same `$id`.
- It counts a name that occurs twice in an object as two properties.
- It accepts schemas that no finite text matches, and then fails after some tokens.
"""

from collections.abc import Callable, Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, TypeGuard
from urllib.parse import unquote, urldefrag, urljoin

Schema = Any  # a dict, or True (every value matches), or False (no value matches)
Place = tuple[str | int, ...]  # keys and indices from the root to a schema

LARGEST_EXACT = 1 << 53  # float64 represents all integers up to here
LARGEST_POWER = 22  # float64 represents all powers of ten up to 10^22
LARGEST_BOUND = 9 * 10**18  # llguidance computes bounds in 64 bits
DIGITS = 15  # float64 preserves this many decimal digits of every number
MOST_ITEMS = 2000  # with this many items, llguidance takes a millisecond per token
BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
LISTS = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
SINGLE = {
    "items",
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
}
IDS = ("$id", "id")  # `id` until draft 4
UPPER, LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")


def prepared(schema: dict[str, Any], only_names: Callable[[str, set[str]], bool]) -> dict[str, Any]:
    """Change a schema so that llguidance enforces it: every answer that matches the result also matches `schema`.

    The result has no `$id`, and every reference in it is a JSON pointer from its root. `only_names` checks whether a
    pattern matches only the given names. Raises ValueError for a schema that we cannot enforce.
    """
    schema = with_pointers(schema)
    for _, part in _parts(schema):
        _check_values(part)
        _check_names(part, only_names)
        for name in (*UPPER, *LOWER):
            if _is_number(part.get(name)):
                part[name] = _inner_bound(part[name], upper=name in UPPER)
    _check_finite(schema)
    return schema


def _children(schema: dict[str, Any]) -> Iterator[tuple[Place, Schema]]:
    """Yield the direct subschemas of a schema, with their keys and indices in it."""
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            yield from (((key, name), child) for name, child in value.items())
        elif key in LISTS and isinstance(value, list):
            yield from (((key, i), child) for i, child in enumerate(value))
        elif key in SINGLE:
            yield (key,), value


def _parts(schema: Schema, place: Place = ()) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield a schema and all schemas inside it that are dicts, with their places."""
    if isinstance(schema, dict):
        yield place, schema
        for step, child in _children(schema):
            yield from _parts(child, place + step)


def with_pointers(schema: dict[str, Any]) -> dict[str, Any]:
    """Copy a schema without its ids and anchors. References to ids and anchors become JSON pointers."""
    targets: dict[str, Place] = {"": ()}
    bases: dict[Place, str] = {}  # place of a schema: the base address of its references
    for place, part in _parts(schema):
        parent = next((bases[place[:end]] for end in range(len(place), -1, -1) if place[:end] in bases), "")
        address, fragment = urldefrag(_joined(parent, _id_of(part)))
        bases[place] = address
        if address not in targets:
            targets[address] = place
        for anchor in (fragment, part.get("$anchor")):
            if isinstance(anchor, str) and anchor:
                targets[f"{address}#{anchor}"] = place

    def copied(value: Any, place: Place) -> Any:
        if not isinstance(value, dict):
            return value
        copy = {key: item for key, item in value.items() if key != "$anchor" and not (key in IDS and _is_text(item))}
        for step, child in _children(value):
            if len(step) == 1:
                copy[step[0]] = copied(child, place + step)
            else:
                if copy[step[0]] is value[step[0]]:
                    copy[step[0]] = value[step[0]].copy()
                copy[step[0]][step[1]] = copied(child, place + step)
        if _is_text(copy.get("$ref")):
            copy["$ref"] = _pointer(copy["$ref"], bases[place], targets)
        return copy

    return copied(schema, ())


def _pointer(reference: str, base: str, targets: dict[str, Place]) -> str:
    """Turn a reference into a JSON pointer from the root. A reference with an unknown target is returned unchanged."""
    address, fragment = urldefrag(_joined(base, reference))
    if address not in targets:
        return reference
    if fragment and not fragment.startswith("/"):
        place = targets.get(f"{address}#{unquote(fragment)}")
        return reference if place is None else f"#{_fragment(place)}"
    return f"#{_fragment(targets[address])}{fragment}"


def _joined(base: str, reference: str) -> str:
    """Resolve a reference against a base.

    Handles a fragment itself, because `urljoin` does not support URNs as a base.
    """
    return base + reference if reference.startswith("#") else urljoin(base, reference)


def _fragment(place: Place) -> str:
    return "".join(f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in place).replace("%", "%25")


def _target(root: dict[str, Any], pointer: str) -> Schema:
    """Return the target of a JSON pointer.

    If the target is missing, returns the schema True, which allows everything: llguidance reports the error later.
    """
    value: Any = root
    for key in unquote(pointer.removeprefix("#")).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, TypeError, ValueError):
            return True
    return value


def _id_of(schema: dict[str, Any]) -> str:
    return next((schema[key] for key in IDS if _is_text(schema.get(key))), "")


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_values(schema: dict[str, Any]) -> None:
    """Raise ValueError for numbers that llguidance would change, and for more items than it can handle."""
    for name in ("const", "enum"):
        for number in _numbers(schema.get(name)):
            if abs(number) > LARGEST_EXACT:
                raise ValueError(
                    f"{name}: expected numbers up to 2^53 (larger ones are not exact), got {number}; use a string"
                )
            if not _is_exact(number):
                raise ValueError(
                    f"{name}: expected at most {DIGITS} digits, with at most {LARGEST_POWER} of them after the point "
                    f"(others are not exact), got {number}; use a string"
                )
    for name in UPPER:
        if _is_number(bound := schema.get(name)) and bound < -LARGEST_BOUND:
            raise ValueError(f"{name}: expected at least -9e18, got {bound}")
    for name in LOWER:
        if _is_number(bound := schema.get(name)) and bound > LARGEST_BOUND:
            raise ValueError(f"{name}: expected at most 9e18, got {bound}")
    if _is_number(count := schema.get("minItems")) and count > MOST_ITEMS:
        raise ValueError(f"minItems: expected at most {MOST_ITEMS}, got {count}")


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield all numbers in a JSON value."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)
    elif _is_number(value):
        yield value


def _is_exact(number: int | float) -> bool:
    """Return whether llguidance surely reads a number as the right float64.

    llguidance multiplies or divides the digits, as an integer, by a power of ten. If float64 represents the integer and
    the power exactly, only the result is rounded.

    >>> _is_exact(0.1), _is_exact(0.1 + 0.2), _is_exact(1.5e-22), _is_exact(2**53 + 2)
    (True, False, False, False)
    """
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    assert isinstance(exponent, int)
    return int("".join(map(str, digits))) <= LARGEST_EXACT and abs(exponent) <= LARGEST_POWER


def _inner_bound(bound: int | float, *, upper: bool) -> int | float:
    """Move a bound that llguidance may misread inward, to a number that it reads exactly.

    >>> _inner_bound(2**63 - 1, upper=True), _inner_bound(-(2**63), upper=False), _inner_bound(7, upper=True)
    (9000000000000000000, -9000000000000000000, 7)
    >>> _inner_bound(9007199254740993, upper=True), _inner_bound(9007199254740993, upper=False)
    (9007199254740980, 9007199254741010)
    >>> _inner_bound(97408.67753766531, upper=True), _inner_bound(1e-30, upper=False)
    (97408.6775376653, 1e-22)
    """
    if abs(bound) > LARGEST_BOUND:
        return LARGEST_BOUND if bound > 0 else -LARGEST_BOUND
    if abs(bound) <= LARGEST_EXACT and _is_exact(bound):
        return bound
    value = Decimal(repr(bound))
    exponent = max(value.adjusted() + 1 - DIGITS, -LARGEST_POWER)
    steps = int(value.scaleb(-exponent).to_integral_value(ROUND_FLOOR if upper else ROUND_CEILING))
    if abs(bound) > LARGEST_EXACT:  # the nearest float64 may lie slightly outside the decimal number
        steps += -1 if upper else 1
    return steps * 10**exponent if exponent >= 0 else float(Decimal(steps).scaleb(exponent))


def _check_names(schema: dict[str, Any], only_names: Callable[[str, set[str]], bool]) -> None:
    """Raise ValueError for rules about the names in an object that llguidance does not enforce.

    llguidance counts a repeated name twice for `minProperties`. If a declared name has a control character, llguidance
    may treat another spelling of the name as a different name. For a pattern that matches only declared names, it may
    find no name.
    """
    declared, required = schema.get("properties"), schema.get("required")
    names = {*declared} if isinstance(declared, dict) else set()
    names |= {name for name in required if _is_text(name)} if isinstance(required, list) else set()
    least = schema.get("minProperties")
    certain = len(required) if isinstance(required, list) else 0
    if _is_number(least) and least > certain + 1:
        reason = f"minProperties: {least} needs {least} names in `required`, because other names may be repeated"
        raise ValueError(reason)
    if schema.get("additionalProperties") is not False:
        for name in names:
            if any(ord(character) < 32 or character == "\x7f" for character in name):
                raise ValueError(f"properties: {name!r} has a control character, which JSON can spell in several ways")
    patterns = schema.get("patternProperties")
    for pattern in patterns if isinstance(patterns, dict) else ():
        if names and only_names(pattern, names):
            raise ValueError(f"patternProperties: {pattern!r} matches only names in `properties`: remove this pattern")


def _check_finite(root: dict[str, Any]) -> None:
    """Raise ValueError for a schema that no finite text matches, since a match would have to contain a second match."""
    reached: dict[int, dict[str, Any]] = {}
    pending: list[Schema] = [root]
    while pending:
        schema = pending.pop()
        if not isinstance(schema, dict) or id(schema) in reached:
            continue
        reached[id(schema)] = schema
        pending += [child for step, child in _children(schema) if step[0] not in ("$defs", "definitions")]
        if _is_text(schema.get("$ref")):
            pending.append(_target(root, schema["$ref"]))
    finite: set[int] = set()

    def ends(schema: Schema) -> bool:
        return not isinstance(schema, dict) or id(schema) in finite

    grows = True
    while grows:
        more = {key for key, schema in reached.items() if key not in finite and _ends(schema, root, ends)}
        finite |= more
        grows = bool(more)
    for key, schema in reached.items():
        if key not in finite:
            about = f" of {schema['$ref']}" if _is_text(schema.get("$ref")) else ""
            raise ValueError(
                f"the schema{about} requires a value inside itself without end, so no answer could ever end"
            )


def _ends(schema: dict[str, Any], root: dict[str, Any], ends: Callable[[Schema], bool]) -> bool:
    """Return whether some finite text matches a schema.

    `ends(subschema)` returns whether we know this already for a subschema.
    """
    if "$ref" in schema and _is_text(schema["$ref"]) and not ends(_target(root, schema["$ref"])):
        return False
    if not all(ends(child) for child in _listed(schema, "allOf")):
        return False
    for name in ("anyOf", "oneOf"):
        if (choices := _listed(schema, name)) and not any(map(ends, choices)):
            return False
    if "const" in schema or "enum" in schema:
        return True
    kinds = schema.get("type")
    if kinds == "object" or kinds == ["object"]:
        declared, required = schema.get("properties"), schema.get("required")
        if isinstance(declared, dict) and isinstance(required, list):
            return all(ends(declared[name]) for name in required if _is_text(name) and name in declared)
    if kinds == "array" or kinds == ["array"]:
        least = schema.get("minItems")
        least = least if _is_number(least) else 0
        first = _listed(schema, "prefixItems") or _listed(schema, "items")
        if not all(ends(child) for child in first[: int(least)]):
            return False
        items = schema.get("additionalItems" if isinstance(schema.get("items"), list) else "items", True)
        return least <= len(first) or ends(items)
    return True


def _listed(schema: dict[str, Any], name: str) -> list[Schema]:
    value = schema.get(name)
    return value if isinstance(value, list) else []
