"""Reasoning between `<think>` and `</think>`, as Qwen 3, DeepSeek's distillations, SmolLM3 and EXAONE write it."""

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.model.chat.channels import channels_of, is_thinking
from llamaspec.model.chat.template import SpecialTokens
from llamaspec.model.tokenizers.huggingface import read_huggingface
from llamaspec.model.tokenizers.tokenizer import decode
from llamaspec.serving.streaming import TextReader
from tests.serving.answer_pieces import joined, pieces_of
from tests.serving.serving_site import FakeEngine, running
from tests.serving.tool_templates import ASK, ROME, TEMPLATES, TOOLS
from tests.support import tiny_tokenizers

END = "<|im_end|>"
CONTROLS = ("<|im_start|>", END)
TAGS = ("<think>", "</think>")
# In the files of Qwen 3 the tags are added tokens; in some files of SmolLM3 and EXAONE they are control tokens.
TOKENIZERS = {
    "added": read_huggingface(tiny_tokenizers.chatml(CONTROLS, TAGS).encode(), path="tokenizer.json"),
    "control": read_huggingface(tiny_tokenizers.chatml((*CONTROLS, *TAGS)).encode(), path="tokenizer.json"),
}
CHATML = """
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for message in messages -%}
    {{ '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif -%}
    {{ message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{{ '<|im_start|>assistant\\n' }}"""
# DeepSeek's distillations, QwQ and EXAONE end the prompt with the opening tag.
OPEN = CHATML + "{{ '<think>\\n' }}"


def ids_of(tokenizer, text: str) -> list[int]:
    """Encode `text`. Names of tags and of the end token in the text become these tokens."""
    return SpecialTokens(tokenizer).encode(text.replace("|END|", END))


def tag(tokenizer, name: str) -> int:
    return tokenizer.special.get(name) or tokenizer.encode(name, start=False)[0]


def read(tokenizer, ids: list[int], cuts: tuple[int, ...] = (), *, prompt: str = "", begun: tuple[int, ...] = ()):
    """Read an answer in pieces that end at `cuts`; return its text, thoughts, and the text of its tokens."""
    channels = channels_of(tokenizer, ids_of(tokenizer, prompt))
    stops = frozenset({tokenizer.special[END]})
    reader = TextReader(tokenizer, begins=False, begun=begun, stops=stops, channels=channels)
    return joined(pieces_of(reader, ids, cuts), tokenizer)


CASES = {
    "<think>\nWhy\n\nRome?\n</think>\n\nIt is warm.\n|END|": ("It is warm.\n", "Why\n\nRome?"),
    "<think>\n\n</think>\n\nYes.|END|": ("Yes.", ""),
    "<think></think>Yes.|END|": ("Yes.", ""),
    "\n<think>Why?</think>Yes.|END|": ("\nYes.", "Why?"),
    "Yes.|END|": ("Yes.", ""),
    "A <think>tag</think> is text.|END|": ("A <think>tag</think> is text.", ""),
    "<think>a</think>b<think>c</think>d|END|": ("b<think>c</think>d", "a"),
    "<think>a <think> b</think>c|END|": ("c", "a <think> b"),
    "<think>Why? It is |END|": ("", "Why? It is"),
    "</think>Yes.|END|": ("</think>Yes.", ""),
    "  |END|": ("  ", ""),
    "": ("", ""),
}


@pytest.mark.parametrize("written", CASES)
def test_an_answer_is_told_apart(written):
    tokenizer = TOKENIZERS["added"]
    ids = ids_of(tokenizer, written)
    full = read(tokenizer, ids)
    assert full[:2] == CASES[written] and full[2] == full[0]  # log-probabilities belong to the text only
    assert read(tokenizer, ids, tuple(range(len(ids)))) == full


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("end", ["<think>", "<think>\n", "<think>\n\n"])
def test_a_prompt_may_begin_the_thoughts(kind, end):
    tokenizer, prompt = TOKENIZERS[kind], f"<|im_start|>assistant\n{end}"
    assert is_thinking(tokenizer, ids_of(tokenizer, prompt))
    read_answer = ids_of(tokenizer, "Why?\n</think>\n\nYes.|END|")
    assert read(tokenizer, read_answer, prompt=prompt) == ("Yes.", "Why?", "Yes.")
    assert read(tokenizer, ids_of(tokenizer, "Why?|END|"), prompt=prompt) == ("", "Why?", "")


@pytest.mark.parametrize("end", ["", "<think>\n\n</think>\n\n", "<think> tags"])
def test_other_prompts_do_not_begin_the_thoughts(end):
    tokenizer = TOKENIZERS["added"]
    assert not is_thinking(tokenizer, ids_of(tokenizer, f"a{end}"))
    assert read(tokenizer, ids_of(tokenizer, "Yes.|END|"), prompt=f"a{end}") == ("Yes.", "", "Yes.")


def test_a_begun_answer_is_not_repeated():
    tokenizer = TOKENIZERS["added"]
    begun = tuple(ids_of(tokenizer, "<think>Why?</think>\n\nIt is"))
    assert read(tokenizer, ids_of(tokenizer, " warm.|END|"), begun=begun) == (" warm.", "", " warm.")


def judged(tokenizer, ids: list[int], *, opened: bool) -> tuple[str, str]:
    """Return the text and the thoughts of a complete answer."""
    spelled = [tokenizer.bytes_of(id) for id in ids]
    start = 0 if opened else next((i for i, piece in enumerate(spelled) if not piece.isspace()), len(ids))
    if not opened and (start == len(ids) or ids[start] != tag(tokenizer, "<think>")):
        return decode(tokenizer, ids, start=False), ""
    inner = ids[start:] if opened else ids[start + 1 :]
    closes = inner.index(tag(tokenizer, "</think>")) if tag(tokenizer, "</think>") in inner else len(inner)
    after = inner[closes + 1 :]
    while after and tokenizer.bytes_of(after[0]).isspace():
        after = after[1:]
    return decode(tokenizer, [*ids[:start], *after], start=False), decode(
        tokenizer, inner[:closes], start=False
    ).strip()


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(
    parts=st.lists(st.sampled_from([*TAGS, "\n", "  ", "a", "<", "think>", "é🦙"]), max_size=12),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    lost=st.sets(st.integers(0, 20), max_size=2),
    opened=st.booleans(),
)
@example(parts=["<think>", "a", "\n", "\n", "</think>", "é🦙"], cuts=[], lost={5}, opened=False)
@example(parts=["<think>", "</think>", "é🦙"], cuts=[], lost=set(), opened=False)
@example(parts=["</think>", "<think>", "\n"], cuts=[], lost=set(), opened=False)
def test_an_answer_reads_the_same_wherever_it_is_cut(kind, parts, cuts, lost, opened):
    tokenizer, prompt = TOKENIZERS[kind], "<think>\n" if opened else ""
    ids = [id for i, id in enumerate(ids_of(tokenizer, "".join(parts))) if i not in lost]
    text, thoughts, tokens = full = read(tokenizer, ids, prompt=prompt)
    for points in (tuple(int(cut * len(ids)) for cut in cuts), tuple(range(len(ids)))):
        assert read(tokenizer, ids, points, prompt=prompt) == full
    assert (text, thoughts) == judged(tokenizer, ids, opened=opened)
    assert tokens == text


def replies(script, template=CHATML, kind="added"):
    tokenizer = TOKENIZERS[kind]
    engine = FakeEngine(lambda request: ids_of(tokenizer, script), context=4000)
    return running(engine, template=template, tokenizer=tokenizer)


def streamed(site, body) -> tuple[str, str, list[str]]:
    """Return the text, the thoughts and the kinds of the deltas of a streamed answer, in order."""
    reply = site.ask("/v1/chat/completions", {**body, "stream": True})
    events = [json.loads(line[6:]) for line in reply.body.decode().split("\n") if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    kinds = [name for delta in deltas for name in ("reasoning_content", "content") if delta.get(name)]
    text, thoughts = ("".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning_content"))
    return text, thoughts, kinds


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("template", [CHATML, OPEN])
def test_a_server_returns_thoughts_apart_whole_and_streamed(kind, template):
    written = ("" if template == OPEN else "<think>") + "\nWhy Rome?\n</think>\n\nIt is warm.|END|"
    with replies(written, template, kind) as site:
        body = {"messages": ASK, "logprobs": True}
        (choice,) = site.ask("/v1/chat/completions", body).json["choices"]
        assert choice["message"]["content"] == "It is warm."
        assert choice["message"]["reasoning_content"] == "Why Rome?"
        assert "".join(token["token"] for token in choice["logprobs"]["content"]) == "It is warm."
        text, thoughts, kinds = streamed(site, body)
        assert (text, thoughts) == ("It is warm.", "Why Rome?")
        assert kinds == sorted(kinds, reverse=True)  # all thoughts before the text
        cut = site.ask("/v1/chat/completions", {"messages": ASK, "max_tokens": 7}).json
        assert cut["choices"][0]["message"]["content"] == ""
        assert "Why Rome?".startswith(cut["choices"][0]["message"]["reasoning_content"])
        assert cut["usage"]["completion_tokens"] == 7
        # The template writes the thoughts that a client sends back.
        message = choice["message"]
        site.ask("/v1/chat/completions", {"messages": [*ASK, message, *ASK]})
        prompt = decode(TOKENIZERS[kind], site.engine.requests[-1].prompt)
        assert "Why Rome?" in prompt and "It is warm." in prompt


def test_a_call_after_thoughts_is_a_call():
    written = f'<think>\nHm.\n</think>\n\n<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>|END|'
    with replies(written, TEMPLATES["hermes"]) as site:
        (choice,) = site.ask("/v1/chat/completions", {"messages": ASK, "tools": TOOLS}).json["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "Hm.")
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": ROME}


@pytest.mark.parametrize("forced", [False, True])
def test_a_grammar_closes_thoughts_that_the_prompt_began(forced):
    pytest.importorskip("llguidance", reason="needs llguidance, of the extra serve")
    tokenizer = TOKENIZERS["added"]
    template = TEMPLATES["hermes"] + "{{ '<think>\\n' }}"

    def first_allowed(request):
        drawn = []
        while not drawn or drawn[-1] != tokenizer.special[END]:
            drawn.append(int(np.flatnonzero(request.allowed(drawn))[-1]))
        return drawn

    engine = FakeEngine(first_allowed, context=4000)
    engine.vocab = tokenizer.vocab
    with running(engine, template=template, tokenizer=tokenizer) as site:
        schema = {
            "type": "object",
            "properties": {"a": {"enum": ["b"]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        body = {"tools": [tool], "tool_choice": "required"} if forced else {"response_format": form}
        message = site.ask("/v1/chat/completions", {"messages": ASK, "max_tokens": 60, **body}).json["choices"][0][
            "message"
        ]
    assert "reasoning_content" not in message
    if forced:
        assert message["tool_calls"][0]["function"]["name"] == "look"
    else:
        assert message["content"] == '{"a": "b"}'
    assert "<think>\n\n</think>\n\n" in decode(tokenizer, engine.requests[0].prompt)
