"""Speculation: drafts of the next tokens, which a model may verify faster than it decodes them.

A draft is copied from the text itself: if the newest tokens occurred before, the same tokens may follow again. This
helps with texts that repeat, quote or edit their prompt. `Verifier.verify` draws as `decode` does, so a draft changes
only the time that a text takes, and never the text.
"""

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from time import perf_counter
from typing import Protocol, runtime_checkable

SHORTEST, LONGEST = 3, 16  # numbers of newest tokens that we look for in the earlier text
MOST_COMPARED = 32  # largest number of earlier places that we compare
DRAFTS = 7  # tokens per draft; `verify` also feeds the newest token, so it computes 8 tokens
# Tokens per draft for matrices of codes. A product decodes the codes for each token, so longer drafts save little more
# time, and `verify` would take twice as long to compile.
DRAFTS_OF_CODES = 3
SHARE = 0.03  # share of the time that drafts which are rejected may cost


@runtime_checkable
class Verifier[Cache, Drawing](Protocol):
    """A `Backend` that also verifies drafts."""

    def drafts(self, *, greedy: bool) -> int:
        """Return the largest number of tokens in a draft, or 0 if this backend cannot verify drafts.

        The first call may compile a program. `greedy` chooses the program as `SamplingOptions.greedy` does.
        """
        ...

    def verify(
        self, cache: Cache, drawing: Drawing, draft: Sequence[int]
    ) -> tuple[Callable[[], list[int]], Drawing, Cache]:
        """Start to draw up to len(draft) + 1 tokens.

        The last of them is the first token that differs from the draft, a stop token, or the token after the whole
        draft. The tokens, the completion and the cache are those of `decode` for as many steps, bit for bit.
        """
        ...


class Lookup:
    """Finds the places in a text at which its newest tokens occurred before."""

    def __init__(self, ids: Sequence[int] = ()):
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # where the token after these tokens is, in order
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in ids:
            if len(self._ids) >= SHORTEST:
                self._ends.setdefault(tuple(self._ids[-SHORTEST:]), []).append(len(self._ids))
            self._ids.append(token)

    def draft(self, most: int) -> list[int]:
        """Return up to `most` tokens that followed the longest suffix of the text that occurred before.

        A suffix has from `SHORTEST` to `LONGEST` tokens. Among places with equally long suffixes, we take the latest.
        If fewer than `most` tokens followed, we repeat them, because the text may be a loop of these tokens.

        >>> Lookup([1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 1, 2, 3, 4]).draft(3)
        [5, 9, 2]
        >>> Lookup([7, 8, 7, 8, 7, 8]).draft(3)
        [7, 8, 7]
        """
        places = self._ends.get(tuple(self._ids[-SHORTEST:]), [])
        end = max(reversed(places[-MOST_COMPARED:]), key=self._length_before, default=len(self._ids))
        source = self._ids[end : end + most]
        return list(islice(cycle(source), most))

    def _length_before(self, end: int) -> int:
        """Count the newest tokens that are equal to the tokens before `end`, up to `LONGEST`."""
        most = min(end, LONGEST)
        return next((n for n in range(most) if self._ids[end - 1 - n] != self._ids[-1 - n]), most)


class Speculation:
    """Drafts for one completion. It stops drafting while drafts do not pay.

    Time that rejected drafts cost must be paid from a budget: `SHARE` of the time so far, and the time that accepted
    drafts saved. If the budget is negative, there are no drafts until it has grown again. So a text takes at most
    `SHARE` longer than without drafts, plus the time of one verification.
    """

    def __init__(self, verifier: Verifier, ids: Sequence[int], *, most: int, clock: Callable[[], float] = perf_counter):
        """Draft up to `most` tokens at once for a completion of `ids`, which end with the newest token."""
        self.verify = verifier.verify
        self.drafted = self.accepted = 0  # tokens
        self._most = most
        self._lookup = Lookup(ids)
        self._clock = clock
        self._step_seconds: float | None = None  # time per decoded token, a moving average
        self._budget = 0.0  # seconds
        self._began = 0.0

    def __str__(self) -> str:
        return f"{self.accepted} of {self.drafted} drafted tokens accepted"

    def counts(self) -> dict[str, int]:
        """Return the numbers of drafted and accepted tokens."""
        return {"drafted": self.drafted, "accepted": self.accepted}

    def draft(self, most: int) -> list[int]:
        """Return a draft of up to `most` tokens. It is empty if no draft is known, or if drafts do not pay."""
        self._began = self._clock()
        if self._step_seconds is None or self._budget < 0:
            return []
        return self._lookup.draft(min(most, self._most))

    def drew(self, drawn: Sequence[int], draft: Sequence[int]) -> None:
        """Record the tokens that were drawn after the call of `draft`, and the time that they took."""
        seconds = self._clock() - self._began
        self._lookup.extend(drawn)
        self._budget += SHARE * seconds
        if draft:
            self.drafted += len(draft)
            self.accepted += len(drawn) - 1
            self._budget += len(drawn) * (self._step_seconds or 0.0) - seconds
        else:
            step = seconds / len(drawn)
            self._step_seconds = step if self._step_seconds is None else (3 * self._step_seconds + step) / 4


def speculation_for(backend: object, ids: Sequence[int], *, greedy: bool) -> Speculation | None:
    """Make the drafts for a completion of `ids`. Returns None for a backend that does not verify drafts."""
    if isinstance(backend, Verifier) and (most := backend.drafts(greedy=greedy)):
        return Speculation(backend, ids, most=most)
    return None
