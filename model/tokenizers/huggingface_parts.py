"""Checks and changes the normalizer, pre-tokenizer and post-processor of a tokenizer.json.

With the changes, a tokenizer can encode text that continues other text.
"""

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.model.tokenizers.charsmap import check_charsmap
from llamaspec.model.tokenizers.gguf_cuttings import CUTTINGS

Part = dict[str, Any]
Places = tuple[Part | None, Part | None]  # normalizer and pre-tokenizer

MOST_GROWTH = 1_000  # As `check_growth` counts, normalizers of transformers 5 make a text at most 6 times as long.
MOST_REPEATS = 1_000_000  # largest product of the numbers in a regular expression's repeats, such as the 3 in {1,3}
LONGEST_PATTERN = 1_000_000  # characters
DEEPEST_CLASS = 8  # deepest nesting of character classes
REPEAT = re.compile(r"[*+]|\{\d*,\}")
KNOWN_PATTERNS = frozenset(pattern for cutting in CUTTINGS.values() for pattern in cutting.patterns)
LISTS = ("normalizers", "pretokenizers", "decoders", "processors")  # the keys of a Sequence


def steps(component: Part | None) -> list[Part]:
    """List the parts of a normalizer, pre-tokenizer, decoder or post-processor, which may be a nested Sequence."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    return [step for part in component[_list_of(component)] for step in steps(part)]


def check_patterns_and_tables(spec: Mapping[str, Any], path: str) -> None:
    """Check the regular expressions and character tables in a tokenizer.json, before the library compiles them.

    The library panics on a damaged table, and some expressions take unlimited memory or time. Raises `CheckpointError`
    for such a table or expression.
    """
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        pending = [spec.get(name)]  # We use a loop, since the file may be nested too deeply for recursive calls.
        while pending:
            part = pending.pop()
            if isinstance(part, list):
                pending += part
            elif isinstance(part, dict):
                pending += part.values()
                if isinstance(pattern := part.get("Regex"), str):
                    check_pattern(pattern, name, path)
                if isinstance(encoded := part.get("precompiled_charsmap"), str):
                    check_charsmap(_decoded(encoded), path)


def _decoded(encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return b""


def check_growth(parts: Sequence[Part], name: str, path: str) -> None:
    """Raise `CheckpointError` if all replacements together could make a text over `MOST_GROWTH` times as long."""
    growth = 1.0
    for part in parts:
        match part:
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if pattern:
                growth *= max(1.0, len(content) / len(pattern))
            case {"type": "Replace", "content": content}:  # An expression may match between any two characters.
                growth *= 1 + len(content)
            case {"type": "Prepend", "prepend": text}:
                growth *= 1 + len(text) / 4
    if growth > MOST_GROWTH:
        raise refused(path, f"the replacements in {name} may make a text more than {MOST_GROWTH:,} times as long")


def may_panic(parts: Iterable[Part]) -> bool:
    """Tell whether the library may panic on some text, given the parts of a normalizer, pre-tokenizer or decoder.

    The library panics if its regular expression engine gives up on a text, or if a part replaces the empty string. The
    regular expressions of known tokenizers never cause this.
    """
    for part in parts:
        match part:
            case {"pattern": {"Regex": pattern}} if pattern not in KNOWN_PATTERNS:
                return True
            case {"pattern": {"String": ""}}:
                return True
    return False


def check_pattern(pattern: str, name: str, path: str) -> None:
    """Raise `CheckpointError` for a regular expression that may take exponential time.

    Such an expression repeats a group that contains a repeat.

    >>> check_pattern(r"[(+]+(?:\\(a+|b)?", "normalizer", "tokenizer.json")
    >>> check_pattern("(?:a+|b)*", "normalizer", "tokenizer.json")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    llamaspec.model.checkpoints.checkpoint.CheckpointError: tokenizer.json: ... contains a repeat: "(?:a+|b)*"
    """
    if len(pattern) > LONGEST_PATTERN:
        raise refused(path, f"a regular expression in {name} has more than {LONGEST_PATTERN:,} characters")
    # We replace each escaped character and each character class with one letter.
    plain = re.sub(r"\\[pPx]\{[^}]*\}|\\.", "x", pattern, flags=re.DOTALL)
    for _ in range(DEEPEST_CLASS):
        plain = re.sub(r"\[\^?\]?[^][]*\]", "x", plain)
    repeats = 1
    for least, most in re.findall(r"\{(\d*)(?:,(\d*))?\}", plain):
        repeats *= max(int(least[:9] or 0), int(most[:9] or 0), 1)
        if repeats > MOST_REPEATS:
            what = f"asks for more than {MOST_REPEATS:,} repeats"
            raise refused(path, f"a regular expression in {name} {what}: {short(pattern)}")
    inside = [False]  # for each open group, whether it contains an unbounded repeat
    for token in re.finditer(r"\(|\)|[*+]|\{\d*,\}", plain):
        if token[0] == "(":
            inside.append(False)
        elif token[0] == ")":
            inner = inside.pop() if len(inside) > 1 else False
            if inner and REPEAT.match(plain, token.end()):
                what = f"repeats a group that contains a repeat: {short(pattern)}"
                raise refused(path, f"a regular expression in {name} {what}")
            inside[-1] |= inner
        else:
            inside[-1] = True


def check_post_processor(after: Part | None, path: str) -> None:
    """Raise `CheckpointError` if a post-processor's template uses a token that it does not define.

    The library would panic on such a template.
    """
    for step in steps(after):
        if step["type"] == "TemplateProcessing":
            names = {part["SpecialToken"]["id"] for part in step["single"] if "SpecialToken" in part}
            if missing := names - step["special_tokens"].keys():
                what = f"the template uses the token {short(min(missing))}, which its special_tokens do not define"
                raise refused(path, f"post_processor: {what}")


def places_of(normalizer: Part | None, before: Part | None) -> tuple[Places, Places, Places]:
    """Return three pairs of normalizer and pre-tokenizer, for three positions of a text.

    The positions are: at the start of a text, after a control token, and in the middle of a text. After a control
    token, Metaspace with the scheme "first" adds no space, but ByteLevel with add_prefix_space adds a space, as in the
    library. In the middle of a text, no part adds a space, since the text already has its own spaces.
    """
    after_special = _changed(normalizer, _only_first), _changed(before, _only_first)
    within = _changed(normalizer, _without_prefix), _changed(before, _without_prefix)
    return (normalizer, before), after_special, within


def with_prefix(
    normalizer: Part | None, before: Part | None, decoder: Part | None, *, scheme: str
) -> tuple[Part | None, Part | None, Part | None]:
    """Change a SentencePiece-like tokenizer so that it puts a space in front of texts according to `scheme`.

    `scheme` is Metaspace's prepend_scheme: "never", "first" or "always". Returns the changed normalizer, pre-tokenizer
    and decoder.
    """
    (normalizer, before), without = places_of(normalizer, before)[2], _changed(decoder, _without_strip)
    if scheme == "never":
        return normalizer, before, without
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    cuts = [part | {"prepend_scheme": scheme} if part["type"] == "Metaspace" else part for part in steps(before)]
    if not any(part["type"] == "Metaspace" for part in cuts):
        cuts = [space, *cuts]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    after = {"type": "Sequence", "decoders": [*steps(without), strip]}
    return normalizer, {"type": "Sequence", "pretokenizers": cuts}, after


def with_byte_level_prefix(before: Part | None, *, prefix: bool) -> Part | None:
    """Change a byte-level pre-tokenizer so that it puts a space in front of texts, or no space if `prefix` is False."""

    def changed(part: Part) -> Part:
        return part | {"add_prefix_space": prefix} if part["type"] == "ByteLevel" else part

    return _changed(before, changed)


def _without_strip(part: Part) -> Part | None:
    """Change a part of a decoder so that it keeps a space at the start of a text.

    Returns None if the part only removes this space.
    """
    match part:
        case {"type": "Strip", "content": " ", "stop": 0}:
            return None
        case {"type": "Metaspace"}:
            return part | {"prepend_scheme": "never"}
    return part


def _changed(component: Part | None, change: Callable[[Part], Part | None]) -> Part | None:
    """Apply `change` to each part of a component, and remove the parts for which `change` returns None."""
    if component is None or component["type"] != "Sequence":
        return None if component is None else change(component)
    key = _list_of(component)
    parts = (_changed(part, change) for part in component[key])
    return component | {key: [part for part in parts if part is not None]}


def _only_first(part: Part) -> Part | None:
    first = part["type"] == "Metaspace" and part["prepend_scheme"] == "first"
    return part | {"prepend_scheme": "never"} if first else part


def _without_prefix(part: Part) -> Part | None:
    match part:
        case {"type": "Prepend"}:
            return None
        case {"type": "Replace", "pattern": {"Regex": pattern}} if pattern.startswith((r"\A", "^")):
            return None  # This changes only the start of a text.
        case {"type": "Metaspace"}:
            return part | {"prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return part | {"add_prefix_space": False}
    return part


def _list_of(sequence: Part) -> str:
    return next(key for key in LISTS if key in sequence)
