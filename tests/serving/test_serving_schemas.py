"""Schemas that llguidance would misread: every answer matches the given schema, or the request gets a 400."""

import json
import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from llamaspec.serving.engine import BatchingEngine
from llamaspec.serving.grammar import Grammars
from llamaspec.serving.openai import Refusal
from llamaspec.serving.request import NO_WAY_ON, Allowed, DeadEnd, Request
from llamaspec.serving.schemas import LARGEST_EXACT, prepared
from llamaspec.serving.tools import HERMES
from tests.serving.serving_site import EOS, TOKENIZER, FakeEngine, obedient, running
from tests.serving.test_serving_engine import LIMITS, VOCAB, Client, Fake
from tests.serving.tool_templates import TEMPLATES

pytest.importorskip("llguidance", reason="needs llguidance, of the extra serve")

INTEGER, BOOLEAN = {"type": "integer"}, {"type": "boolean"}
ASK = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, vocab=1024, stops=frozenset({EOS}))


@pytest.fixture(scope="module")
def site():
    with running(FakeEngine(obedient, context=4000), template=TEMPLATES["hermes"]) as site:
        yield site


def closed(properties: dict[str, Any], *, required: bool = True, **more: Any) -> dict[str, Any]:
    names = [*properties] if required else []
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


def is_taken(grammars: Grammars, schema: dict[str, Any], text: str) -> bool:
    """Return whether a schema's grammar accepts exactly this text."""
    rule, drawn = grammars.of_schema(schema, param="response_format")(), []
    for token in TOKENIZER.encode(text, start=False):
        if not rule(drawn)[token]:
            return False
        drawn.append(token)
    return bool(rule(drawn)[EOS])


def answers(grammars: Grammars, schema: dict[str, Any], count: int) -> list[Any]:
    """Draw `count` random answers that the schema's grammar allows, and parse them."""
    new_grammar = grammars.of_schema(schema, param="response_format")
    drawn = [drawn_by(new_grammar(), random.Random(seed)) for seed in range(count)]
    return [json.loads(b"".join(map(TOKENIZER.bytes_of, tokens))) for tokens in drawn]


def drawn_by(rule: Allowed, draw: random.Random) -> list[int]:
    drawn: list[int] = []
    signs = [token for token in range(1024) if TOKENIZER.bytes_of(token) in (b'"', b"}", b"]", b"},", b'",', b'":')]
    while not drawn or drawn[-1] != EOS:
        allowed = rule(drawn)
        likely = [token for token in (EOS, *signs) if allowed[token]]
        drawn.append(draw.choice(likely if likely and draw.random() < 0.5 else np.flatnonzero(allowed).tolist()))
    return drawn[:-1]


def refused(grammars: Grammars, schema: dict[str, Any]) -> str:
    with pytest.raises(Refusal) as refusal:
        grammars.of_schema(schema, param="response_format")
    error = refusal.value.body["error"]
    assert (refusal.value.status, error["code"], error["param"]) == (400, "invalid_schema", "response_format")
    return error["message"]


@pytest.mark.parametrize("large", [LARGEST_EXACT + 1, -LARGEST_EXACT - 1, 1145141919810893001, 2**64, 10**30, 2.0**60])
@pytest.mark.parametrize("key", ["const", "enum"])
def test_values_beyond_2_to_the_53_are_refused(grammars, key, large):
    value = [1, large] if key == "enum" else large
    assert f"{key}: expected numbers up to 2^53" in refused(grammars, closed({"id": {key: value}}))
    nested = [{"a": [large]}] if key == "enum" else {"a": [large]}
    assert key in refused(grammars, {"anyOf": [{"$ref": "#/$defs/id"}], "$defs": {"id": {key: nested}}})


# llguidance reads each of these numbers as another float64.
@pytest.mark.parametrize("value", [97408.67753766531, 2.5495679789185846e-06, 4503599627370495.5, 1.079193197e-16])
def test_fractions_that_would_come_back_as_others_are_refused(grammars, value):
    for schema in ({"const": value}, {"enum": [{"a": [value]}]}):
        assert "(others are not exact)" in refused(grammars, schema)


@pytest.mark.parametrize("key", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize("bound", [97408.67753766531, -945997.3947885659, 31453720.764582146, 1.079193197e-16, 1e-30])
def test_bounds_with_many_digits_move_inward(bound, key):
    moved = Fraction(prepared({"type": "number", key: bound}, lambda *_: False)[key])
    assert (moved <= Fraction(bound)) if "max" in key.lower() else (moved >= Fraction(bound))
    assert abs(moved - Fraction(bound)) <= max(abs(Fraction(bound)) / 10**14, Fraction(1, 10**22))


def test_exact_values_stay(grammars):
    for value in (LARGEST_EXACT, -LARGEST_EXACT, 0.1, 1e-7, 123456789012345e-22, 12345678901.2345, True):
        assert answers(grammars, {"const": value}, 1) == [value]
    # A huge number in a description or a default is neither a value nor a bound, so it is allowed.
    assert is_taken(grammars, closed({"const": INTEGER}, description=str(2**60), default=2**60), '{"const": 1}')


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("seed", range(12))
def test_no_number_is_beyond_its_bounds(grammars, kind, seed):
    draw = random.Random(seed)
    low = draw.choice([LARGEST_EXACT, 10**17, 1145141919810893001, -(2**63), -(2**64), -LARGEST_EXACT - 7])
    low += draw.randrange(2000)
    high = low + draw.choice([10**4, 10**6, 2**64])
    schema = {"type": kind, draw.choice(["minimum", "exclusiveMinimum"]): low}
    schema |= {draw.choice(["maximum", "exclusiveMaximum"]): high}
    try:
        numbers = answers(grammars, schema, 6)
    except Refusal as refusal:
        assert "Unsatisfiable" in str(refusal) or "9e18" in str(refusal)
        return
    for number in numbers:
        assert schema.get("minimum", -math.inf) <= number <= schema.get("maximum", math.inf)
        assert schema.get("exclusiveMinimum", -math.inf) < number < schema.get("exclusiveMaximum", math.inf)


def test_bounds_of_64_bits_are_taken(grammars):
    assert is_taken(grammars, {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-12")
    assert is_taken(grammars, {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "7")
    assert is_taken(grammars, {"type": "number", "maximum": 1.7976931348623157e308}, "7.5")
    assert "maximum" in refused(grammars, {"type": "integer", "maximum": -(10**19)})
    assert "minimum" in refused(grammars, {"type": "integer", "minimum": 10**19})
    assert refused(grammars, {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1})


def in_defs(kind: dict[str, Any], *, id: str, target: str, inner: dict[str, Any]) -> dict[str, Any]:
    return closed({"x": {"$ref": target}}) | {"$id": id, "$defs": {"d": kind | inner}}


SAME_ID = {
    "of both": lambda kind: in_defs(kind, id="https://example.org/s", target="#/$defs/d", inner={}),
    "whole address": lambda kind: in_defs(kind, id="https://example.org/s", target="s#/$defs/d", inner={}),
    "of a part": lambda kind: in_defs(kind, id="", target="https://example.org/d", inner={"$id": "https://example.org/d"}),
    "of a part, relative": lambda kind: in_defs(kind, id="https://example.org/s", target="d", inner={"$id": "d"}),
    "until draft 4": lambda kind: in_defs(kind, id="", target="urn:d", inner={"id": "urn:d"}),
    "anchor": lambda kind: in_defs(kind, id="https://example.org/s", target="#d", inner={"$anchor": "d"}),
    "urn": lambda kind: in_defs(
        {"$ref": "#/$defs/e"}, id="urn:s", target="urn:d", inner={"$id": "urn:d", "$defs": {"e": kind}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", SAME_ID)
def test_two_tools_with_one_id_keep_their_schemas(grammars, site, form):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": SAME_ID[form](kind)}}
        for name, kind in (("count", INTEGER), ("test", BOOLEAN))
    ]
    names = set()
    for seed in range(8):
        body = {"messages": ASK, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        reply = site.ask("/v1/chat/completions", body)
        assert reply.status == 200, reply.body
        (call,) = reply.json["choices"][0]["message"]["tool_calls"]
        name, value = call["function"]["name"], json.loads(call["function"]["arguments"])["x"]
        assert type(value) is (int if name == "count" else bool)
        names.add(name)
    assert len(names) == 2
    assert HERMES.schema([], most=1) == {"anyOf": []}


def test_a_reference_finds_its_target_and_unknown_ones_are_refused(grammars):
    odd = {"a/b~c%d é": INTEGER, "list": {"prefixItems": [BOOLEAN, INTEGER]}}
    for target in ("#/$defs/a~1b~0c%25d%20%C3%A9", "#/$defs/list/prefixItems/1"):
        schema = {"$id": "urn:x", "$ref": target, "$defs": odd}
        assert is_taken(grammars, schema, "1") and not is_taken(grammars, schema, "true")
    for target in ("#/$defs/none", "urn:y", "#none"):
        assert refused(grammars, {"$id": "urn:x", "$ref": target, "$defs": odd})
    # Here $id, $ref and $anchor are names and values, not keywords.
    names = closed({"$id": {"const": "$ref"}, "$ref": {"enum": [{"$ref": "#/nowhere"}]}, "$anchor": INTEGER})
    assert answers(grammars, names, 1)[0]["$ref"] == {"$ref": "#/nowhere"}


@pytest.mark.parametrize(
    ("least", "more"),
    [
        (2, {}),
        (2, {"patternProperties": {"^[xy]$": BOOLEAN}, "additionalProperties": False}),
        (3, {"properties": {"a": {}}, "required": ["a"]}),
        (2.0, {"additionalProperties": INTEGER}),
    ],
)
def test_as_many_different_names_cannot_be_promised(grammars, least, more):
    assert "may be repeated" in refused(grammars, {"type": "object", "minProperties": least, **more})
    assert "may be repeated" in refused(grammars, closed({"inner": {"type": "object", "minProperties": least, **more}}))


@pytest.mark.parametrize("least", [0, 1, 2])
def test_an_object_has_as_many_properties_as_it_needs(grammars, least):
    schema = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": INTEGER}
    assert all(len(value) >= least for value in answers(grammars, schema | {"minProperties": least}, 20))


@pytest.mark.parametrize("name", ["a", "\u6666", "é", "x y", 'q"', "b\\", "\U0001f98a"])
@pytest.mark.parametrize("more", [{}, {"additionalProperties": {"type": "string"}}])
def test_a_declared_name_has_one_spelling(grammars, name, more):
    units = name.encode("utf-16-be")
    spelled = "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
    for schema in (
        {"type": "object", "properties": {name: INTEGER}, **more},
        {"type": "object", "patternProperties": {f"^{name.replace(chr(92), chr(92) * 2)}$": INTEGER}, **more},
    ):
        assert is_taken(grammars, schema, f"{{{json.dumps(name, ensure_ascii=False)}: 1}}")
        for text in ("true", '"a"'):
            for form in (spelled, spelled.upper().replace("U", "u")):
                assert not is_taken(grammars, schema, f'{{"{form}": {text}}}')
        assert is_taken(grammars, schema | {"additionalProperties": True}, '{"other\\u0001\\n": true}')


def test_control_characters_keep_their_escapes(grammars):
    assert is_taken(grammars, {"const": "\x1f\n\x7f"}, '"\\u001f\\n\\u007f"')
    assert is_taken(grammars, {"type": "string", "pattern": "^\x01$"}, '"\\u0001"')
    assert "control character" in refused(grammars, {"type": "object", "properties": {"a\nb": {}}})
    assert is_taken(grammars, closed({"a\nb": INTEGER}), '{"a\\nb": 1}')


ENDLESS = closed({"child": {"$ref": "#"}})
DEAD_ENDS = {
    "a pattern that only a declared name matches": closed({"a": BOOLEAN}, patternProperties={"^a$": {}}),
    "of optional names": closed({"a": BOOLEAN, "b": {}}, required=False, patternProperties={"^(a|b)$": {}}),
    "of a required name": closed({}, patternProperties={"^z$": {}}) | {"required": ["z"]},
    "inside": closed({"x": closed({"é": BOOLEAN}, patternProperties={"^é$": {}})}, required=False),
    "a reference to itself": {"$ref": "#"},
    "references in a ring": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "choices of itself": {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]},
    "a child without end": ENDLESS,
    "a child after a number": closed({"number": INTEGER, "child": {"$ref": "#"}}),
    "an optional child without end": closed({"x": {"$ref": "#/$defs/e"}}, required=False)
    | {"$defs": {"e": closed({"child": {"$ref": "#/$defs/e"}})}},
    "one of two": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/anyOf/1"}, "minItems": 1}]},
    "a tuple of itself": {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    "a million items": {"type": "array", "items": {"type": "null"}, "minItems": 10**6},
    "a million items inside": closed({"a": {"type": "array", "minItems": 10.0**6}}),
    "499 optional names": {"type": "object", "properties": {f"p{i}": INTEGER for i in range(499)}},
}  # fmt: skip


@pytest.mark.parametrize("name", DEAD_ENDS)
def test_a_dead_end_is_found_before_the_first_token(grammars, name):
    assert refused(grammars, DEAD_ENDS[name])


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        closed({"child": {"$ref": "#"}}, required=False),
        {"type": "array", "items": {"$ref": "#"}},
        closed({"child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
        {"properties": {"child": {"$ref": "#"}}, "required": ["child"]},
        {"enum": [1, 2], "type": "object", "properties": {"child": {"$ref": "#"}}, "required": ["child"]}
        | {"type": "integer"},
        closed({"a": {}}, required=False, patternProperties={"^[ab]$": INTEGER}),
        closed({"a": INTEGER}, patternProperties={"^.*$": {}}),
        {"type": "array", "items": {"type": "null"}, "minItems": 200},
        closed({f"p{i}": INTEGER for i in range(499)}, required=False),
    ],
)
def test_what_has_an_end_is_taken(grammars, schema):
    grammars.of_schema(schema, param="response_format")


def test_a_schema_that_comes_again_is_compiled_once(grammars, monkeypatch):
    schema = closed({"once": INTEGER})
    grammars.of_schema(schema, param="response_format")
    monkeypatch.setattr("llamaspec.serving.grammar.prepared", lambda *_: 1 / 0)
    assert grammars.of_schema(schema, param="response_format")()([]).any()


def test_preparing_changes_no_schema_in_place():
    schema = {"$id": "a", "$defs": {"b": {"maximum": 2**60, "$anchor": "c"}}, "anyOf": [{"$ref": "#c"}, True]}
    before = json.dumps(schema)
    after = prepared(schema, lambda pattern, names: False)
    assert json.dumps(schema) == before
    assert after["anyOf"] == [{"$ref": "#/$defs/b"}, True] and after["$defs"]["b"]["maximum"] < 2**60


def test_a_dead_end_during_an_answer_is_an_invalid_schema():
    """A schema that allows no next token in the middle of an answer gives the client a 400; nothing is logged."""

    def allowed(drawn):
        if len(drawn) == 2:
            raise DeadEnd("nothing")
        return np.arange(VOCAB) == 5

    engine, client = BatchingEngine(Fake(), LIMITS, vocab=VOCAB, dim=2, eos=frozenset()), Client()
    try:
        engine.submit(Request((1, 2), 10, allowed=allowed), client)
        end = client.wait()
    finally:
        engine.close()
    assert (end.reason, end.message) == ("error", NO_WAY_ON)


def test_the_client_of_a_dead_end_gets_400():
    class Dead(FakeEngine):
        def _run(self, number, request, deliver):
            from llamaspec.serving.request import Finished

            deliver(Finished("error", len(request.prompt), 0, 0, NO_WAY_ON))
            self._open.discard(number)

    with running(Dead()) as site:
        reply = site.ask("/v1/completions", {"prompt": "fox"})
    assert (reply.status, reply.error["code"], reply.error["message"]) == (400, "invalid_schema", NO_WAY_ON)
