"""Requests, and the events that answer them.

An `Engine` serves many requests at once. `submit` takes a request and a function. The engine calls the function with
each event of the request, in order, from its own thread: first at most one `PromptLogprobs` or `Embedding`, then any
number of `Tokens`, and last exactly one `Finished`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float

from llamaspec.model.options import SamplingOptions, check_max_new_tokens, check_seed

MOST_LOGPROBS = 20  # largest number of likeliest tokens to report per position
MOST_BIASES = 300  # entries of `logit_bias`
MOST_STOPS = 64  # token ids that may end a text, including the model's own
NO_WAY_ON = "no token can follow: the schema leads to a dead end"  # the client's schema causes this error
LARGEST_BIAS = 100.0
LARGEST_PENALTY = 2.0  # for the presence and the frequency penalty

# `Allowed` takes the tokens drawn so far and returns a mask of the tokens that may follow, [vocab]. The engine calls it
# from its thread, once per drawn token. If it raises an exception, only its own request ends.
Allowed = Callable[[Sequence[int]], Bool[np.ndarray, " vocab"]]

FinishReason = Literal["stop", "length", "context", "cancelled", "expired", "error"]


@dataclass(frozen=True)
class Request(SamplingOptions):
    """A prompt and the options of its answer. Raises ValueError for an option out of range.

    `reference.sampling` defines temperature, filters and the repetition penalty. The presence and frequency penalties
    are OpenAI's. If the answer already has a token n > 0 times, we subtract the presence penalty once and the frequency
    penalty n times from the token's logit. Then we add the token's bias. Penalties and bias come before the
    temperature.
    """

    prompt: tuple[int, ...]  # token ids, with BOS if the model uses it
    max_tokens: int  # largest number of drawn tokens; 0 only prefills the prompt
    temperature: float = field(default=1.0, kw_only=True)
    top_p: float = field(default=1.0, kw_only=True)
    presence_penalty: float = 0.0  # 0: off
    frequency_penalty: float = 0.0  # 0: off
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token id
    seed: int = 0  # below 2^64
    stop_ids: frozenset[int] = frozenset()  # more token ids that end the answer, besides the model's own
    ignore_eos: bool = False  # if set, the model's own end tokens do not end the answer
    logprobs: int | None = (
        None  # number of likeliest tokens to report with each token's log-probability; None: no report
    )
    prompt_logprobs: int | None = None  # as `logprobs`, but for the prompt's tokens after the first
    embeds: bool = False  # whether to compute the prompt's embedding; such a request draws no tokens
    priority: int = 0  # requests with a smaller number run earlier
    tenant: str = ""  # requests share cached prompts only within one tenant
    adapter: str = ""  # the name of the adapter with which the model answers; empty: the model without an adapter
    deadline: float | None = None  # the request expires this many seconds after `submit`
    allowed: Allowed | None = None

    @property
    def cache_owner(self) -> tuple[str, str]:
        """The tenant and the adapter, because the keys and values of a prompt depend on the adapter."""
        return self.tenant, self.adapter

    def __post_init__(self) -> None:
        super().__post_init__()
        check_max_new_tokens(self.max_tokens)
        check_seed(self.seed)
        if not self.prompt:
            raise ValueError("the prompt is empty: expected at least one token")
        if self.embeds and (self.max_tokens or self.prompt_logprobs is not None):
            raise ValueError("a request with embeds must have max_tokens 0 and no prompt_logprobs")
        for name, penalty in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not abs(penalty) <= LARGEST_PENALTY:
                raise ValueError(f"{name}_penalty must be between -2 and 2, got {penalty}")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and not 0 <= count <= MOST_LOGPROBS:
                raise ValueError(f"{name} must be between 0 and {MOST_LOGPROBS}, got {count}")
        if len(self.logit_bias) > MOST_BIASES:
            raise ValueError(f"logit_bias may have at most {MOST_BIASES} tokens, got {len(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            if not abs(bias) <= LARGEST_BIAS:
                raise ValueError(f"logit_bias must be between -100 and 100, got {bias} for token {token}")
        if self.deadline is not None and not self.deadline > 0:
            raise ValueError(f"deadline must be above 0 seconds, got {self.deadline}")
        if not -(2**31) <= self.priority < 2**31:
            raise ValueError(f"priority must be between -2^31 and 2^31 - 1, got {self.priority}")


class DeadEnd(ValueError):
    """Raised by `Allowed` if no token may follow, although all previous tokens were allowed."""


class TopLogprobs(NamedTuple):
    """The likeliest tokens at one position, from the likeliest on."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Tokens(NamedTuple):
    """Drawn tokens, including a token that ends the text.

    Log-probabilities refer to the model's own distribution, before bias, penalties, temperature and filters.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None  # one per token; None unless requested
    top_logprobs: tuple[TopLogprobs, ...] | None  # one per token; None unless requested


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the prompt's tokens after the first, each conditioned on all tokens before it."""

    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]


class Embedding(NamedTuple):
    """The final hidden state of a prompt's last token, and the mean over all its tokens."""

    last: Float[np.ndarray, " dim"]
    mean: Float[np.ndarray, " dim"]


class Finished(NamedTuple):
    """The end of a request: its reason, and token counts."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int  # number of tokens delivered in `Tokens`
    cached_tokens: int  # prompt tokens found in the prefix cache when the request began
    message: str | None  # the error message, if the reason is an error


Event = PromptLogprobs | Embedding | Tokens | Finished
Deliver = Callable[[Event], None]


class QueueFull(Exception):
    """Raised for a request if too many requests are waiting, or if the engine accepts no new requests."""


class PromptTooLong(ValueError):
    """Raised for a prompt that is longer than the engine's context."""


class Stats(NamedTuple):
    """Statistics of an engine. Its counters only grow."""

    waiting: int  # requests that have not begun, or were preempted
    running: int
    pages_free: int
    pages_held: int  # pages that running requests use
    pages_cached: int  # unused pages that stay in the prefix cache
    preemptions: int  # this field and all below are counters
    prompt_tokens: int  # prompt tokens of all requests that began
    cached_tokens: int  # prompt tokens found in the prefix cache
    completion_tokens: int
    finished: Mapping[FinishReason, int]


@runtime_checkable
class Engine(Protocol):
    """A model that serves many requests at once. All methods may be called from any thread."""

    @property
    def context(self) -> int:
        """The largest number of tokens of a prompt and its answer together."""
        ...

    @property
    def vocab(self) -> int:
        """The number of tokens in the vocabulary."""
        ...

    @property
    def dim(self) -> int:
        """The number of dimensions of an embedding."""
        ...

    @property
    def failed(self) -> BaseException | None:
        """The exception that made the engine fail, or None while it works.

        A failed engine has ended all open requests.
        """
        ...

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Queue a request and return its number. The engine calls `deliver` with each event of the request.

        `deliver` must return quickly, and must not raise an exception.

        Raises QueueFull, PromptTooLong, or ValueError for a token outside the vocabulary, for too many stop ids, or for
        an unknown adapter.
        """
        ...

    def cancel(self, number: int) -> None:
        """Cancel a request. Does nothing if it has ended or never existed."""
        ...

    def drain(self, seconds: float) -> bool:
        """Accept no more requests, wait up to `seconds` for the open ones, and then cancel the unfinished ones.

        Returns True if no request had to be cancelled.
        """
        ...

    def close(self) -> None:
        """Cancel all requests and end the engine's thread. Calling this again does nothing."""
        ...

    def stats(self) -> Stats:
        """Return the current statistics."""
        ...
