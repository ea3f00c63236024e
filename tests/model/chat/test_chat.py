"""`model.chat.chat` computes only the new tokens of each turn, both for scripted answers and for real models."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from llamaspec.cli import llamaspec
from llamaspec.commands.chat import named_values
from llamaspec.model.chat.chat import Chat
from llamaspec.model.chat.marked_text import marked
from llamaspec.model.chat.template import ChatTemplate, SpecialTokens, find_template
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.llama import Llama, load, load_backend
from llamaspec.model.options import RunOptions, SamplingOptions
from llamaspec.model.tokenizers.huggingface import read_huggingface
from llamaspec.model.tokenizers.llama2c import read_llama2c
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.tiktoken_ranks import read_tiktoken
from llamaspec.model.tokenizers.tokenizer import decode
from llamaspec.reference.config import Config
from tests.support import tiny_tokenizers
from tests.support.families import FAMILIES, write_checkpoint

pytestmark = pytest.mark.usefixtures("workers_stay")
TOKENIZERS = {
    "llama2": read_llama2c(tiny_tokenizers.llama2c(), path="tokenizer.bin"),
    "llama3": read_tiktoken(tiny_tokenizers.llama3(), path="tokenizer.model"),
}
HARMONY = read_huggingface(
    tiny_tokenizers.chatml(("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")).encode(),
    path="tokenizer.json",
)
THINK_TAGS = ("<think>", "</think>")
MARKED = {  # tokenizers of models that mark their reasoning
    "harmony": HARMONY,
    "added tags": read_huggingface(tiny_tokenizers.chatml(("<|return|>",), THINK_TAGS).encode(), path="tokenizer.json"),
    "control tags": read_huggingface(
        tiny_tokenizers.chatml(("<|return|>", *THINK_TAGS)).encode(), path="tokenizer.json"
    ),
}
STOPS = {"llama2": "</s>", "llama3": "<|eot_id|>", **dict.fromkeys(MARKED, "<|return|>")}
GREEDY = SamplingOptions(temperature=0.0)


class Script:
    """A `Backend` that returns scripted answers. Its cache is the list of all tokens passed to it so far."""

    burst = 4
    chunk = 16
    ahead = 0

    def __init__(self, capacity: int = 1000):
        self.capacity = capacity
        self.fed: list[int] = []
        self.answer: list[int] = []  # tokens to draw next

    def start(self) -> list[int]:
        return []

    def rewind(self, cache: list[int], length: int) -> list[int]:
        return cache[:length]

    def extend(self, cache: list[int], ids: Sequence[int]) -> list[int]:
        assert 0 < len(ids) <= self.chunk
        self.fed += ids
        return [*cache, *ids]

    def begin(self, token, *, seen, seed, options, stops):
        return token, stops

    def decode(self, cache, drawing, *, steps):
        token, stops = drawing
        drawn, self.answer = self.answer[:steps], self.answer[steps:]
        assert drawn, "more was drawn than the script has"
        ends = [i for i, id in enumerate(drawn, start=1) if id in stops]
        drawn = drawn[: ends[0]] if ends else drawn
        return lambda: drawn, (drawn[-1], stops), self.extend(cache, [token, *drawn[:-1]])

    def logits(self, ids):
        raise NotImplementedError

    def bytes_read(self, position):
        return None

    def describe(self):
        return "by a script"


class Talk:
    """A chat with a `Script` as its backend."""

    def __init__(self, kind: str, template: ChatTemplate | None = None, *, system=None, capacity: int = 1000):
        self.tokenizer: Any = (TOKENIZERS | MARKED)[kind]
        self.stop = self.tokenizer.special[STOPS[kind]]
        self.script = Script(capacity)
        vocab = self.tokenizer.vocab
        numbers = {"dim": 8, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 8, "ffn": 8, "eps": 1e-5, "theta": 1e4}
        config = Config(**numbers, vocab=vocab, context=capacity)
        self.llama = Llama(config, self.tokenizer, self.script, stops=frozenset())
        self.template = template or find_template(self.tokenizer)
        self.chat = Chat(self.llama, self.template, system=system)

    def ask(self, question: str, answer: Sequence[int], **options):
        """Run one turn with the scripted `answer`, and return the finished generation."""
        self.script.answer = list(answer)
        generation = self.chat.reply(question, **options)
        list(generation)
        return generation

    def answer(self, text: str) -> list[int]:
        """Encode an answer to the ids that a model would generate, followed by the stop token."""
        return [*self.tokenizer.encode(text, start=False), self.stop]

    @property
    def cached(self) -> list[int]:
        return self.chat._session.ids


@pytest.fixture(params=TOKENIZERS)
def kind(request) -> str:
    return request.param


def text(answer: str, kind: str) -> str:
    """Put a space before the answer for Llama 2, as its template does; return it unchanged for other templates."""
    return f" {answer}" if kind == "llama2" else answer


def test_a_turn_computes_only_new_tokens(kind):
    talk = Talk(kind, system="Be <s> brief.")
    questions, answers = ["Hi </s>", "And <|eot_id|> then? 🦙", "é"], [text(a, kind) for a in ("Yes.", "é, no.", "Bye")]
    for question, answer in zip(questions, answers, strict=True):
        before = len(talk.script.fed)
        generation = talk.ask(question, talk.answer(answer))
        assert generation.completion == answer
        assert generation.finish_reason == "stop"
        new = talk.script.fed[before:]
        assert talk.cached[before:] == new  # no token of earlier turns, and no token twice
    assert talk.script.fed == talk.cached

    # Three turns, one at a time, give the same ids as the whole conversation at once.
    special = SpecialTokens(talk.tokenizer)
    assert [message["content"] for message in talk.chat.messages[1::2]] == questions
    assert [message["content"] for message in talk.chat.messages[2::2]] == answers
    expected = special.encode(talk.template.render(talk.chat.messages[:-1])) + talk.answer(answers[-1])[:-1]
    assert talk.cached == expected
    begin = talk.tokenizer.bos
    assert expected.count(begin) == (3 if kind == "llama2" else 1) and expected[:2] != [begin, begin]


def test_a_question_that_was_taken_back_leaves_no_trace(kind):
    talk, expected = Talk(kind, system="Be brief."), Talk(kind, system="Be brief.")
    for chat in (talk, expected):
        chat.ask("Hi", chat.answer(text("Yes.", kind)))
    talk.ask("Why?", talk.answer(text("Hm.", kind)))
    assert talk.chat.take_back() == {"role": "user", "content": "Why?"}
    assert talk.chat.messages == expected.chat.messages
    for chat in (talk, expected):
        chat.ask("When?", chat.answer(text("Now.", kind)))
    assert talk.cached == expected.cached and talk.chat.messages == expected.chat.messages
    for question in ("When?", "Hi"):
        assert talk.chat.take_back()["content"] == question
    with pytest.raises(ValueError, match="no question"):
        talk.chat.take_back()
    assert [message["role"] for message in talk.chat.messages] == ["system"]


def test_a_loaded_conversation_goes_on_as_the_saved_one(kind):
    saved, loaded = Talk(kind, system="Be brief."), Talk(kind)
    saved.ask("Hi", saved.answer(text("Yes.", kind)))
    loaded.ask("Something else", loaded.answer(text("No.", kind)))
    loaded.chat.resume(json.loads(json.dumps(saved.chat.messages)))
    for chat in (saved, loaded):
        chat.ask("Why?", chat.answer(text("Hm.", kind)))
    assert loaded.cached == saved.cached and loaded.chat.messages == saved.chat.messages
    before = loaded.chat.messages
    for wrong in ([], [{"role": "robot", "content": "x"}], [{"role": "user", "content": 1}]):
        with pytest.raises(ValueError, match="expected"):
            loaded.chat.resume(wrong)
    assert loaded.chat.messages == before
    loaded.chat.reset()
    assert loaded.chat.messages == before[:1]  # the loaded system message stays


TOOLED = """\
{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}<|eot_id|>{% endfor %}\
{% if enable_thinking is false %}<think></think>{% endif %}"""


def test_tools_and_options_are_the_templates():
    talk = Talk("llama3")
    tool = {"name": "look <|eot_id|>", "strict": True, "parameters": [1, {"<|eot_id|>": "<|eot_id|>"}]}
    talk.chat = Chat(talk.llama, ChatTemplate("t", TOOLED), tools=[tool], options={"enable_thinking": False})
    talk.ask("Rain?", talk.answer("look()"))
    talk.ask("yes <|eot_id|>", talk.answer("It rains."), role="tool")
    assert [message["role"] for message in talk.chat.messages] == ["user", "assistant", "tool", "assistant"]
    rendered = "".join(json.dumps([tool]) + "user:Rain?")
    ids = talk.tokenizer.encode(rendered)
    assert talk.cached[: len(ids)] == ids  # the tool's output spells no special token
    assert "tool:yes <|eot_id|>" in decode(talk.tokenizer, talk.cached)
    assert talk.cached.count(talk.stop) == 3  # one after each message but the last: its answer is in the cache
    with pytest.raises(ValueError, match="does not read an option"):
        Chat(talk.llama, ChatTemplate("t", TOOLED), options={"thinking": True})
    with pytest.raises(ValueError, match="does not read tools"):
        Chat(talk.llama, ChatTemplate("t", "{{ messages }}"), tools=[tool])


def test_options_on_the_command_line_are_json_or_text():
    stated = ("enable_thinking=false", "effort=high", "n=[1, 2]", "empty=", "a=b=c")
    expected = {"enable_thinking": False, "effort": "high", "n": [1, 2], "empty": "", "a": "b=c"}
    assert named_values(stated) == expected
    deep = "[" * 100_000  # deeper than Python's parser can follow
    assert named_values([f"a={deep}"]) == {"a": deep}
    for wrong in ("enable_thinking", "=false", "a b=1"):
        done = CliRunner().invoke(llamaspec, ["chat", "--template-option", wrong])
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"expected NAME=VALUE, got {wrong!r}" in done.stderr


def test_a_tools_result_is_forgotten_with_its_question():
    talk = Talk("llama3", ChatTemplate("t", TOOLED), capacity=400)
    for turn in range(3):
        talk.ask(f"question {turn}", talk.answer("look()"))
        talk.ask("z" * 40, talk.answer("It rains."), role="tool")
    assert talk.chat.make_room("now?" * 20, answer=50) == 2
    assert [message["content"] for message in talk.chat.messages[:1]] == ["question 2"]


def test_an_answer_that_is_left_early_is_kept_so_far(kind):
    talk = Talk(kind)
    talk.script.answer = talk.answer(text("A long answer, left early", kind))
    generation = talk.chat.reply("Hi")
    assert talk.chat.messages == []
    printed = ""
    for token in generation:
        printed += token.text
        assert talk.chat.messages[-1] == {"role": "assistant", "content": printed}
        if printed.endswith("long"):
            break

    before = len(talk.script.fed)
    talk.ask("Go on", talk.answer(text("No", kind)))
    assert [m["content"] for m in talk.chat.messages] == ["Hi", printed, "Go on", text("No", kind)]
    kept_length = generation.prompt_tokens + len(generation.ids)
    assert talk.cached[generation.prompt_tokens : kept_length] == generation.ids
    assert len(talk.script.fed) - before <= len(talk.cached) - kept_length + 1

    unread = [token.text for token in generation]  # the rest of the burst; no more tokens are drawn
    assert len(unread) < talk.script.burst and generation.finish_reason == "interrupted"
    assert [m["content"] for m in talk.chat.messages] == ["Hi", printed, "Go on", text("No", kind)]


def test_an_interrupted_answer_is_kept(kind):
    talk = Talk(kind)
    answer = text("Another", kind)
    talk.script.answer = talk.answer(answer)
    printed: list[str] = []
    generation = talk.chat.reply("Well?", interrupted=lambda: len(printed) > 2)
    for token in generation:
        printed.append(token.text)
    assert generation.finish_reason == "interrupted"
    assert talk.chat.messages[-1]["content"] == "".join(printed) != answer
    assert answer.startswith("".join(printed))
    talk.ask("And", talk.answer(text("b", kind)))
    assert talk.script.fed == talk.cached


def test_a_question_without_an_answer_is_dropped(kind):
    talk = Talk(kind)
    generation = talk.chat.reply("Hi", interrupted=lambda: True)
    assert list(generation) == [] and generation.finish_reason == "interrupted"
    assert list(talk.chat.reply("Hi", max_new_tokens=0)) == []
    talk.chat.reply("Hi")  # its tokens are never read
    assert talk.chat.messages == []
    talk.ask("Hi", [talk.stop])  # an empty answer is an answer, too
    assert [m["content"] for m in talk.chat.messages] == ["Hi", ""]
    talk.ask("Hi", talk.answer(text("Yes", kind)))
    assert talk.script.fed == talk.cached


@pytest.mark.parametrize("length", range(1, 6))
def test_an_answer_cut_inside_a_character_stays_as_shown(kind, length):
    talk = Talk(kind)
    begin, end = text("a", kind), "\ufffd" if 1 < length < 5 else ""
    drawn = talk.tokenizer.encode(f"{begin}🦙", start=False)
    generation = talk.ask("Hi", drawn, max_new_tokens=length)
    assert generation.completion == (f"{begin}🦙" if length == 5 else begin + end)
    talk.ask("And", talk.answer(text("b", kind)))
    expected = drawn if length == 5 else [drawn[0], *talk.tokenizer.encode(end, start=False)]
    assert talk.cached[generation.prompt_tokens :][: len(expected)] == expected
    assert talk.chat.messages[1]["content"] == generation.completion


def test_half_a_character_keeps_its_bytes(kind):
    talk = Talk(kind)
    begin, *later_bytes = talk.tokenizer.encode(text("！", kind), start=False)[-3:]
    assert talk.tokenizer.bytes_of(begin) == "\ufffd".encode()[:1] and len(later_bytes) == 2
    generation = talk.ask("Hi", [begin], max_new_tokens=1)
    assert generation.completion == "\ufffd"
    talk.ask("And", talk.answer(text("b", kind)))
    assert talk.chat.messages[1]["content"] == "\ufffd"


def test_the_space_in_front_of_an_answer_that_begins_a_text_is_not_shown_but_kept():
    source = "{% for m in messages %}<s>{{ m.content }}{% endfor %}<s>"
    talk = Talk("llama2", ChatTemplate("turns", source))
    drawn = talk.tokenizer.encode(" ", start=False) + talk.tokenizer.encode("Yes", start=False)
    assert drawn != talk.tokenizer.encode("Yes")  # two tokens where one would be enough
    generation = talk.ask("Hi", [*drawn, talk.stop])
    assert generation.completion == "Yes"
    talk.ask("And", [*drawn, talk.stop])
    assert talk.cached[generation.prompt_tokens :][: len(drawn)] == drawn
    assert talk.script.fed == talk.cached


def test_a_stop_text_is_not_part_of_the_answer(kind):
    talk = Talk(kind)
    answer = text("one", kind)
    generation = talk.ask("Hi", talk.answer(f"{answer}, two"), stop=[", t"])
    assert (generation.completion, generation.finish_reason) == (answer, "stop")
    talk.ask("And", talk.answer(text("b", kind)))
    after = talk.cached[generation.prompt_tokens :]
    assert after[:3] == talk.tokenizer.encode(answer, start=False)
    assert talk.tokenizer.encode(",", start=False)[0] not in after


def test_a_stop_text_may_be_the_name_of_a_control_token(kind):
    """A control token ends the answer if its name is a stop string, although no typed text encodes to this token."""
    name = "<|begin_of_text|>" if kind == "llama3" else "<s>"
    talk = Talk(kind)
    answer = text("one", kind)
    drawn = [*talk.answer(answer)[:-1], talk.tokenizer.special[name], *talk.answer("two")]
    generation = talk.ask("Hi", drawn, stop=[name, "three"])
    assert (generation.completion, generation.finish_reason) == (answer, "stop")
    talk.ask("And", talk.answer(text("b", kind)))
    special = SpecialTokens(talk.tokenizer)
    rendered = talk.template.render(talk.chat.messages[:-1])
    assert talk.cached[: -len(talk.answer(text("b", kind))) + 1] == special.encode(rendered)


def test_every_end_of_turn_ends_an_answer(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.chatml(("<|im_start|>", "<|im_end|>", "<e>", "<x>")))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>", "chat_template": "<|im_start|>"}))
    tokenizer = load_tokenizer(tmp_path)
    talk = Talk("llama3")
    assert {talk.tokenizer.piece(id) for id in talk.chat._stops} == {
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    }
    llama = Llama(
        dataclasses.replace(talk.llama.config, vocab=tokenizer.vocab), tokenizer, talk.script, stops=frozenset({7})
    )
    chat = Chat(llama, find_template(tokenizer, tmp_path))
    assert chat._stops == {7, tokenizer.special["<|im_end|>"], tokenizer.special["<e>"]}
    talk.script.answer = [65, tokenizer.special["<x>"], 66, tokenizer.special["<|im_end|>"], 67]
    generation = chat.reply("Hi")
    assert len(list(generation)) == 4 and generation.finish_reason == "stop"


def test_a_conversation_that_no_longer_fits_says_so_and_loses_nothing(kind):
    talk = Talk(kind, capacity=200)
    talk.ask("Hi", talk.answer(text("Yes.", kind)))
    messages, cached = talk.chat.messages, talk.cached
    with pytest.raises(ValueError, match=r"\d+ tokens.*\b200\b.*make_room") as caught:
        talk.chat.reply("abcd " * 60)
    assert "\n" not in str(caught.value)
    assert (talk.chat.messages, talk.cached) == (messages, cached)
    with pytest.raises(ValueError, match="max-new-tokens must be"):
        talk.chat.reply("Hi", max_new_tokens=-1)
    assert (talk.chat.messages, talk.cached) == (messages, cached)

    talk.ask("Go on", talk.answer(text("No.", kind)))
    assert talk.script.fed == talk.cached
    talk.chat.reset()
    assert talk.chat.messages == []
    with pytest.raises(ValueError, match=r"^(?!.*make_room).*\d+ tokens.*\b200\b"):
        talk.chat.reply("abcd " * 60)  # no message is left to drop
    talk.ask("Hi", talk.answer(text("Yes.", kind)))
    assert talk.script.fed != talk.cached  # the new answer starts in another sequence
    assert len(talk.chat.messages) == 2


def test_old_turns_make_room(kind):
    talk = Talk(kind, capacity=400, system="Be brief.")
    for number in range(4):
        assert talk.chat.make_room("Hi", answer=40) == 0
        talk.ask(f"{number}" * 40, talk.answer(text("Yes.", kind)))
    before = talk.chat.messages
    dropped = talk.chat.make_room("abcd " * 40, answer=40)
    assert dropped > 0
    assert talk.chat.messages == [before[0], *before[1 + 2 * dropped :]]
    generation = talk.ask("abcd " * 40, talk.answer(text("No.", kind)))
    assert generation.finish_reason == "stop"
    special = SpecialTokens(talk.tokenizer)
    assert (
        talk.cached
        == special.encode(talk.template.render(talk.chat.messages[:-1])) + talk.answer(text("No.", kind))[:-1]
    )


def test_old_turns_stay_if_dropping_them_does_not_help(kind):
    talk = Talk(kind, capacity=200)
    talk.ask("Hi", talk.answer(text("Yes.", kind)))
    messages = talk.chat.messages
    assert talk.chat.make_room("abcd " * 60, answer=40) == 0
    assert talk.chat.messages == messages


def test_another_system_message_begins_anew(kind):
    talk = Talk(kind, system="Be brief.")
    talk.ask("Hi", talk.answer(text("Yes.", kind)))
    talk.chat.instruct("Be long.")
    assert talk.chat.messages == [{"role": "system", "content": "Be long."}]
    talk.chat.instruct(None)
    assert talk.chat.messages == []


def test_a_context_that_fills_up_ends_the_answer(kind):
    talk = Talk(kind, capacity=200)
    generation = talk.ask("Hi", [65] * 300, max_new_tokens=300)
    assert generation.finish_reason == "context"
    assert len(talk.chat.messages) == 2
    with pytest.raises(ValueError, match=r"reset.*make_room"):
        talk.chat.reply("Hi")
    assert len(talk.chat.messages) == 2


def test_the_system_message_outlives_a_reset_and_is_reused(kind):
    talk = Talk(kind, system="Be brief.")
    talk.ask("Hi", talk.answer("a"))
    talk.chat.reset()
    assert talk.chat.messages == [{"role": "system", "content": "Be brief."}]
    before = len(talk.script.fed)
    talk.ask("Bye", talk.answer("a"))
    assert len(talk.script.fed) - before < len(talk.cached) - len("Be brief.")


def test_an_answer_that_the_template_trims_is_computed_as_the_template_has_it(kind):
    talk = Talk(kind)
    talk.ask("Hi", talk.answer("  Yes.\n\n"))
    talk.ask("And", talk.answer(text("b", kind)))
    rendered = SpecialTokens(talk.tokenizer).encode(talk.template.render(talk.chat.messages[:-1]))
    assert talk.cached == [*rendered, *talk.answer(text("b", kind))[:-1]]


THOUGHTLESS = """\
{{- bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>
{{ m.content.split('</think>')[-1] }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>
"""


def test_a_template_that_changes_earlier_turns_recomputes_the_rest():
    talk = Talk("llama3", ChatTemplate("thoughtless", THOUGHTLESS, {"bos_token": "<|begin_of_text|>"}))
    first = talk.ask("Hi", talk.answer("<think>Hm.</think>Yes"))
    before = len(talk.script.fed)
    second = talk.ask("And?", talk.answer("No"))
    rendered = SpecialTokens(talk.tokenizer).encode(talk.template.render(talk.chat.messages[:-1]))
    assert talk.cached == [*rendered, *talk.answer("No")[:-1]]
    assert len(talk.script.fed) - before == len(talk.cached) - first.prompt_tokens
    assert second.prompt_tokens == len(rendered)
    assert talk.chat.messages[1]["content"] == "<think>Hm.</think>Yes"


WITHOUT_THOUGHTS = "{% for m in messages %}{{ m.role + ': ' + m.content }}<|return|>{% endfor %}assistant: "
LATEST_THOUGHTS = """
{%- for m in messages %}{{ m.role + ': ' }}
{%- if m.reasoning_content and loop.index > messages | length - 2 %}{{ '<think>' + m.reasoning_content + '</think>' }}
{%- endif %}{{ m.content }}<|return|>{% endfor %}assistant: """


@pytest.mark.parametrize("thoughts", ["Hm.", " Yes", ""])
@pytest.mark.parametrize("template", [WITHOUT_THOUGHTS, LATEST_THOUGHTS, WITHOUT_THOUGHTS + "<think>"])
@pytest.mark.parametrize("kind", MARKED)
def test_thoughts_are_apart_and_the_template_decides_what_stays(kind, template, thoughts):
    talk = Talk(kind, ChatTemplate("thinks", template))
    if kind == "harmony":
        written = f"<|channel|>analysis<|message|>{thoughts}<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    else:
        written = ("" if template.endswith("<think>") else "<think>") + f"{thoughts}</think>Yes"
    answer = [*SpecialTokens(talk.tokenizer).encode(marked(written)), talk.stop]
    generation = talk.ask("Hi", answer)
    spoken = thoughts if kind == "harmony" else thoughts.strip()
    assert (generation.completion, generation.thoughts) == ("Yes", spoken)
    assert talk.chat.messages[1].get("reasoning_content", "") == spoken
    final = [talk.tokenizer.special[name] for name in ("<|channel|>", "<|message|>")] if kind == "harmony" else []
    plain = [*final[:1], *talk.tokenizer.encode("final"), final[1], *talk.answer("No")] if final else talk.answer("No")
    talk.ask("And?", plain)
    rendered = SpecialTokens(talk.tokenizer).encode(talk.template.render(talk.chat.messages[:-1]))
    assert talk.cached == [*rendered, *plain[:-1]]


def test_answers_without_thoughts_keep_their_ids():
    """A model that can think, but does not, computes no token twice."""
    talk = Talk("added tags", ChatTemplate("thinks", WITHOUT_THOUGHTS))
    for question, answer in (("Hi", "Yes"), ("And?", "No"), ("So?", "Yes and no")):
        assert talk.ask(question, talk.answer(answer)).completion == answer
    assert talk.script.fed == talk.cached


def test_a_template_that_refuses_or_makes_nothing_loses_nothing():
    source = "{% if messages | length > 2 %}{{ raise_exception('enough') }}{% endif %}{{ messages[0].content }}"
    talk = Talk("llama3", ChatTemplate("short", source))
    talk.ask("Hi", talk.answer("a"))
    with pytest.raises(ValueError, match=r"short: .*: enough"):
        talk.chat.reply("more")
    assert len(talk.chat.messages) == 2
    with pytest.raises(ValueError, match=r"nothing: .*empty text"):
        Talk("llama3", ChatTemplate("nothing", "")).chat.reply("Hi")
    with pytest.raises(ValueError, match="not valid Unicode"):
        talk.chat.reply("\ud800")


def test_control_tokens_within_an_answer_stay(kind):
    talk = Talk(kind)
    control = talk.tokenizer.special["<s>" if kind == "llama2" else "<|python_tag|>"]
    answer = [*talk.answer(text("ab", kind))[:-1], control, *talk.answer("c")]
    generation = talk.ask("Hi", answer)
    assert generation.completion == text("abc", kind)
    talk.ask("And", talk.answer(text("d", kind)))
    assert talk.cached[generation.prompt_tokens :][: len(answer) - 1] == answer[:-1]
    assert talk.script.fed == talk.cached


# Tests with real models.


@pytest.fixture(scope="module", params=TOKENIZERS)
def model(request, tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp(request.param)
    family, tokenizer = {"llama2": "llama-2", "llama3": "llama-3.1"}[request.param], TOKENIZERS[request.param]
    ids = {"vocab_size": tokenizer.vocab, "eos_token_id": tokenizer.special[STOPS[request.param]]}
    write_checkpoint(folder, {**FAMILIES[family], **ids, "bos_token_id": tokenizer.bos, "max_position_embeddings": 256})
    return folder, request.param


def arrays(cache: Any, length: int) -> list[np.ndarray]:
    """Return the keys and values of the cache's first `length` positions; `cache` is the cache of either backend."""
    layers = cache.layers if hasattr(cache, "layers") else cache
    return [np.asarray(x)[0, :, :length] if x.ndim == 4 else np.asarray(x)[:length] for layer in layers for x in layer]


@pytest.mark.sampled(1)  # 8 s each
@pytest.mark.parametrize(("backend", "ahead"), [("reference", 0), ("jax", 0), ("jax", 1)])
def test_what_a_conversation_left_in_the_cache_is_what_its_tokens_make_one_by_one(model, backend, ahead):
    folder, kind = model
    checkpoint = open_checkpoint(folder)
    tokenizer = TOKENIZERS[kind]
    running: Any = load_backend(checkpoint, RunOptions(backend=backend))  # each backend has its own kind of cache
    running.ahead = ahead
    llama = Llama(checkpoint.config, tokenizer, running, stops=checkpoint.stops)
    chat = Chat(llama, find_template(tokenizer), system="Be brief.")
    for question in ("Hi", "And then?"):
        generation = chat.reply(question, max_new_tokens=8, seed=1)
        list(generation)
    ids = chat._session.ids
    assert len(ids) == generation.prompt_tokens + len(generation.ids) - 1

    cache = running.start()
    for id in ids:
        cache = running.extend(cache, [id])
    for actual, expected in zip(arrays(chat._session._cache, len(ids)), arrays(cache, len(ids)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9 if backend == "reference" else 1e-4)

    # Equal keys and values give equal logits, which the next tokens show.
    again = list(llama.continue_ids(chat._session, [*ids, generation.ids[-1]], sampling=GREEDY, max_new_tokens=4))
    fresh = list(llama.continue_ids(llama.session(), [*ids, generation.ids[-1]], sampling=GREEDY, max_new_tokens=4))
    assert again == fresh
    row = llama.logits([*ids, generation.ids[-1]])[-1]
    assert again[0].id == int(np.argmax(row))


def test_stories_can_be_talked_to(data):
    stories = data / "stories260K"
    llama = load(stories / "stories260K.bin", tokenizer=stories / "tok512.model")
    chat = Chat(llama, find_template(llama.tokenizer, stories))
    replies = [
        "".join(token.text for token in chat.reply(question, seed=1, max_new_tokens=20)) for question in ("Hi", "So?")
    ]
    assert [message["content"] for message in chat.messages] == ["Hi", replies[0], "So?", replies[1]]
    assert all(replies)
