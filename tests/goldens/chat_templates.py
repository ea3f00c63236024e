"""Chat templates that we wrote with features of recent model families, and conversations to render with them."""

# This template drops thoughts of earlier turns, calls tools, puts tool results into one message, and can switch
# thoughts off by closing them before they begin.
THINKING = """\
{%- set state = namespace(last_question=-1, calls=0) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - loop.index %}
    {%- if state.last_question < 0 and message.role == 'user' and message.content is string %}
        {%- set state.last_question = index %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|begin|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content ~ '\\n\\n' }}{%- endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' ~ (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools><|end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|begin|>system\\n' + messages[0].content + '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- set said = message.content | default('', true) %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in said %}
            {%- set thoughts = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set said = said.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|begin|>assistant\\n' }}
        {%- if loop.index0 > state.last_question and (loop.last or (not loop.last and thoughts)) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- said }}
        {%- for call in message.tool_calls | default([]) %}
            {%- if not loop.first or said %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {%- set state.calls = state.calls + 1 %}
            {{- '<call>{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}</call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|begin|>user' }}{%- endif %}
        {{- '\\n<result>\\n' ~ message.content ~ '\\n</result>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|end|>\\n' }}{%- endif %}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|begin|>' ~ message.role ~ '\\n' ~ message.content ~ '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|begin|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# Recursive macros write tools as types of another language. The template also tests for the pad, unk and cls tokens.
TYPES = """\
{%- macro type_of(schema, depth=0) -%}
    {%- if schema is not mapping -%}unknown
    {%- elif schema.enum is defined -%}{{ schema.enum | map('tojson') | join(' | ') }}
    {%- elif schema.type == 'array' -%}{{ type_of(schema['items'], depth + 1) }}[]
    {%- elif schema.type == 'object' -%}
        {{ '{' }}
        {%- for name, inner in schema.properties.items() %}
{{ '  ' * (depth + 1) }}{{ name }}{{ '?' if name not in schema.required | default([]) }}:{{ ' ' -}}
            {{ type_of(inner, depth + 1) }}
            {%- if inner.description is defined %} // {{ inner.description | trim | replace('\\n', ' ') }}{% endif %}
            {%- if not loop.last %},{% endif %}
        {%- endfor %}
{{ '  ' * depth }}{{ '}' }}
    {%- elif schema.type is sequence and schema.type is not string -%}{{ schema.type | join(' | ') }}
    {%- else -%}{{ schema.type | default('any') }}{{ ' | null' if schema.nullable }}
    {%- endif -%}
{%- endmacro -%}
{{- bos_token }}{{ pad_token is defined }} {{ unk_token | default('none') }} {{ cls_token is defined }}
{% set date = strftime_now('%%') if strftime_now is defined else '' %}
{% for tool in (tools or []) | sort(attribute='function.name') %}
    {% set function = tool.function %}
// {{ function.description | default('no description') | truncate(30, true, '...') }}
type {{ function.name }} = (_: {{ type_of(function.parameters) }}) => any;{{ date }}
{% endfor %}
{% filter trim %}
{% for message in messages if message.content is defined %}
    {% set parts = [message.content] if message.content is string else message.content %}
    {% for part in parts if part is string or part.get('type') == 'text' %}
        {% set text %}{{ part if part is string else part['text'] }}{% endset %}
{{ loop.index0 }}/{{ loop.length }} {{ message.role | capitalize }}: {{ text | trim | indent(4) }}
    {% else %}
(nothing to read)
    {% endfor %}
{% endfor %}
{% endfilter %}

{% for key, value in dict(b=1, a=[2, {'c': none}], d='é<').items() | sort %}
{{- key }}={{ value | tojson(indent=2 if value is iterable and value is not string else none) }};
{%- endfor %}
{{ {'z': 'ü', 'a': 1.0} | tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true) }}
{%- set seen = namespace() %}{% set seen.roles = messages | map(attribute='role') | unique | list %}
 {{ seen.roles | reject('equalto', 'user') | list }} {{ '%s of %d' | format(seen.roles | first, messages | length) }}
{%- generation %} last: {{ (messages | last).role[:4] }}{% endgeneration %}{{ eos_token }}
"""

# The thoughts of a message have an older name, and the template tests for a variable that may be missing.
CHANNELS = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.thinking %}
        {{- '<|begin|>analysis ' ~ message.thinking ~ ' (' ~ message.reasoning_content ~ ')<|end|>' }}
    {%- endif %}
    {{- '<|begin|>' ~ message.role ~ ' ' ~ message.content ~ '<|end|>' }}
{%- endfor %}
{%- if effort is defined %}{{ '<effort ' ~ effort | int * 2 ~ '>' }}{% endif %}
{%- if strict is defined and strict %}{{ raise_exception('strict: ' ~ messages[0].missing.key) }}{% endif %}
"""

# transformers' sandbox does not keep names with a leading underscore.
UNDERSCORE = "{% set state = namespace(a=1) %}{% set state._hidden = 2 %}{{ state.a }}"

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather of a <place>, today or in the next few days.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": " A town,\nas in 'Zürich' "},
                "days": {"type": "array", "items": {"type": ["integer", "null"]}},
                "unit": {"enum": ["°C", "°F"]},
                "where": {"type": "object", "properties": {"lat": {"type": "number", "nullable": True}, "lon": True}},
            },
            "required": ["place"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it raining in Zürich?"}]
CALL = {"name": "weather", "arguments": {"place": "Zürich <ZH>", "days": [1, None]}}
CALLED = [
    *ASK,
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "\nI must look.\n",
        "tool_calls": [{"type": "function", "function": CALL}, {"name": "clock", "arguments": "{}"}],
    },
    {"role": "tool", "content": '{"rain": true}'},
    {"role": "tool", "content": "12:00"},
]
THOUGHT = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "4", "reasoning": "also easy"},
]
OLDER = [
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "so", "thinking": "hm"},
    {"role": "assistant", "content": "or so", "thinking": None, "reasoning": "hm, hm"},
    {"role": "assistant", "content": "thus", "thinking": "a", "reasoning_content": "b"},
]
PARTS = [
    {
        "role": "user",
        "content": [{"type": "text", "text": " two\nlines "}, {"type": "image"}, {"type": "text", "text": ""}],
    },
    {"role": "assistant", "content": [{"type": "image"}]},
    {"role": "user", "content": "and more"},
]

CASES: list[tuple[str, str, list[dict], dict]] = [  # name of the template, template, messages, other variables
    ("thinking", THINKING, ASK, {}),
    ("thinking", THINKING, ASK, {"enable_thinking": False}),
    ("thinking", THINKING, ASK, {"enable_thinking": True, "tools": [WEATHER, CLOCK]}),
    ("thinking", THINKING, CALLED, {"tools": [WEATHER]}),
    ("thinking", THINKING, THOUGHT, {"add_generation_prompt": False}),
    ("thinking", THINKING, [*THOUGHT, ASK[1]], {"enable_thinking": False}),
    ("types", TYPES, ASK, {"tools": [WEATHER, CLOCK]}),
    ("types", TYPES, PARTS, {}),
    ("types", TYPES, CALLED, {"tools": []}),
    ("channels", CHANNELS, OLDER, {"effort": "21"}),
    ("channels", CHANNELS, OLDER, {"strict": True}),
    ("underscore", UNDERSCORE, ASK, {}),
]

# Folders by their special feature: the files next to a tokenizer.json, a conversation, and its variables.
TOKENS = ("<|begin|>", "<|end|>", "<s>", "<tool>", "<pad>")  # special tokens in that tokenizer.json
MAIN = (
    "{{ bos_token }}main{{ eos_token is defined }}{{ pad_token }}:"
    "{% for message in messages %}<|begin|>{{ message.content }}<|end|>{% endfor %}"
)
USES = MAIN.replace("main", "with {{ tools | length if tools else 'no' }} tools")
NAMED = [{"name": "tool_use", "template": USES}, {"name": "default", "template": MAIN}]
BOS = {"bos_token": "<s>", "eos_token": "<|end|>"}
FOLDERS: list[tuple[str, dict[str, object], list[dict], dict]] = [
    ("configured", {"tokenizer_config.json": {**BOS, "pad_token": "<pad>", "chat_template": MAIN}}, ASK, {}),
    ("null eos", {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": None, "chat_template": MAIN}}, ASK, {}),
    ("BOS is added to texts", {"tokenizer_config.json": BOS | {"add_bos_token": True, "chat_template": MAIN}}, ASK, {}),
    ("a list", {"tokenizer_config.json": {**BOS, "chat_template": NAMED}}, ASK, {}),
    ("a list, with tools", {"tokenizer_config.json": {**BOS, "chat_template": NAMED}}, ASK, {"tools": [CLOCK]}),
    ("a list, with no tool", {"tokenizer_config.json": {**BOS, "chat_template": NAMED}}, ASK, {"tools": []}),
    ("a file", {"tokenizer_config.json": {**BOS, "chat_template": "configured"}, "chat_template.jinja": MAIN}, ASK, {}),
    (
        "a folder of others, with tools",
        {
            "tokenizer_config.json": {**BOS, "chat_template": "configured"},
            "chat_template.jinja": MAIN,
            "additional_chat_templates/tool_use.jinja": USES,
            "additional_chat_templates/rag.jinja": "of documents",
        },
        ASK,
        {"tools": [CLOCK, WEATHER]},
    ),
    (
        "a map of tokens",
        {
            "tokenizer_config.json": {"bos_token": "<|begin|>", "eos_token": None, "chat_template": MAIN},
            "special_tokens_map.json": {"bos_token": {"content": "<s>", "lstrip": False}, "pad_token": "<pad>"},
        },
        ASK,
        {},
    ),
    (
        "a map that does not count",
        {
            "tokenizer_config.json": {
                "bos_token": "<|begin|>",
                "eos_token": "<|end|>",
                "added_tokens_decoder": {"256": {"content": "<|begin|>", "special": True}},
                "chat_template": MAIN,
            },
            "special_tokens_map.json": {"bos_token": "<s>", "pad_token": "<pad>"},
        },
        ASK,
        {},
    ),
]  # fmt: skip
