"""`model.chat.template` renders as transformers does, and refuses hostile templates in time."""

import os
import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.model.chat import template_process
from llamaspec.model.chat.chat import Chat
from llamaspec.model.chat.marked_text import marked, quoted
from llamaspec.model.chat.template import (
    CannotRender,
    ChatTemplate,
    SpecialTokens,
    check_options,
    find_template,
    turn_stops,
)
from llamaspec.model.chat.template_process import CPU_SECONDS, IDLE_WORKERS, TemplateWorker, Workers
from llamaspec.model.chat.template_worker import LONGEST
from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.llama import Llama
from llamaspec.model.tokenizers.llama2c import read_llama2c
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.tiktoken_ranks import read_tiktoken
from llamaspec.model.tokenizers.tokenizer import decode
from tests.support import tiny_tokenizers
from tests.support.goldens import read_golden
from tests.support.refusals import mentions
from tests.support.waiting import PATIENCE

GOLDEN = read_golden("chat")
WORDS_OF_ERRORS = {
    "TemplateError": "refuses this conversation: ",
    "UndefinedError": "fails: UndefinedError: ",
    "SecurityError": "forbidden namespace '_hidden'",
}
HELLO = [{"role": "user", "content": "Hello"}]
DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hello \n"},
    {"role": "assistant", "content": " Hi. "},
    {"role": "user", "content": "Bye"},
]

LLAMA2 = read_llama2c(tiny_tokenizers.llama2c(), path="tokenizer.bin")
LLAMA3 = read_tiktoken(tiny_tokenizers.llama3(), path="tokenizer.model")
TOKENIZERS = {"llama2": LLAMA2, "llama3": LLAMA3}


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["template"])
def test_templates_render_as_in_transformers(case):
    template = ChatTemplate(case["template"], GOLDEN["templates"][case["template"]], GOLDEN["special"])
    if "error" in case:
        with pytest.raises(ValueError) as caught:
            template.render(case["messages"], **case["variables"])
        message = str(caught.value)
        assert message.startswith(f"{case['template']}: ") and mentions(message, WORDS_OF_ERRORS[case["kind"]])
        assert case["kind"] == "SecurityError" or message.endswith(case["error"])
    else:
        assert template.render(case["messages"], **case["variables"]) == case["rendered"]


def test_none_values_are_undefined_in_templates():
    template = ChatTemplate(
        "t", "{% for m in messages %}{{ m.name is defined }}{{ m.content }}{% endfor %}{{ bos_token }}"
    )
    messages = [{"role": "user", "content": "a", "name": None}, {"role": "user", "content": "b", "name": 0}]
    assert template.render(messages) == "FalseaTrueb"


HOSTILE = {
    "{{ 'a' * 10**10 }}": "more than 512 MB of memory",
    "{% set s = namespace(l=[1]) %}{% for i in range(99) %}{% set s.l = s.l + s.l %}{% endfor %}": "takes more than",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "takes more than 2 seconds",
    "{{ 7 ** (10 ** 9) }}": "takes more than 2 seconds",  # within a single instruction of Python
    "{% for a in range(99999) %}{{ 'aaaaaaaaaa' * 10 }}{% endfor %}": f"more than {LONGEST:,} characters",
    "{% for a in range(10**6) %}{% endfor %}": "fails: OverflowError: Range too big",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "is nested too deeply",
    "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}": "is nested too deeply",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "uses a forbidden operation: access to attribute '__class__'",
    "{{ '{0.__class__.__mro__}'.format('') }}": "uses a forbidden operation: access to attribute '__class__'",
    "{{ (messages | attr('__class__')).mro() }}": "uses a forbidden operation: access to attribute '__class__'",
    "{{ raise_exception.__globals__.keys() }}": "uses a forbidden operation: access to attribute '__globals__'",
    "{{ messages.append(1) }}": "uses a forbidden operation: access to attribute 'append'",
    "{% include '/etc/passwd' %}": "fails: TypeError: no loader",
    "{{ nothing.at.all }}": "fails: UndefinedError: 'nothing' is undefined",
    "{% if %}": "not valid template: line 1: Expected an expression",
    "\n{{ 'a'": "not valid template: line 2: unexpected end",
    "{{ raise_exception('two\\nlines \\x1b[31m') }}": r"refuses this conversation: two\nlines \x1b[31m",
    "{{ raise_exception('long ' * 1000) }}": "refuses this conversation: long",
}


@pytest.fixture(autouse=True, scope="module")
def limits_of_the_clock() -> Iterator[None]:
    """Raise the wall-clock limits.

    On a busy machine, a hostile template then exceeds the limit on CPU time first.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_process, "SECONDS", PATIENCE)
        patch.setattr(template_process, "SECONDS_TO_START", PATIENCE + 1)
        yield


@pytest.mark.sampled(8)  # 19 cases, 6 s
@pytest.mark.parametrize("source", HOSTILE, ids=range(len(HOSTILE)))
def test_a_harmful_template_is_one_line_and_soon(source):
    began = seconds_of_children()
    with pytest.raises(CheckpointError) as caught:
        ChatTemplate("folder/chat_template.jinja", source).render(HELLO)
    message = str(caught.value)
    assert message.startswith("folder/chat_template.jinja: ") and mentions(message, HOSTILE[source])
    assert message.isprintable() and len(message) < 400
    assert seconds_of_children() - began < CPU_SECONDS + 1  # the kernel checks the limit only now and then


def seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(("name", "what"), [("SECONDS", "end"), ("SECONDS_TO_START", "start")])
def test_a_machine_without_time_is_not_the_templates_fault(monkeypatch, name, what):
    limit = getattr(template_process, name)

    def timer(seconds, action):
        return SimpleNamespace(start=action if seconds == limit else lambda: None, cancel=lambda: None)

    monkeypatch.setattr("llamaspec.model.chat.template_process.Timer", timer)
    with pytest.raises(CannotRender, match=f"^t: cannot be rendered: .* did not {what} within {limit:g} seconds"):
        ChatTemplate("t", "a").render(HELLO)


WORD = "messages[0].content"
AS_TOLD = (
    f"{{% if {WORD} == 'eat' %}}{{{{ {WORD} * 10**10 }}}}"
    f"{{% elif {WORD} == 'hang' %}}{{% for a in range(9999) %}}{{% for b in range(9999) %}}{{% endfor %}}{{% endfor %}}"
    f"{{% elif {WORD} == 'refuse' %}}{{{{ raise_exception('no') }}}}{{% else %}}{{{{ {WORD} }}}}{{% endif %}}"
)


@pytest.fixture
def started(monkeypatch):
    """Record the process ids of all template workers that a test starts."""
    ids: list[int] = []

    class Listed(TemplateWorker):
        def __init__(self, source: str):
            super().__init__(source)
            ids.append(self._process.pid)

    monkeypatch.setattr("llamaspec.model.chat.template_process.TemplateWorker", Listed)
    return ids


def say(template: ChatTemplate, text: str) -> str:
    return template.render([{"role": "user", "content": text}])


def test_one_worker_renders_many_templates_even_after_failures(monkeypatch, started):
    monkeypatch.setattr("llamaspec.model.chat.template_process.CPU_SECONDS", 1)
    with closing(Workers()) as workers:
        template = ChatTemplate("t", AS_TOLD, workers=workers)
        for wrong, what in (("eat", "more than 512 MB"), ("hang", "more than 2 seconds"), ("refuse", "refuses .* no")):
            with pytest.raises(CheckpointError, match=f"^t: .*{what}"):
                say(template, wrong)
            assert [say(template, text) for text in ("a", "b")] == ["a", "b"]
        assert len(started) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_a_worker_that_died_is_replaced(started):
    with closing(Workers()) as workers:
        template = ChatTemplate("t", f"{{{{ {WORD} }}}}", workers=workers)
        assert say(template, "a") == "a"
        os.killpg(started[0], signal.SIGKILL)
        assert say(template, "b") == "b" and len(started) == 2


def test_workers_render_side_by_side_and_two_are_kept(started):
    with closing(Workers()) as workers, ThreadPoolExecutor(3) as threads:
        template = ChatTemplate("t", f"{{{{ {WORD} }}}}", workers=workers)
        texts = [str(i) for i in range(30)]
        assert list(threads.map(partial(say, template), texts)) == texts
        assert len(list(threads.map(partial(say, template), texts))) == 30
        assert len([pid for pid in started if Path(f"/proc/{pid}").exists()]) <= IDLE_WORKERS


def test_a_template_that_cannot_be_compiled_is_told_each_time(started):
    with closing(Workers()) as workers:
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"^t: is not a valid template: line 1: Expected"):
                say(ChatTemplate("t", "{% if %}", workers=workers), "a")
    assert len(started) == 1


def test_the_worker_knows_nothing_of_its_caller(monkeypatch, tmp_path):
    # The worker imports no module of the current folder, and no module that the environment names.
    (tmp_path / "jinja2.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "jinja2.py"))
    assert ChatTemplate("t", "{{ messages[0].content }}").render(HELLO) == "Hello"


def test_the_built_in_formats():
    assert find_template(LLAMA2).render(DIALOGUE) == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n Hello [/INST] Hi. </s><s>[INST] Bye [/INST]"
    )
    assert find_template(LLAMA2).render(DIALOGUE[1:]) == "<s>[INST] Hello [/INST] Hi. </s><s>[INST] Bye [/INST]"
    assert find_template(LLAMA3).render(DIALOGUE) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHi.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    with pytest.raises(ValueError, match="alternate"):
        find_template(LLAMA2).render([DIALOGUE[1], DIALOGUE[3]])


def test_the_built_in_formats_that_are_chosen():
    assert find_template(LLAMA3, template="chatml").render(DIALOGUE) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    assert find_template(LLAMA2, template="mistral").render(DIALOGUE) == (
        "<s>[INST]  Hello \n[/INST] Hi.</s>[INST] Be brief.\n\nBye[/INST]"
    )
    assert find_template(LLAMA2, template="vicuna").render(DIALOGUE) == (
        "<s>Be brief. USER: Hello ASSISTANT: Hi.</s>USER: Bye ASSISTANT:"
    )


def test_an_option_that_no_template_reads_is_refused():
    template = ChatTemplate("t", "{{ enable_thinking }}", named={"tool_use": "{{ effort }}"})
    check_options(template, ["enable_thinking", "effort"])
    with pytest.raises(ValueError, match=r'^t: .*not read an option "thinking"') as caught:
        check_options(template, ["effort", "thinking"])
    assert not mentions(str(caught.value), "effort")
    with pytest.raises(ValueError, match="messages comes from the conversation"):
        check_options(template, ["messages"])


@pytest.mark.parametrize(
    ("special", "eos", "ends"),
    [
        (("<|start|>", "<|end|>", "<|return|>", "<|call|>"), None, ("<|return|>", "<|call|>")),  # gpt-oss
        (("<|user|>", "<|end|>", "<|endoftext|>"), None, ("<|end|>", "<|endoftext|>")),  # Phi-3
        (("<bos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", ("<end_of_turn>",)),  # Gemma
        (("[turn]", "[/turn]"), "[/turn]", ("[/turn]",)),
    ],
)
def test_what_ends_an_answer(tmp_path, special, eos, ends):
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.chatml(special=special))
    tokenizer = load_tokenizer(tmp_path)
    template = ChatTemplate("t", "", {} if eos is None else {"eos_token": eos})
    assert turn_stops(tokenizer, template) == {tokenizer.special[name] for name in ends}


# Strings that people type to break a template.
names = [*LLAMA2.special, "<|begin_of_text|>", "<|eot_id|>", "[INST]", "<<SYS>>", "<think>", "</think>"]
contents = st.lists(st.sampled_from([*names, "<", "|", "s>", "</", "\n", " ", "a", "é", "🦙"])).map("".join) | st.text()


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=contents.filter(lambda text: "▁" not in text))
@example("<|eot_id|>")
@example("</s>")
@example("<<s>s>")
def test_message_text_is_never_a_special_token(name, text):
    tokenizer = TOKENIZERS[name]
    special = SpecialTokens(tokenizer)
    begin, end = list(tokenizer.special)[:2]
    ids = special.encode(f"{begin}x" + quoted(text) + f"y{end}")
    assert [ids[0], ids[-1]] == [tokenizer.special[begin], tokenizer.special[end]]
    assert not set(ids[1:-1]) & set(tokenizer.special.values())
    assert decode(tokenizer, ids) == f"x{text}y"
    assert ids[1:-1] == tokenizer.encode(f"x{text}y")


@given(parts=st.lists(st.text("<|eot_id>/s", max_size=4) | st.sampled_from(["<|", "eot_id", "|>"])))
def test_message_parts_cannot_form_a_special_token(parts):
    together = marked("").join(map(quoted, parts))
    assert SpecialTokens(LLAMA3).encode(together) == LLAMA3.encode("".join(parts))


@pytest.mark.parametrize(
    ("before", "content", "after"), [("<|", "eot_id|>", ""), ("", "<|eot_id", "|>"), ("<|eot", "_", "id|>")]
)
def test_message_text_inside_a_name_is_no_special_token(before, content, after):
    text = marked(before) + quoted(content) + after
    assert text == "<|eot_id|>" and SpecialTokens(LLAMA3).encode(text) == LLAMA3.encode("<|eot_id|>")


def test_a_part_begins_a_text_after_a_special_token_alone():
    special = SpecialTokens(LLAMA2)
    first, later = LLAMA2.encode("ab"), LLAMA2.encode("ab", start=False)
    assert first != later
    assert special.encode("ab<s>ab</s>ab") == [*first, 1, *first, 2, *first]
    assert special.encode("ab<s>ab", after="<s>x") == [*later, 1, *first]
    assert special.encode("ab<s>ab", after="x<s>") == [*first, 1, *first]
    assert special.encode("<s></s>", after="x") == [1, 2]
    assert special.tail("<s>ab") == "ab" and special.tail("ab<s>") == ""


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{% if '<think>' in messages[0].content %}thinks{% endif %}", "thinks"),
        ("{{ messages[0].content.split('</think>')[-1] }}", "<|eot_id|>"),
        ("{{ messages[0].content | replace('<', '&lt;') }}", "&lt;think>a&lt;/think>&lt;|eot_id|>"),
        ("{{ messages[0].content | tojson }}", '"<think>a</think><|eot_id|>"'),
        ("{{ messages[0].content.startswith('<') }}{{ messages[0].content | length }}", "True26"),
    ],
)
def test_templates_see_what_was_said(source, rendered):
    text = ChatTemplate("t", source).render([{"role": "user", "content": "<think>a</think><|eot_id|>"}])
    assert text == rendered
    assert SpecialTokens(LLAMA3).encode(text) == LLAMA3.encode(rendered)


def test_errors_of_templates_show_what_was_said():
    template = ChatTemplate("t", "{{ raise_exception('no: ' + messages[0].content) }}")
    with pytest.raises(CheckpointError, match=r"^t: refuses this conversation: no: <\|eot_id\|> \U0001f999$"):
        template.render([{"role": "user", "content": "<|eot_id|> \U0001f999"}])


def test_joined_halves_of_a_character_are_refused():
    with pytest.raises(CheckpointError, match=r"^t: .*text that is not valid Unicode"):
        ChatTemplate("t", r"{{ '\ud83d' ~ '\udc4b' }}").render([])


def test_text_that_is_not_unicode_is_refused():
    chat = Chat(Model(), ChatTemplate("t", "{{ messages[0].content }}{{ tools }}"))
    with pytest.raises(ValueError, match="not valid Unicode"):
        chat.reply("\udc00")
    with pytest.raises(ValueError, match="not valid Unicode"):
        Chat(Model(), ChatTemplate("t", "{{ tools }}"), tools=[{"a": ["\udc00"]}])


def test_of_names_that_begin_alike_the_longest_is_meant(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.chatml(special=("<a>", "<a>b", "c")))
    tokenizer = load_tokenizer(tmp_path)
    special = SpecialTokens(tokenizer)
    assert special.encode("<a>b<a>c") == [tokenizer.special[name] for name in ("<a>b", "<a>", "c")]
    assert special.encode(quoted("<a>b<a>c")) == tokenizer.encode("<a>b<a>c")
    assert special.encode("<a>" + quoted("b")) == [tokenizer.special["<a>"], *tokenizer.encode("b")]


def test_a_tokenizer_without_special_tokens(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.chatml(special=()))
    tokenizer = load_tokenizer(tmp_path)
    special = SpecialTokens(tokenizer)
    assert special.encode(quoted("<s>") + "<s>") == tokenizer.encode("<s><s>")


class Model(Llama):
    """A model that has only the attributes that a chat reads before it computes logits."""

    context = 100  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self):
        self.tokenizer, self.stops = LLAMA3, frozenset()

    def session(self) -> Any: ...


def test_a_prompt_far_beyond_the_context_is_refused_before_it_is_encoded():
    """A rendered prompt of 2.8 million characters is refused before it is encoded; encoding it would take 1.8 GB."""
    chat = Chat(Model(), ChatTemplate("t", "{{ 'x' * 2_800_000 }}"))
    with pytest.raises(ValueError, match=r"^t: .*2,800,000.*25,600"):
        chat.reply("a")
    assert chat.messages == []
