"""JSON answers: every drawn answer matches its schema, or is a prefix of a match if it was cut."""

import json

import numpy as np
import pytest

from llamaspec.serving.grammar import Grammars
from llamaspec.serving.openai import JsonFormat, Refusal, Schema, SchemaFormat
from tests.serving.serving_site import EOS, TOKENIZER, FakeEngine, obedient, running

pytest.importorskip("llguidance", reason="needs llguidance, of the extra serve")

FOX = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def site():
    with running(FakeEngine(obedient, context=400)) as site:
        yield site


@pytest.mark.sampled(3)  # 1 s each
@pytest.mark.parametrize("seed", range(10))
def test_an_answer_keeps_to_its_schema(site, seed):
    form = {"type": "json_schema", "json_schema": {"name": "fox", "strict": True, "schema": FOX}}
    body = {"messages": ASK, "seed": seed, "response_format": form}
    choice = site.ask("/v1/chat/completions", body).json["choices"][0]
    assert choice["finish_reason"] == "stop"
    fox = json.loads(choice["message"]["content"])
    assert [*fox] == ["name", "age"] and isinstance(fox["name"], str) and 1 <= fox["age"] <= 99
    assert choice["message"]["content"] == json.dumps(fox, ensure_ascii=False) or "\\" in choice["message"]["content"]


def test_choices_have_rules_of_their_own(site):
    form = {"type": "json_schema", "json_schema": {"schema": FOX}}
    body = {"prompt": "fox", "n": 4, "seed": 1, "max_tokens": 300, "response_format": form}
    texts = [choice["text"] for choice in site.ask("/v1/completions", body).json["choices"]]
    assert len({*texts}) == 4 and all(json.loads(text)["age"] for text in texts)


def test_any_text_has_no_rule():
    with running(FakeEngine()) as site:
        assert site.ask("/v1/completions", {"prompt": "fox", "response_format": {"type": "text"}}).status == 200
        assert site.engine.requests[-1].allowed is None


def test_an_object_begins_with_a_brace():
    rule = Grammars(TOKENIZER, vocab=1024, stops=frozenset({EOS})).allowed_by(JsonFormat())()
    assert {TOKENIZER.bytes_of(int(token))[:1] for token in np.flatnonzero(rule([]))} == {b"{"}
    with pytest.raises(ValueError):
        rule([EOS])


@pytest.mark.parametrize(
    "schema", [{"type": "objct"}, {"properties": 5}, {"$ref": "#/nowhere"}, {"enum": ["x" * 100] * 1000}]
)
def test_a_schema_that_cannot_be_used_is_refused(site, schema):
    reply = site.ask(
        "/v1/chat/completions",
        {"messages": ASK, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
    )
    assert (reply.status, reply.error["param"]) == (400, "response_format")


def test_without_llguidance_one_line_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(Refusal, match="pip install"):
        Grammars(TOKENIZER, vocab=1024, stops=frozenset({EOS})).allowed_by(SchemaFormat(json_schema=Schema(schema=FOX)))
