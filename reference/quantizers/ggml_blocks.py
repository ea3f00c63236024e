r"""ggml's blocks of 32 weights in equal steps: Q8_0, Q4_0, Q5_0, Q4_1, Q5_1.

(https://github.com/ggml-org/ggml; the types of llama.cpp's GGUF files.) Consecutive weights of a row share a
float16 scale d, and in the types that end in _1 also a float16 minimum m:

            d                            code, b bits                                      weight
    Q8_0    max |w| / 127                round(w / d)                                      d q
    Qb_0    w* / -2^(b-1)                min(2^b - 1, floor(w / d + 2^(b-1) + 1/2))        d (q - 2^(b-1))
    Qb_1    (max w - m) / (2^b - 1)      min(2^b - 1, floor((w - m) / d + 1/2))            d q + m,  m = min w

w* is the weight of largest magnitude, with its sign; the first one on ties. In Qb_0, w* gets code 0, the weight
-2^(b-1) d. The grid does not contain 2^(b-1) d. Sign: Q(-w) = -Q(w), where Q(w) are the dequantized weights. In Q8_0
the codes of -w are -q. In Qb_0 the weights -w have the same codes, and -d. Qb_1 does not have this law.

The codes agree bit for bit with ggml's C code. The C code computes in float32, and multiplies by fl(1 / d) before it
rounds d to float16. Its `round` rounds ties away from zero. If 1 / d overflows, d is 0 in float16, and all codes are 0,
because on x86 the C code converts infinity to 0.

Guaranteed, where d' and m' are d and m after rounding to float16, so that |d' - d| <= max(2^-11 |d|, 2^-25), and the
same for m:

    |w - w^|  <=  step + |q| |d' - d| + |m' - m| + 2^-120        q: the factor of d in the table
    step = (1/2 + 2^-14) d, but (1 + 2^-14) d in Qb_0 for weights opposite w*, clipped to the last code

2^-14 d is for at most four float32 roundings of numbers up to 127, and 2^-120 for an overflow of 1 / d. If |d| is below
about 2^-25, d' is 0, and every weight of the block becomes 0 (m' in Qb_1). `quantize` refuses a d above 65504, the
largest number of float16.

With an importance of each column, Qb_0 and Qb_1 take d, m and the codes from a search of `ggml_search` instead. The
squared error of a weight then counts importance sqrt(v + w^2) times, where v is the mean square of the row, and the
bound above does not hold. Q8_0 does not use importances.

Fixed point: for Q8_0 and Qb_0, quantizing dequantized weights gives the same codes and d'. Their largest magnitude is
|d'| times 127 (Q8_0) or times 2^(b-1) (Qb_0), and dividing it by this number gives |d'| again. Qb_1 has no such
guarantee, because m' and (2^b - 1) d' are added in float32. Powers of two: the weights 2^k w have the same codes as w,
with 2^k d' and 2^k m', while all of these are normal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float16, Float32, Float64, Integer, UInt8

from llamaspec.reference.quantizers import ggml_search, packing
from llamaspec.reference.quantizers.blocks import finite, in_float16

BLOCK = 32


class Blocks(NamedTuple):
    """Codes, scales d and minima m (0 if the type has none)."""

    codes: Integer[np.ndarray, "*batch blocks 32"]
    scales: Float16[np.ndarray, "*batch blocks"]
    minima: Float16[np.ndarray, "*batch blocks"]


@dataclass(frozen=True)
class Bytes:
    """Q8_0: codes from -127 to 127.

    >>> q = Q8_0.quantize(np.eye(1, 32))
    >>> q.codes[0, 0, :2], q.scales
    (array([127,   0], dtype=int8), array([[0.00787]], dtype=float16))
    """

    weights = BLOCK
    bytes = 34

    def quantize(self, w: Float[np.ndarray, "*batch cols"]) -> Blocks:
        blocks = in_blocks(w, BLOCK)
        d = np.max(np.abs(blocks), axis=-1) / np.float32(127)
        codes = round_away(times_reciprocal(blocks, d)).astype(np.int8)
        return Blocks(codes, in_float16(d), np.zeros(d.shape, np.float16))

    def dequantize(self, q: Blocks) -> Float64[np.ndarray, "*batch cols"]:
        return in_rows(q.codes * q.scales.astype(np.float64)[..., None])

    def pack(self, q: Blocks) -> UInt8[np.ndarray, "*batch blocks bytes"]:
        """Pack the scale d, then one byte per code."""
        return np.concatenate([bytes_of(q.scales), q.codes.astype(np.int8).view(np.uint8)], axis=-1)

    def unpack(self, packed: UInt8[np.ndarray, "*batch blocks bytes"]) -> Blocks:
        scales = float16_at(packed, 0)
        return Blocks(packed[..., 2:].view(np.int8), scales, np.zeros_like(scales))


@dataclass(frozen=True)
class Signed:
    """Q4_0 and Q5_0: codes from 0 to 2^bits - 1. The code 2^(bits - 1) means the weight zero.

    >>> Q4_0.dequantize(Q4_0.quantize(np.array([[-8.0, 8.0, 2.4, 2.5] * 8])))[0, :4]
    array([-8.,  7.,  2.,  3.])
    """

    bits: int

    weights = BLOCK

    @property
    def bytes(self) -> int:
        return 2 + BLOCK * self.bits // 8

    @property
    def zero(self) -> int:
        return 1 << self.bits - 1

    def quantize(
        self, w: Float[np.ndarray, "*batch cols"], importance: Float[np.ndarray, " cols"] | None = None
    ) -> Blocks:
        blocks = in_blocks(w, BLOCK)
        d = largest(blocks) / np.float32(-self.zero)
        if importance is not None:
            in_float16(d)  # refused before a sum overflows
            q = _searched(blocks, importance, lambda *columns: ggml_search.signed(*columns, most=self.zero))
            return q._replace(codes=(q.codes + self.zero).astype(np.uint8))
        codes = times_reciprocal(blocks, d, offset=self.zero + 0.5).astype(np.uint8)
        codes = np.minimum(codes, 2**self.bits - 1)
        return Blocks(codes, in_float16(d), np.zeros(d.shape, np.float16))

    def dequantize(self, q: Blocks) -> Float64[np.ndarray, "*batch cols"]:
        return in_rows((q.codes.astype(np.float64) - self.zero) * q.scales[..., None])

    def pack(self, q: Blocks) -> UInt8[np.ndarray, "*batch blocks bytes"]:
        """Pack the scale d, then the codes by `pack_codes`."""
        return np.concatenate([bytes_of(q.scales), pack_codes(q.codes, self.bits)], axis=-1)

    def unpack(self, packed: UInt8[np.ndarray, "*batch blocks bytes"]) -> Blocks:
        scales = float16_at(packed, 0)
        return Blocks(unpack_codes(packed[..., 2:], self.bits), scales, np.zeros_like(scales))


@dataclass(frozen=True)
class Shifted:
    """Q4_1 and Q5_1: codes from 0 for the smallest weight of a block to 2^bits - 1 for the largest.

    >>> Q4_1.dequantize(Q4_1.quantize(np.array([[-1.0, 14.0, 5.4, 5.5] * 8])))[0, :4]
    array([-1., 14.,  5.,  6.])
    """

    bits: int

    weights = BLOCK

    @property
    def bytes(self) -> int:
        return 4 + BLOCK * self.bits // 8

    def quantize(
        self, w: Float[np.ndarray, "*batch cols"], importance: Float[np.ndarray, " cols"] | None = None
    ) -> Blocks:
        blocks = in_blocks(w, BLOCK)
        m = np.min(blocks, axis=-1) + np.float32(0)  # without the sign of -0
        with np.errstate(over="ignore"):  # refused below
            d = (np.max(blocks, axis=-1) - m) / np.float32(2**self.bits - 1)
            scales, minima = in_float16(d), in_float16(m)
        if importance is not None:
            return _searched(
                blocks,
                importance,
                lambda *columns: ggml_search.shifted(*columns, most=2**self.bits - 1, starts=ggml_search.STARTS),
            )
        codes = times_reciprocal(blocks - m[..., None], d, offset=0.5).astype(np.uint8)
        return Blocks(np.minimum(codes, 2**self.bits - 1), scales, minima)

    def dequantize(self, q: Blocks) -> Float64[np.ndarray, "*batch cols"]:
        d, m = (a.astype(np.float64)[..., None] for a in (q.scales, q.minima))
        return in_rows(d * q.codes + m)

    def pack(self, q: Blocks) -> UInt8[np.ndarray, "*batch blocks bytes"]:
        """Pack the scale d and the minimum m, then the codes by `pack_codes`."""
        return np.concatenate([bytes_of(q.scales), bytes_of(q.minima), pack_codes(q.codes, self.bits)], axis=-1)

    def unpack(self, packed: UInt8[np.ndarray, "*batch blocks bytes"]) -> Blocks:
        return Blocks(unpack_codes(packed[..., 4:], self.bits), float16_at(packed, 0), float16_at(packed, 2))


def _searched(
    blocks: Float32[np.ndarray, "*batch blocks 32"],
    importance: Float[np.ndarray, " cols"],
    search: Callable[[np.ndarray, np.ndarray], ggml_search.Fit],
) -> Blocks:
    """Quantize by a search that minimizes the sum of c (w - w^)^2; c says how much the error of a weight counts.

    d and m are rounded after the search.
    """
    rows = blocks.reshape(*blocks.shape[:-2], -1)
    c = ggml_search.importances(rows, importance.astype(np.float32), count=rows.shape[-1])
    with np.errstate(all="ignore"):
        w, c = (np.ascontiguousarray(array.reshape(-1, BLOCK).T) for array in (blocks, c))
        fit = search(w, c)
    scales, minima = (in_float16(array).reshape(blocks.shape[:-1]) for array in (fit.step, -fit.minimum))
    return Blocks(fit.codes.T.reshape(blocks.shape).astype(np.int8), scales, minima)


def in_blocks(w: Float[np.ndarray, "*batch cols"], block: int) -> Float32[np.ndarray, "*batch blocks block"]:
    """Convert weights to float32 blocks. Raises ValueError if a weight is not finite, or a block is incomplete."""
    if w.shape[-1] % block:
        raise ValueError(f"rows of {w.shape[-1]} weights do not fill blocks of {block}")
    return finite(w).astype(np.float32).reshape(*w.shape[:-1], -1, block)


def in_rows(blocks: Float64[np.ndarray, "*batch blocks block"]) -> Float64[np.ndarray, "*batch cols"]:
    return blocks.reshape(*blocks.shape[:-2], -1)


def largest(blocks: Float32[np.ndarray, "*batch block"]) -> Float32[np.ndarray, "*batch"]:
    """Return w*: the number of largest magnitude with its sign, the first one on ties; 0 for a block of zeros."""
    at = np.argmax(np.abs(blocks), axis=-1, keepdims=True)
    return np.take_along_axis(blocks, at, axis=-1)[..., 0] + np.float32(0)


def times_reciprocal(
    w: Float32[np.ndarray, "*batch block"], d: Float32[np.ndarray, "*batch"], *, offset: float = 0.0
) -> Float32[np.ndarray, "*batch block"]:
    """Return w fl(1 / d) + offset in float32; 0 if 1 / d overflows, and `offset` if d is 0."""
    with np.errstate(divide="ignore", over="ignore"):
        reciprocal = np.where(d == 0, 0, 1 / d)[..., None]
    usable = np.isfinite(reciprocal)
    return np.where(usable, w * np.where(usable, reciprocal, 0) + np.float32(offset), 0)


def round_away(x: Float32[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """Round as C's roundf does: ties go away from zero.

    >>> round_away(np.array([0.5, -0.5, 0.49999997, 2.5], np.float32))
    array([ 1., -1.,  0.,  3.], dtype=float32)
    """
    truncated = np.trunc(x)
    return truncated + np.copysign(np.abs(x - truncated) >= 0.5, x).astype(np.float32)


def pack_codes(codes: Integer[np.ndarray, "*batch 32"], bits: int) -> UInt8[np.ndarray, "*batch bytes"]:
    """Pack 32 codes: first their fifth bits, if any, then their low four bits.

    The fifth bit of code j is bit j of four bytes. Codes j and j + 16 are the low and the high half of byte j."""
    codes = codes.astype(np.uint8)
    nibbles = packing.pack(codes & np.uint8(15), bits=4, stride=BLOCK // 2)
    return nibbles if bits == 4 else np.concatenate([packing.pack(codes >> 4, bits=1), nibbles], axis=-1)


def unpack_codes(packed: UInt8[np.ndarray, "*batch bytes"], bits: int) -> UInt8[np.ndarray, "*batch 32"]:
    codes = packing.unpack(packed[..., -BLOCK // 2 :], bits=4, stride=BLOCK // 2)
    return codes if bits == 4 else codes | packing.unpack(packed[..., :4], bits=1) << 4


def bytes_of(x: Float16[np.ndarray, "*batch"]) -> UInt8[np.ndarray, "*batch 2"]:
    """Return the bytes of `x`, little-endian on every machine."""
    return x.astype("<f2")[..., None].view(np.uint8)


def float16_at(packed: UInt8[np.ndarray, "*batch bytes"], at: int) -> Float16[np.ndarray, "*batch"]:
    return packed[..., at : at + 2].copy().view("<f2")[..., 0].astype(np.float16)


Q8_0 = Bytes()
Q4_0 = Signed(bits=4)
Q5_0 = Signed(bits=5)
Q4_1 = Shifted(bits=4)
Q5_1 = Shifted(bits=5)
