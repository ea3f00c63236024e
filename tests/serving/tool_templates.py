"""Short chat templates that write tools and calls in the forms of three model families, and answers in these forms."""

TURNS = """
{%- for message in messages -%}
    {%- if message.tool_calls -%}
        {{ '<|assistant|>' + message.content }}CALLS</s>
    {%- elif message.role == 'tool' -%}
        {{ '<|user|>result ' ~ message.tool_call_id ~ ': ' + message.content }}
    {%- else -%}
        {{ '<|' + message.role + '|>' + message.content + ('</s>' if message.role == 'assistant' else '') }}
    {%- endif -%}
{%- endfor -%}
{{ '<|assistant|>' }}"""

HERMES_CALLS = """
{%- for call in message.tool_calls -%}
    {{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}"""
HERMES = "{% if tools %}<|user|>{{ tools | tojson }}{% endif %}" + TURNS.replace("CALLS", HERMES_CALLS)

MISTRAL_CALLS = """[TOOL_CALLS] [
{%- for call in message.tool_calls -%}
    {{ call.function | tojson }}{{ ', ' if not loop.last }}
{%- endfor -%}
]"""
MISTRAL = "{% if tools %}<|user|>{{ tools | tojson }}{% endif %}" + TURNS.replace("CALLS", MISTRAL_CALLS)

LLAMA_CALLS = """
{%- if message.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{% endif -%}
{%- set call = message.tool_calls[0].function -%}
{{ '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson }}}"""
LLAMA = "{% if tools %}<|user|>{{ tools | tojson }}{% endif %}" + TURNS.replace("CALLS", LLAMA_CALLS)

# gpt-oss's form, with the variables of its template. Thoughts are shown only with a call.
HARMONY = """
{%- if reasoning_effort %}<|start|>system<|message|>Reasoning: {{ reasoning_effort }}<|end|>{% endif -%}
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif -%}
{%- for message in messages -%}
    {%- if message.tool_calls -%}
        {%- if message.content and message.thinking %}{{ raise_exception('both content and thinking') }}{% endif -%}
        {%- if message.content or message.thinking -%}
            {{ '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}
        {%- endif -%}
        {%- set call = message.tool_calls[0].function -%}
        {{ '<|start|>assistant to=' + "functions." + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'tool' -%}
        {{ '<|start|>functions to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'assistant' -%}
        {{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- else -%}
        {{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif -%}
{%- endfor -%}
<|start|>assistant"""

TEMPLATES = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA}

ASK = [{"role": "user", "content": "Is it warm in Rome?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"$ref": "#/$defs/Unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["C", "F"]}},
}
ADD = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/Unit"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"Unit": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
]
ROME = '{"city": "Rome", "unit": "C"}'
ANSWERS = {
    "hermes": f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ROME}}}, {{"name": "add", "arguments": {{"a": 1}}}}]',
    "llama": f'{{"name": "weather", "parameters": {ROME}}}; {{"name": "add", "parameters": {{"a": 1}}}}',
}
CALLED = [("weather", ROME), ("add", '{"a": 1}')]
