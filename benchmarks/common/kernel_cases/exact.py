"""The ops of the table in float64, with bounds on a kernel's error, composed from `verify.bounds.running_error`.

Each function takes the arguments of the kernel with the same name, as NumPy arrays. It returns the exact results, with
a bound on the error of each element. The bounds are valid for sums in any order.
"""

from typing import Any

import numpy as np

from llamaspec.pallas_kernels.parts import int4
from llamaspec.pallas_kernels.parts.compat import WARPS
from llamaspec.pallas_kernels.parts.integer_mma import CHUNK as STEP
from llamaspec.pallas_kernels.parts.matrix import ScaledCodes, ScaledE4M3
from llamaspec.pallas_kernels.parts.quantized_product import GROUPS
from llamaspec.reference.attention import causal_mask
from llamaspec.reference.quantizers.minifloat import E4M3
from llamaspec.reference.softmax import softmax as exact_softmax
from llamaspec.verify.bounds.precision import TINY, U
from llamaspec.verify.bounds.running_error import (
    ELEMENTARY,
    Approx,
    added,
    attended,
    exactly,
    fixed_point_product,
    gamma,
    gated,
    normalized,
    projected,
    turned_by,
)
from llamaspec.verify.bounds.running_error import rounded as rounded_by

ROUNDING = 2.0**-8  # relative rounding error of bfloat16
PARTS = 16  # most parts into which a product of several vectors cuts its columns; each part adds one rounding
KEYS = 64  # keys in a tile of attention, at least


def rounded(x: Approx, dtype: Any) -> Approx:
    """Add the error of rounding the result to `dtype`.

    This is one rounding for bfloat16. For float32 nothing is added, because the bound of x includes the last rounding.
    """
    return rounded_by(x, 0.0 if np.dtype(dtype) == np.float32 else ROUNDING)


def gemv(w, x, *, norm=None, eps: float = 1e-5, bias=None, residual=None, out: Any = None) -> Approx:
    y = _biased(_product(_apply_norm(x, norm, eps), w, eps=None if norm is None else eps), bias)
    return rounded(y if residual is None else added(y, exactly(residual)), out or x.dtype)


def _biased(y: Approx, bias) -> Approx:
    return y if bias is None else added(y, exactly(bias))


def _product(x: Approx, w, *, eps: float | None) -> Approx:
    """Compute W x and its error bound. Kernels multiply quantized codes by x in fixed point, with three 8-bit digits.

    For each digit, a warp takes a quarter of the groups. It multiplies the integer sum of each group by the group's
    scale and adds the products up, with one rounding per group. Then the kernel adds up the three digits and the four
    warps, and may multiply by the scale of the row. If `eps` is not None, x is a normalized vector, and the kernel
    multiplies by 1/rms at the end. 1/rms is at most 1 / sqrt(eps).
    """
    if isinstance(w, tuple):
        parts = [_product(x, part, eps=eps) for part in w]
        return Approx(*(np.concatenate(some, axis=-1) for some in zip(*parts, strict=True)))
    if isinstance(w, ScaledE4M3):
        y, scales = projected(x, E4M3.decode(np.asarray(w.codes).view(np.uint8))), np.abs(exactly(w.scales).value)
        value = y.value * exactly(w.scales).value
        return Approx(value, y.error * scales * (1 + U) + U * np.abs(value) + 2 * TINY * (1 + y.size + scales))
    if not isinstance(w, ScaledCodes):
        return projected(x, exactly(w).value)
    (rows, cols), group, planes = w.shape, w.group or max(GROUPS), 1
    if w.levels is not None and len(w.levels.planes) > 1:
        planes = 2 * len(w.levels.planes)  # digits of a level may be twice as large as it
    roundings = -(-cols // STEP) * STEP // (WARPS * group) * planes + 3 + 3 + 1
    rms = 1.0 if eps is None else eps**-0.5
    scales = np.asarray(w.scales, np.float64).reshape(rows, -1)
    y = fixed_point_product(x, levels_of(w), scales, group=group, roundings=roundings, rms=rms)
    if w.minima is None:
        return y
    least = _of_minima(x, np.asarray(w.minima, np.float64), roundings=roundings, rms=rms)
    return Approx(y.value + least.value, y.error + least.error)


def coded_gemm(w, x) -> Approx:
    """Compute W x and its error bound. The tensor cores add a group's products in float32, and then groups are added.

    U is the unit roundoff of float32, and the size of a sum is the sum of its terms' magnitudes. The tensor cores add
    sixteen products and a sum at once, and truncate all seventeen terms at about the last bit of the largest. For each
    term, this changes a group's sum by at most (17 / 16) 2 U times its size, and the bound allows 3 U. Then each group
    has one rounding for its scale and one for its addition (two of each with minima), and each addition of parts has
    one. Codes and vectors are exact in bfloat16.
    """
    (rows, cols), group = w.shape, w.group or max(GROUPS)
    scales = np.asarray(w.scales, np.float64).reshape(rows, -1)
    weights = levels_of(w) * np.repeat(scales, cols // scales.shape[1], axis=1)
    x = exactly(x)
    sizes = x.size @ np.abs(weights).T
    tiny = TINY * (1 + np.max(scales)) * np.sum(x.size + 1, axis=-1, keepdims=True)
    y = Approx(x.value @ weights.T, gamma(3 * group + 2 * (cols // group) + PARTS) * sizes + 256 * tiny)
    if w.minima is None:
        return y
    least = _of_minima(x, np.asarray(w.minima, np.float64), roundings=2 * (cols // group) + PARTS, rms=1.0)
    return Approx(y.value + least.value, y.error + least.error)


def levels_of(w: ScaledCodes) -> np.ndarray:
    """Decode codes [rows, cols] to the numbers that are multiplied by scales."""
    if not w.in_words:
        return np.asarray(w.codes, np.float64)
    codes = int4.unpacked(np.asarray(w.codes), w.order, None if w.low_bits is None else np.asarray(w.low_bits))
    if w.levels is not None:
        return np.array(w.levels.integers, np.float64)[codes] * w.levels.unit
    return (codes if w.minima is not None else int4.signed(codes, w.bits)).astype(np.float64)


def _of_minima(x: Approx, minima: np.ndarray, *, roundings: int, rms: float) -> Approx:
    """Multiply minima [rows groups] by the sums of the groups of x, and bound the error.

    The sum of n numbers has n roundings. `roundings` counts all later roundings of a product.
    """
    groups = minima.shape[1]

    def sums(part: np.ndarray) -> np.ndarray:
        return np.sum(part.reshape(*part.shape[:-1], groups, -1), axis=-1)

    size, off, magnitudes = sums(x.size), sums(x.error + TINY), np.abs(minima).T
    group = x.value.shape[-1] // groups
    error = off @ magnitudes + gamma(group + 1 + roundings) * ((size + off) @ magnitudes)
    tiny = 4 * TINY * (1 + np.max(magnitudes)) * np.sum(1 + size, axis=-1, keepdims=True)
    return Approx(sums(x.value) @ minima.T, error + tiny * max(1.0, rms))


def norm_gate_up(w, x, norm, *, eps: float, bias=None) -> Approx:
    gate_and_up = _biased(_product(_apply_norm(x, norm, eps), w, eps=eps), bias)
    gate, up = (gate_and_up.map(lambda part, half=half: np.split(part, 2, axis=-1)[half]) for half in (0, 1))
    return rounded(gated(gate, up), x.dtype)


def norm_qkv(
    w, x, norm, k, v, positions, cos, sin, *, heads: int, eps: float, bias=None
) -> tuple[Approx, Approx, Approx]:
    """Compute q and both caches. Each sequence's new k and v are written to the cache row at its position."""
    batch, kv_heads, _, head_dim = k.shape
    y = _biased(_product(_apply_norm(x, norm, eps), w, eps=eps), bias)
    y = y.map(lambda part: part.reshape(batch, -1, head_dim))
    turned = rounded(turned_by(y, exactly(cos).value, exactly(sin).value), x.dtype)
    y = rounded(y, x.dtype)
    rows = np.arange(batch)

    def appended(cache, new: Approx) -> Approx:
        old = exactly(cache)
        for part, row in zip(old, new, strict=True):
            part[rows, :, positions] = row
        return old

    new_k = turned.map(lambda part: part[:, heads : heads + kv_heads])
    new_v = y.map(lambda part: part[:, heads + kv_heads :])
    return turned.map(lambda part: part[:, :heads]), appended(k, new_k), appended(v, new_v)


def _apply_norm(x, norm, eps: float) -> Approx:
    return exactly(x) if norm is None else normalized(exactly(x), exactly(norm).value, eps=eps)


def attention_decode(q, k, v, lengths, *, window: int | None = None) -> Approx:
    return _over_sequences([
        attended_to(q[b : b + 1], k[b], v[b], int(lengths[b]) - 1, window=window) for b in range(len(q))
    ])  # fmt: skip


def attention_paged(q, k, v, table, lengths, *, window: int | None = None) -> Approx:
    """Attend to a paged cache. Page numbers and lengths that are out of range are clamped, as in the kernel."""
    table = np.clip(table, 0, len(k) - 1)
    k, v = (pages[table].swapaxes(1, 2).reshape(len(q), pages.shape[1], -1, pages.shape[-1]) for pages in (k, v))
    return attention_decode(q, k, v, np.minimum(lengths, k.shape[2]), window=window)


def attention_prefill(q, k, v, offsets, *, window: int | None = None) -> Approx:
    rows = [attended_to(q[b], k[b], v[b], int(offsets[b]), window=window) for b in range(len(q))]
    return _over_sequences([row.map(lambda part: part[None]) for row in rows])


def attended_to(q, k, v, offset: int, *, window: int | None = None) -> Approx:
    """Attend with q [seq, heads, head_dim], at positions from `offset`, to k and v [kv_heads, capacity, head_dim]."""
    seq, heads, head_dim = q.shape
    stop = offset + seq  # later rows of the cache are not read
    if stop <= 0:
        return exactly(np.zeros((seq, heads * head_dim)))
    mask = causal_mask(seq, stop, offset=offset, window=window)
    keys, values = (exactly(a[:, :stop].swapaxes(0, 1)) for a in (k, v))
    # Each tile of keys rescales once, and so does joining the parts.
    o = attended(exactly(q), keys, values, mask, blocks=-(-stop // KEYS) + 3)
    if q.dtype != np.float32:  # weights are rounded before they multiply v, but not before they are added up
        weighted = attended(exactly(q), keys, values.map(np.abs), mask).value
        o = Approx(o.value, o.error + ROUNDING * (weighted + o.error))
    return rounded(o.map(lambda part: part.reshape(seq, -1)), q.dtype)


def _over_sequences(rows: list[Approx]) -> Approx:
    return Approx(*(np.concatenate(parts) for parts in zip(*rows, strict=True)))


def rmsnorm(x, weight, *, eps: float) -> Approx:
    return rounded(normalized(exactly(x), exactly(weight).value, eps=eps), x.dtype)


def softmax(scores) -> Approx:
    """Compute softmax. The bound includes the errors of an element's exponent, of its exponential and of 1 / sum."""
    scores = exactly(scores).value
    spread, off = _score_spread(scores)
    exact = exact_softmax(scores)
    return Approx(exact, exact * (np.exp(U * spread + 2 * ELEMENTARY + U) / (1 - off) - 1) + 2 * TINY)


def _score_spread(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two numbers for each row: the largest minus the smallest finite score, and the error of the softmax sum.

    This error is relative to the sum of exponentials. U is float32's unit roundoff. An exponent has an error of at most
    U times its magnitude, even if it rescales the sum of a part. A term is a product of two exponentials, and a sum has
    n terms.
    """
    lowest = np.min(scores, axis=-1, keepdims=True, initial=np.inf, where=np.isfinite(scores))
    spread = scores.max(axis=-1, keepdims=True) - lowest
    return spread, np.expm1(2 * U * spread + 2 * ELEMENTARY + gamma(scores.shape[-1] + 1))
