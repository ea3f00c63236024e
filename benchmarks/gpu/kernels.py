"""Each kernel beside what XLA makes of the same op, each call on arguments of its own."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.drawing import draw
from benchmarks.gpu.scale import Scale
from benchmarks.kernel_cases.case import Case
from benchmarks.report import Row, skipped, timed
from benchmarks.timing import Seconds, measure
from model.compiling import LOOPS_IN_GRAPHS


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

    What a case updates in place, which are the last of its results, goes back into the next call with these arguments.
    """
    sets = [draw(case, seed) for seed in range(scale.sets)]
    updated = [[arguments[i] for i in case.donated] for arguments in sets]
    fixed = [[a for i, a in enumerate(arguments) if i not in case.donated] for arguments in sets]
    program = jax.jit(partial(again_and_again, case, jax.jit(form)), donate_argnums=1)
    compiled = program.lower(scale.rounds, updated, fixed).compile(compiler_options=LOOPS_IN_GRAPHS)

    def call():
        nonlocal updated
        updated, results = compiled(scale.rounds, updated, fixed)
        return results

    return measure(call, scale.effort).over(scale.sets * scale.rounds)


def again_and_again(
    case: Case, form: Callable[..., Any], rounds: Int[Array, ""], updated: list[Any], fixed: list[Any]
) -> tuple[list[Any], list[Any]]:
    """`in_turn`, so many times: the updated arrays, and the last results."""

    def one(_: Any, state: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        # Arguments that come with the state, or XLA would make the calls once, before the loop.
        (updated, _), mine = lax.optimization_barrier((state, fixed))
        return in_turn(case, form, updated, mine)

    results = jax.eval_shape(partial(in_turn, case, form), updated, fixed)[1]
    return lax.fori_loop(0, rounds, one, (updated, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), results)))


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
