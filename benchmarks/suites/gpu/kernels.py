"""Times each kernel and XLA's program for the same op, with different arguments in consecutive calls."""

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

from llamaspec.benchmarks.common.kernel_cases.case import Case
from llamaspec.benchmarks.common.report import Row, in_a_line, skipped, timed
from llamaspec.benchmarks.suites.gpu.clock import Deadline
from llamaspec.benchmarks.suites.gpu.drawing import draw
from llamaspec.benchmarks.suites.gpu.scale import Scale
from llamaspec.benchmarks.suites.gpu.varied import clearing_cases
from llamaspec.model.insight.timing import Seconds, measure_turns
from llamaspec.model.running.compile import LOOPS_IN_GRAPHS
from llamaspec.pallas_kernels.parts.compat import Target, current_target, use_target
from llamaspec.pallas_kernels.parts.key_ring import TILE

FRESH = 512 << 20  # bytes of all sets of arguments, which are used in turn: caches hold 60 MB


def time_kernels(scale: Scale, clock: Deadline, *, backwards: bool = False, variants: bool = False) -> Iterator[Row]:
    """Time each case of the table, or each variant.

    If `backwards`, the last cases come first. A run may skip the cases for which no time is left.
    """
    cases = scale.timed_variants if variants else scale.timed
    for some in batched(reversed(cases) if backwards else cases, scale.prepared):
        if clock.over:
            yield from (skipped(case.name) for case in some)
            continue
        with scale.running():  # no effect on XLA's program
            yield from _rows(some, scale, clock)


def time_clearing(scale: Scale, clock: Deadline) -> Iterator[Row]:
    """Time decode attention with hidden rows in the last tile of V, because the kernel must set these rows to 0.

    All cases read the same number of tiles. The first case of each dtype and shape has no hidden row, and is the
    baseline.
    """
    totals: dict[str, float] = {}
    for case, seen in clearing_cases(scale.cleared):
        if clock.over:
            yield skipped(case.name)
            continue
        case_timed = CaseTimer(case, scale)
        with scale.running():
            by_kernel = case_timed.seconds(case.function)
        first = totals.setdefault(f"{case.dtype} {case.arrays[1].shape}", by_kernel.least)
        yield {"case": case.name, "rows": -seen % TILE, **by_kernel._asdict(), "more": by_kernel.least - first}


def _rows(cases: Sequence[Case], scale: Scale, clock: Deadline) -> Iterator[Row]:
    """Compile a few cases, and then time them."""
    prepare = partial(_prepared, scale=scale, target=current_target())
    with ThreadPoolExecutor(len(cases)) as pool:
        ready = [pool.submit(prepare, case) for case in cases]
    for case in cases:
        prepared = ready.pop(0)  # frees its arguments once it is timed
        if clock.over:
            yield skipped(case.name)
            continue
        try:
            yield _row(case, *prepared.result())
        except Exception as error:  # the other cases still run
            jax.block_until_ready(jnp.zeros(()) + 1)  # raises if the device is lost
            yield skipped(case.name, in_a_line(error))


def _prepared(case: Case, scale: Scale, target: Target) -> "tuple[CaseTimer, list[Any]]":
    """Draw the arguments of a case, and compile our kernel and XLA's program.

    Runs in its own thread, and sets `target` there, because a target is valid for one thread only.
    """
    timing = CaseTimer(case, scale)
    with use_target(target):
        return timing, compiled_together(timing.lowered(case.function), timing.lowered(case.plain))


def _row(case: Case, timing: "CaseTimer", programs: list[Any]) -> Row:
    by_kernel, plain = map(timing.of, programs)
    return {
        "case": case.name,
        "op": case.op,
        **timed(by_kernel, bytes=case.bytes, flops=case.flops, dtype=case.dtype),
        "plain": plain.median,
        "speedup": plain.median / by_kernel.median,
    }


class CaseTimer:
    """Times the kernel and XLA's program of a case.

    Consecutive calls use different sets of arguments, up to 512 MB in total, so that large matrices do not stay in the
    L2 cache.
    """

    def __init__(self, case: Case, scale: Scale):
        self._case, self._scale = case, scale
        size = sum(prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(case.arrays))
        # We need two sets at least, because a call may still update its arrays when the next one begins.
        sets = [draw(case, seed) for seed in range(max(2, min(scale.calls, -(-FRESH // size))))]
        self._updated = [[arguments[i] for i in case.donated] for arguments in sets]
        self._fixed = [[a for i, a in enumerate(arguments) if i not in case.donated] for arguments in sets]
        jax.block_until_ready(sets)

    def lowered(self, form: Callable[..., Any]) -> Any:
        """Lower a program that calls `form` many times in a loop on the device, with changing arguments.

        An iteration of the loop takes about 10 us even without calls, so each iteration makes many calls. If a case
        updates arrays in place, the next call with the same set of arguments gets the updated arrays.
        """
        program = jax.jit(partial(again_and_again, self._case, jax.jit(form), self._scale.calls), donate_argnums=1)
        return program.lower(1, self._updated, self._fixed)

    def of(self, compiled: Any) -> Seconds:
        """Run a compiled program, and return the time of one call."""

        def call(turns: int):
            self._updated, results = compiled(turns, self._updated, self._fixed)
            return results

        return measure_turns(call, self._scale.span, self._scale.effort).over(self._scale.calls)

    def seconds(self, form: Callable[..., Any]) -> Seconds:
        """Time one call of `form`."""
        return self.of(*compiled_together(self.lowered(form)))


def compiled_together(*programs: Any) -> list[Any]:
    """Compile several programs at once, while nothing is timed."""
    with ThreadPoolExecutor(len(programs)) as pool:
        return list(pool.map(lambda program: program.compile(compiler_options=LOOPS_IN_GRAPHS), programs))


def again_and_again(
    case: Case, form: Callable[..., Any], calls: int, turns: Int[Array, ""], updated: list[Any], fixed: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Run `in_turn` `turns` times. Returns the updated arrays and the results of the last turn."""

    def body(_: Any, state: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        # The barrier ties the arguments to the state. Without it XLA would make the calls once, before the loop.
        (updated, _), constants = lax.optimization_barrier((state, fixed))
        return in_turn(case, form, calls, updated, constants)

    results = jax.eval_shape(partial(in_turn, case, form, calls), updated, fixed)[1]
    return lax.fori_loop(0, turns, body, (updated, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), results)))


def in_turn(
    case: Case, form: Callable[..., Any], calls: int, updated: list[Any], fixed: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Call `form` with each set of arguments in turn. Returns the updated arrays of each set, and the other results.

    The arguments of a call and the results of the previous call pass through one barrier, so each call waits for the
    previous one. Otherwise XLA would merge independent calls. It would also drop calls with unused results, so we
    return all results.
    """
    donated, updated, results, last = len(case.donated), list(updated), [], None
    for call in range(calls):
        turn = call % len(fixed)
        buffers, constants, before = lax.optimization_barrier((updated[turn], fixed[turn], last))
        if before is not None:
            results.append(before[: len(before) - donated])
            updated[(call - 1) % len(fixed)] = before[len(before) - donated :]
        last = jax.tree.leaves(form(*_merged(case, buffers, constants)))
    assert last is not None
    updated[(calls - 1) % len(fixed)] = last[len(last) - donated :]
    return updated, [*results, last[: len(last) - donated]]


def _merged(case: Case, updated: list[Any], fixed: list[Any]) -> list[Any]:
    """Put updated and fixed arguments back into the order of the case's arguments."""
    of = {True: iter(updated), False: iter(fixed)}
    return [next(of[i in case.donated]) for i in range(len(case.arrays))]
