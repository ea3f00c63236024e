"""Each kernel beside what XLA makes of the same op, each call on other arguments than the one before."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import batched
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.drawing import draw
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.varied import clearing_cases
from benchmarks.kernel_cases.case import Case
from benchmarks.report import Row, in_a_line, skipped, timed
from model.insight.timing import Seconds, measure_turns
from model.running.compile import LOOPS_IN_GRAPHS
from pallas_kernels.parts.compat import Target, current_target, use_target
from pallas_kernels.parts.key_ring import TILE

FRESH = 512 << 20  # bytes of arguments that calls go through before the first come again: caches hold 60 MB


def time_kernels(scale: Scale, clock: Clock, *, backwards: bool = False, variants: bool = False) -> Iterator[Row]:
    """A row for each case of the table, or for each variant. From the end, what another run had no time for comes
    first.
    """
    cases = scale.timed_variants if variants else scale.timed
    for some in batched(reversed(cases) if backwards else cases, scale.prepared):
        if clock.over:
            yield from (skipped(case.name) for case in some)
            continue
        with scale.running():  # XLA's form, too, which it changes nothing for
            yield from _rows(some, scale, clock)


def time_clearing(scale: Scale, clock: Clock) -> Iterator[Row]:
    """What decode attention takes where the last tile of V has rows that are not to be seen, and so is cleared.

    Each case has as many tiles to read; the first of each, which has none to clear, is what the others are held
    against.
    """
    whole: dict[str, float] = {}
    for case, seen in clearing_cases(scale.cleared):
        if clock.over:
            yield skipped(case.name)
            continue
        case_timed = Timing(case, scale)
        with scale.running():
            ours = case_timed.seconds(case.function)
        first = whole.setdefault(f"{case.dtype} {case.arrays[1].shape}", ours.least)
        yield {"case": case.name, "rows": -seen % TILE, **ours._asdict(), "more": ours.least - first}


def _rows(cases: Sequence[Case], scale: Scale, clock: Clock) -> Iterator[Row]:
    """Of a few cases, which are all compiled before the first is timed."""
    prepare = partial(_prepared, scale=scale, target=current_target())
    with ThreadPoolExecutor(len(cases)) as pool:
        ready = [pool.submit(prepare, case) for case in cases]
    for case in cases:
        prepared = ready.pop(0)  # and its arguments make room for others when it is timed
        if clock.over:
            yield skipped(case.name)
            continue
        try:
            yield _row(case, *prepared.result())
        except Exception as error:  # of one case
            jax.block_until_ready(jnp.zeros(()) + 1)  # the others are timed, unless the device is beyond use
            yield skipped(case.name, in_a_line(error))


def _prepared(case: Case, scale: Scale, target: Target) -> "tuple[Timing, list[Any]]":
    """Its arguments, and the programs of both forms. A thread has a target of its own."""
    timing = Timing(case, scale)
    with use_target(target):
        return timing, compiled_together(timing.lowered(case.function), timing.lowered(case.plain))


def _row(case: Case, timing: "Timing", programs: list[Any]) -> Row:
    ours, plain = map(timing.of, programs)
    return {
        "case": case.name,
        "op": case.op,
        **timed(ours, bytes=case.bytes, flops=case.flops, dtype=case.dtype),
        "plain": plain.median,
        "speedup": plain.median / ours.median,
    }


class Timing:
    """Of a case: arguments that its forms are called with, as many sets as calls, or what makes 512 MB: a matrix of
    1 MB or more is in no cache then.
    """

    def __init__(self, case: Case, scale: Scale):
        self._case, self._scale = case, scale
        size = sum(prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(case.arrays))
        # Two at least: what a call updates is not in place yet for the next.
        sets = [draw(case, seed) for seed in range(max(2, min(scale.calls, -(-FRESH // size))))]
        self._updated = [[arguments[i] for i in case.donated] for arguments in sets]
        self._fixed = [[a for i, a in enumerate(arguments) if i not in case.donated] for arguments in sets]
        jax.block_until_ready(sets)

    def lowered(self, form: Callable[..., Any]) -> Any:
        """A program that makes many calls, one after the other, each with other arguments than the last; none waits for
        the host. A turn of its loop makes as many of each case, as it takes time itself, some 10 us.

        What a case updates in place, which are the last of its results, goes back into the next call with these
        arguments.
        """
        program = jax.jit(partial(again_and_again, self._case, jax.jit(form), self._scale.calls), donate_argnums=1)
        return program.lower(1, self._updated, self._fixed)

    def of(self, compiled: Any) -> Seconds:
        """Of one call by a program."""

        def call(turns: int):
            self._updated, results = compiled(turns, self._updated, self._fixed)
            return results

        return measure_turns(call, self._scale.span, self._scale.effort).over(self._scale.calls)

    def seconds(self, form: Callable[..., Any]) -> Seconds:
        """Of one call of `form`."""
        return self.of(*compiled_together(self.lowered(form)))


def compiled_together(*programs: Any) -> list[Any]:
    """While nothing is timed."""
    with ThreadPoolExecutor(len(programs)) as pool:
        return list(pool.map(lambda program: program.compile(compiler_options=LOOPS_IN_GRAPHS), programs))


def again_and_again(
    case: Case, form: Callable[..., Any], calls: int, turns: Int[Array, ""], updated: list[Any], fixed: list[Any]
) -> tuple[list[Any], list[Any]]:
    """`in_turn`, so many times: the updated arrays, and the last results."""

    def one(_: Any, state: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        # Arguments that come with the state, or XLA would make the calls once, before the loop.
        (updated, _), mine = lax.optimization_barrier((state, fixed))
        return in_turn(case, form, calls, updated, mine)

    results = jax.eval_shape(partial(in_turn, case, form, calls), updated, fixed)[1]
    return lax.fori_loop(0, turns, one, (updated, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), results)))


def in_turn(
    case: Case, form: Callable[..., Any], calls: int, updated: list[Any], fixed: list[Any]
) -> tuple[list[Any], list[Any]]:
    """What is updated in place of each set of arguments, and the other results of so many calls with them in turn.

    A call waits for the results before it, and these, which all are returned, pass through the same barrier: calls that
    nothing connects XLA would run as one, and those whose results nobody wants, not at all.
    """
    kept, updated, results, last = len(case.donated), list(updated), [], None
    for call in range(calls):
        turn = call % len(fixed)
        mine, others, before = lax.optimization_barrier((updated[turn], fixed[turn], last))
        if before is not None:
            results.append(before[: len(before) - kept])
            updated[(call - 1) % len(fixed)] = before[len(before) - kept :]
        last = jax.tree.leaves(form(*_merged(case, mine, others)))
    assert last is not None
    updated[(calls - 1) % len(fixed)] = last[len(last) - kept :]
    return updated, [*results, last[: len(last) - kept]]


def _merged(case: Case, updated: list[Any], fixed: list[Any]) -> list[Any]:
    """All arguments in their order."""
    of = {True: iter(updated), False: iter(fixed)}
    return [next(of[i in case.donated]) for i in range(len(case.arrays))]
