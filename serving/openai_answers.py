"""Wire types of answers, as OpenAI's clients read them, whole and in chunks.

Source: https://platform.openai.com/docs/api-reference, "Completions" and "Chat".
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class Usage(Struct):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TopLogprob(Struct):
    """A token and its log-probability, before temperature and filters."""

    token: str
    logprob: float
    bytes: list[int]
    id: int  # an extension: two tokens can look the same


class TokenLogprob(TopLogprob):
    """A drawn token and the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of an answer's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """Log-probabilities of a text's tokens, as one list per property."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


FinishReason = Literal["stop", "length", "tool_calls"]


class CompletionChoice(Struct):
    """One text, or a piece of a text in a chunk."""

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None = None


class CallPart(Struct):
    """The arguments of a call, as a JSON string, whole or in pieces. The first piece has the function's name."""

    arguments: str
    name: str | UnsetType = UNSET


class AnswerCall(Struct):
    """A tool call."""

    id: str
    function: CallPart
    type: Literal["function"] = "function"


class CallDelta(Struct):
    """A piece of a call in a chunk. The first piece has the id, the type and the name, but no arguments."""

    index: int
    function: CallPart
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class AssistantMessage(Struct):
    """A whole answer."""

    content: str | None  # None if the answer only calls tools
    role: Literal["assistant"] = "assistant"
    reasoning_content: str | UnsetType = UNSET  # an extension: the model's thoughts, if it marks them
    refusal: None = None
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class Delta(Struct, omit_defaults=True):
    """A piece of an answer in a chunk. The first piece has the role."""

    content: str | None = None
    role: Literal["assistant"] | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: AssistantMessage
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None = None


class ChatChunkChoice(Struct):
    """A piece of one answer."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None


class Completion(Struct):
    """The answer to a completion, or a chunk of it: OpenAI uses one type for both."""

    id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET  # in a stream: None before the last chunk, absent unless requested
    object: Literal["text_completion"] = "text_completion"


class ChatCompletion(Struct):
    """The answer to a conversation."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class ChatChunk(Struct):
    """A chunk of a streamed answer."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ModelCard(Struct):
    """The served model."""

    id: str
    created: int
    owned_by: str
    context: int  # an extension: tokens of a prompt and its answer together
    object: Literal["model"] = "model"
