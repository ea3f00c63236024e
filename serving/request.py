"""Requests, and the events by which an engine answers them.

An `Engine` serves many requests at once. `submit` hands one over with a function that the engine calls with each of the
request's events, in order, from the engine's own thread: `PromptLogprobs` at most once and before any token, then
`Tokens` any number of times, then `Finished` exactly once, as the last.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool

from llamaspec.model.options import SamplingOptions, check_max_new_tokens, check_seed

MOST_LOGPROBS = 20  # likeliest tokens that a request may ask for at each position
MOST_BIASES = 300  # tokens in `logit_bias`
MOST_STOPS = 64  # token ids that end a text, the model's own included
NO_WAY_ON = "no token can follow: the schema leads to a dead end"  # message of an error that the client's schema causes
LARGEST_BIAS = 100.0
LARGEST_PENALTY = 2.0  # of presence and of frequency

# `Allowed` takes the tokens drawn so far and gives those that may follow, [vocab]. The engine calls it from its thread,
# once for every token that it draws. An exception that it raises ends its request alone.
Allowed = Callable[[Sequence[int]], Bool[np.ndarray, " vocab"]]

FinishReason = Literal["stop", "length", "context", "cancelled", "expired", "error"]


@dataclass(frozen=True)
class Request(SamplingOptions):
    """A prompt and the options of its answer. Raises ValueError for an option out of range.

    `reference.sampling` defines temperature, filters and the repetition penalty. The presence and frequency penalties
    are OpenAI's: they are subtracted from the logit of a token that the answer already has, once and once per
    occurrence. The bias is added to the logit. Bias and penalties come before the temperature.
    """

    prompt: tuple[int, ...]  # token ids, BOS included where the model wants it
    max_tokens: int  # drawn at most; 0 reads the prompt alone
    temperature: float = field(default=1.0, kw_only=True)
    top_p: float = field(default=1.0, kw_only=True)
    presence_penalty: float = 0.0  # 0: off
    frequency_penalty: float = 0.0  # 0: off
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token id
    seed: int = 0  # of the draws: below 2^64
    stop_ids: frozenset[int] = frozenset()  # token ids that end the answer, besides the model's own
    ignore_eos: bool = False  # whether the model's own do not end it
    logprobs: int | None = None  # likeliest tokens to report beside each token's own log-probability; None: neither
    prompt_logprobs: int | None = None  # the same for the prompt's tokens after the first
    priority: int = 0  # the smaller, the sooner
    tenant: str = ""  # shares cached prompts with requests of the same tenant only
    deadline: float | None = None  # seconds from `submit` after which it ends as expired
    allowed: Allowed | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_max_new_tokens(self.max_tokens)
        check_seed(self.seed)
        if not self.prompt:
            raise ValueError("a prompt needs a token at least")
        for name, penalty in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not abs(penalty) <= LARGEST_PENALTY:
                raise ValueError(f"{name}_penalty must be between -2 and 2, got {penalty}")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and not 0 <= count <= MOST_LOGPROBS:
                raise ValueError(f"{name} must be between 0 and {MOST_LOGPROBS}, got {count}")
        if len(self.logit_bias) > MOST_BIASES:
            raise ValueError(f"logit_bias may have {MOST_BIASES} tokens at most, got {len(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            if not abs(bias) <= LARGEST_BIAS:
                raise ValueError(f"logit_bias must be between -100 and 100, got {bias} for token {token}")
        if self.deadline is not None and not self.deadline > 0:
            raise ValueError(f"a deadline must be above 0 seconds, got {self.deadline}")
        if not -(2**31) <= self.priority < 2**31:
            raise ValueError(f"priority must fit 32 bits, got {self.priority}")


class DeadEnd(ValueError):
    """Raised by `Allowed` if no token may follow, although every token before was allowed."""


class TopLogprobs(NamedTuple):
    """The likeliest tokens at a position, the likeliest first, as many as the request asked for."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Tokens(NamedTuple):
    """Tokens that were drawn. A token that ends the text is among them.

    Log-probabilities are those of the model's own distribution, before bias, penalties, temperature and filters.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None  # of `ids`; None unless asked for
    top_logprobs: tuple[TopLogprobs, ...] | None  # one per token; None unless asked for


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the prompt's tokens after the first, each given all tokens before it."""

    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]


class Finished(NamedTuple):
    """The end of a request, and what it took."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int  # delivered in `Tokens`
    cached_tokens: int  # of the prompt, found in the prefix cache when the request began
    message: str | None  # of an error


Event = PromptLogprobs | Tokens | Finished
Deliver = Callable[[Event], None]


class QueueFull(Exception):
    """A request that is refused since too many wait, or since the engine drains or is closed."""


class PromptTooLong(ValueError):
    """A prompt that is longer than the engine's context."""


class Stats(NamedTuple):
    """Figures of an engine. Counters only grow."""

    waiting: int  # requests that have not begun, those that gave way included
    running: int
    pages_free: int
    pages_held: int  # by running requests
    pages_cached: int  # held by nobody, kept for prompts that begin alike
    preemptions: int  # counters from here on
    prompt_tokens: int  # of all requests that began
    cached_tokens: int  # those of them that were found in the prefix cache
    completion_tokens: int
    finished: Mapping[FinishReason, int]


@runtime_checkable
class Engine(Protocol):
    """A model that serves many requests at once. All methods may be called from any thread."""

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer together."""
        ...

    @property
    def vocab(self) -> int:
        """The number of tokens that there are."""
        ...

    @property
    def failed(self) -> BaseException | None:
        """The exception that ended the engine's thread, after which every open request has an error."""
        ...

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Queue a request, and return its number. `deliver` must return soon and must not raise.

        Raises QueueFull, PromptTooLong, or ValueError for a token that the vocabulary lacks or too many stop ids.
        """
        ...

    def cancel(self, number: int) -> None:
        """End a request as cancelled. Does nothing to one that has ended or never was."""
        ...

    def drain(self, seconds: float) -> bool:
        """Accept nothing more, wait until all requests have ended, and cancel those that have not by then.

        Returns whether all ended by themselves.
        """
        ...

    def close(self) -> None:
        """Cancel all requests, and end the thread. Does nothing the second time."""
        ...

    def stats(self) -> Stats:
        """Count what happens now, and what has happened."""
        ...
