"""A sequence that grows: what the cache holds, and the tokens drawn after it."""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from model.options import SamplingOptions

FinishReason = Literal["stop", "length", "context", "interrupted"]

# A burst takes no longer than this, so that a token is seen soon after it exists. On a CPU each begins with about a
# millisecond in which nothing is computed: at half of this, a model of 134M parameters decodes 5 % slower.
DISPLAY_SECONDS = 0.08


@runtime_checkable
class Backend(Protocol):
    """What runs the model. A cache is an opaque value: passed in, used up, and returned extended."""

    capacity: int  # positions that a cache has room for

    @property
    def burst(self) -> int: ...  # tokens that `decode` draws at most

    @property
    def chunk(self) -> int: ...  # tokens that `extend` takes at most

    def start(self) -> Any: ...
    def rewind(self, cache: Any, length: int) -> Any: ...
    def extend(self, cache: Any, ids: Sequence[int]) -> Any: ...
    def decode(
        self,
        cache: Any,
        token: int,
        *,
        steps: int,
        seen: np.ndarray,
        seed: int,
        options: SamplingOptions,
        stops: Sequence[int],
    ) -> tuple[list[int], Any]: ...
    def logits(self, ids: Sequence[int]) -> np.ndarray: ...


class Session:
    """One sequence on a backend. A new prompt reuses the cache as far as it starts with the same tokens."""

    def __init__(self, backend: Backend, *, vocab: int):
        self._backend = backend
        self._vocab = vocab
        self._ids: list[int] = []  # tokens whose keys and values the cache holds
        self._cache = None
        self._generations = 0

    @property
    def ids(self) -> list[int]:
        """The tokens whose keys and values are in the cache."""
        return list(self._ids)

    def prefill(self, prompt: Sequence[int], *, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Bring the cache to all of `prompt` but its last token. False if interrupted on the way."""
        if len(prompt) > self._backend.capacity:
            raise ValueError(f"the prompt is {len(prompt)} tokens, the context {self._backend.capacity}")
        shared = _common_prefix(self._ids, prompt[:-1])
        cache = self._take(shared)
        for start in range(shared, len(prompt) - 1, self._backend.chunk):
            if interrupted():
                self._put(cache, prompt[:start])
                return False
            cache = self._backend.extend(cache, prompt[start : min(start + self._backend.chunk, len(prompt) - 1)])
        self._put(cache, prompt[:-1])
        return True

    def bursts(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        options: SamplingOptions,
        seed: int,
        stops: frozenset[int],
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[list[int], FinishReason | None]]:
        """Draw tokens after `prompt`, a few at a time, the last with the reason why nothing follows.

        A stopping token is drawn and given, and its keys and values are not computed. Raises
        ValueError for a prompt longer than the context, FloatingPointError if logits are not finite, RuntimeError
        if another generation has begun on this session meanwhile.
        """
        self._generations += 1
        mine = self._generations
        if not self.prefill(prompt, interrupted=interrupted):
            yield [], "interrupted"
            return
        if max_new_tokens == 0:
            yield [], "length"
            return
        token, remaining = prompt[-1], max_new_tokens
        step_seconds = float("inf")  # of the latest burst, to size the next: the first is a single token
        seen = np.zeros(self._vocab, bool)
        seen[list(prompt)] = True
        while True:
            if interrupted():
                yield [], "interrupted"
                return
            if self._generations != mine:
                raise RuntimeError("another generation has begun on this session")
            room = self._backend.capacity - len(self._ids)
            if room == 0:
                yield [], "context"
                return
            ids, steps = self._ids, min(tokens_at_once(step_seconds, self._backend.burst), remaining, room)
            cache, began = self._take(len(ids)), perf_counter()
            drawn, cache = self._backend.decode(
                cache, token, steps=steps, seen=seen, seed=seed, options=options, stops=sorted(stops)
            )
            self._put(cache, [*ids, token, *drawn[:-1]])
            step_seconds = (perf_counter() - began) / len(drawn)
            if max(drawn) >= self._vocab:
                raise FloatingPointError("the model's logits are not numbers: its weights overflow in this dtype")
            token, remaining = drawn[-1], remaining - len(drawn)
            seen[drawn] = True
            if token in stops:
                yield drawn, "stop"
                return
            if remaining == 0:
                yield drawn, "length"
                return
            yield drawn, None

    def _take(self, length: int):
        """The cache, cut to `length`. It is gone from here until put back, so a call cut short leaves no stale one."""
        cache = self._backend.start() if self._cache is None else self._cache
        cut = length < len(self._ids)
        self._cache, self._ids = None, []
        return self._backend.rewind(cache, length) if cut else cache

    def _put(self, cache, ids: Sequence[int]) -> None:
        self._cache, self._ids = cache, list(ids)


def tokens_at_once(step_seconds: float, most: int) -> int:
    """Tokens of a burst, where each takes so long.

    >>> tokens_at_once(0.004, 128), tokens_at_once(0.0005, 128), tokens_at_once(1.0, 128)
    (20, 128, 1)
    """
    return max(1, min(most, int(DISPLAY_SECONDS / step_seconds)))


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
