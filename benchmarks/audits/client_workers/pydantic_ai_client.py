"""pydantic-ai: agents with a model of OpenAI's chat API."""

from typing import Any, Literal

from checks import MODEL, QUESTION, URL, run  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput  # pyright: ignore[reportMissingImports]
from pydantic_ai.models.openai import OpenAIChatModel  # pyright: ignore[reportMissingImports]
from pydantic_ai.providers.openai import OpenAIProvider  # pyright: ignore[reportMissingImports]

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
SETTINGS: dict[str, Any] = {"max_tokens": 150, "seed": 7}


class Animals(BaseModel):
    """Count animals."""

    animal: Literal["fox", "bear"]
    count: Literal[1, 2, 3]


def agent(**options: Any) -> Any:
    return Agent(model, model_settings=SETTINGS, **options)


def stream() -> bool:
    answer = agent().run_stream_sync(QUESTION)
    return "".join(answer.stream_text(delta=True)) == agent().run_sync(QUESTION).output


def second_turn() -> bool:
    first = agent().run_sync(QUESTION)
    return bool(agent().run_sync("And then?", message_history=first.all_messages()).output)


run(
    {
        "chat": lambda: agent().run_sync(QUESTION).output,
        "stream equals the answer": stream,
        "a second turn": second_turn,
        "output by a tool": lambda: isinstance(agent(output_type=Animals).run_sync(QUESTION).output, Animals),
        "output by a schema": lambda: isinstance(
            agent(output_type=NativeOutput(Animals)).run_sync(QUESTION).output, Animals
        ),
    },
    ["pydantic-ai-slim"],
)
