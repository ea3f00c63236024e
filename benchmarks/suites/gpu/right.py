"""Checks kernels on the device, with exact numbers, poisoned memory, repeats and canaries.

Each kernel gets inputs that reveal bugs: memory that it allocates holds NaN, and so do cache rows that no query may
see. Pages without an owner are NaN, and unused entries of a page table point beyond all pages. The results must be
within a proved bound of the exact numbers. They must have equal bits in every repeat, because a race shows as a
difference. Canary arrays elsewhere in memory must not change.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llamaspec.benchmarks.common.kernel_cases.attention import WINDOW
from llamaspec.benchmarks.common.kernel_cases.case import Case
from llamaspec.benchmarks.common.report import Row, in_a_line, skipped
from llamaspec.benchmarks.suites.gpu.clock import Deadline
from llamaspec.benchmarks.suites.gpu.drawing import draw
from llamaspec.benchmarks.suites.gpu.scale import Scale
from llamaspec.model.running.compile import untuned_options
from llamaspec.pallas_kernels.unsupported import Unsupported
from llamaspec.verify.bounds.running_error import NO_BOUND, Approx

POISON = 1 << 24  # numbers
CANARIES = 64  # arrays
CANARY = 1 << 14  # numbers in each


def check(scale: Scale, clock: Deadline, *, varied: bool = False, share: int = 0, shares: int = 1) -> Iterator[Row]:
    """Check each case. A row has the largest error relative to its bound, and how many repeats gave different results.

    If `varied`, the cases have options that no model of the table uses. Otherwise they come from the table. One call
    checks every `shares`-th case, starting with case number `share`.
    """
    cases, repeats = (scale.varied, scale.varied_repeats) if varied else (scale.checked, scale.repeats)
    canaries = [jnp.full(CANARY, i, jnp.int32) for i in range(CANARIES)]
    for case in cases[share::shares]:
        if clock.over:
            yield skipped(case.name)
            continue
        try:
            with scale.running() if case.kernels else nullcontext():  # the interpreter needs a kernel
                row = checked(case, repeats)
        except Exception as error:  # a single case
            jax.block_until_ready(jnp.zeros(()) + 1)  # raises if the device is lost; else check the others
            row = {"case": case.name, "outcome": "failed", "words": in_a_line(error)}
        yield row
    changed = sum(bool(jnp.any(canary != i)) for i, canary in enumerate(canaries))
    yield {"case": "canaries", "outcome": "wrong" if changed else "right", "differing": changed}


def checked(case: Case, repeats: int) -> Row:
    arguments = spoiled(case, jax.tree.map(np.array, draw(case, seed=1)))
    on_device = jax.tree.map(jnp.asarray, unseen(case, arguments))
    try:
        lowered = jax.jit(lambda *arrays: _repeated(case, arrays, repeats)).lower(*on_device)
        # With autotuning on a busy GPU, XLA's own ops may round differently in the loop and before it.
        program = lowered.compile(untuned_options(jax.default_backend()))
    except Unsupported as refusal:
        return {"case": case.name, "outcome": "refused", "words": str(refusal)}
    jax.block_until_ready([jnp.full(POISON, jnp.nan)])  # freed at once, so the next allocation holds NaN
    results, differing = program(*on_device)
    expected = case.exact(*arguments)
    pairs = zip(jax.tree.leaves(results), (expected,) if isinstance(expected, Approx) else expected, strict=True)
    error = max(share_of_bound(np.asarray(result), exact) for result, exact in pairs)
    # XLA may round its own ops differently before a loop and in it.
    right = error <= 1 and not (case.kernels and int(differing))
    return {
        "case": case.name,
        "outcome": "right" if right else "wrong",
        "share_of_bound": min(error, NO_BOUND),  # JSON has no infinity
        "differing": int(differing),
    }


def share_of_bound(result: np.ndarray, exact: Approx) -> float:
    """Compute the largest error as a share of its bound. It is infinite if a NaN is missing or unexpected.

    >>> share_of_bound(np.array([1.5, np.nan]), Approx(np.array([1.0, np.nan]), np.array([1.0, 0.0])))
    0.5
    """
    result = result.astype(np.float64)
    equal = (result == exact.value) | (np.isnan(result) & np.isnan(exact.value))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(equal, 0, np.abs(result - exact.value) / exact.error)
    return float(np.max(np.where(np.isnan(share), np.inf, share)))


def _repeated(case: Case, arguments: Any, repeats: int) -> tuple[Any, jax.Array]:
    """Run a case. Returns its results, and how many repeats gave different results."""
    first = case.function(*arguments)

    def again(i: jax.Array, differing: jax.Array) -> jax.Array:
        # The barrier ties the arguments to the step. Without it XLA would run the kernel once, before the loop.
        same_again, step = lax.optimization_barrier((arguments, i))
        differences = jax.tree.leaves(jax.tree.map(_differ, case.function(*same_again), first))
        return differing + (jnp.any(jnp.stack(differences)) & (step >= 0)).astype(jnp.int32)

    return first, lax.fori_loop(0, repeats, again, jnp.int32(0))


def _differ(a: jax.Array, b: jax.Array) -> jax.Array:
    both_nan = jnp.isnan(a) & jnp.isnan(b) if jnp.issubdtype(a.dtype, jnp.floating) else False
    return jnp.any((a != b) & ~both_nan) if both_nan is not False else jnp.any(a != b)


def _norm_qkv(w, x, norm, k, v, positions, cos, sin, *bias):
    """Fill the caches with NaN, and draw a different position for each sequence."""
    k[:], v[:] = np.nan, np.nan
    return [w, x, norm, k, v, _choose_numbers(len(positions), k.shape[2] - 1), cos, sin, *bias]


def _attention_decode(q, k, v, lengths):
    lengths = _choose_numbers(len(lengths), k.shape[2])
    for b, length in enumerate(lengths):
        k[b, :, length:] = v[b, :, length:] = np.nan
    return [q, k, v, lengths]


def _attention_paged(q, k, v, table, lengths):
    page = k.shape[2]
    lengths = _choose_numbers(len(lengths), table.shape[1] * page)
    for b, length in enumerate(lengths):
        first_page, first_row = divmod(int(length), page)
        for i, number in enumerate(table[b, first_page:]):
            start = first_row if i == 0 else 0
            k[number, :, start:] = v[number, :, start:] = np.nan
        table[b, first_page + (first_row > 0) :] = 2**30
    return [q, k, v, table, lengths]


def _attention_prefill(q, k, v, offsets):
    offsets = offsets - 7
    for b, offset in enumerate(offsets):
        k[b, :, offset + q.shape[1] :] = v[b, :, offset + q.shape[1] :] = np.nan
    return [q, k, v, offsets]


def _decode_before_window(q, k, v, lengths):
    k, v = np.copy(k), np.copy(v)
    for b, length in enumerate(lengths):
        k[b, :, : max(length - WINDOW, 0)] = v[b, :, : max(length - WINDOW, 0)] = np.nan
    return [q, k, v, lengths]


def _paged_before_window(q, k, v, table, lengths):
    k, v = np.copy(k), np.copy(v)
    for b, length in enumerate(lengths):
        first_page, first_row = divmod(max(int(length) - WINDOW, 0), k.shape[2])
        k[table[b, :first_page]] = v[table[b, :first_page]] = np.nan
        k[table[b, first_page], :, :first_row] = v[table[b, first_page], :, :first_row] = np.nan
    return [q, k, v, table, lengths]


def _prefill_before_window(q, k, v, offsets):
    return [*_decode_before_window(q, k, v, offsets + 1)[:3], offsets]


def _masked(scores):
    """Set half of the scores of a row to -inf, and make one score much larger than the others."""
    scores[:, ::2] = -np.inf
    scores[:, 7] = 30
    return [scores]


def _choose_numbers(count: int, largest: int) -> np.ndarray:
    """Choose `count` numbers from 1 to `largest`: both ends, numbers near the size of a tile, and random numbers."""
    rng = np.random.default_rng(0)
    numbers = [largest - 5, 1, largest, 63, 64, 65, *rng.integers(1, largest + 1, max(count - 6, 0))]
    return np.array(numbers[:count], np.int32)


def spoiled(case: Case, arguments: list[Any]) -> list[Any]:
    """Make the arguments of a case harder if `SPOILED` has a function that does so for the case's op."""
    spoil = SPOILED.get(case.op.split()[0])
    return spoil(*arguments) if spoil else arguments


def unseen(case: Case, arguments: list[Any]) -> list[Any]:
    """Put NaN in the cache rows before the sliding window of each query. Cases without a window stay unchanged.

    Use the result only for the kernel, because the exact op reads these rows.
    """
    op, *how = case.op.split()
    return BEFORE_WINDOW[op](*arguments) if "window" in how else arguments


BEFORE_WINDOW: dict[str, Callable[..., list[np.ndarray]]] = {
    "attention_decode": _decode_before_window,
    "attention_paged": _paged_before_window,
    "attention_prefill": _prefill_before_window,
}
# Functions that replace the arguments of an op by hard ones.
SPOILED: dict[str, Callable[..., list[np.ndarray]]] = {
    "norm_qkv": _norm_qkv,
    "attention_decode": _attention_decode,
    "attention_paged": _attention_paged,
    "attention_prefill": _attention_prefill,
    "softmax": _masked,
}
