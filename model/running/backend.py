"""The interface of a backend, with which a session runs a model."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float

from llamaspec.model.options import SamplingOptions


@runtime_checkable
class Backend[Cache, Drawing](Protocol):
    """A model that runs one sequence at a time.

    `Cache` (keys and values) and `Drawing` (a completion in progress) are opaque to callers. A method with a `Cache` or
    a `Drawing` as argument consumes it, and returns a new one.
    """

    capacity: int  # number of positions in a cache

    @property
    def burst(self) -> int:
        """The largest number of tokens that one call of `decode` draws."""
        ...

    @property
    def chunk(self) -> int:
        """The largest number of tokens that one call of `extend` takes."""
        ...

    @property
    def ahead(self) -> int:
        """The number of later calls of `decode` that a session starts before it reads the tokens of a call.

        This is possible because `decode` returns before the tokens are computed.
        """
        ...

    def start(self) -> Cache:
        """Make an empty cache."""
        ...

    def rewind(self, cache: Cache, length: int) -> Cache:
        """Return the cache, cut to its first `length` positions."""
        ...

    def extend(self, cache: Cache, ids: Sequence[int]) -> Cache:
        """Append the keys and values of `ids` (at most `chunk` tokens) to the cache."""
        ...

    def begin(
        self, token: int, *, seen: Bool[np.ndarray, " vocab"], seed: int, options: SamplingOptions, stops: Sequence[int]
    ) -> Drawing:
        """Start a completion after `token`, which is not in the cache yet. The completion ends at one of `stops`.

        `seen` is True for the ids that the repetition penalty applies to. Raises ValueError if there are more `stops`
        than the compiled program accepts.
        """
        ...

    def decode(self, cache: Cache, drawing: Drawing, *, steps: int) -> tuple[Callable[[], list[int]], Drawing, Cache]:
        """Start to draw up to `steps` tokens. `steps` must be at most `burst`.

        Returns a function that waits for the tokens and returns them; also returns the new state of the completion, and
        the cache. If a stop token is drawn, it is the last of the tokens.
        """
        ...

    def logits(self, ids: Sequence[int]) -> Float[np.ndarray, "seq vocab"]:
        """Compute the logits after each of `ids`. Raises FloatingPointError if a logit is not finite."""
        ...

    def bytes_read(self, position: float) -> float | None:
        """Count the bytes that decoding must read for one token after `position` tokens.

        Returns None if we do not count them.
        """
        ...

    def describe(self) -> str:
        """Describe in one line how the model runs, such as its dtype and device."""
        ...


def check_logits(logits: Float[np.ndarray, "*rows vocab"]) -> Float[np.ndarray, "*rows vocab"]:
    """Return `logits` if all are finite. Raises FloatingPointError if one is NaN or infinite."""
    if not np.isfinite(logits).all():
        raise not_numbers()
    return logits


def not_numbers() -> FloatingPointError:
    """Make the error to raise if logits are NaN or infinite."""
    return FloatingPointError("the model's logits are NaN or infinite: its weights overflow in this dtype")
