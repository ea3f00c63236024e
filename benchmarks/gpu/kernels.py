"""Each kernel beside what XLA makes of the same op, on arguments that no cache holds."""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.drawing import draw
from benchmarks.gpu.scale import Scale
from benchmarks.kernel_cases.case import Case
from benchmarks.report import Row, skipped, timed
from benchmarks.timing import Seconds, measure

MOST_SETS = 64  # of arguments


def time_kernels(scale: Scale, clock: Clock) -> Iterator[Row]:
    """A row for each case of the table."""
    for case in scale.timed:
        if clock.over:
            yield skipped(case.name)
            continue
        with scale.running():
            ours, plain = (seconds(form, case, scale) for form in (case.function, case.plain))
        yield {
            "case": case.name,
            "op": case.op,
            **timed(ours, bytes=case.bytes, flops=case.flops, dtype=case.dtype),
            "plain": plain.median,
            "speedup": plain.median / ours.median,
        }


def seconds(form: Callable[..., Any], case: Case, scale: Scale) -> Seconds:
    """Of one call. A program makes many, each with arguments of its own, so that launches follow each other closely."""
    held = sum(a.size * a.dtype.itemsize for a in case.arrays)
    sets = [draw(case, seed) for seed in range(min(MOST_SETS, max(2, -(-scale.rotated // held))))]
    program = jax.jit(lambda sets: [form(*arguments) for arguments in sets]).lower(sets).compile()
    return measure(lambda: program(sets), scale.effort).over(len(sets))
