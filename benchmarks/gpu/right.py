"""Whether kernels are right on the device: exact numbers, poisoned memory, repeats, canaries.

Each kernel is run on the inputs that break kernels: memory that it allocates holds NaN, and so do the rows of a cache
that no query may see; pages that no sequence has are NaN, and numbers of pages that nobody should look at are beyond
all pages. What it gives is held against the exact numbers within a proven bound, and is the same, bit by bit, however
often it runs: a race would show as a difference. What stands in memory beside all of that stays as it was.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.drawing import draw
from benchmarks.gpu.scale import Scale
from benchmarks.kernel_cases.attention import WINDOW
from benchmarks.kernel_cases.case import Case
from benchmarks.report import Row, in_a_line, skipped
from verify.running_error import NO_BOUND, Approx

POISON = 1 << 24  # numbers
CANARIES = 64  # arrays
CANARY = 1 << 14  # numbers in each


def check(scale: Scale, clock: Clock, *, varied: bool = False, share: int = 0, shares: int = 1) -> Iterator[Row]:
    """A row for each case of a share: the largest error as a part of its bound, and how many repeats differed.

    The cases are those of the table, or what no model of the table has.
    """
    cases, repeats = (scale.varied, scale.varied_repeats) if varied else (scale.checked, scale.repeats)
    canaries = [jnp.full(CANARY, i, jnp.int32) for i in range(CANARIES)]
    for case in cases[share::shares]:
        if clock.over:
            yield skipped(case.name)
            continue
        try:
            with scale.running() if case.kernels else nullcontext():  # the interpreter wants something to interpret
                row = checked(case, repeats)
        except Exception as error:  # of one case
            jax.block_until_ready(jnp.zeros(()) + 1)  # the others are checked, unless the device is beyond use
            row = {"case": case.name, "outcome": "failed", "words": in_a_line(error)}
        yield row
    changed = sum(bool(jnp.any(canary != i)) for i, canary in enumerate(canaries))
    yield {"case": "canaries", "outcome": "wrong" if changed else "right", "differing": changed}


def checked(case: Case, repeats: int) -> Row:
    arguments = spoiled(case, jax.tree.map(np.array, draw(case, seed=1)))
    on_device = jax.tree.map(jnp.asarray, unseen(case, arguments))
    try:
        program = jax.jit(lambda *arrays: _repeated(case, arrays, repeats)).lower(*on_device).compile()
    except ValueError as refusal:
        return {"case": case.name, "outcome": "refused", "words": str(refusal)}
    jax.block_until_ready([jnp.full(POISON, jnp.nan)])  # and it is freed: what is allocated next holds it
    results, differing = program(*on_device)
    expected = case.exact(*arguments)
    pairs = zip(jax.tree.leaves(results), (expected,) if isinstance(expected, Approx) else expected, strict=True)
    error = max(share_of_bound(np.asarray(result), exact) for result, exact in pairs)
    # XLA's own programs need not round alike before a loop and in it.
    right = error <= 1 and not (case.kernels and int(differing))
    return {
        "case": case.name,
        "outcome": "right" if right else "wrong",
        "share_of_bound": min(error, NO_BOUND),  # infinity is no JSON
        "differing": int(differing),
    }


def share_of_bound(result: np.ndarray, exact: Approx) -> float:
    """The largest error as a share of its bound; infinite where NaN should not be, or should.

    >>> share_of_bound(np.array([1.5, np.nan]), Approx(np.array([1.0, np.nan]), np.array([1.0, 0.0])))
    0.5
    """
    result = result.astype(np.float64)
    same = (result == exact.value) | (np.isnan(result) & np.isnan(exact.value))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(same, 0, np.abs(result - exact.value) / exact.error)
    return float(np.max(np.where(np.isnan(share), np.inf, share)))


def _repeated(case: Case, arguments: Any, repeats: int) -> tuple[Any, jax.Array]:
    """What a case gives, and how many of so many repeats gave anything else."""
    first = case.function(*arguments)

    def again(i: jax.Array, differing: jax.Array) -> jax.Array:
        # Arguments that come with the step, or XLA would run the kernel once, before the loop.
        same_again, step = lax.optimization_barrier((arguments, i))
        other = jax.tree.leaves(jax.tree.map(_differ, case.function(*same_again), first))
        return differing + (jnp.any(jnp.stack(other)) & (step >= 0)).astype(jnp.int32)

    return first, lax.fori_loop(0, repeats, again, jnp.int32(0))


def _differ(a: jax.Array, b: jax.Array) -> jax.Array:
    both = jnp.isnan(a) & jnp.isnan(b) if jnp.issubdtype(a.dtype, jnp.floating) else False
    return jnp.any((a != b) & ~both) if both is not False else jnp.any(a != b)


def _norm_qkv(w, x, norm, k, v, positions, cos, sin, *bias):
    """Caches of NaN; positions that are not alike."""
    k[:], v[:] = np.nan, np.nan
    return [w, x, norm, k, v, _some(len(positions), k.shape[2] - 1), cos, sin, *bias]


def _attention_decode(q, k, v, lengths):
    lengths = _some(len(lengths), k.shape[2])
    for b, length in enumerate(lengths):
        k[b, :, length:] = v[b, :, length:] = np.nan
    return [q, k, v, lengths]


def _attention_paged(q, k, v, table, lengths):
    page = k.shape[2]
    lengths = _some(len(lengths), table.shape[1] * page)
    for b, length in enumerate(lengths):
        whole, rest = divmod(int(length), page)
        for i, number in enumerate(table[b, whole:]):
            start = rest if i == 0 else 0
            k[number, :, start:] = v[number, :, start:] = np.nan
        table[b, whole + (rest > 0) :] = 2**30
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
        whole, rest = divmod(max(int(length) - WINDOW, 0), k.shape[2])
        k[table[b, :whole]] = v[table[b, :whole]] = np.nan
        k[table[b, whole], :, :rest] = v[table[b, whole], :, :rest] = np.nan
    return [q, k, v, table, lengths]


def _prefill_before_window(q, k, v, offsets):
    return [*_decode_before_window(q, k, v, offsets + 1)[:3], offsets]


def _masked(scores):
    """Half of a row counts nothing, and one score is far above the others."""
    scores[:, ::2] = -np.inf
    scores[:, 7] = 30
    return [scores]


def _with_ties(scores):
    return [np.round(scores)]


def _some(count: int, largest: int) -> np.ndarray:
    """Numbers from 1 to `largest`: both, those around what a kernel takes at once, and others."""
    rng = np.random.default_rng(0)
    numbers = [largest - 5, 1, largest, 63, 64, 65, *rng.integers(1, largest + 1, max(count - 6, 0))]
    return np.array(numbers[:count], np.int32)


def spoiled(case: Case, arguments: list[Any]) -> list[Any]:
    """Arguments made hard, where the op has a way to be; a quantized matrix changes nothing about that."""
    spoil = SPOILED.get(case.op.split()[0])
    return spoil(*arguments) if spoil else arguments


def unseen(case: Case, arguments: list[Any]) -> list[Any]:
    """The same with NaN in the rows of a cache that are before every window. NumPy, which reads them, gets them not."""
    op, *how = case.op.split()
    return BEFORE_WINDOW[op](*arguments) if "window" in how else arguments


BEFORE_WINDOW: dict[str, Callable[..., list[np.ndarray]]] = {
    "attention_decode": _decode_before_window,
    "attention_paged": _paged_before_window,
    "attention_prefill": _prefill_before_window,
}
# What makes the inputs of an op hard.
SPOILED: dict[str, Callable[..., list[np.ndarray]]] = {
    "norm_qkv": _norm_qkv,
    "attention_decode": _attention_decode,
    "attention_paged": _attention_paged,
    "attention_prefill": _attention_prefill,
    "softmax": _masked,
    "logsumexp": _masked,
    "argmax": _with_ties,
}
