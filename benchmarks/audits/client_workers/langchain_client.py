"""langchain: ChatOpenAI and OpenAIEmbeddings of langchain-openai."""

from typing import Any, Literal

from checks import MODEL, QUESTION, TEXTS, TOOL, URL, are_near, run  # pyright: ignore[reportMissingImports]
from langchain_core.messages import HumanMessage, ToolMessage  # pyright: ignore[reportMissingImports]
from langchain_openai import ChatOpenAI, OpenAIEmbeddings  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel

PLACE: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
model = ChatOpenAI(model=MODEL, seed=7, max_tokens=150, **PLACE)


class Animals(BaseModel):
    """Count animals."""

    animal: Literal["fox", "bear"]
    count: Literal[1, 2, 3]


def tool_call_and_back() -> bool:
    bound = model.bind_tools([TOOL], tool_choice="count_animals")
    message = bound.invoke(QUESTION)
    call = message.tool_calls[0]
    model.bind_tools([TOOL]).invoke([HumanMessage(QUESTION), message, ToolMessage("done", tool_call_id=call["id"])])
    return call["args"]["animal"] in ("fox", "bear")


def embeddings() -> bool:
    # By default this class sends ids of OpenAI's own tokenizer, which mean other texts to other models.
    return are_near(OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False, **PLACE).embed_documents(TEXTS))


run(
    {
        "chat": lambda: model.invoke(QUESTION).content,
        "stream equals the answer": lambda: (
            "".join(chunk.content for chunk in model.stream(QUESTION)) == model.invoke(QUESTION).content
        ),
        "batch": lambda: all(answer.content for answer in model.batch([QUESTION, "Tell me a story about a bear."])),
        "structured output, json_schema": lambda: model.with_structured_output(Animals).invoke(QUESTION),
        "structured output, function_calling": lambda: model.with_structured_output(
            Animals, method="function_calling", strict=True
        ).invoke(QUESTION),
        "tool call, and its result": tool_call_and_back,
        "embeddings": embeddings,
    },
    ["langchain-openai", "langchain-core"],
)
