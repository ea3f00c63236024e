"""Data for fine-tuning: the loss counts the right tokens of a conversation, and bad lines are refused by number."""

import json
from pathlib import Path
from typing import Any

import pytest

from llamaspec.model.chat.template import ChatTemplate, find_template
from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.tokenizer import Tokenizer, decode
from llamaspec.training.conversations import Reader, marked_text, read_data
from llamaspec.training.data import Example
from tests.support import tiny_tokenizers

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
# The same text, by a template that marks the answers, with tags in all styles of white space.
TAGGED = """{% for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{% generation %}
{{- m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else -%}{{ m.content + '<|im_end|>\\n' }}{% endif -%}
{% endfor %}"""
FORGETFUL = CHATML.replace("m.content", "(m.content if loop.last else m.content.split('!')[-1])")
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi <|im_end|>"},
    {"role": "assistant", "content": "ah! hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "bye"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tiny_tokenizers.chatml())
    return load_tokenizer(path)


def examples(tokenizer: Tokenizer, path: Path, *lines: Any, source: str | None = CHATML + PROMPT) -> list[Example]:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return read_data(path, tokenizer, None if source is None else ChatTemplate("the template", source), Reader.example)


def counted(tokenizer: Tokenizer, example: Example) -> list[str]:
    """Return each run of tokens that count in the loss, as a text."""
    return marked_text(tokenizer, example).replace("»", "«").split("«")[1::2]


@pytest.mark.parametrize("source", [CHATML + PROMPT, TAGGED + PROMPT], ids=["prefixes", "generation tags"])
def test_the_answers_and_their_ends_count(tokenizer, tmp_path, source):
    """An answer counts in the loss from its first token to <|im_end|>.

    A message that contains the name of a control token stays text.
    """
    [example] = examples(tokenizer, tmp_path / "d", {"messages": TALK}, source=source)
    assert counted(tokenizer, example) == ["ah! hello<|im_end|>", "bye<|im_end|>"]
    assert set(example.weights) == {0.0, 1.0} and len(example.weights) == len(example.ids)
    assert example.ids.count(tokenizer.special["<|im_end|>"]) == len(TALK)
    assert "Hi <|im_end|><|im_end|>" in marked_text(tokenizer, example)


@pytest.mark.parametrize("source", [CHATML + PROMPT, TAGGED + PROMPT], ids=["prefixes", "generation tags"])
def test_the_answers_of_a_prompt_do_not_count(tokenizer, tmp_path, source):
    line = {"prompt": TALK[:4], "completion": [TALK[4]]}
    [example] = examples(tokenizer, tmp_path / "d", line, source=source)
    assert counted(tokenizer, example) == ["bye<|im_end|>"]
    [same] = examples(tokenizer, tmp_path / "d", {**line, "completion": "bye"}, source=source)
    assert same == example


def test_texts_and_completions_count(tokenizer, tmp_path):
    text, pair = examples(tokenizer, tmp_path / "d", {"text": "one"}, "", {"prompt": "2 + 2 =", "completion": " 4"})
    end = tokenizer.special["<|endoftext|>"]
    assert (decode(tokenizer, text.ids[:-1]), text.ids[-1], set(text.weights)) == ("one", end, {1.0})
    assert decode(tokenizer, pair.ids[:-1]) == "2 + 2 = 4" and pair.ids[-1] == end
    assert counted(tokenizer, pair) == [" 4<|endoftext|>"]


def test_a_preference_has_two_completions_of_one_prompt(tokenizer, tmp_path):
    template = ChatTemplate("the template", CHATML + PROMPT)
    lines = [
        {"prompt": TALK[:2], "chosen": [TALK[2]], "rejected": [TALK[4]]},
        {"chosen": TALK[:3], "rejected": [*TALK[:2], TALK[4]]},
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
    ]
    (tmp_path / "d").write_text("\n".join(map(json.dumps, lines)))
    pairs = read_data(tmp_path / "d", tokenizer, template, Reader.preference)
    sides = [[counted(tokenizer, side) for side in pair] for pair in pairs]
    assert sides[0] == sides[1] == [["ah! hello<|im_end|>"], ["bye<|im_end|>"]]
    assert sides[2] == [[" 4<|endoftext|>"], [" 5<|endoftext|>"]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not usable JSON: Expecting property name"),
        ("[1]", "expected a JSON object, got a list"),
        ('{"text": "\\ud800"}', "is not usable JSON: the text is not valid Unicode"),
        ({"texts": "a"}, "expected messages, or prompt and completion, or text; got texts"),
        ({"text": 3}, "text is 3, expected a string"),
        ({"prompt": "a", "completion": " "}, "completion is empty"),
        ({"messages": []}, "expected a list of messages, got a list"),
        ({"messages": [{"role": "robot", "content": "a"}]}, 'message 1 has role "robot", expected system, user'),
        ({"messages": [TALK[1], {"role": "assistant"}]}, "message 2 has content null, expected a string"),
        ({"messages": [TALK[1], {"role": "assistant", "content": " "}]}, "message 2 is an answer, but it is empty"),
        ({"messages": TALK[:2]}, "has no message of the assistant to learn"),
    ],
)
def test_a_bad_line_is_named(tokenizer, tmp_path, line, words):
    with pytest.raises(CheckpointError) as error:
        examples(tokenizer, tmp_path / "data.jsonl", {"text": "good"}, "", line)
    assert "data.jsonl: line 3: " in str(error.value) and words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "holds a conversation, but the model has no chat template"),
        (FORGETFUL + PROMPT, "renders the messages before message 5 differently"),
        (CHATML, "writes <|im_start|> before message 3, but not in the prompt for it, so the model would learn to"),
        (
            CHATML + "{% generation %}{% endgeneration %}",
            "has 0 {% generation %} blocks with text, expected one for each of 2 answers",
        ),
        ("{{ raise_exception('no system message') }}", "no system message"),
    ],
)
def test_a_template_that_cannot_tell_the_answers_is_refused(tokenizer, tmp_path, source, words):
    """A template is refused if it does not show which tokens are the answers.

    Otherwise other tokens, such as an answer's header, could count in the loss.
    """
    with pytest.raises(CheckpointError) as error:
        examples(tokenizer, tmp_path / "d", {"messages": TALK}, source=source)
    assert "line 1: " in str(error.value) and words in str(error.value)


def test_the_built_in_model_learns_from_conversations(tmp_path):
    """The template of the built-in model refuses a system message, and its answers end with </s>."""
    from llamaspec.model.checkpoints.open import BUILT_IN

    place = BUILT_IN["stories"]
    tokenizer = load_tokenizer(place)
    template = find_template(tokenizer, place)
    (tmp_path / "d").write_text(json.dumps({"messages": TALK[1:]}))
    [example] = read_data(tmp_path / "d", tokenizer, template, Reader.example)
    assert counted(tokenizer, example) == [" ah! hello</s>", " bye</s>"]
