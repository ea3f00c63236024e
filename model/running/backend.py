"""The interface of a backend: what a session needs to run a model."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float

from llamaspec.model.options import SamplingOptions


@runtime_checkable
class Backend[Cache, Drawing](Protocol):
    """A model that runs one sequence at a time.

    `Cache` (keys and values) and `Drawing` (a completion in progress) are opaque to callers. A method that takes one
    consumes it, and returns the new one.
    """

    capacity: int  # positions that a cache has room for

    @property
    def burst(self) -> int:
        """The most tokens that one call of `decode` draws."""
        ...

    @property
    def chunk(self) -> int:
        """The most tokens that one call of `extend` takes."""
        ...

    @property
    def ahead(self) -> int:
        """The number of further bursts to start before reading the tokens of a burst: `decode` does not wait."""
        ...

    def start(self) -> Cache:
        """Make an empty cache."""
        ...

    def rewind(self, cache: Cache, length: int) -> Cache:
        """Return the cache cut to its first `length` positions."""
        ...

    def extend(self, cache: Cache, ids: Sequence[int]) -> Cache:
        """Append the keys and values of `ids`, at most `chunk` tokens."""
        ...

    def begin(
        self, token: int, *, seen: Bool[np.ndarray, " vocab"], seed: int, options: SamplingOptions, stops: Sequence[int]
    ) -> Drawing:
        """Start a completion after `token`, which is not in the cache yet; the completion ends at one of `stops`.

        `seen` are the ids that the repetition penalty applies to. Raises ValueError for more stops than a program
        takes.
        """
        ...

    def decode(self, cache: Cache, drawing: Drawing, *, steps: int) -> tuple[Callable[[], list[int]], Drawing, Cache]:
        """Start drawing `steps` tokens, at most `burst`. The first result waits for them; a stop is the last."""
        ...

    def logits(self, ids: Sequence[int]) -> Float[np.ndarray, "seq vocab"]:
        """Compute the logits that follow each of `ids`. Raises FloatingPointError if one is not finite."""
        ...

    def bytes_read(self, position: float) -> float | None:
        """Count the bytes that drawing one token must read after `position` tokens; None if not counted."""
        ...

    def describe(self) -> str:
        """Say in one line how the model runs, such as its dtype and device."""
        ...


def check_logits(logits: Float[np.ndarray, "*rows vocab"]) -> Float[np.ndarray, "*rows vocab"]:
    """Return finite `logits`. Raises FloatingPointError if one is NaN or infinite."""
    if not np.isfinite(logits).all():
        raise not_numbers()
    return logits


def not_numbers() -> FloatingPointError:
    """Make the error to raise if logits are NaN or infinite."""
    return FloatingPointError("the model's logits are not numbers: its weights overflow in this dtype")
