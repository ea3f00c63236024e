"""Chat templates that write tools and calls in the three families' ways, as short as these ways allow."""

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
{%- set call = message.tool_calls[0].function -%}
{{ '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson }}}"""
LLAMA = "{% if tools %}<|user|>{{ tools | tojson }}{% endif %}" + TURNS.replace("CALLS", LLAMA_CALLS)

TEMPLATES = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA}
