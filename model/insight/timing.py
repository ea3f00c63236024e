"""Measures the time of a call: the median, the fastest and the slowest of several measurements."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import jax

MOST_TURNS = 1 << 24  # largest number of turns in one measurement


class Seconds(NamedTuple):
    """The seconds of a call: the median, the fastest and the slowest measurement."""

    median: float
    least: float
    most: float

    def over(self, count: int | float) -> "Seconds":
        """Return the seconds of one part, if the call consists of `count` equal parts.

        >>> Seconds(4.0, 2.0, 8.0).over(2)
        Seconds(median=2.0, least=1.0, most=4.0)
        """
        return Seconds(*(value / count for value in self))

    def rates(self, amount: int | float) -> tuple[float, float, float]:
        """Return `amount` divided by the seconds: the median rate, the lowest and the highest.

        >>> Seconds(4.0, 2.0, 8.0).rates(8)
        (2.0, 1.0, 4.0)
        """
        return amount / self.median, amount / self.most, amount / self.least


class Effort(NamedTuple):
    """The numbers of calls in a measurement of time."""

    repeats: int  # number of measurements
    warm: int = 2  # number of calls before the first measurement: one to compile, one to warm up
    in_flight: int = 1  # number of calls in a measurement


def spread(values: Sequence[int | float]) -> tuple[float, float, float]:
    """Return the median, the minimum and the maximum of `values`.

    >>> spread([3.0, 9.0, 4.0])
    (4.0, 3.0, 9.0)
    """
    return statistics.median(values), min(values), max(values)


def in_turn(call: Callable[[], Any], second_call: Callable[[], float], effort: Effort) -> list[tuple[float, float]]:
    """Return pairs of the seconds of `call`, and the mean of the results of `second_call` before and after that call.

    The speed of a shared machine may change within seconds, so we measure both numbers of a ratio close together.
    """
    for _ in range(effort.warm):
        jax.block_until_ready(call())
    rounds, before = [], second_call()
    for _ in range(effort.repeats):
        seconds = measure(call, effort._replace(repeats=1, warm=0)).median
        rounds.append((seconds, (before + (after := second_call())) / 2))
        before = after
    return rounds


def measure(call: Callable[[], Any], effort: Effort) -> Seconds:
    """Time `call`, which returns arrays.

    If `effort` has several calls in flight, the host launches the next call before the previous one has ended. So a GPU
    never waits for the host.
    """
    for _ in range(effort.warm):
        jax.block_until_ready(call())
    seconds_taken = []
    for _ in range(effort.repeats):
        began, last = time.perf_counter(), None
        for _ in range(effort.in_flight):
            last = call()
        jax.block_until_ready(last)
        seconds_taken.append((time.perf_counter() - began) / effort.in_flight)
    return Seconds(*spread(seconds_taken))


def measure_turns(call: Callable[[int], Any], span: int | float, effort: Effort) -> Seconds:
    """Time one turn (iteration) of a loop. `call(turns)` runs `turns` turns; a measurement takes about `span` seconds.

    A GPU needs some milliseconds to reach its full speed, so we measure many turns at once. A host needs up to a
    millisecond to launch a program with hundreds of arguments, so we also measure `call(0)` and subtract its time.
    Raises RuntimeError if the turns take no time.
    """
    jax.block_until_ready(call(1))
    launching = measure(partial(call, 0), effort).least
    turns = 1
    # We use the fastest of several measurements, because other work may interrupt the host in any of them.
    while (net := measure(partial(call, turns), effort).least - launching) < span / 2:
        turns *= max(2, int(span / 2 / max(net, launching)))
        if turns >= MOST_TURNS:
            raise RuntimeError(f"cannot time one iteration of a loop: {turns:,} iterations take less than {span} s")
    turns = max(turns, ceil(turns * span / net))
    return Seconds(*(seconds - launching for seconds in measure(partial(call, turns), effort))).over(turns)
