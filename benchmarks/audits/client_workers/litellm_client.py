"""litellm, with the provider openai and our server's address."""

import json
from typing import Any

import litellm  # pyright: ignore[reportMissingImports]
from checks import MESSAGES, MODEL, PARAMETERS, TEXTS, TOOL, URL, are_near, run  # pyright: ignore[reportMissingImports]

PLACE = {"api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
FORMAT = {"type": "json_schema", "json_schema": {"name": "animals", "schema": PARAMETERS, "strict": True}}


def chat(messages: list[Any] = MESSAGES, **options: Any) -> Any:
    options = {"seed": 7, "max_tokens": 150} | options
    return litellm.completion(model=f"openai/{MODEL}", messages=messages, **options, **PLACE)


def stream() -> bool:
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chat(stream=True))
    return text == chat().choices[0].message.content


def tool_call_and_back() -> bool:
    message = chat(tools=[TOOL], tool_choice="required").choices[0].message
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "done"}
    chat([*MESSAGES, message.model_dump(), result], tools=[TOOL], max_tokens=5)
    return json.loads(call.function.arguments)["count"] in (1, 2, 3)


def formatted() -> bool:
    message = chat(response_format=FORMAT).choices[0].message
    chat([*MESSAGES, message, *MESSAGES], max_tokens=5)
    return json.loads(message.content)["animal"] in ("fox", "bear")


def embeddings() -> bool:
    answer = litellm.embedding(model=f"openai/{MODEL}", input=TEXTS, **PLACE)
    return are_near([entry["embedding"] for entry in answer.data])


run(
    {
        "chat": lambda: chat().choices[0].message.content,
        "stream equals the answer": stream,
        "schema, and send it back": formatted,
        "tool call, and its result": tool_call_and_back,
        "embeddings": embeddings,
    },
    ["litellm"],
)
