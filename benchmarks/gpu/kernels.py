"""Each kernel beside what XLA makes of the same op, on arguments that no cache holds."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
from jax import lax

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
            ours = seconds(case.function, case, scale)
        plain = seconds(case.plain, case, scale)
        yield {
            "case": case.name,
            "op": case.op,
            **timed(ours, bytes=case.bytes, flops=case.flops, dtype=case.dtype),
            "plain": plain.median,
            "speedup": plain.median / ours.median,
        }


def seconds(form: Callable[..., Any], case: Case, scale: Scale) -> Seconds:
    """Of one call. A program makes many, one after the other, each with arguments of its own; none waits for the host.

    What a case updates in place, which are the last of its results, goes back into the next program.
    """
    held = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(case.arrays))
    sets = [draw(case, seed) for seed in range(min(MOST_SETS, max(1, -(-scale.rotated // held))))]
    updated = [[arguments[i] for i in case.donated] for arguments in sets]
    fixed = [[a for i, a in enumerate(arguments) if i not in case.donated] for arguments in sets]
    program = jax.jit(partial(in_turn, case, jax.jit(form)), donate_argnums=0).lower(updated, fixed).compile()

    def call():
        nonlocal updated
        updated, results = program(updated, fixed)
        return results

    return measure(call, scale.effort).over(len(sets))


def in_turn(case: Case, form: Callable[..., Any], updated: list[Any], fixed: list[Any]) -> tuple[list[Any], list[Any]]:
    """For each set of arguments what is updated in place, and the other results.

    A set waits for the results before it, and these, which all are returned, pass through the same barrier: calls that
    nothing connects XLA would run as one, and those whose results nobody wants, not at all.
    """
    results, last = [], None
    for mine, others in zip(updated, fixed, strict=True):
        mine, others, before = lax.optimization_barrier((mine, others, last))
        results.append(before)
        last = jax.tree.leaves(form(*_merged(case, mine, others)))
    results = [*results[1:], last]
    kept = len(case.donated)
    split = [len(result) - kept for result in results]
    return (
        [result[at:] for result, at in zip(results, split, strict=True)],
        [result[:at] for result, at in zip(results, split, strict=True)],
    )


def _merged(case: Case, updated: list[Any], fixed: list[Any]) -> list[Any]:
    """All arguments in their order."""
    of = {True: iter(updated), False: iter(fixed)}
    return [next(of[i in case.donated]) for i in range(len(case.arrays))]
