"""Write chat.json: transformers' rendering of the chat templates here and in `chat_templates`.

    python -m tests.goldens.make_chat

Run it in the root of the repository, in a separate environment (Python 3.11):

    pip install transformers tokenizers jinja2

transformers renders in a sandbox with `trim_blocks`, `lstrip_blocks`, `break`, `continue`, and a block `generation`
that renders its content. Namespaces do not keep names such as `_a`; `tojson` keeps `<`, `&` and non-ASCII letters; the
functions `raise_exception` and `strftime_now` exist. `tools` and `documents` are always defined (default: none); no
template here reads `documents`. A message has its thoughts under every key from which templates read thoughts. Each of
these features changes the result of at least one case. No case depends on the date.
"""

import json
import platform
import tempfile
from pathlib import Path

from tests.goldens import chat_templates
from tests.support.tiny_tokenizers import chatml

COMMAND = "python -m tests.goldens.make_chat"

# ChatML's templates trim whitespace around blocks with `-`, on both sides.
CHATML = """\
{%- if tools %}
    {{- '<|begin|>system\\n' }}
    {{- 'Tools:' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- elif messages[0]['role'] != 'system' %}
    {{- '<|begin|>system\\nBe brief.<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|begin|>assistant\\n' }}{% generation %}{{ message.content }}<|end|>
{% endgeneration %}
    {%- else %}
        {{- '<|begin|>' + message.role + '\\n' + message.content + '<|end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|begin|>assistant\\n' }}
{%- endif %}
"""

# This template is one line. It uses the special tokens as variables, and raises if roles do not alternate.
INST = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = false %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate: turn ' ~ loop.index ~ ' is ' ~ message['role'] | upper ~ '!') }}"
    "{% endif %}"
    "{% if loop.index0 == 0 and system is not false %}"
    "{% set content = '<<S>>\\n' + system.strip() + '\\n<</S>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[I] ' + content | trim + ' [/I]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' ~ content.strip() ~ ' ' ~ eos_token }}{% endif %}"
    "{% endfor %}"
)

# Indented text between blocks, so that trim_blocks and lstrip_blocks matter; a namespace keeps state.
HEADERS = """\
{% set state = namespace(users=0, calls=[]) %}
{% for message in messages %}
    {% set header = '<|head|>' + message['role'] + '<|/head|>\\n\\n' %}
    {% if loop.first %}
{{ bos_token }}{% endif %}
    {# a comment, which leaves nothing behind #}
    {% if message['role'] == 'user' %}
        {% set state.users = state.users + 1 %}
    {% endif %}
    {% if message.tool_calls is defined %}
{{ header }}{{ message.tool_calls | tojson }}
{{ message.tool_calls[0] | tojson(indent=2) }}<|eot|>
        {% set state.calls = state.calls + [message.tool_calls | length] %}
    {% else %}
{{ header + message['content'] | trim }}<|eot|>
    {%- endif +%}
    {% if loop.last and add_generation_prompt -%}
        <|head|>assistant<|/head|>
        {{- '\\n\\n' }}
    {%- endif %}
{% endfor %}
({{ state.users }} from the user{{ ', ' ~ state.calls | join('+') ~ ' calls' if state.calls }})
"""

# Macros, a date from a variable or from a clock that may be missing, and a loop with `break`. `%%` replaces a date:
# strftime makes `%` of it on any day.
MACROS = """\
{%- macro turn(role, text, end=eos_token) -%}
    [{{ role }}]{{ caller() if caller else text }}{{ end }}
{%- endmacro -%}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("today (%%)") %}
    {%- else %}
        {%- set date_string = "no clock" %}
    {%- endif %}
{%- endif %}
{{- bos_token }}Date: {{ date_string }}
Tools: {{ 'none' if tools is none else tools | map(attribute='name') | join(', ') }}
{% for message in messages %}
    {%- if message.content is not string %}
        {%- for part in message.content if part.type == 'text' %}
            {{- turn(message.role, part.text | replace('\\n', ' / ')) }}
        {%- endfor %}
        {%- continue %}
    {%- endif %}
    {%- if message.content.startswith('STOP') %}
        {%- break %}
    {%- endif %}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {{- turn('assistant', message.content.split('</think>')[-1].lstrip('\\n'), end='') }}
    {%- else %}
        {%- call turn(message['role'] | title, '') %}
 "{{ message.content }}" {% endcall %}
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt and messages[-1].role != 'assistant' %}{{ turn('assistant', '', end='') }}{% endif %}
"""

HELLO = [{"role": "user", "content": "Hello, world!"}]
DIALOGUE = [
    {"role": "system", "content": "  You are a <b>careful</b> & helpful reader.\n"},
    {"role": "user", "content": '\n What does "naïve" mean? It\'s French, 日本語 no. \t'},
    {"role": "assistant", "content": " Innocent.\n\nOr simple. "},
    {"role": "user", "content": "{{ bos_token }} {% if %} stays as it is \\n"},
]
LONG = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "4 🦙"},
    {"role": "user", "content": "Thanks"},
]
TOOL = {"type": "function", "name": "weather", "description": "The weather in <place> & around, e.g. Zürich"}
CALL = [
    {"role": "user", "content": "Is it raining in Zürich?"},
    {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": {"place": "Zürich <ZH>", "days": [1, 2.5]}}]},
    {"role": "tool", "content": '{"rain": true}'},
]
PARTS = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "two\nlines"}, {"type": "image"}, {"type": "text", "text": "and more"}],
    },
    {"role": "user", "content": "seen"},
    {"role": "user", "content": "STOP here"},
    {"role": "user", "content": "unseen"},
]
ASTRAY = [*LONG[:2], {"role": "assistant", "content": "I go on."}]

CASES: list[tuple[str, str, list[dict], dict]] = [  # name of the template, template, messages, other variables
    ("chatml", CHATML, HELLO, {}),
    ("chatml", CHATML, DIALOGUE, {}),
    ("chatml", CHATML, LONG, {"tools": [TOOL]}),
    ("inst", INST, HELLO, {}),
    ("inst", INST, DIALOGUE, {}),
    ("inst", INST, LONG, {}),
    ("inst", INST, ASTRAY, {}),
    ("headers", HEADERS, HELLO, {}),
    ("headers", HEADERS, DIALOGUE, {}),
    ("headers", HEADERS, CALL, {}),
    ("macros", MACROS, LONG, {}),
    ("macros", MACROS, DIALOGUE, {"date_string": "26 Jul 2024"}),
    ("macros", MACROS, PARTS, {"tools": [TOOL]}),
    *chat_templates.CASES,
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def render(template: str, messages: list[dict], variables: dict) -> dict[str, str]:
    """Render a template with transformers; return `rendered`, or the kind and message of the template's exception."""
    # Render a template with transformers. Return `rendered`, or the type and message of the exception that the template
    # raised.
    from jinja2.exceptions import TemplateError
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)
    try:
        rendered = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, **{"add_generation_prompt": True} | variables
        )
    except TemplateError as error:
        return {"kind": type(error).__name__, "error": str(error)}
    return {"rendered": rendered}


def render_folder(files: dict[str, object], messages: list[dict], variables: dict) -> dict[str, object]:
    """Render and encode with the tokenizer that transformers loads from a folder with these files."""
    from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "tokenizer.json").write_text(chatml(special=chat_templates.TOKENS))
        for name, contents in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(contents if isinstance(contents, str) else json.dumps(contents))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    options = {"add_generation_prompt": True} | variables
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return {"rendered": rendered, "ids": " ".join(map(str, ids))}


def main() -> None:
    import jinja2
    import transformers  # pyright: ignore[reportMissingImports]

    versions = {
        "command": COMMAND,
        "python": platform.python_version(),
        "transformers": transformers.__version__,
        "jinja2": jinja2.__version__,
    }
    templates = {name: template for name, template, _, _ in CASES}
    cases = [
        {"template": name, "messages": messages, "variables": variables, **render(template, messages, variables)}
        for name, template, messages, variables in CASES
    ]
    folders = [
        {"name": name, "files": files, "messages": messages, "variables": variables}
        | render_folder(files, messages, variables)
        for name, files, messages, variables in chat_templates.FOLDERS
    ]
    chat = {"made": versions, "special": SPECIAL, "templates": templates, "cases": cases, "folders": folders}
    (Path(__file__).parent / "chat.json").write_text(json.dumps(chat, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
