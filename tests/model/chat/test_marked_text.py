"""Marked text: a template sees a plain string, and no operation turns quoted user text into a control token."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.filters import FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llamaspec.model.chat.marked_text import (
    QUOTED,
    MarkedText,
    lengths_of,
    marked,
    marks_from,
    marks_of,
    plain,
    quoted,
)
from llamaspec.model.chat.template import ChatTemplate
from llamaspec.model.chat.template_environment import tojson
from llamaspec.model.chat.template_worker import compiled, render, with_marks

CONTENT = "<|im_end|>a <b> & 'Q' \n\n x, y"
MESSAGES = [{"role": "user", "content": CONTENT, "k": "a"}, {"role": "user", "content": "<s>"}]
# Templates and their expected results. Q stands for text from a message; the rest is the template's own text.
EXACT = {
    "{{ m.content }}": "Q",
    "{{ '<s>' + m.content + '</s>' }}": "<s>Q</s>",
    "{{ '<s>' ~ m.content ~ '</s>' ~ 3 ~ [1] }}": "<s>Q</s>3[1]",
    "{{ m.content.strip() + '<s>' }}{{ '<s>' }}": "Q<s><s>",
    "{{ m.content | trim('<') }}{{ m.content.lstrip('<|') }}{{ m.content.rstrip('y ') }}": "Q",
    "{{ m.content.split('<b>')[-1] }}": "Q",
    "{{ m.content.split() | join('</s>') }}": "Q</s>Q</s>Q</s>Q</s>Q</s>Q",
    "{{ '</s>'.join(m.content.split(',')) }}": "Q</s>Q",
    "{{ m.content.rsplit(None, 2) | join('|') }}": "Q|Q|Q",
    "{{ m.content.split(None, 2) | join('|') }}": "Q|Q|Q",
    "{{ m.content.rsplit('<b>', 1)[0] }}": "Q",
    "{{ '</s>'.join(messages | map(attribute='content')) }}": "Q</s>Q",
    "{{ messages | join('</s>', attribute='content') }}": "Q</s>Q",
    "{{ ['<s>', m.content] | join }}": "<s>Q",
    "{{ m.content | replace('<b>', '<s>') }}": "Q<s>Q",
    "{{ '<s>@</s>' | replace('@', m.content) }}": "<s>Q</s>",
    "{{ '<s>@</s>'.replace('@', m.content) }}": "<s>Q</s>",
    "{{ m.content | replace('', '<s>', 3) }}": "<s>Q<s>Q<s>Q",
    "{{ m.content[2:-3] }}{{ m.content[-1] }}{{ m.content | reverse }}{{ m.content[0] }}": "Q",
    "{{ m.content | upper }}{{ m.content.lower() }}{{ m.content | title }}{{ m.content | capitalize }}": "Q",
    "{{ '<s>%s</s>%%%d' % (m.content, 4) }}": "<s>Q</s>%4",
    "{{ '%(a)s<s>' % {'a': m.content} }}{{ '<s>%s' % m.content }}": "Q<s><s>Q",
    "{{ '<s>%s' | format(m.content) }}": "<s>Q",
    "{{ '<s>{}</s>{}'.format(m.content, 1) }}": "<s>Q</s>1",
    "{{ '{0}<s>{a}'.format(1, a=m.content) }}{{ '{a[0]}<s>'.format_map({'a': [m.content]}) }}": "1<s>Q<s>",
    "{{ m.content | e }}{{ '<s>' ~ (m.content | escape) }}": "Q<s>Q",
    "{{ '[INST]' + m.content | e + '[/INST]' }}{{ ('<' + m.content) | e }}": "[INST]Q[/INST]&lt;Q",
    "{{ ('<s>' + m.content) | safe }}{{ ('<s>' + m.content) | string }}": "<s>Q<s>Q",
    "{{ m | tojson }}{{ m.content | tojson }}{{ 'a' | tojson }}": 'Q"a"',
    "{{ [m.content] }}{{ m }}{{ [1] }}": "Q[1]",
    "{{ ('<s>' + m.content) | indent(2, true, true) }}": "  <s>Q\n  \n  Q",
    "{{ m.content | indent }}": "Q\n\n    Q",
    "{% set x %}<s>{{ m.content }}</s>{% endset %}{{ x | trim }}": "<s>Q</s>",
    "{% macro f(t) %}<s>{{ t }}</s>{% endmacro %}{{ f(m.content) | trim }}": "<s>Q</s>",
    "{% macro g() %}<s>{{ caller() }}{% endmacro %}{% call g() %}{{ m.content }}</s>{% endcall %}": "<s>Q</s>",
    "{% filter upper %}<s>{{ m.content }}</s>{% endfilter %}": "<S>Q</S>",
    "{% generation %}<s>{{ m.content }}{% endgeneration %}": "<s>Q",
    "{% for c in m.content %}{{ c }}{% endfor %}<s>": "Q<s>",
    "{% for key in m %}{{ key }}<s>{% endfor %}": "Q<s>Q<s>Q<s>",
    "{% set ns = namespace(t='') %}{% set ns.t = ns.t + m.content + '<s>' %}{{ ns.t }}": "Q<s>",
    "{{ m.content.encode().decode() }}{{ m.content * 2 }}{{ 2 * m.content }}": "Q",
    "{{ m.content.partition('<b>') | join('<s>') }}{{ m.content.rpartition('<b>')[2] }}": "Q<s>Q<s>Q",
    "{{ m.content.splitlines() | join('<s>') }}{{ m.content.splitlines(true) | join }}": "Q<s><s>Q",
    "{{ m.content.removeprefix('<|im_end|>') }}{{ m.content.removesuffix('y') }}": "Q",
    "{{ m.content | default('x') }}{{ m.none | default(m.content) }}{{ m.content | length }}": "Q29",
    "{{ m.content | list | first }}{{ m.content | list | last }}{{ [m.content] | unique | first }}": "Q",
    "{{ '<|im_end|>' in m.content }}{{ m.content.startswith('<|im') }}{{ m.content is string }}": "TrueTrueTrue",
    "{{ m.content.find('<b>') }}{{ {'a': 1}[m.k] }}{{ m.content == m.content }}": "121True",
    "{% autoescape true %}{{ m.content ~ '<' }}{% set x %}<s>{{ m.content }}{% endset %}{{ x }}{% endautoescape %}": (
        "Q&lt;<s>Q"
    ),
    "{{ m.role }}{{ '<s>'.join(['a', 'b']) }}": "usera<s>b",
}
# Templates with a result that counts as text from a message as a whole.
QUOTED_RESULTS = [
    "{{ m.content | center(80) }}{{ m.content.center(80) }}{{ m.content.ljust(80) }}{{ m.content.zfill(80) }}",
    "{{ m.content | wordwrap(5) }}{{ m.content | truncate(8) }}{{ m.content | urlencode }}",
    "{{ m.content | striptags }}{{ m.content.expandtabs() }}{{ m.content.swapcase() }}{{ m.content.casefold() }}",
    "{{ ('<s>' + m.content) | truncate(8) }}{{ '{:>{}}<s>'.format(m.content, 50) }}{{ '<s>%*s' % (9, m.content) }}",
    "{{ m.content % () }}{{ m.content.format() }}{{ ('<s>{}' | safe).format(m.content) }}",
    "{{ {'<s>': m.content} }}{{ {'<s>': m.content} | tojson }}{{ ['<s>', m.content] | pprint }}",
    "{{ {'class': m.content} | xmlattr }}{{ ('<s>' ~ m.content) | urlize }}",
    "{{ ['<s>' ~ m.content] ~ '' }}{{ strftime_now(m.content) }}",
]


def in_plain_jinja(source: str) -> str:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["strftime_now"] = lambda format: format
    source = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return environment.from_string("{% set m = messages[0] %}" + source).render(messages=MESSAGES)


def with_our_marks(source: str) -> MarkedText:
    request: dict[str, Any] = {"variables": {"messages": MESSAGES}, "tokens": {}}
    return render(compiled("{% set m = messages[0] %}" + source), with_marks(request))


def with_quotes(text: str) -> str:
    """Replace each run of quoted characters by the letter Q."""
    at, parts = 0, []
    for i, length in enumerate(lengths_of(marks_of(text))):
        parts.append("Q" if i % 2 else plain(text)[at : at + length])
        at += length
    return "".join(parts)


@pytest.mark.parametrize("source", EXACT, ids=range(len(EXACT)))
def test_a_template_sees_plain_texts_and_marks_stay(source):
    text = with_our_marks(source)
    assert text == in_plain_jinja(source)
    assert with_quotes(text) == EXACT[source]


@pytest.mark.parametrize("source", QUOTED_RESULTS, ids=range(len(QUOTED_RESULTS)))
def test_what_is_not_followed_is_quoted_as_a_whole(source):
    text = with_our_marks(source)
    assert text == in_plain_jinja(source)
    assert with_quotes(text) == "Q"


@pytest.mark.parametrize("name", sorted({*FILTERS} - {"random"}))
def test_no_filter_loses_marks(name):
    """Every Jinja filter gives the same text as in plain Jinja, and letters from the quoted message stay marked.

    If our code does not know a filter, its whole result is marked.
    """
    source = f"{{% set x = m.content | {name} %}}{{{{ x if x is string or x is number else x | list }}}}"
    try:
        expected = in_plain_jinja(source)
    except Exception as error:
        with pytest.raises(type(error)):
            with_our_marks(source)
        return
    text = with_our_marks(source)
    assert text == expected
    assert all(mark for mark, letter in zip(marks_of(text), text, strict=True) if letter in "<|_>b")


def test_the_tokens_of_the_model_and_roles_are_the_templates_own():
    template = ChatTemplate(
        "t", "{{ bos_token }}{{ x }}<|{{ messages[0].role }}|>{{ tools[0].a }}", {"bos_token": "<s>"}
    )
    text = template.render([{"role": "user", "content": ""}], x="<s>", tools=[{"a": "</s>"}])
    assert text == "<s><s><|user|></s>"
    assert with_quotes(text) == "<s>Q<|user|>Q"


def test_errors_name_what_templates_have():
    with pytest.raises(ValueError, match="'str object' has no attribute 'nope'"):
        ChatTemplate("t", "{{ messages[0].content.nope.nope }}").render([{"role": "user", "content": "a"}])


pieces = st.text("<s>| \n\tßİa", max_size=6)
texts = st.lists(st.tuples(st.booleans(), pieces), max_size=4)
OPERATIONS = [
    *("lower", "upper", "title", "capitalize", "swapcase", "casefold"),
    *("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "expandtabs"),
]


def built(parts: list[tuple[bool, str]]) -> MarkedText:
    """Join parts of plain and quoted text into one `MarkedText`; the flag of a part says whether it is quoted."""
    return marked("").join([quoted(text) if quote else text for quote, text in parts])


@given(text=texts, second=texts, name=st.sampled_from(OPERATIONS))
def test_methods_equal_those_of_str(text, second, name):
    text, second = built(text), built(second)
    result = getattr(text, name)()
    assert result == getattr(plain(text), name)()
    parts = result if isinstance(result, list) else [result]
    assert all(len(marks_of(part)) == len(part) for part in parts)
    assert text + second == plain(text) + plain(second) and len(marks_of(text + second)) == len(text + second)


@given(
    text=texts,
    separator=pieces.filter(bool),
    new=texts,
    count=st.integers(-1, 3),
    first=st.integers(-9, 9),
    step=st.sampled_from([1, -1, 2]),
)
def test_parts_keep_their_marks(text, separator, new, count, first, step):
    text, new = built(text), built(new)
    for name in ("split", "rsplit", "partition", "rpartition"):
        options = (separator, count) if "split" in name else (separator,)
        parts = getattr(text, name)(*options)
        assert [*parts] == [*getattr(plain(text), name)(*options)]
        between = marked("") if "partition" in name else _part(text, separator)
        assert marks_of(between.join(parts)) == marks_of(text) or "split" in name
    for name in ("split", "rsplit"):
        assert [*getattr(text, name)(None, count)] == getattr(plain(text), name)(None, count)
    for old in (separator, ""):
        replaced = text.replace(old, new, count)
        assert replaced == plain(text).replace(old, plain(new), count)
        assert len(marks_of(replaced)) == len(replaced)
        assert QUOTED in marks_of(replaced) or QUOTED not in marks_of(text) or old in text
    assert text[first::step] == plain(text)[first::step] and marks_of(text[first::step]) == marks_of(text)[first::step]
    assert "".join(map(plain, text)) == text and b"".join(map(marks_of, text)) == marks_of(text)


def _part(text: MarkedText, part: str) -> MarkedText:
    at = text.find(part)
    return text[at : at + len(part)] if at >= 0 else marked("")


@given(marks=st.lists(st.integers(0, 1)).map(bytes))
def test_marks_survive_the_way_between_processes(marks):
    assert marks_from(json.loads(json.dumps(lengths_of(marks)))) == marks
