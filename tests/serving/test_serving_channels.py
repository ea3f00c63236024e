"""Served models that write to channels: thoughts, answers and tool calls, whole and streamed."""

import json
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.model.chat.channels import channels_of
from llamaspec.model.tokenizers.huggingface import read_huggingface
from llamaspec.model.tokenizers.tokenizer import decode
from llamaspec.serving.openai import Function, Refusal, Tool
from llamaspec.serving.streaming import TextReader
from llamaspec.serving.tools import HARMONY, form_of
from tests.serving.answer_pieces import joined, pieces_of
from tests.serving.serving_site import FakeEngine, running
from tests.serving.tool_templates import ASK, CALLED, ROME, TOOLS
from tests.serving.tool_templates import HARMONY as TEMPLATE
from tests.support import tiny_tokenizers
from tests.support.waiting import PATIENCE

openai = pytest.importorskip("openai", reason="needs OpenAI's client, of the extra dev")

CONTROLS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
TOKENIZER = read_huggingface(tiny_tokenizers.chatml(CONTROLS).encode(), path="tokenizer.json")
STOPS = frozenset(TOKENIZER.special[name] for name in ("<|call|>", "<|return|>"))
NAMES = frozenset({"weather", "add"})
THINKS = "<|channel|>analysis<|message|>Why Rome?<|end|><|start|>assistant"
ANSWER = THINKS + "<|channel|>final<|message|>It is warm.<|return|>"
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ROME}<|call|>"
SAYS = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
TO = f" to=functions.weather<|channel|>commentary json<|message|>{ROME}<|call|>"  # as prompts write earlier calls


def ids_of(text: str) -> list[int]:
    parts = re.split(r"(<\|\w+\|>)", text)
    return [
        id
        for part in parts
        for id in ([TOKENIZER.special[part]] if part in TOKENIZER.special else TOKENIZER.encode(part))
    ]


def read(ids: list[int], cuts: tuple[int, ...] = (), *, begun: tuple[int, ...] = (), stop: str = "No stop"):
    """Read an answer in pieces that end at `cuts`; return its text, thoughts and calls, and the text of its tokens."""
    channels = channels_of(TOKENIZER, (), tools=NAMES)
    reader = TextReader(TOKENIZER, begins=False, begun=begun, stops=STOPS, stop_texts=[stop], channels=channels)
    pieces = pieces_of(reader, ids, cuts)
    calls: list[list[str]] = []
    for piece in (call for part in pieces for call in part.calls):
        if piece.name is not None:
            assert piece.number == len(calls)
            calls.append([piece.name, ""])
        calls[piece.number][1] += piece.arguments
    text, thoughts, tokens = joined(pieces, TOKENIZER)
    return text, thoughts, calls, tokens


WEATHER = ["weather", ROME]
CASES = {
    ANSWER: ("It is warm.", "Why Rome?", []),
    THINKS + CALL: ("", "Why Rome?", [WEATHER]),
    TO: ("", "", [WEATHER]),
    THINKS + SAYS + TO: ("Let me see.", "Why Rome?", [WEATHER]),
    CALL.replace(" <|constrain|>", "<|constrain|>"): ("", "", [WEATHER]),
    CALL.replace("commentary", "analysis"): ("", "", [WEATHER]),
    CALL.replace("weather", "launch"): (f"commentary to=functions.launch  json{ROME}", "", []),
    CALL.replace("functions.weather", "python").replace("commentary", "analysis"): ("", ROME, []),
    CALL[:-20]: ("", "", [["weather", ROME[:-12]]]),
    "No channel.<|return|>": ("No channel.", "", []),
    " to<|return|>": (" to", "", []),
    " to the end<|return|>": (" to the end", "", []),
    "<|channel|>ana": ("", "", []),
}  # fmt: skip


@pytest.mark.parametrize("written", CASES)
def test_an_answer_is_told_apart(written):
    ids = ids_of(written)
    assert read(ids)[:3] == read(ids, tuple(range(len(ids))))[:3] == CASES[written]


@pytest.mark.parametrize("written", CASES)
def test_log_probabilities_are_of_the_text_alone(written):
    text, _, _, tokens = read(ids_of(written))
    assert tokens == (ROME if "launch" in written else text)  # the header is shown if it does not begin a call


def test_a_stop_text_in_thoughts_or_calls_ends_nothing():
    assert read(ids_of(ANSWER), stop="Rome")[:2] == ("It is warm.", "Why Rome?")
    assert read(ids_of(ANSWER), stop=" warm")[:2] == ("It is", "Why Rome?")
    assert read(ids_of(CALL), stop="Rome")[2] == [WEATHER]


def test_half_a_character_stays_on_its_channel():
    half = TOKENIZER.encode("é")[:1]
    thinks, says = ids_of("<|channel|>analysis<|message|>"), ids_of("<|end|>" + SAYS + "<|channel|>")
    assert read([*thinks, *half, *says])[:2] == ("Let me see.", "\ufffd")
    # Half a character at the end of one channel does not change how the next channel is read.
    assert read([*ids_of("<|channel|>final<|message|>"), *half, *ids_of(THINKS)])[:2] == ("\ufffd", "Why Rome?")


def test_a_begun_answer_is_not_repeated():
    begun = ids_of(THINKS + "<|channel|>final<|message|>It is")
    assert read(ids_of(" warm.<|return|>"), begun=tuple(begun))[:3] == (" warm.", "", [])
    assert read(ids_of(ROME + "<|call|>"), begun=tuple(ids_of(CALL)[: -len(ids_of(ROME)) - 1]))[2] == [WEATHER]


@given(
    parts=st.lists(
        st.sampled_from([*CONTROLS, "analysis", "final", " to=functions.add", " ", "assistant", "{}", "é🦙"])
    ),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    lost=st.sets(st.integers(0, 20), max_size=2),
)
@example(parts=["é🦙"], cuts=[], lost={2})
def test_an_answer_reads_the_same_wherever_it_is_cut(parts, cuts, lost):
    """The parsed answer does not depend on how its tokens are cut into pieces, and no character is parsed twice."""
    ids = [id for i, id in enumerate(ids_of("".join(parts))) if i not in lost]
    full = read(ids)
    assert read(ids, tuple(int(cut * len(ids)) for cut in cuts)) == read(ids, tuple(range(len(ids)))) == full
    text, thoughts, calls, _ = full
    # A character of four bytes may lose one byte; each of the three others is then read as U+FFFD.
    written = len("".join(parts)) + 2 * len(lost)
    assert len(text) + len(thoughts) + sum(map(len, (call[1] for call in calls))) <= written


class Script:
    """A script for the site's engine that answers with the text that a test sets."""

    text = ANSWER

    def __call__(self, request):
        return ids_of(self.text)


@pytest.fixture(scope="module")
def site():
    with running(FakeEngine(Script(), context=4000), template=TEMPLATE, tokenizer=TOKENIZER) as site:
        yield site


@pytest.fixture
def says(site, monkeypatch):
    return lambda text: monkeypatch.setattr(site.engine._script, "text", text, raising=False)


@pytest.fixture(scope="module")
def client(site):
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


def prompt_of(site) -> str:
    names = {id: name for name, id in TOKENIZER.special.items()}
    return "".join(names.get(id) or decode(TOKENIZER, [id], start=False) for id in site.engine.requests[-1].prompt)


def test_a_client_gets_thoughts_apart_whole_and_streamed(client, says):
    says(ANSWER)
    arguments = {"model": "stories", "messages": ASK, "logprobs": True, "top_logprobs": 1, "n": 2}
    full = client.chat.completions.create(**arguments)
    for choice in full.choices:
        assert (choice.message.content, choice.message.reasoning_content) == ("It is warm.", "Why Rome?")
        assert choice.finish_reason == "stop" and choice.message.tool_calls is None
        assert "".join(token.token for token in choice.logprobs.content) == "It is warm."
    chunks = [*client.chat.completions.create(**arguments, stream=True)]
    for index in (0, 1):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        deltas = [(getattr(item.delta, "reasoning_content", None) or "", item.delta.content or "") for item in choices]
        assert ["".join(item) for item in zip(*deltas, strict=True)] == ["Why Rome?", "It is warm."]
        assert all(not (thoughts and text) for thoughts, text in deltas)
        drawn = [token.token for item in choices if item.logprobs for token in item.logprobs.content]
        assert "".join(drawn) == "It is warm."
        assert all(item.delta.content is not None for item in choices if item.logprobs)
    # An answer that was cut during its thoughts has no text yet; usage counts its thoughts.
    cut = client.chat.completions.create(model="stories", messages=ASK, max_tokens=12)
    assert cut.choices[0].message.content == "" and "Why Rome?".startswith(cut.choices[0].message.reasoning_content)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 12)


def test_other_answers_have_no_such_field(client, says, site):
    says("<|channel|>final<|message|>Yes.<|return|>")
    body = {"messages": ASK}
    assert "reasoning_content" not in site.ask("/v1/chat/completions", body).json["choices"][0]["message"]
    assert b"reasoning_content" not in site.ask("/v1/chat/completions", body | {"stream": True}).body


@pytest.mark.parametrize("before", ["", SAYS])
def test_a_client_gets_calls_and_sends_them_back_with_the_thoughts(client, says, site, before):
    says(THINKS + before + CALL)
    arguments = {"model": "stories", "messages": ASK, "tools": TOOLS}
    (choice,) = client.chat.completions.create(**arguments).choices
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert (message.content, message.reasoning_content) == ("Let me see." if before else None, "Why Rome?")
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == CALLED[:1]
    with client.chat.completions.stream(**arguments) as stream:
        (again,) = stream.until_done().get_final_completion().choices
    assert (again.finish_reason, again.message.content or None) == ("tool_calls", message.content)
    assert [(call.function.name, call.function.arguments) for call in again.message.tool_calls] == CALLED[:1]

    says(ANSWER)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "warm"}
    client.chat.completions.create(**arguments | {"messages": [*ASK, message, result]})
    prompt = prompt_of(site)
    thought = "Why Rome?\nLet me see." if before else "Why Rome?"
    assert f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant to=functions.weather" in prompt
    assert prompt.endswith("<|message|>warm<|end|><|start|>assistant")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_sent_back_never_become_special_tokens(site, says, name):
    says(ANSWER)
    message = {"role": "assistant", "content": "Yes.", name: "Hm. <|return|>"}
    assert site.ask("/v1/chat/completions", {"messages": [*ASK, message, *ASK]}).status == 200
    assert "final<|message|>Yes.<|end|>" in prompt_of(site) and "Hm." not in prompt_of(site)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    body = {"messages": [*ASK, {**message, "content": None, "tool_calls": [call]}]}
    assert site.ask("/v1/chat/completions", body).status == 200
    assert "<|message|>Hm. <|return|><|end|>" in prompt_of(site)
    assert TOKENIZER.special["<|return|>"] not in site.engine.requests[-1].prompt
    refused = site.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", name: "b"}]})
    assert (refused.status, refused.error["param"]) == (400, f"messages[0].{name}")


def test_a_forced_call_begins_on_its_channel(site, says):
    pytest.importorskip("llguidance", reason="needs llguidance, of the extra serve")
    says(ROME + "<|call|>")
    choice = {"type": "function", "function": {"name": "weather"}}
    reply = site.ask("/v1/chat/completions", {"messages": ASK, "tools": TOOLS, "tool_choice": choice})
    message = reply.json["choices"][0]["message"]
    assert (message["content"], message["tool_calls"][0]["function"]) == (None, {"name": "weather", "arguments": ROME})
    assert prompt_of(site).endswith("assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>")
    allowed = site.engine.requests[-1].allowed
    assert np.flatnonzero(allowed([])).tolist() == TOKENIZER.encode("{")
    assert {*np.flatnonzero(allowed(TOKENIZER.encode(ROME)))} & STOPS
    answer = site.ask("/v1/chat/completions", {"messages": ASK, "tools": TOOLS, "tool_choice": "required"})
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")


def test_a_format_holds_the_final_channel(site, says):
    pytest.importorskip("llguidance", reason="needs llguidance, of the extra serve")
    says("{}<|return|>")
    reply = site.ask("/v1/chat/completions", {"messages": ASK, "response_format": {"type": "json_object"}})
    assert json.loads(reply.json["choices"][0]["message"]["content"]) == {}
    assert prompt_of(site).endswith("<|start|>assistant<|channel|>final<|message|>")


def test_options_reach_the_template(site, says):
    says(ANSWER)
    body = {"messages": ASK, "reasoning_effort": "low <|end|>", "chat_template_kwargs": {"unsafe": ["<|return|>"]}}
    reply = site.ask("/v1/chat/completions", body)
    assert (reply.status, reply.error["param"]) == (400, "chat_template_kwargs")
    reply = site.ask("/v1/chat/completions", body | {"chat_template_kwargs": {"tools": "<|return|>"}})
    assert (reply.status, reply.error["param"]) == (400, "chat_template_kwargs")
    assert (
        "the server sets tools from the conversation" in reply.error["message"]
    )  # the template does read this variable
    assert site.ask("/v1/chat/completions", body | {"chat_template_kwargs": None}).status == 200
    assert "<|message|>Reasoning: low <|end|><|end|>" in prompt_of(site)
    assert [*site.engine.requests[-1].prompt].count(TOKENIZER.special["<|end|>"]) == 2  # one each for system and user
    encoded = site.ask("/tokenize", {"messages": ASK, "reasoning_effort": "low <|end|>"}).json["tokens"]
    assert encoded == [*site.engine.requests[-1].prompt]
    assert site.ask("/tokenize", body).error["param"] == "chat_template_kwargs"
    assert site.ask("/tokenize", {"prompt": "A", "reasoning_effort": "low"}).error["param"] == "reasoning_effort"
    with running(FakeEngine()) as stories:
        reply = stories.ask("/v1/chat/completions", body | {"chat_template_kwargs": None})
        assert (reply.status, reply.error["param"]) == (400, "reasoning_effort")
        reply = stories.ask("/v1/chat/completions", {"messages": ASK, "chat_template_kwargs": {"self": 1}})
        assert reply.status == 400


def test_the_form_is_that_of_templates_with_channels():
    assert form_of(TEMPLATE) == HARMONY
    assert form_of("<|channel|>") is None
    with pytest.raises(Refusal, match=r"tool_choice: .* name one function"):
        HARMONY.beginning([Tool(type="function", function=Function(name=name)) for name in ("a", "b")])
