r"""ggml's blocks of 32 four-bit codes with unequal steps: IQ4_NL and MXFP4.

    w ~ d v_q        IQ4_NL  v = -127, -104, ..., 113 (`IQ4_NL_LEVELS`), d in float16
                     MXFP4   v = 0, 1/2, 1, 3/2, 2, 3, 4, 6 and their negatives (e2m1), d = 2^(e - 127), a byte

IQ4_NL's levels are closer around zero, where weights are more frequent. No formula gives the best d, so ggml
searches. w* is the weight of largest magnitude. For every start d_t = w* / (t - 127), t = -7 ... 7, and for
w* / 127, it takes the nearest levels v and then the best d for these levels:

    d = sum_i w_i^3 v_i / sum_i w_i^2 v_i^2        which minimizes sum_i w_i^2 (w_i - d v_i)^2

It keeps the first d with the smallest sum. The codes are computed from d before it is rounded to float16: the
nearest level, the upper one on ties. Sums are in float32 and in order, as in the C code. With an importance of each
column, c = importance sqrt(2 mean w_i^2 + w^2) replaces the factor w^2 of an error.

MXFP4 is the OCP's microscaling format (see `mx`) as written by ggml: e = floor(log2(max |w|)) + 125. ggml computes log2
in float32, so that a number slightly below 2^k gives k. A weight gets the nearest level, and on ties the level of
smaller magnitude (the OCP rounds to even). The code of -0 does not occur. If max |w| is below 2^-125, the C code does
not define e; here e is 0.

Below, Q(w) = w^ is the weight after quantizing and dequantizing w.

Guaranteed for MXFP4: |w - w^| <= max(|w| / 4, d / 4) and max |w| < 8 d. Reasons: The step is d / 2 for |w| up to 2 d, d
from 2 d to 4 d, and 2 d from 4 d to 6 d. So half a step is at most d / 4 or |w| / 4. A weight between 6 d and 8 d
becomes 6 d, and |w| - 6 d < |w| / 4. Fixed point: Q(Q(w)) = Q(w). Sign: Q(-w) = -Q(w). Powers of two: the weights 2^k w
have the same codes as w, and e + k, unless log2 rounds up for only one of the two blocks.

Guaranteed for IQ4_NL: every weight gets the level nearest to w / d, up to float32 rounding. No formula bounds d. Sign:
Q(-w) = -Q(w), because d changes its sign with w*. Fixed point: not guaranteed, Q(Q(w)) may differ from Q(w). Powers of
two: the weights 2^k w have the same codes as w, and the scale 2^k d, while both scales are normal.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64, UInt8

from llamaspec.reference.quantizers import ggml_search, packing
from llamaspec.reference.quantizers.blocks import Quantized, in_float16
from llamaspec.reference.quantizers.ggml_blocks import (
    BLOCK,
    bytes_of,
    float16_at,
    in_blocks,
    in_rows,
    largest,
)

IQ4_NL_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
_LEVELS = IQ4_NL_LEVELS.astype(np.float32)
_MIDDLES = IQ4_NL_LEVELS[1:] + IQ4_NL_LEVELS[:-1]  # times 2
_HALVES = np.roll(np.arange(-256, 256), 256)  # item i is i, also for negative i, which NumPy counts from the end
_NEAREST = np.searchsorted(_MIDDLES, _HALVES, side="right").astype(np.uint8)
E2M1_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True)
class NonLinear:
    """IQ4_NL: a code is the index of one of 16 levels, and each block of 32 has a float16 scale.

    >>> q = IQ4_NL.quantize(np.array([[-127.0, 113.0, 1.0, 0.0] * 8]))
    >>> q.codes[0, 0, :4], q.scales
    (array([ 0, 15,  8,  8], dtype=uint8), array([[1.]], dtype=float16))
    """

    weights = BLOCK
    bytes = 18

    def quantize(
        self, w: Float[np.ndarray, "*batch cols"], importance: Float[np.ndarray, " cols"] | None = None
    ) -> Quantized:
        blocks = in_blocks(w, BLOCK)
        first = largest(blocks)
        in_float16(first / np.float32(127))  # refused before anything overflows
        if importance is None:
            c = blocks * blocks
        else:
            of_columns = importance.astype(np.float32).reshape(-1, BLOCK)
            c = ggml_search.importances(blocks, of_columns, count=BLOCK // 2)
        zero = np.abs(first) < ggml_search.TINY
        columns, c = (np.ascontiguousarray(array.reshape(-1, BLOCK).T) for array in (blocks, c))
        d = _step(columns, c, np.where(zero, 1, first))
        d = np.where(zero, 0, d)
        reciprocal = np.where(d == 0, 0, 1 / np.where(d == 0, 1, d))
        return Quantized(nearest_level(blocks * reciprocal[..., None]).astype(np.uint8), in_float16(d))

    def dequantize(self, q: Quantized) -> Float64[np.ndarray, "*batch cols"]:
        return in_rows(IQ4_NL_LEVELS[q.codes] * q.scales.astype(np.float64)[..., None])

    def pack(self, q: Quantized) -> UInt8[np.ndarray, "*batch blocks bytes"]:
        """Pack the scale d, then codes j and j + 16 in the low and high half of a byte."""
        return np.concatenate([bytes_of(q.scales), packing.pack(q.codes, bits=4, stride=16)], axis=-1)

    def unpack(self, packed: UInt8[np.ndarray, "*batch blocks bytes"]) -> Quantized:
        return Quantized(packing.unpack(packed[..., 2:], bits=4, stride=16), float16_at(packed, 0))


@dataclass(frozen=True)
class Microscaling:
    """MXFP4: a code is an e2m1 float, and each block of 32 has a power of two as its scale.

    >>> q = MXFP4.quantize(np.array([[6.0, -0.25, 0.75, -2.6] * 8]))
    >>> q.codes[0, 0, :4], q.scales
    (array([ 7,  0,  1, 13], dtype=uint8), array([[127]], dtype=uint8))
    """

    weights = BLOCK
    bytes = 17

    def quantize(self, w: Float[np.ndarray, "*batch cols"]) -> Quantized:
        blocks = in_blocks(w, BLOCK)
        top = np.max(np.abs(blocks), axis=-1).astype(np.float64)
        exponents = np.floor(np.log2(np.where(top == 0, 1, top)).astype(np.float32)) + 125
        exponents = np.where(top == 0, 0, np.maximum(exponents, 0)).astype(np.uint8)
        magnitudes = np.abs(blocks) / _power(exponents)[..., None]
        codes = np.searchsorted((E2M1_LEVELS[1:] + E2M1_LEVELS[:-1]) / 2, magnitudes, side="left")
        return Quantized((codes + 8 * ((codes > 0) & (blocks < 0))).astype(np.uint8), exponents)

    def dequantize(self, q: Quantized) -> Float64[np.ndarray, "*batch cols"]:
        levels = np.concatenate([E2M1_LEVELS, -E2M1_LEVELS])
        return in_rows(levels[q.codes] * _power(q.scales)[..., None])

    def pack(self, q: Quantized) -> UInt8[np.ndarray, "*batch blocks bytes"]:
        """Pack the scale's exponent e, then codes j and j + 16 in the low and high half of a byte."""
        return np.concatenate([q.scales[..., None], packing.pack(q.codes, bits=4, stride=16)], axis=-1)

    def unpack(self, packed: UInt8[np.ndarray, "*batch blocks bytes"]) -> Quantized:
        return Quantized(packing.unpack(packed[..., 1:], bits=4, stride=16), packed[..., 0])


def nearest_level(x: Float32[np.ndarray, "*shape"]) -> np.ndarray:
    """Return the index of the IQ4_NL level nearest to `x`, the upper one on ties.

    The middle of two neighboring levels is always a multiple of 1/2, so the index is the same for all `x` with the same
    floor(2 x).

    >>> nearest_level(np.array([-4.6, -4.5, 7.0], np.float32))
    array([7, 8, 9], dtype=uint8)
    """
    return _NEAREST[np.floor(x + x).clip(-256, 255).astype(np.int16)]


def _step(
    w: Float32[np.ndarray, "32 blocks"], c: Float32[np.ndarray, "32 blocks"], first: Float32[np.ndarray, "*batch"]
) -> Float32[np.ndarray, "*batch"]:
    """Search the scale d of each block. A block is a column of `w`.

    `c` says how much the error of a weight counts, and `first` is the block's weight of largest magnitude.
    """
    shape, first = first.shape, first.reshape(-1)

    def sums(start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return sum c w v and sum c v^2 of each block, where v is the level nearest to `start` * w."""
        levels = _LEVELS[nearest_level(w * start)]
        terms = c * levels
        return ggml_search.total(terms * w), ggml_search.total(terms * levels)

    along, across = sums(1 / (first / np.float32(127)))
    d = along / np.where(across == 0, 1, across)
    with np.errstate(over="ignore"):  # sums of weights above about 10^5 overflow; no start improves on infinity
        best = d * along  # the reduction of the sum of squares by d
        for t in range(-7, 8):
            along, across = sums(np.float32(t - 127) / first)
            fit = along / np.where(across == 0, 1, across)
            better = (across > 0) & (along * along > best * across)
            d, best = np.where(better, fit, d), np.where(better, fit * along, best)
    return d.reshape(shape)


def _power(exponents: UInt8[np.ndarray, "*batch"]) -> Float64[np.ndarray, "*batch"]:
    return np.ldexp(1.0, exponents.astype(np.int32) - 127)


IQ4_NL = NonLinear()
MXFP4 = Microscaling()
