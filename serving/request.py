"""Requests, and the events that answer them.

An `Engine` serves many requests at once. `submit` takes a request and a function. The engine calls the function with
each event of the request, in order, from its own thread: first at most one `PromptLogprobs`, then any number of
`Tokens`, and last exactly one `Finished`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool

from llamaspec.model.options import SamplingOptions, check_max_new_tokens, check_seed

MOST_LOGPROBS = 20  # largest number of likeliest tokens to report per position
MOST_BIASES = 300  # tokens in `logit_bias`
MOST_STOPS = 64  # token ids that end a text, including the model's own
NO_WAY_ON = "no token can follow: the schema leads to a dead end"  # an error caused by the client's schema
LARGEST_BIAS = 100.0
LARGEST_PENALTY = 2.0  # presence and frequency penalty

# `Allowed` takes the tokens drawn so far and returns a mask of the tokens that may follow, [vocab]. The engine calls it
# from its thread, once per drawn token. If it raises an exception, only its own request ends.
Allowed = Callable[[Sequence[int]], Bool[np.ndarray, " vocab"]]

FinishReason = Literal["stop", "length", "context", "cancelled", "expired", "error"]


@dataclass(frozen=True)
class Request(SamplingOptions):
    """A prompt and the options of its answer. Raises ValueError for an option out of range.

    `reference.sampling` defines temperature, filters and the repetition penalty. The presence and frequency penalties
    are OpenAI's: a token that the answer already has loses the presence penalty from its logit, and the frequency
    penalty once for each occurrence. The bias is added to the logit. Bias and penalties come before the temperature.
    """

    prompt: tuple[int, ...]  # token ids, with BOS if the model uses it
    max_tokens: int  # largest number of drawn tokens; 0 only prefills the prompt
    temperature: float = field(default=1.0, kw_only=True)
    top_p: float = field(default=1.0, kw_only=True)
    presence_penalty: float = 0.0  # 0: off
    frequency_penalty: float = 0.0  # 0: off
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token id
    seed: int = 0  # below 2^64
    stop_ids: frozenset[int] = frozenset()  # token ids that end the answer, in addition to the model's own
    ignore_eos: bool = False  # whether the model's own ids do not end the answer
    logprobs: int | None = (
        None  # number of likeliest tokens to report with each token's log-probability; None: no report
    )
    prompt_logprobs: int | None = None  # the same, for the prompt's tokens after the first
    priority: int = 0  # smaller is sooner
    tenant: str = ""  # shares cached prompts with requests of the same tenant only
    deadline: float | None = None  # seconds after `submit` when the request expires
    allowed: Allowed | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_max_new_tokens(self.max_tokens)
        check_seed(self.seed)
        if not self.prompt:
            raise ValueError("a prompt needs at least one token")
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
            raise ValueError(f"a deadline must be above 0 seconds, got {self.deadline}")
        if not -(2**31) <= self.priority < 2**31:
            raise ValueError(f"priority must fit 32 bits, got {self.priority}")


class DeadEnd(ValueError):
    """Raised by `Allowed` if no token may follow, although all previous tokens were allowed."""


class TopLogprobs(NamedTuple):
    """The likeliest tokens at a position, the likeliest first."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Tokens(NamedTuple):
    """Drawn tokens, including a token that ends the text.

    Log-probabilities refer to the model's own distribution, before bias, penalties, temperature and filters.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None  # of `ids`; None unless requested
    top_logprobs: tuple[TopLogprobs, ...] | None  # one per token; None unless requested


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the prompt's tokens after the first, each conditioned on all tokens before it."""

    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]


class Finished(NamedTuple):
    """The end of a request, with token counts."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int  # delivered in `Tokens`
    cached_tokens: int  # prompt tokens found in the prefix cache when the request began
    message: str | None  # describes an error


Event = PromptLogprobs | Tokens | Finished
Deliver = Callable[[Event], None]


class QueueFull(Exception):
    """Raised for a request if too many are waiting, or if the engine drains or is closed."""


class PromptTooLong(ValueError):
    """Raised for a prompt that is longer than the engine's context."""


class Stats(NamedTuple):
    """Statistics of an engine. Counters only grow."""

    waiting: int  # requests that have not begun or were preempted
    running: int
    pages_free: int
    pages_held: int  # by running requests
    pages_cached: int  # not held, kept for later prompts with the same beginning
    preemptions: int  # this and the following are counters
    prompt_tokens: int  # of all requests that began
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
        """The number of tokens of the vocabulary."""
        ...

    @property
    def failed(self) -> BaseException | None:
        """The exception that made the engine fail, and all open requests end with an error; None while it works."""
        ...

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Queue a request, and return its number. `deliver` must return soon and must not raise.

        Raises QueueFull, PromptTooLong, or ValueError for a token outside the vocabulary or for too many stop ids.
        """
        ...

    def cancel(self, number: int) -> None:
        """Cancel a request. Does nothing if it has ended or never existed."""
        ...

    def drain(self, seconds: float) -> bool:
        """Accept no more requests, wait up to `seconds` for the open ones, and cancel the remaining ones.

        Returns whether none had to be cancelled.
        """
        ...

    def close(self) -> None:
        """Cancel all requests and end the thread. A second call does nothing."""
        ...

    def stats(self) -> Stats:
        """Return current statistics."""
        ...
