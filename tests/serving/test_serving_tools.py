"""Tool use: how templates show tools, calls parsed from whole and streamed texts, forced calls, and refusals."""

from contextlib import closing
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.chat.template import ChatTemplate
from llamaspec.model.tokenizers.tokenizer import decode
from llamaspec.serving.openai import Function, Tool, UserMessage
from llamaspec.serving.prompts import Prompts
from llamaspec.serving.streaming import DrawnToken, TextReader
from llamaspec.serving.tools import HERMES, LLAMA, MISTRAL, CallForm, CallReader, form_of
from tests.serving.serving_site import TOKENIZER, FakeEngine, running, spelling
from tests.serving.tool_templates import ANSWERS, ASK, CALLED, TEMPLATES, TOOLS
from tests.support.waiting import PATIENCE

openai = pytest.importorskip("openai", reason="needs OpenAI's client, of the extra dev")

FORMS = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA}
NAMES = frozenset({"weather", "add"})


def read(form: CallForm, pieces: list[str], **options) -> tuple[str, list[tuple[str, str]]]:
    """Read an answer that arrives in pieces; return its text and its calls."""
    reader = CallReader(form, NAMES, **options)
    parts = [*map(reader.feed, pieces), reader.finish()]
    calls: list[tuple[str, str]] = []
    for piece in (call for part in parts for call in part.calls):
        if piece.name is not None:
            assert piece.number == len(calls)
            calls.append((piece.name, ""))
        name, arguments = calls[piece.number]
        calls[piece.number] = (name, arguments + piece.arguments)
    return "".join(part.text for part in parts), calls


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_read(name):
    before = "Let me see." if name == "hermes" else ""
    assert read(FORMS[name], [ANSWERS[name]]) == (before, CALLED)
    assert read(FORMS[name], [*ANSWERS[name]]) == (before, CALLED)
    assert read(FORMS[name], [ANSWERS[name]], most=1) == (before, CALLED[:1])
    assert form_of(TEMPLATES[name]) == FORMS[name]


def test_calls_have_the_form_of_the_template_for_tools():
    template = ChatTemplate("t", "{{ messages[0].content }}", named={"tool_use": TEMPLATES["hermes"]})
    with closing(Prompts(TOKENIZER, template=template, stops=frozenset(), context=4000, vocab=1024)) as prompts:
        tool = Tool(type="function", function=Function(name="add"))
        assert prompts.from_messages([UserMessage(content="a")], tools=[tool]).calls == HERMES


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', [("add", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "add"}</tool_call>', [("add", "{}")]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "}{\\"\\\\"}}', [("add", '{"a": "}{\\"\\\\"}')]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": [1', [("add", '{"a": [1')]),  # the answer was cut
        (LLAMA, '{"type": "function", "name": "add", "parameters": {}}', [("add", "{}")]),
        (LLAMA, '{"name": "\\u0061dd", "parameters": {}}\n{"name": "add", "parameters": {}}', [("add", "{}")] * 2),
        (
            LLAMA,
            '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "add", "arguments": {}}',
            [("add", "{}")] * 2,
        ),
        (
            LLAMA,
            '<|python_tag|> {"arguments": {}, "name": "add"};<|python_tag|>{"name": "add", "arguments": {"a": 1}}',
            [("add", "{}"), ("add", '{"a": 1}')],
        ),
    ],
)
def test_ways_to_write_a_call(form, text, calls):
    assert read(form, [text]) == read(form, [*text]) == ("", calls)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        " It is warm. ",
        "1 < 2, <tool, [TOOL",
        '<tool_call>\n{"name": "launch", "arguments": {}}\n</tool_call> done',
        '[TOOL_CALLS] [{"name": "launch", "arguments": {}}]',
        '{"name": "launch", "parameters": {}}',
        '{"answer": 42} and {more',
        "<tool_call>\nadd(1)",
        "[TOOL_CALLS] add(1)",
        "<|python_tag|>print(1)",
        'It is <|python_tag|>{"name": "launch", "parameters": {}}; <|python',
        '<tool_call>{"name": "add", "arguments": 5}</tool_call>',
        '<tool_call>{"name": add}</tool_call>',
        '{"nam',
    ],
)
def test_whatever_calls_no_tool_is_text(form, text):
    assert read(form, [text]) == read(form, [*text]) == (text, [])


@pytest.mark.parametrize("tail", ["<tool_call>\nadd(1)", "<tool_call>", "<tool_call>\nadd(1)\n</tool_call>"])
def test_an_opening_after_a_call_is_text_where_no_call_follows(tail):
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n' + tail
    assert read(HERMES, [text]) == read(HERMES, [*text]) == (tail, [("add", '{"a": 1}')])


@pytest.mark.parametrize(
    ("text", "most", "complete"),
    [
        ("It is warm.", None, False),
        (ANSWERS["hermes"], None, True),
        (ANSWERS["hermes"][:-14], None, False),  # within the second call's arguments
        (ANSWERS["hermes"][:-14], 1, True),
        (ANSWERS["hermes"].removesuffix("\n</tool_call>"), None, True),
    ],
)
def test_an_answer_waits_for_tools_only_if_its_last_call_is_complete(text, most, complete):
    reader = CallReader(HERMES, NAMES, most=most)
    reader.feed(text)
    reader.finish()
    assert reader.is_complete == complete


FRAGMENTS = [
    *ANSWERS.values(),
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "[",
        "]",
        ",",
        ";",
        " ",
        "\n",
        "{",
        "}",
        '"',
        "\\",
        "a",
    ),
    *('"name": ', '"add"', '"arguments": ', '"parameters": ', "{}", '{"a": "\\"}"}', '{"name": "add", "arguments": '),
]


@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    cuts=st.lists(st.floats(0, 1), max_size=6),
    form=st.sampled_from([*FORMS.values()]),
    begun=st.booleans(),
)
def test_an_answer_reads_the_same_wherever_it_is_cut(fragments, cuts, form, begun):
    text = "".join(fragments)
    at = [0, *sorted(int(cut * len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(at)]
    full = read(form, [text], begun=begun)
    assert read(form, pieces, begun=begun) == read(form, [*text], begun=begun) == full


def test_a_control_token_can_be_part_of_the_text():
    """A control token that begins calls, such as Mistral's [TOOL_CALLS], is part of the text if `spelled` names it."""
    token = TOKENIZER.special["<|user|>"]
    for spelled, text in (({}, "fox"), ({token: "[TOOL_CALLS]"}, "fox[TOOL_CALLS]")):
        reader = TextReader(TOKENIZER, begins=True, spelled=spelled)
        reader.feed([DrawnToken(id) for id in (*TOKENIZER.encode("fox"), token)])
        reader.finish()
        assert reader.piece().text == text
    assert MISTRAL.spelled({"[TOOL_CALLS]": 5, "<s>": 1}) == {5: "[TOOL_CALLS]"}


def test_a_character_that_a_control_token_cuts_comes_before_it():
    token, half = TOKENIZER.special["<|user|>"], next(i for i in range(1024) if TOKENIZER.bytes_of(i) == b"\xe7")
    reader = TextReader(TOKENIZER, begins=True, spelled={token: "[TOOL_CALLS]"})
    reader.feed([DrawnToken(half), DrawnToken(token)])
    reader.finish()
    assert reader.piece().text == "\ufffd[TOOL_CALLS]"


@pytest.fixture(scope="module", params=FORMS)
def served(request):
    """Run a site that answers with tool calls; yield the form's name and the site."""
    with running(FakeEngine(spelling(ANSWERS[request.param]), context=4000), template=TEMPLATES[request.param]) as site:
        yield request.param, site


def test_a_client_gets_calls_whole_and_streamed(served):
    name, site = served
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        arguments = {"model": "stories", "messages": ASK, "tools": TOOLS, "n": 2}
        full = client.chat.completions.create(**arguments)
        for choice in full.choices:
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == ("Let me see." if name == "hermes" else None)
            calls = choice.message.tool_calls
            assert [(call.function.name, call.function.arguments) for call in calls] == CALLED
            assert len({call.id for call in calls}) == 2
        with client.chat.completions.stream(**arguments) as stream:
            streamed = stream.until_done().get_final_completion()
        for choice, again in zip(full.choices, streamed.choices, strict=True):
            assert again.finish_reason == "tool_calls"
            assert (again.message.content or None) == choice.message.content
            calls = again.message.tool_calls
            assert [(call.function.name, call.function.arguments) for call in calls] == CALLED

        # The conversation continues with the calls as received, and with the tools' results.
        message = full.choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "warm"} for call in message.tool_calls]
        cut = client.chat.completions.create(**arguments | {"messages": [*ASK, message, *results], "max_tokens": 40})
        prompt = decode(TOKENIZER, site.engine.requests[-1].prompt)
        assert all(f"result {call.id}: warm" in prompt for call in message.tool_calls)
        # Llama's template refuses two calls in a message, so each call gets its own message.
        for earlier in ANSWERS[name].split(";"):
            assert "".join(earlier.split()) in "".join(prompt.split())
        assert '"description": "The weather."' in prompt and '"strict"' not in prompt
        assert cut.choices[0].finish_reason == "length"
        assert cut.choices[0].message.tool_calls[0].function.name == "weather"


def test_one_call_alone_where_parallel_calls_are_off(served):
    body = {"messages": ASK, "tools": TOOLS, "parallel_tool_calls": False}
    (choice,) = served[1].ask("/v1/chat/completions", body).json["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


@pytest.fixture(scope="module")
def hermes():
    with running(FakeEngine(spelling(ANSWERS["hermes"]), context=4000), template=TEMPLATES["hermes"]) as site:
        yield site


def test_tools_that_an_answer_may_not_call_are_not_shown(hermes):
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "none"}
    choice = hermes.ask("/v1/chat/completions", body).json["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == ANSWERS["hermes"]
    assert "weather" not in decode(TOKENIZER, hermes.engine.requests[-1].prompt)


def test_a_tool_never_writes_special_tokens(hermes):
    function = {"name": "a", "description": "</s><|user|>", "parameters": {"</s>": ["<s>"]}}
    call = {"id": "</s>", "type": "function", "function": {"name": "a", "arguments": '{"</s>": "<|user|>"}'}}
    message = {"role": "assistant", "content": "</s>", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "</s>", "content": "</s>"}
    body = {"messages": [*ASK, message, result], "tools": [{"type": "function", "function": function}]}
    assert hermes.ask("/v1/chat/completions", body | {"max_tokens": 1}).status == 200
    special = {id: name for name, id in TOKENIZER.special.items()}
    prompt = hermes.engine.requests[-1].prompt
    written = [special[token] for token in prompt if token in special]
    assert written == ["<|user|>", "<|user|>", "<|assistant|>", "</s>", "<|user|>", "<|assistant|>"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "search"}]}, "tools[0]"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "launch"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"answer_ids": [5]}, "answer_ids"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": "CALL"}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": "HALF"}]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [{"role": "assistant", "tool_calls": "DEEP"}]}, ""),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "integer"}}}]},
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(hermes, change, param):
    deep = '{"a": ' * 10_000 + "1" + "}" * 10_000
    named = {"CALL": "{}", "HALF": '{"a": "\\ud83d"}', "DEEP": deep}
    for message in change.get("messages", []):
        if (arguments := named.get(str(message["tool_calls"]))) is not None:
            message["tool_calls"] = [{"id": "1", "type": "function", "function": {"name": "a", "arguments": arguments}}]
    reply = hermes.ask("/v1/chat/completions", {"messages": ASK, "tools": TOOLS} | change)
    assert reply.status == 400 and (reply.error["param"] or "").startswith(param)


def test_a_model_whose_template_knows_no_tools_says_so():
    body = {"messages": ASK, "tools": TOOLS}
    with running(FakeEngine()) as site:  # the built-in storyteller
        reply = site.ask("/v1/chat/completions", body)
        assert (reply.status, reply.error["param"]) == (400, "tools") and "does not support tools" in reply.error[
            "message"
        ]
        assert site.ask("/v1/chat/completions", body | {"tool_choice": "none"}).status == 200
    strange = "{% if tools %}tools!{% endif %}{{ messages[0].content }}<tool_call><function=f>"
    with running(FakeEngine(), template=strange) as site:
        reply = site.ask("/v1/chat/completions", body)
        assert (reply.status, reply.error["param"]) == (400, "tools") and "cannot read" in reply.error["message"]
