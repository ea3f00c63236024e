"""Computes the code, the scale and the guaranteed error of each weight. The quantizers' files prove the guarantees.

Each function takes weights w [rows, cols] in float32 or a narrower dtype, and q, the quantizer's result for w.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from llamaspec.reference.quantizers import double_quantization, ggml, mx, pruning
from llamaspec.reference.quantizers.affine import Affine
from llamaspec.reference.quantizers.blocks import Quantized, spread
from llamaspec.reference.quantizers.ggml_blocks import Blocks, Shifted, Signed, largest
from llamaspec.reference.quantizers.ggml_codebooks import IQ4_NL_LEVELS
from llamaspec.reference.quantizers.ggml_superblocks import Superblock
from llamaspec.reference.quantizers.hqq import Hqq
from llamaspec.reference.quantizers.kmeans import Codebooks
from llamaspec.reference.quantizers.minifloat import E2M1, E4M3, Minifloat
from llamaspec.reference.quantizers.mlx import Mlx
from llamaspec.reference.quantizers.nf4 import NF4, SMALLEST, Codebook
from llamaspec.reference.quantizers.nvfp4 import Nvfp4
from llamaspec.reference.quantizers.symmetric import largest_code
from llamaspec.reference.quantizers.torchao_int4 import TorchaoInt4

U32, U64 = 2.0**-24, 2.0**-53
OVERFLOW = 2.0**-120  # ggml quantizes weights this small to 0, because 1 / d overflows

Matrix = Float64[np.ndarray, "rows cols"]


class WeightDetails(NamedTuple):
    """Code, scale and guaranteed error of each weight. A field is None if the quantizer does not have it."""

    codes: np.ndarray | None  # [rows, cols], integers
    scales: np.ndarray | None  # [rows, cols]
    within: np.ndarray | None  # [rows, cols]


def of_weights(scales: np.ndarray, w: Matrix, group: int | None = None) -> Matrix:
    """Expand scales [rows, groups], with one scale for `group` columns, to one scale per weight [rows, cols]."""
    cols = w.shape[1]
    width = group or cols // scales.shape[1]
    return np.repeat(scales.astype(np.float64), width, axis=1)[:, :cols]


def nearest(w: Matrix, levels: Float64[np.ndarray, "rows _ levels"]) -> Matrix:
    """Bound the error of rounding each weight to the nearest level.

    Between two levels, the bound is half their gap. For a weight above the largest or below the smallest level, it is
    the larger of two numbers: the distance to this level, and half the gap next to this level.

    >>> nearest(np.array([[0.1, 1.5, 4.0]]), np.array([[[0.0, 1.0, 3.0]]]))
    array([[0.5, 1. , 1. ]])
    """
    levels = np.broadcast_to(np.sort(levels, axis=-1), (*w.shape, levels.shape[-1]))
    place = np.clip(np.sum(levels <= w[..., None], axis=-1), 1, levels.shape[-1] - 1)[..., None]
    below, above = (np.take_along_axis(levels, place - i, axis=-1)[..., 0] for i in (1, 0))
    return np.maximum.reduce([(above - below) / 2, levels[..., 0] - w, w - levels[..., -1]])


def symmetric(w: Matrix, q: Quantized, *, bits: int, group: int | None = None) -> WeightDetails:
    """Return the details of weights that are symmetric integers times a scale. Each error is at most half a step."""
    s = of_weights(q.scales, w, group)
    return WeightDetails(q.codes, s, np.maximum(s / 2, largest_code(bits) * 2.0**-150))


def llama2c_groups(w: Matrix, q: Quantized) -> WeightDetails:
    """Return the details of weights in llama2.c's Q8_0, with groups of the flattened matrix."""
    s = np.repeat(q.scales.astype(np.float64), w.size // q.scales.size).reshape(w.shape)
    return WeightDetails(q.codes, s, (1 / 2 + 256 * U32) * s + 64 * 2.0**-149)


def absmax(w: Matrix, q: Quantized) -> WeightDetails:
    """Return the details of weights that LLM.int8() quantizes, with one scale per row."""
    top = of_weights(q.scales, w)
    return WeightDetails(q.codes, top / 127, np.where(top < 127 * 2.0**-127, top, (1 / 2 + 256 * U32) * top / 127))


def affine(w: Matrix, q: Affine, *, bits: int) -> WeightDetails:
    """Return the details of weights that are integers with a zero point. Each error is at most about half a step."""
    s = of_weights(q.scales, w)
    return WeightDetails(q.codes, s, s / 2 + (2**bits - 1) * (2 * U32 * s + 2.0**-150))


def hqq(w: Matrix, q: Hqq, *, bits: int) -> WeightDetails:
    """Return the details of weights that HQQ quantizes: each becomes the nearest level, except for rounding errors.

    w / s + z and s (code - z) are computed in float64; the guaranteed error includes their rounding.
    """
    s, z = of_weights(q.scales, w), of_weights(q.zeros, w)
    levels = s[..., None] * (np.arange(2**bits) - z[..., None])
    return WeightDetails(q.codes, s, nearest(w, levels) + 8 * U64 * (np.abs(w) + s * (2**bits + np.abs(z))))


def torchao_int4(w: Matrix, q: TorchaoInt4) -> WeightDetails:
    """Return the details of weights in torchao's int4: a code counts steps from the smallest weight of its group.

    Each error is at most about half a step.
    """
    s, z = of_weights(q.scales, w), of_weights(q.zeros, w)
    return WeightDetails(q.codes, s, s / 2 + U32 * (100 * s + 2 * np.abs(z)))


def mlx(w: Matrix, q: Mlx, *, bits: int) -> WeightDetails:
    """Return the details of weights in MLX's format: a code counts steps from one weight of its group.

    This weight is the smallest or the largest one, whichever has the larger magnitude. Each error is at most about one
    step.
    """
    s, b = of_weights(q.scales, w), of_weights(q.biases, w)
    return WeightDetails(q.codes, s, np.abs(s) + U32 * (8 * (2**bits - 1) * np.abs(s) + 2 * np.abs(b)))


def minifloat(w: Matrix, q: Quantized, *, to: Minifloat) -> WeightDetails:
    """Return the details of minifloats with a float32 scale. Each error is at most half a unit in the last place."""
    s, m = of_weights(q.scales, w), to.mantissa_bits
    near = np.maximum(2.0 ** -(m + 1) * np.abs(w), 2.0 ** -(to.bias + m) * s)
    return WeightDetails(q.codes, s, near + to.largest * 2.0**-150)


def microscaling(w: Matrix, q: Quantized, *, to: Minifloat) -> WeightDetails:
    """Return the details of minifloats with a power of two as scale.

    A weight beyond the largest minifloat times the scale is rounded to this product.
    """
    s = of_weights(np.ldexp(1.0, q.scales.astype(int) - mx.BIAS), w, mx.BLOCK)
    saturated = 1 - to.largest / 2.0 ** math.frexp(to.largest)[1]
    return WeightDetails(q.codes, s, np.maximum(saturated * np.abs(w), s * 2.0 ** -(to.bias + to.mantissa_bits)))


def codebook(w: Matrix, q: Quantized, *, codebook: Codebook, group: int | None = None) -> WeightDetails:
    """Return the details of weights in NF4 or FP4. Each error is at most half the gap between two levels."""
    a = of_weights(q.scales, w, group)
    near = nearest(w, a[..., None] * codebook.levels.astype(np.float64)) + 3 * 2.0**-23 * a
    return WeightDetails(q.codes, a, np.where(a < SMALLEST, a, near))


def double(w: Matrix, q: tuple[Quantized, double_quantization.Scales]) -> WeightDetails:
    """Return the details of weights in NF4 with quantized scales.

    The guaranteed error is the error of NF4, plus the error of the scale times the magnitude of the code's level.
    """
    first, second = q
    a = first.scales.astype(np.float64)
    blocks = np.arange(a.size) // double_quantization.BLOCK
    b = second.tops.astype(np.float64)[blocks].reshape(a.shape)
    moved = 0.0071 * b + 2.0**-22 * (a + np.abs(np.float64(second.offset)) + b)
    moved += U32 * (a + moved) + 2.0**-149  # the scale is rounded to float32 again
    stored = double_quantization.dequantize(second).astype(np.float32)
    exact = codebook(w, first, codebook=NF4)
    assert exact.within is not None
    level = np.abs(NF4.levels.astype(np.float64)[first.codes])
    return WeightDetails(first.codes, of_weights(stored, w), exact.within + level * of_weights(moved, w))


def kmeans(w: Matrix, q: Codebooks) -> WeightDetails:
    """Return the details of weights in rows that each have their own levels. A weight becomes the nearest level."""
    return WeightDetails(q.codes, None, nearest(w, q.levels.astype(np.float64)[:, None]))


def nvfp4(w: Matrix, q: Nvfp4) -> WeightDetails:
    """Return the details of weights in NVFP4: e2m1 numbers in blocks of 16, with scales in e4m3."""
    g = np.float64(q.scale)
    s = g * spread(E4M3.decode(q.scales), w.shape)
    tops = np.max(np.abs(w.reshape(len(w), -1, 16)), axis=-1)
    expected = of_weights(tops / (E2M1.largest * (g or np.inf)), w)
    off = np.maximum(2.0**-4 * expected, 2.0**-10) + 448 * 2.0**-23
    return WeightDetails(q.codes, s, np.maximum(np.abs(w) / 5, s / 4) + 6 * g * off)


def bitnet(w: Matrix, q: Quantized) -> WeightDetails:
    """Return the details of weights that become -b, 0 or b.

    Each error is at most half the scale b, or |w| - b if |w| is above 3 b / 2.
    """
    b = np.broadcast_to(q.scales.astype(np.float64), w.shape)
    return WeightDetails(q.codes, b, (4 * U32) * b + np.maximum(b / 2, np.abs(w) - b))


def binary(w: Matrix, q: Quantized) -> WeightDetails:
    """Return the details of weights that become their sign times a scale.

    The scale minimizes the sum of squared errors. The error of a single weight has no bound.
    """
    return WeightDetails(q.codes, of_weights(q.scales, w), None)


def sparse(w: Matrix, pruned: Matrix) -> WeightDetails:
    """Return the details of weights after 2:4 pruning: two of four weights stay exact, and the other two become 0."""
    return WeightDetails(None, None, np.where(pruning.n_of_m(w, n=2, m=4), 0.0, np.abs(w)))


def ggml_type(w: Matrix, q: Any, *, name: str) -> WeightDetails:
    """Return the details of weights in the GGUF type `name`."""
    kind = ggml.TYPES[name]
    blocks = w.reshape(len(w), -1, kind.weights)
    codes = q.codes.reshape(w.shape)
    if isinstance(kind, Superblock):
        a, b = (unit.astype(float)[..., None] * part for unit, part in ((q.d, q.scales), (q.e, q.minima)))
        a, b = (of_weights(part.reshape(len(w), -1), w) for part in (a, b))
        levels = a[..., None] * np.arange(kind.lowest, kind.highest + 1) - b[..., None]
        roundings = 8 * U64 * (np.abs(w) + np.max(np.abs(levels), axis=-1) + np.abs(b))
        return WeightDetails(codes, a, nearest(w, levels) + roundings)
    if name == "MXFP4":
        d = of_weights(np.ldexp(1.0, q.scales.astype(int) - mx.BIAS), w)
        return WeightDetails(codes, d, np.maximum(np.abs(w) / 4, d / 4))
    d = of_weights(q.scales, w)
    if name == "IQ4_NL":  # codes are chosen before d is rounded; rounding moves a level by at most 2 `moved`
        moved = 127 * _in_float16(np.abs(d) * (1 + 2.0**-10))
        near = nearest(w, d[..., None] * IQ4_NL_LEVELS)
        return WeightDetails(codes, d, near + 2 * moved + 2.0**-22 * 127 * np.abs(d))
    if isinstance(q, Blocks):
        return WeightDetails(codes, d, _equal_steps(blocks, q, kind).reshape(w.shape))
    top = np.max(np.abs(blocks), axis=-1, keepdims=True)  # the types TQ1_0 and TQ2_0
    within = (1 / 2 + 2.0**-20) * top + np.abs(q.codes) * _in_float16(top) + OVERFLOW
    return WeightDetails(codes, d, within.reshape(w.shape))


def _equal_steps(blocks: np.ndarray, q: Blocks, kind: Any) -> np.ndarray:
    """Bound the errors of Q8_0, Q4_0, Q5_0, Q4_1 and Q5_1, for `blocks` of weights [rows, blocks, 32]."""
    low = np.min(blocks, axis=-1, keepdims=True)
    codes, m, opposite = q.codes.astype(np.float64), np.zeros_like(low), np.zeros(blocks.shape, bool)
    if isinstance(kind, Signed):
        d = largest(blocks.astype(np.float32)).astype(np.float64)[..., None] / -kind.zero
        codes = codes - kind.zero
        opposite = blocks / np.where(d == 0, 1, d) > kind.zero - 1
    elif isinstance(kind, Shifted):
        m, d = low, (np.max(blocks, axis=-1, keepdims=True) - low) / (2**kind.bits - 1)
    else:
        d = np.max(np.abs(blocks), axis=-1, keepdims=True) / 127
    d = np.abs(d) * (1 + 4 * U32)  # ggml rounds d to float32 before it uses d
    step = (np.where(opposite, 1, 0.5) + 2.0**-14) * d
    return step + np.abs(codes) * _in_float16(d) + _in_float16(np.abs(m)) * (m != 0) + OVERFLOW


def _in_float16(d: np.ndarray) -> np.ndarray:
    """Bound the error of rounding d to float16."""
    return np.maximum(2.0**-11 * d, 2.0**-25)
