"""Answers that must call tools: one or several calls, in each template's form, and which tools are allowed."""

import json
from typing import Any

import pytest

from llamaspec.model.tokenizers.tokenizer import decode
from llamaspec.serving.grammar import Grammars
from llamaspec.serving.openai import Function, Tool
from llamaspec.serving.tools import HERMES, LLAMA, MISTRAL, MOST_FORCED
from tests.serving.serving_site import TOKENIZER, FakeEngine, obedient, running
from tests.serving.tool_templates import ASK, TEMPLATES, TOOLS

pytest.importorskip("llguidance", reason="needs llguidance, of the extra serve")

FORMS = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA}
ADD = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module", params=FORMS)
def served(request):
    """Run a site that draws random texts within the grammar; yield the form's name and the site."""
    with running(FakeEngine(obedient, context=4000), template=TEMPLATES[request.param]) as site:
        yield request.param, site


def calls_of(site: Any, **options: Any) -> list[list[str]]:
    """Check that the calls in eight answers match the tools' schemas; return the names of the called tools."""
    body = {"messages": ASK, "tools": TOOLS, "n": 8, "seed": 1, **options}
    names = []
    for answer in site.ask("/v1/chat/completions", body).json["choices"]:
        assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
        calls = [call["function"] for call in answer["message"]["tool_calls"]]
        for call in calls:
            arguments = json.loads(call["arguments"])
            if call["name"] == "add":
                assert arguments["a"] in range(1, 10) and len(arguments) == 1
            else:
                assert [*arguments] == ["city", "unit"] and arguments["unit"] in ("C", "F")
        names.append([call["name"] for call in calls])
    return names


def test_calls_keep_to_their_schemas_one_or_several(served):
    name, site = served
    several = calls_of(site, tool_choice="required")
    assert {name for names in several for name in names} == {"weather", "add"}
    assert max(map(len, several)) > 1 and all(1 <= len(names) <= MOST_FORCED for names in several)
    assert decode(TOKENIZER, site.engine.requests[-1].prompt).endswith(FORMS[name].beginning(()))
    single = calls_of(site, tool_choice="required", parallel_tool_calls=False)
    assert all(len(names) == 1 for names in single)
    assert calls_of(site, tool_choice=ADD) == [["add"]] * 8


def test_several_calls_stream_as_they_are(served):
    """The streamed pieces of several calls add up to the calls of the whole answer."""
    _, site = served
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "seed": 3}
    full = site.ask("/v1/chat/completions", body).json["choices"][0]["message"]["tool_calls"]
    calls: list[dict[str, str]] = []
    for line in site.ask("/v1/chat/completions", body | {"stream": True}).body.decode().split("\n\n"):
        if line.startswith("data: {"):
            delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
            for piece in delta.get("tool_calls") or ():
                if "name" in piece["function"]:
                    assert piece["index"] == len(calls)
                    calls.append({"name": piece["function"]["name"], "arguments": ""})
                calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    assert calls == [call["function"] for call in full]


@pytest.mark.parametrize("parameters", [{}, {"properties": {"a": {"type": "integer"}}}])
def test_forced_arguments_are_an_object_whatever_the_schema_says(parameters):
    schema = HERMES.schema([Tool(type="function", function=Function(name="add", parameters=parameters))])
    assert schema["properties"]["arguments"] == {"$id": "urn:tool:0", "type": "object"} | parameters


def test_a_schema_that_cannot_be_used_is_refused_for_one_call_and_for_several():
    wrong = {"type": "object", "properties": {"a": {"type": "nothing"}}}
    tools = [{"type": "function", "function": {"name": "a", "parameters": wrong}}]
    with running(FakeEngine(), template=TEMPLATES["llama"]) as site:
        for several in (True, False):
            body = {"messages": ASK, "tools": tools, "tool_choice": "required", "parallel_tool_calls": several}
            reply = site.ask("/v1/chat/completions", body)
            assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "invalid_schema", "tools")


@pytest.mark.parametrize("separator", ["; ", "<|user|>", ";<|user|>;"])
def test_values_have_a_most_and_between_them_control_tokens_are_drawn_as_such(separator):
    """A list of values has at most `most` values, with `separator` between them.

    If the separator contains the name of a control token, the grammar allows this control token there.
    """
    eos = TOKENIZER.special["</s>"]
    grammars = Grammars(TOKENIZER, vocab=1024, stops=frozenset({eos}))
    rule = grammars.of_schema({"const": 1}, param="tools", most=3, separator=separator)()
    digit = TOKENIZER.encode("1", start=False)
    between: list[int] = []
    for part in separator.partition("<|user|>"):
        between += [TOKENIZER.special[part]] if part in TOKENIZER.special else TOKENIZER.encode(part, start=False)
    drawn = list(digit)
    for _ in range(2):
        assert rule(drawn)[eos]
        for token in (*between, *digit):
            assert rule(drawn)[token]
            drawn.append(token)
    assert rule(drawn).nonzero()[0].tolist() == [eos]
