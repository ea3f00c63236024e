"""A sequence that grows: the tokens in the cache, and the tokens that are drawn after them."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Literal

import numpy as np

from llamaspec.model.options import SamplingOptions
from llamaspec.model.running.backend import Backend, not_numbers
from llamaspec.model.running.speculation import Speculation

FinishReason = Literal["stop", "length", "context", "interrupted"]

# The longest time of a burst, so that a token is shown soon after it was drawn. On a CPU each burst has about a
# millisecond of overhead. With bursts half as long, a model of 134M parameters decodes 5 % slower.
DISPLAY_SECONDS = 0.08


class Session[Cache, Drawing]:
    """One sequence on a backend.

    If a new prompt begins with tokens that are in the cache, we do not compute their keys and values again.
    """

    def __init__(self, backend: Backend[Cache, Drawing], *, vocab: int):
        self._backend = backend
        self._vocab = vocab
        self._ids: list[int] = []  # the tokens in the cache
        self._cache: Cache | None = None
        self._beyond = False  # whether the cache may contain more tokens than `_ids`
        self._generations = 0

    @property
    def ids(self) -> list[int]:
        """The tokens whose keys and values are in the cache."""
        return list(self._ids)

    def prefill(self, prompt: Sequence[int], *, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Extend the cache to all tokens of `prompt` except the last. Returns False if `interrupted` returned True."""
        if len(prompt) > self._backend.capacity:
            raise ValueError(f"the prompt has {len(prompt)} tokens, but the context has {self._backend.capacity}")
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
        speculation: Speculation | None = None,
    ) -> Iterator[tuple[list[int], FinishReason | None]]:
        """Yield the tokens drawn after `prompt` in bursts. A burst has the tokens of one call of `Backend.decode`.

        With `speculation`, a burst may instead have the tokens of one call of `Verifier.verify`. The text is the same.

        Each item has a burst, and the reason why the text ended: None except for the last burst. A stop token is
        included, but its keys and values are not computed. Raises ValueError for a prompt longer than the context,
        FloatingPointError if logits are not finite, and RuntimeError if another generation has begun on this session in
        the meantime.
        """
        self._generations += 1
        generation = self._generations
        if not self.prefill(prompt, interrupted=interrupted):
            yield [], "interrupted"
            return
        if max_new_tokens == 0:
            yield [], "length"
            return
        token, remaining = prompt[-1], max_new_tokens
        seen = np.zeros(self._vocab, bool)
        seen[list(prompt)] = True
        drawing = self._backend.begin(token, seen=seen, seed=seed, options=options, stops=sorted(stops))
        pending: deque[tuple[Callable[[], list[int]], int]] = deque()  # unread bursts, with their numbers of steps
        # The time of the latest burst decides the size of the next one. The first bursts have one token each.
        step_seconds, since = float("inf"), 0.0
        while True:
            if interrupted():
                yield [], "interrupted"
                return
            if self._generations != generation:
                raise RuntimeError("this generation cannot continue: another generation has begun on its session")
            ids, room = self._ids, self._backend.capacity - len(self._ids)
            if room == 0:
                yield [], "context"
                return
            cache = self._take()
            since = since if pending else perf_counter()
            draft = speculation.draft(min(remaining, room) - 1) if speculation else []
            if speculation and draft:  # a backend that verifies drafts starts no burst ahead
                read, drawing, cache = speculation.verify(cache, drawing, draft)
                pending.append((read, len(draft) + 1))
            while (unrequested := min(remaining, room) - sum(steps_asked for _, steps_asked in pending)) and len(
                pending
            ) <= self._backend.ahead:
                steps = min(tokens_at_once(step_seconds, self._backend.burst), unrequested)
                read, drawing, cache = self._backend.decode(cache, drawing, steps=steps)
                pending.append((read, steps))
            read, _ = pending.popleft()
            drawn = read()
            self._put(cache, [*ids, token, *drawn[:-1]], beyond=bool(pending))
            now = perf_counter()
            if not draft:
                step_seconds = (now - since) / len(drawn)
            since = now
            if speculation:
                speculation.drew(drawn, draft)
            if max(drawn) >= self._vocab:
                raise not_numbers()
            token, remaining = drawn[-1], remaining - len(drawn)
            if token in stops:
                yield drawn, "stop"
                return
            if remaining == 0:
                yield drawn, "length"
                return
            yield drawn, None

    def _take(self, length: int | None = None) -> Cache:
        """Remove the cache from the session until `_put` is called, so that a failed call leaves no stale cache behind.

        If `length` is given, the cache is cut to this number of positions.
        """
        cache = self._backend.start() if self._cache is None else self._cache
        if length is not None and (length < len(self._ids) or self._beyond):
            cache = self._backend.rewind(cache, length)
        self._cache, self._ids, self._beyond = None, [], False
        return cache

    def _put(self, cache: Cache, ids: Sequence[int], *, beyond: bool = False) -> None:
        self._cache, self._ids, self._beyond = cache, list(ids), beyond


def tokens_at_once(step_seconds: float, most: int) -> int:
    """Return how many tokens to draw in one call of `decode`, if each token takes `step_seconds`.

    The call should take at most `DISPLAY_SECONDS`. The result is at least 1 and at most `most`.

    >>> tokens_at_once(0.004, 128), tokens_at_once(0.0005, 128), tokens_at_once(1.0, 128)
    (20, 128, 1)
    """
    return max(1, min(most, int(DISPLAY_SECONDS / step_seconds)))


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
