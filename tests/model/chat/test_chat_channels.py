"""Answers of models that write to channels: which part is shown as the answer, and which part as a thought."""

import re

import pytest

from llamaspec.commands.output import stream
from llamaspec.model.chat.channels import channels_of
from llamaspec.model.chat.template import ChatTemplate
from tests.model.chat.test_chat import HARMONY, TOKENIZERS, Talk

pytestmark = pytest.mark.usefixtures("workers_stay")
TEMPLATE = ChatTemplate(
    "harmony",
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{% else %}"
    "{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "<|start|>assistant",
)
THINKS = (
    "<|channel|>analysis<|message|>Why? A fox…<|end|><|start|>assistant<|channel|>final<|message|>The fox.<|return|>"
)


def ids_of(text: str) -> list[int]:
    parts = re.split(r"(<\|\w+\|>)", text)
    return [
        id for part in parts for id in ([HARMONY.special[part]] if part in HARMONY.special else HARMONY.encode(part))
    ]


@pytest.fixture
def talk() -> Talk:
    return Talk("harmony", TEMPLATE)


CASES = {
    THINKS: ("The fox.", "Why? A fox…"),
    "<|channel|>final<|message|>Yes.<|return|>": ("Yes.", ""),
    "<|channel|>analysis<|message|>Cut": ("", "Cut"),
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|> Yes.<|return|>": (
        "I look. Yes.",
        "",
    ),
    # The text of a tool call is unchanged: its header names the tool.
    "<|channel|>analysis<|message|>I call.<|end|><|start|>assistant<|channel|>commentary to=functions.f json"
    '<|message|>{"a": 1}<|call|>': ('commentary to=functions.f json{"a": 1}', "I call."),
    "<|channel|>analysis to=python<|message|>1+1<|call|>": ("", "1+1"),
    "No channel.<|return|>": ("No channel.", ""),
    "<|channel|>final": ("", ""),
}  # fmt: skip


@pytest.mark.parametrize("written", CASES)
def test_the_answer_is_the_final_channel(talk, written):
    ids = ids_of(written)
    ends = {} if written.endswith("<|return|>") else {"max_new_tokens": len(ids)}
    talk.script.answer = list(ids)
    tokens = list(answer := talk.chat.reply("Who?", **ends))
    assert ("".join(token.text for token in tokens), "".join(token.thoughts for token in tokens)) == CASES[written]
    assert answer.completion == CASES[written][0]
    text, thoughts = CASES[written]
    kept = {"reasoning_content": thoughts} if thoughts else {}
    assert talk.chat.messages[1:] == [{"role": "assistant", "content": text, **kept}]


@pytest.mark.parametrize("end", ["", "<|end|>", "<|return|>"])
def test_half_a_character_of_the_thoughts_is_no_answer(talk, end):
    ids = [*ids_of("<|channel|>analysis<|message|>…")[:-1], *ids_of(end)]
    talk.script.answer = list(ids)
    tokens = list(answer := talk.chat.reply("Who?", max_new_tokens=len(ids)))
    assert answer.completion == "" and "".join(token.thoughts for token in tokens) == "\ufffd"


def test_later_turns_read_the_answer_without_the_thoughts(talk):
    talk.ask("Who?", ids_of(THINKS))
    talk.ask("Is it?", ids_of("<|channel|>final<|message|>Yes.<|return|>"))
    before = "<|start|>user<|message|>Who?<|end|><|start|>assistant<|channel|>final<|message|>The fox.<|end|>"
    prompt = f"{before}<|start|>user<|message|>Is it?<|end|><|start|>assistant"
    drawn = ids_of("<|channel|>final<|message|>Yes.<|return|>")
    assert talk.cached == [*ids_of(prompt), *drawn][: len(talk.cached)] and len(talk.cached) >= len(ids_of(prompt))


def test_a_stop_text_in_the_thoughts_ends_nothing(talk):
    assert talk.ask("Who?", ids_of(THINKS), stop=["Why?"]).completion == "The fox."


@pytest.mark.parametrize("thoughts", [False, True])
def test_thoughts_go_to_stderr_if_they_are_asked_for(talk, thoughts, capsys):
    talk.script.answer = ids_of(THINKS)
    stream(talk.chat.reply("Who?"), answer=True, thoughts=thoughts)
    printed = capsys.readouterr()
    assert printed.out == "The fox.\n"
    assert printed.err == ("Why? A fox…\n" if thoughts else "")


def test_other_models_have_no_channels():
    assert all(channels_of(tokenizer, ()) is None for tokenizer in TOKENIZERS.values())
