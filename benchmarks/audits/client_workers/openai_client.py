"""OpenAI's client for Python."""

import json
from typing import Any, Literal

import openai
from checks import MESSAGES, MODEL, TEXTS, TOOL, URL, are_near, run  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel

# `Any`, because the client has types of its own for messages and tools, and ours are plain JSON.
client: Any = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


class Animals(BaseModel):
    animal: Literal["fox", "bear"]
    count: Literal[1, 2, 3]


def chat(**options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=7, max_tokens=150, **options)


def stream() -> bool:
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    answer = chat()
    return text == answer.choices[0].message.content and chunks[-1].usage == answer.usage


def tool_call_and_back() -> bool:
    message = chat(tools=[TOOL], tool_choice="required").choices[0].message
    call = message.tool_calls[0]
    Animals.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    conversation = [*MESSAGES, message, result]
    client.chat.completions.create(model=MODEL, messages=conversation, tools=[TOOL], max_tokens=5)
    return call.function.name == "count_animals"


def parsed() -> bool:
    completion = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Animals, max_tokens=150)
    message = completion.choices[0].message
    client.chat.completions.create(model=MODEL, messages=[*MESSAGES, message, *MESSAGES], max_tokens=5)
    return isinstance(message.parsed, Animals)


def streamed_tool_call() -> bool:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=150, seed=3
    ) as events:
        message = events.until_done().get_final_completion().choices[0].message
    return json.loads(message.tool_calls[0].function.arguments)["animal"] in ("fox", "bear")


def embeddings() -> bool:
    answers = [client.embeddings.create(model=MODEL, input=TEXTS, encoding_format=form) for form in ("float", "base64")]
    return are_near([entry.embedding for entry in client.embeddings.create(model=MODEL, input=TEXTS).data]) and (
        answers[0].usage == answers[1].usage
    )


def error() -> bool:
    try:
        chat(top_p=9)
    except openai.BadRequestError as wrong:
        return wrong.param == "top_p"
    return False


run(
    {
        "models": lambda: client.models.list().data[0].id == MODEL and client.models.retrieve(MODEL).id == MODEL,
        "chat, twice the same": lambda: chat().choices[0].message.content == chat().choices[0].message.content,
        "stream equals the answer": stream,
        "log-probabilities": lambda: len(chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content) > 10,
        "completion": lambda: client.completions.create(model=MODEL, prompt="The fox", max_tokens=5).choices[0].text,
        "parse, and send it back": parsed,
        "tool call, and its result": tool_call_and_back,
        "streamed tool call": streamed_tool_call,
        "embeddings": embeddings,
        "error names the field": error,
    },
    ["openai"],
)
