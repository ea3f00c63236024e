"""Time a candidate that meets its contract, and compare it with a second candidate.

Each round times all candidates in random order, so a machine that warms up or gets busy slows them equally. A round's
time is the median of its calls; we report the median and the range of the rounds, and take ratios within a round.
Every call gets new arrays, and only the last call of a round gets exactly the round's numbers: see
`verify.candidates.clock`. Rounds alternate between two sets of inputs, which depend on the seed, so a cached result is
wrong in the next round, and answers stored by an earlier run are of no use. We judge the result of a round's last call
unless its bits equal a result that we judged before: judging 4,096 x 4,096 numbers in float64 takes a hundred times as
long as timing them.

A candidate that searches its process for the clock and rewrites it is out of scope.
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
from llamaspec.verify.candidates.candidate import Failure, NotJudged, NoVerdict, Outputs, Worker
from llamaspec.verify.contract import Arguments, Contract
from llamaspec.verify.draws.domain import domain, narrowed
from llamaspec.verify.draws.draw import Draw, Values
from llamaspec.verify.draws.drawing import draws_from, leaves, narrowed_draws
from llamaspec.verify.judging.judge import judge
from llamaspec.verify.judging.keywords import accepted

ROUNDS = 11
SECONDS = 0.1  # time for the calls of a candidate in a round
INPUTS = 2  # sets of numbers that rounds alternate between; there are at least as many rounds


@dataclass(frozen=True)
class Timing:
    """Seconds per call of each candidate, by round, for one draw."""

    op: str
    dtype: str
    draw: Draw
    seconds: Mapping[str, Sequence[float]]  # by name; the candidate under verification comes first
    rounds: int  # planned; fewer run if the time ran out

    def lines(self) -> list[str]:
        """Format a line for each candidate: median and range over rounds, and the ratio to the first candidate."""
        first, *rivals = self.seconds
        drawn = " ".join(f"{name}={value}".replace(" ", "") for name, value in self.draw.items())
        lines = [f"time          {self.op} {self.dtype}  {first}  {self._spread(first)}  for {drawn}"]
        for rival in rivals:
            ratios = [b / a for a, b in zip(self.seconds[first], self.seconds[rival], strict=True)]
            says = f"the first is {median(ratios):.3g} times as fast ({min(ratios):.3g} to {max(ratios):.3g})"
            lines.append(f"  compared with {rival}  {self._spread(rival)}: {says}")
        return lines

    def _spread(self, name: str) -> str:
        """Format the median and range of a candidate, and the number of rounds."""
        seconds = self.seconds[name]
        few = len(seconds) < self.rounds
        rounds = f"{len(seconds)} of {self.rounds} rounds: the time was up" if few else f"{len(seconds)} rounds"
        middle, least, most = (_seconds_text(of(seconds)) for of in (median, min, max))
        return f"{middle} ({least} to {most}, {rounds})"


def _seconds_text(seconds: float) -> str:
    """Format seconds with a unit.

    >>> _seconds_text(0.00123456), _seconds_text(2.5e-6), _seconds_text(12.0)
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
    """Time `workers` for one draw, with the largest sizes that `only` allows.

    Arrays hold normally distributed numbers if the contract can draw such arrays. The first two rounds always run;
    after `limit` seconds, no new round starts. Raises NoVerdict if a timed call returns no result or a wrong one.
    """
    random = Random(seed)
    start = monotonic()
    draw = _largest(contract, narrowed(contract, only), random)
    turns = [_Turn(contract, precision, draw, seed=random.randrange(2**31)) for _ in range(INPUTS)]
    seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
    left_out: dict[str, set[str]] = {worker.name: set() for worker in workers}
    for number in range(ROUNDS):
        if number >= INPUTS and monotonic() - start > limit:
            break
        turn = turns[number % INPUTS]
        results: dict[str, tuple[np.ndarray, ...]] = {}
        for worker in random.sample(workers, len(workers)):
            times, outcome = _timed_calls(contract, worker, turn.arguments, left_out[worker.name])
            if isinstance(outcome, Failure):
                raise NoVerdict(f"{worker.name}: not timed, because a timed call {outcome.kind}: {outcome.message}")
            results[worker.name] = outcome.arrays
            seconds[worker.name].append(median(times))
        turn.check(results)
        progress(number + 1)
    return Timing(contract.name, precision.name, draw, seconds, ROUNDS)


def _timed_calls(
    contract: Contract, worker: Worker, arguments: Arguments, left_out: set[str]
) -> tuple[list[float], Outputs | Failure]:
    """Time calls of a candidate as `Worker.timed` does, with the keyword arguments that it accepts."""
    times: list[float] = []

    def call(positional: Arguments, keyword: Arguments) -> Outputs | Failure:
        times[:], outcome = worker.timed(positional, keyword, seconds=SECONDS)
        return outcome

    try:
        return times, accepted(contract, call, *contract.split(arguments), left_out)
    except NotJudged as error:
        raise NoVerdict(f"{worker.name}: not timed, because {error}") from error


class _Turn:
    """One set of inputs, and for each candidate the last result that we judged for these inputs."""

    def __init__(self, contract: Contract, precision: Precision, draw: Draw, *, seed: int):
        reseeded = {name: replace(v, seed=seed) if isinstance(v, Values) else v for name, v in draw.items()}
        self.contract, self.precision = contract, precision
        self.arguments: Arguments = contract.arguments(precision=precision, **reseeded)
        self._judged: dict[str, tuple[np.ndarray, ...]] = {}

    def check(self, results: Mapping[str, tuple[np.ndarray, ...]]) -> None:
        """Judge results, unless their bits equal the last judged results. Raises NoVerdict for a wrong result."""
        unjudged = {
            name: arrays for name, arrays in results.items() if not _bits_equal(arrays, self._judged.get(name, ()))
        }
        expected = self.contract.expected(self.arguments) if unjudged else ()
        for name, arrays in unjudged.items():
            finding = judge(arrays, expected, self.precision).finding
            if finding and finding.kind != "suspicious":
                wrong = f"{finding.kind}: {finding.message}"
                raise NoVerdict(f"{name}: not timed, because a timed call returned a wrong result: {wrong}")
        self._judged.update(unjudged)


def _bits_equal(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    """Compare arrays bit by bit: NaN equals NaN."""
    return len(first) == len(second) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(first, second, strict=True)
    )


def _largest(contract: Contract, only: Mapping[str, Sequence[Any]], random: Random) -> Draw:
    draws = narrowed_draws(contract.draws, only)
    drawn = list(itertools.islice(draws_from(draws, random), 64))
    draw = drawn[0]
    for name, strategy in draws.items():
        allowed = domain(strategy)
        if name in contract.shapes:
            draw[name] = max((sample[name] for sample in drawn), key=lambda value: sum(leaves(value)))
            if sizes := [value for value in allowed.drawn if type(value) is int]:
                draw[name] = max(sizes)
        elif allowed.arrays and "normal" in allowed.arrays.kinds:
            draw[name] = Values("normal")
        elif name not in only and allowed.drawn and not allowed.arrays:
            draw[name] = allowed.drawn[0]  # the simplest, for example nothing hidden
    return draw
