"""Types of answers, as OpenAI's clients read them, complete and in chunks.

Source: https://platform.openai.com/docs/api-reference, "Completions" and "Chat".
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class Usage(Struct):
    """The token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TopLogprob(Struct):
    """A token and its log-probability before temperature and filters."""

    token: str
    logprob: float
    bytes: list[int]
    id: int  # an extension, because two tokens can have the same text


class TokenLogprob(TopLogprob):
    """A drawn token, and the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of the tokens of a chat answer."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """Log-probabilities of the tokens of a completion. Each field is a list with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


FinishReason = Literal["stop", "length", "tool_calls"]


class CompletionChoice(Struct):
    """One choice of a completion, or a piece of a choice in a chunk."""

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None = None


class CallPart(Struct):
    """The function of a tool call.

    `arguments` is a JSON string, or a piece of one; the first piece also has the name.
    """

    arguments: str
    name: str | UnsetType = UNSET


class AnswerCall(Struct):
    """A complete tool call."""

    id: str
    function: CallPart
    type: Literal["function"] = "function"


class CallDelta(Struct):
    """A piece of a tool call in a chunk. The first piece has the id, the type and the name, but no arguments."""

    index: int
    function: CallPart
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class AssistantMessage(Struct):
    """The message of a complete chat answer."""

    content: str | None  # None if the answer only calls tools
    role: Literal["assistant"] = "assistant"
    reasoning_content: str | UnsetType = UNSET  # an extension: the model's reasoning, if the model marks it
    refusal: None = None
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class Delta(Struct, omit_defaults=True):
    """A piece of a chat answer in a chunk. The first piece has the role."""

    content: str | None = None
    role: Literal["assistant"] | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChoice(Struct):
    """One choice of a chat answer."""

    index: int
    message: AssistantMessage
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None = None


class ChatChunkChoice(Struct):
    """A piece of one choice of a chat answer."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None


class Completion(Struct):
    """An answer to a completion request, or one chunk of it: OpenAI uses one type for both."""

    id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET  # in a stream: None before the last chunk, absent unless requested
    object: Literal["text_completion"] = "text_completion"


class ChatCompletion(Struct):
    """An answer to a chat request."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class ChatChunk(Struct):
    """A chunk of a streamed chat answer."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class EmbeddingUsage(Struct):
    """The token counts of a request for embeddings."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingEntry(Struct):
    """The embedding of one input: numbers, or their bytes in base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(Struct):
    """An answer to a request for embeddings."""

    model: str
    data: list[EmbeddingEntry]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class ModelCard(Struct):
    """The description of the server's model."""

    id: str
    created: int
    owned_by: str
    context: int  # an extension: the largest number of tokens of a prompt and its answer together
    parent: str | UnsetType = UNSET  # an extension: for an adapter, the id of the model that it changes
    object: Literal["model"] = "model"
