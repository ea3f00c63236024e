"""The interface of a backend: what a session needs to run a model."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float

from llamaspec.model.options import SamplingOptions


@runtime_checkable
class Backend[Cache, Drawing](Protocol):
    """A model that runs one sequence at a time.

    `Cache` (keys and values) and `Drawing` (a text that is being drawn) are opaque to callers: a method takes them
    over, and gives them back extended.
    """

    capacity: int  # positions that a cache has room for

    @property
    def burst(self) -> int:
        """Tokens that `decode` draws at most."""
        ...

    @property
    def chunk(self) -> int:
        """Tokens that `extend` takes at most."""
        ...

    @property
    def ahead(self) -> int:
        """Bursts to ask for beyond the one that is read: `decode` does not wait for its tokens."""
        ...

    def start(self) -> Cache:
        """Make an empty cache."""
        ...

    def rewind(self, cache: Cache, length: int) -> Cache:
        """Forget all but the first `length` positions."""
        ...

    def extend(self, cache: Cache, ids: Sequence[int]) -> Cache:
        """Append at most `chunk` tokens."""
        ...

    def begin(
        self, token: int, *, seen: Bool[np.ndarray, " vocab"], seed: int, options: SamplingOptions, stops: Sequence[int]
    ) -> Drawing:
        """Begin a text after `token`, which is not in the cache yet. It ends at one of `stops`.

        `seen` are the ids that the repetition penalty applies to. Raises ValueError for more stops than a program
        takes.
        """
        ...

    def decode(self, cache: Cache, drawing: Drawing, *, steps: int) -> tuple[Callable[[], list[int]], Drawing, Cache]:
        """Begin to draw `steps` tokens, at most `burst`. The first result waits for them; none follow a stop."""
        ...

    def logits(self, ids: Sequence[int]) -> Float[np.ndarray, "seq vocab"]:
        """Compute the logits that follow each of `ids`. Raises FloatingPointError if one is not finite."""
        ...

    def bytes_read(self, position: float) -> float | None:
        """Count the bytes that drawing a token reads at least, after `position` tokens; None if not counted."""
        ...

    def describe(self) -> str:
        """Say in one line how the model runs: dtype, device, and which ops are plain and why."""
        ...


def check_logits(logits: Float[np.ndarray, "*rows vocab"]) -> Float[np.ndarray, "*rows vocab"]:
    """Return finite `logits`. Raises FloatingPointError if one is NaN or infinite."""
    if not np.isfinite(logits).all():
        raise not_numbers()
    return logits


def not_numbers() -> FloatingPointError:
    """Make the error to raise if logits are NaN or infinite."""
    return FloatingPointError("the model's logits are not numbers: its weights overflow in this dtype")
