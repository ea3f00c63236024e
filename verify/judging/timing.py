"""How fast a candidate is, beside another: only said of one whose contract holds.

Candidates are timed in turn, in an order that each round draws, so that a machine that warms up or gets busy slows
both. A round's time is the median of its calls; what is said is the median of the rounds, and their range. Ratios are
taken within a round. Every call gets arrays of its own. Rounds take turns with two sets of inputs, so that a result
that was kept is wrong in the next round. The result of a round's last call is judged, or has the bits of one that was:
judging 4,096 x 4,096 numbers in float64 takes a hundred times as long as timing them.

`verify.candidates.clock` times a call. A candidate that rewrites the clock in its own process is out of scope.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from time import monotonic
from typing import Any

import numpy as np

from llamaspec.verify.bounds.precision import Precision
from llamaspec.verify.candidates.candidate import Failure, NoVerdict, Worker
from llamaspec.verify.contract import Arguments, Contract
from llamaspec.verify.draws.domain import domain, narrowed
from llamaspec.verify.draws.draw import Draw, Values
from llamaspec.verify.draws.drawing import each, leaves, narrowed_draws
from llamaspec.verify.judging.judge import judge

ROUNDS = 11
SECONDS = 0.1  # of timed calls, for a candidate and round
INPUTS = 2  # sets of numbers that rounds take turns with: there are as many rounds at least


@dataclass(frozen=True)
class Timing:
    """Seconds a call of each candidate, by round, for one draw."""

    op: str
    dtype: str
    draw: Draw
    seconds: Mapping[str, Sequence[float]]  # by the candidate's name, the one under verification first
    rounds: int  # that were planned; there are fewer where the time was up

    def lines(self) -> list[str]:
        """A line for each candidate: median and range over rounds, and how it compares with the first."""
        first, *others = self.seconds
        drawn = " ".join(f"{name}={value}".replace(" ", "") for name, value in self.draw.items())
        lines = [f"time          {self.op} {self.dtype}  {first}  {self._spread(first)}  for {drawn}"]
        for other in others:
            ratios = [b / a for a, b in zip(self.seconds[first], self.seconds[other], strict=True)]
            says = f"the first is {median(ratios):.3g} times as fast ({min(ratios):.3g} to {max(ratios):.3g})"
            lines.append(f"  beside {other}  {self._spread(other)}: {says}")
        return lines

    def _spread(self, name: str) -> str:
        """Median and range of a candidate, and how many rounds they are of."""
        seconds = self.seconds[name]
        few = len(seconds) < self.rounds
        rounds = f"{len(seconds)} of {self.rounds} rounds: the time was up" if few else f"{len(seconds)} rounds"
        return f"{_written(median(seconds))} ({_written(min(seconds))} to {_written(max(seconds))}, {rounds})"


def _written(seconds: float) -> str:
    """Seconds with a unit.

    >>> _written(0.00123456), _written(2.5e-6), _written(12.0)
    ('1.23 ms', '2.5 µs', '12 s')
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"


def timed(
    contract: Contract,
    workers: Sequence[Worker],
    precision: Precision,
    *,
    only: Mapping[str, Sequence[Any]],
    seed: int,
    limit: float = math.inf,
    progress: Callable[[int], object] = lambda rounds: None,
) -> Timing:
    """Time `workers` for one draw: the largest sizes of the contract that `only` leaves, normal numbers where it may.

    No round starts after `limit` seconds, but for the first two. Raises NoVerdict where a timed call gives no result,
    or a wrong one.
    """
    random = Random(seed)
    start = monotonic()
    draw = _largest(contract, narrowed(contract, only), random)
    turns = [_Turn(contract, precision, draw, seed=number) for number in range(INPUTS)]
    seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
    for number in range(ROUNDS):
        if number >= INPUTS and monotonic() - start > limit:
            break
        turn = turns[number % INPUTS]
        results: dict[str, tuple[np.ndarray, ...]] = {}
        for worker in random.sample(workers, len(workers)):
            times, outcome = worker.timed(*contract.split(turn.arguments), seconds=SECONDS)
            if isinstance(outcome, Failure):
                raise NoVerdict(f"{worker.name}: no time, since a timed call {outcome.kind}: {outcome.message}")
            results[worker.name] = outcome.arrays
            seconds[worker.name].append(median(times))
        turn.check(results)
        progress(number + 1)
    return Timing(contract.name, precision.name, draw, seconds, ROUNDS)


class _Turn:
    """One set of inputs, and each candidate's result for it that was judged."""

    def __init__(self, contract: Contract, precision: Precision, draw: Draw, *, seed: int):
        one = {name: replace(v, seed=seed) if isinstance(v, Values) else v for name, v in draw.items()}
        self.contract, self.precision = contract, precision
        self.arguments: Arguments = contract.arguments(precision=precision, **one)
        self._judged: dict[str, tuple[np.ndarray, ...]] = {}

    def check(self, results: Mapping[str, tuple[np.ndarray, ...]]) -> None:
        """Judge results, by candidate, that have not the bits of the judged ones. Raises NoVerdict for a wrong one."""
        others = {name: arrays for name, arrays in results.items() if not _same(arrays, self._judged.get(name, ()))}
        expected = self.contract.expected(self.arguments) if others else ()
        for name, arrays in others.items():
            found = judge(arrays, expected, self.precision).finding
            if found and found.kind != "suspicious":
                raise NoVerdict(f"{name}: no time, since a timed call was wrong: {found.kind}: {found.message}")
        self._judged.update(others)


def _same(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    """Compare arrays bit by bit: a NaN is itself."""
    return len(some) == len(others) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(some, others, strict=True)
    )


def _largest(contract: Contract, only: Mapping[str, Sequence[Any]], random: Random) -> Draw:
    draws = narrowed_draws(contract.draws, only)
    drawn = list(itertools.islice(each(draws, random), 64))
    draw = drawn[0]
    for name, strategy in draws.items():
        held = domain(strategy)
        if name in contract.shapes:
            draw[name] = max((one[name] for one in drawn), key=lambda value: sum(leaves(value)))
            if sizes := [value for value in held.drawn if type(value) is int]:
                draw[name] = max(sizes)
        elif held.arrays and "normal" in held.arrays.kinds:
            draw[name] = Values("normal")
        elif name not in only and held.drawn and not held.arrays:
            draw[name] = held.drawn[0]  # the simplest: nothing hidden, say
    return draw
