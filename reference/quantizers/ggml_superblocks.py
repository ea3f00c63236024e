r"""ggml's superblocks of 256 weights: Q2_K, Q3_K, Q4_K, Q5_K and Q6_K.

(https://github.com/ggml-org/llama.cpp/pull/1684.) A superblock is 16 or 8 groups of 16 or 32 weights of a
row. Each group has its own scale. The scales are quantized too, in equal steps, so a superblock needs only one
or two float16 numbers:

            bits of codes   groups     weight            s               m          bits per weight
    Q2_K    2, from 0       16 of 16   d s q - e m       0 ... 15        0 ... 15   2.625
    Q3_K    3, from -4      16 of 16   d s q             -32 ... 31                 3.4375
    Q4_K    4, from 0        8 of 32   d s q - e m       0 ... 63        0 ... 63   4.5
    Q5_K    5, from 0        8 of 32   d s q - e m       0 ... 63        0 ... 63   5.5
    Q6_K    6, from -32     16 of 16   d s q             -128 ... 127               6.5625

d and e are float16 numbers of the superblock, s and m are integers of the group, and q is the code of the weight. The
format defines how to compute a weight from these numbers. The result is exact in float64. The format does not define
how to choose the numbers: ggml searches for good ones. `quantize` also searches, in float64, for a small sum of squared
errors. (In the sum of ggml's C code, the errors of large weights count more.)

1. For each group, try `STARTS` guesses of its step, which put the last code slightly below or above its largest
   weight. Take the nearest codes q, then the step a (and minimum b >= 0) with the smallest sum of (w - a q + b)^2.
   Keep the guess with the smallest sum of squares.
2. d is the largest step divided by the largest s, and e the largest minimum divided by the largest m, in float16.
3. For each group, try s = m = 0, and the integers nearest to a / d and b / e and their neighbors. Take the s and m
   with the smallest sum of squares for the nearest codes, computed from the stored d and e.

Guaranteed: for the stored scales, each code is the one nearest to w (up to float64 rounding). So a weight within the
range of the codes moves by at most |d s| / 2, and a weight outside the range moves to its end. The sum of squared
errors of a group is at most the sum for a group of zeros. Groups with s = 0 have code 0. `quantize` refuses a
superblock if d or e is too large for float16.

Powers of two: the weights 2^k w have the same codes, s and m as w, with 2^k d and 2^k e, while all of these are normal.
Sign: Q(-w) = -Q(w) in Q3_K and Q6_K, where Q(w) are the dequantized weights, because -w has the scale -d. The other
types do not have this law, because m is never negative. Dequantized weights are not a fixed point, because a second
search may find another step.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float16, Float64, Int8, Shaped, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import in_float16
from llamaspec.reference.quantizers.ggml_blocks import bytes_of, float16_at, in_blocks, in_rows

BLOCK = 256
STARTS = np.linspace(-1, 1, 21)  # in codes: how far a first guess extends the range


class Superblocks(NamedTuple):
    """Quantized weights: q per weight, s and m per group, d and e per superblock. Unused m and e are 0."""

    codes: Int8[np.ndarray, "*batch superblocks 256"]
    scales: Int8[np.ndarray, "*batch superblocks groups"]
    minima: Int8[np.ndarray, "*batch superblocks groups"]
    d: Float16[np.ndarray, "*batch superblocks"]
    e: Float16[np.ndarray, "*batch superblocks"]


@dataclass(frozen=True)
class Superblock:
    """The common part of the five types: everything except the layout in bytes."""

    bits: int
    group: int
    bytes: int
    largest: int  # the code of the largest scale: 15 or 63; -32 or -128 in types without minima

    weights = BLOCK

    @property
    def minima(self) -> bool:
        return self.largest > 0

    @property
    def lowest(self) -> int:
        """Return the first code. Packed codes count from this code."""
        return 0 if self.minima else -(1 << self.bits - 1)

    @property
    def highest(self) -> int:
        return self.lowest + (1 << self.bits) - 1

    def quantize(self, w: Float[np.ndarray, "*batch cols"]) -> Superblocks:
        """Quantize weights.

        Raises ValueError for rows that are not complete superblocks, and for weights that are not finite or too large.
        """
        blocks = in_blocks(w, BLOCK).astype(np.float64)
        groups = blocks.reshape(*blocks.shape[:-1], -1, self.group)
        steps, floors = self._fit(groups)
        d, scales = self._in_units(steps)
        e, minima = self._in_units(floors)
        least = np.full(steps.shape, np.inf)
        best = scales, minima
        shifts = itertools.product((0, -1, 1), (0, -1, 1) if self.minima else (0,))
        candidates = [(scales + i, minima + j) for i, j in shifts]
        for s, m in [*candidates, (0 * scales, 0 * minima)]:
            s, m = s.clip(*self._ends), m.clip(*self._ends)
            a, b = _product(d, s), _product(e, m)
            loss = np.sum((groups - a[..., None] * self._codes(groups, a, b) + b[..., None]) ** 2, axis=-1)
            best = tuple(np.where(loss < least, new, old) for new, old in zip((s, m), best, strict=True))
            least = np.minimum(loss, least)
        scales, minima = best
        codes = self._codes(groups, _product(d, scales), _product(e, minima))
        codes, scales, minima = (x.astype(np.int8) for x in (codes.reshape(blocks.shape), scales, minima))
        return Superblocks(codes, scales, minima, d, e)

    def dequantize(self, q: Superblocks) -> Float64[np.ndarray, "*batch cols"]:
        groups = q.codes.astype(np.float64).reshape(*q.scales.shape, -1)
        weights = _product(q.d, q.scales)[..., None] * groups - _product(q.e, q.minima)[..., None]
        return in_rows(weights.reshape(q.codes.shape))

    def _fit(
        self, groups: Float64[np.ndarray, "*batch group"]
    ) -> tuple[Float64[np.ndarray, "*batch"], Float64[np.ndarray, "*batch"]]:
        """Return the step a and the minimum b of each group, from the guess with the smallest sum of squares."""
        least = np.full(groups.shape[:-1], np.inf)
        step, floor = np.zeros_like(least), np.zeros_like(least)
        for stretch in STARTS:
            a, b = self._fit_shifted(groups, stretch) if self.minima else self._fit_signed(groups, stretch)
            loss = np.sum((groups - a[..., None] * self._codes(groups, a, b) + b[..., None]) ** 2, axis=-1)
            better = loss < least
            least, step, floor = np.where(better, loss, least), np.where(better, a, step), np.where(better, b, floor)
        return step, floor

    def _fit_signed(
        self, groups: Float64[np.ndarray, "*batch group"], stretch: float
    ) -> tuple[Float64[np.ndarray, "*batch"], Float64[np.ndarray, "*batch"]]:
        """Fit signed codes: guess a step, round w to codes q, and return a = sum w q / sum q^2 and b = 0.

        The guess maps the weight of largest magnitude to the first code minus `stretch`.
        """
        at = np.argmax(np.abs(groups), axis=-1, keepdims=True)
        guess = np.take_along_axis(groups, at, axis=-1) / (self.lowest - stretch)
        q = np.rint(groups / np.where(guess == 0, np.inf, guess)).clip(self.lowest, self.highest)
        qq = np.sum(q * q, axis=-1)
        a = np.sum(groups * q, axis=-1) / np.where(qq == 0, np.inf, qq)
        return a, np.zeros_like(a)

    def _fit_shifted(
        self, groups: Float64[np.ndarray, "*batch group"], stretch: float
    ) -> tuple[Float64[np.ndarray, "*batch"], Float64[np.ndarray, "*batch"]]:
        """Fit codes that count from the smallest weight, or from 0 if that is smaller. Return a and b >= 0.

        The first guess maps the largest weight to the last code plus `stretch`; a and b are the line through (q, w).
        """
        lo = np.minimum(np.min(groups, axis=-1, keepdims=True), 0)
        guess = (np.max(groups, axis=-1, keepdims=True) - lo) / (self.highest + stretch)
        q = np.rint((groups - lo) / np.where(guess == 0, np.inf, guess)).clip(0, self.highest)
        q_mean, w_mean = np.mean(q, axis=-1, keepdims=True), np.mean(groups, axis=-1, keepdims=True)
        spread = np.sum((q - q_mean) ** 2, axis=-1)
        line = np.sum((q - q_mean) * (groups - w_mean), axis=-1) / np.where(spread == 0, np.inf, spread)
        b = line * q_mean[..., 0] - w_mean[..., 0]
        qq = np.sum(q * q, axis=-1)
        through_zero = np.sum(groups * q, axis=-1) / np.where(qq == 0, np.inf, qq)
        return np.where(b < 0, through_zero, line), np.maximum(b, 0)

    def _in_units(
        self, x: Float64[np.ndarray, "*batch groups"]
    ) -> tuple[Float16[np.ndarray, "*batch"], Float64[np.ndarray, "*batch groups"]]:
        """Return a float16 unit, the largest of x divided by `largest`, and x in multiples of the unit."""
        at = np.argmax(np.abs(x), axis=-1, keepdims=True)
        unit = in_float16((np.take_along_axis(x, at, axis=-1) / self.largest).astype(np.float32))
        multiples = np.rint(x / np.where(unit == 0, np.inf, unit.astype(np.float64)))
        return unit[..., 0], multiples.clip(*self._ends)

    @property
    def _ends(self) -> tuple[int, int]:
        """Return the smallest and the largest code of s and m."""
        return (0, self.largest) if self.minima else (self.largest, -self.largest - 1)

    def _codes(
        self,
        groups: Float64[np.ndarray, "*batch group"],
        a: Float64[np.ndarray, "*batch"],
        b: Float64[np.ndarray, "*batch"],
    ) -> Float64[np.ndarray, "*batch group"]:
        """Return the codes nearest to (w + b) / a for the weights w in `groups`; 0 if a is 0."""
        codes = np.rint((groups + b[..., None]) / np.where(a == 0, np.inf, a)[..., None])
        return codes.clip(self.lowest, self.highest)


class Q2(Superblock):
    """Q2_K: codes of 2 bits in 16 groups of 16 weights, with s and m of 4 bits.

    >>> q = Q2_K.quantize(np.tile([[-32.0, -16.0, 0.0, 31.0]], 64))
    >>> q.codes[0, 0, :4], q.scales[0, 0, 0], q.minima[0, 0, 0]
    (array([0, 1, 2, 3], dtype=int8), np.int8(15), np.int8(15))
    >>> Q2_K.dequantize(q)[0, :4].round(1)
    array([-35. , -14.5,   6. ,  26.5])
    """

    def pack(self, q: Superblocks) -> UInt8[np.ndarray, "*batch superblocks bytes"]:
        """Pack s and m of each group in one byte, then the codes, then d and e."""
        scales = (q.scales | q.minima << 4).astype(np.uint8)
        return np.concatenate([scales, packing.pack(q.codes, bits=2, stride=32), bytes_of(q.d), bytes_of(q.e)], axis=-1)

    def unpack(self, packed: UInt8[np.ndarray, "*batch superblocks bytes"]) -> Superblocks:
        scales, codes, _ = np.split(packed, [16, 80], axis=-1)
        return Superblocks(
            packing.unpack(codes, bits=2, stride=32).astype(np.int8),
            (scales & np.uint8(15)).astype(np.int8),
            (scales >> 4).astype(np.int8),
            float16_at(packed, 80),
            float16_at(packed, 82),
        )


class Q3(Superblock):
    """Q3_K: signed codes of 3 bits in 16 groups of 16 weights, with s of 6 bits.

    >>> q = Q3_K.quantize(np.tile([[-32.0, -16.0, 0.0, 31.0]], 64))
    >>> q.codes[0, 0, :4], q.scales[0, 0, 0], q.d
    (array([-3, -2,  0,  3], dtype=int8), np.int8(-32), array([[-0.314]], dtype=float16))
    >>> Q3_K.dequantize(q)[0, :4].round(1)
    array([-30.1, -20.1,   0. ,  30.1])
    """

    def pack(self, q: Superblocks) -> UInt8[np.ndarray, "*batch superblocks bytes"]:
        """Pack the third bits of the codes, their low two bits, the low four and upper two bits of s + 32, and d."""
        codes, scales = (q.codes + 4).astype(np.uint8), (q.scales + 32).astype(np.uint8)
        return np.concatenate(
            [
                packing.pack(codes >> 2, bits=1, stride=32),
                packing.pack(codes & np.uint8(3), bits=2, stride=32),
                packing.pack(scales & np.uint8(15), bits=4, stride=8),
                packing.pack(scales >> 4, bits=2, stride=4),
                bytes_of(q.d),
            ],
            axis=-1,
        )

    def unpack(self, packed: UInt8[np.ndarray, "*batch superblocks bytes"]) -> Superblocks:
        high, low, low_scales, high_scales, _ = np.split(packed, [32, 96, 104, 108], axis=-1)
        codes = packing.unpack(low, bits=2, stride=32) | packing.unpack(high, bits=1, stride=32) << 2
        scales = packing.unpack(low_scales, bits=4, stride=8) | packing.unpack(high_scales, bits=2, stride=4) << 4
        return _without_minima(codes.astype(np.int8) - np.int8(4), scales.astype(np.int8) - np.int8(32), packed, 108)


class Q4(Superblock):
    """Q4_K: codes of 4 bits in 8 groups of 32 weights, with s and m of 6 bits.

    >>> q = Q4_K.quantize(np.tile([[-32.0, -16.0, 0.0, 31.0]], 64))
    >>> q.codes[0, 0, :4], q.scales[0, 0, 0], q.minima[0, 0, 0]
    (array([ 0,  4,  8, 15], dtype=int8), np.int8(63), np.int8(63))
    >>> Q4_K.dequantize(q)[0, :4].round(1)
    array([-32.6, -15.8,   1. ,  30.4])
    """

    def pack(self, q: Superblocks) -> UInt8[np.ndarray, "*batch superblocks bytes"]:
        """Pack d and e, then s and m in 6 bits each, then the codes."""
        head = [bytes_of(q.d), bytes_of(q.e), _six_bits(q.scales, q.minima)]
        return np.concatenate([*head, packing.pack(q.codes, bits=4, stride=32)], axis=-1)

    def unpack(self, packed: UInt8[np.ndarray, "*batch superblocks bytes"]) -> Superblocks:
        _, scales, codes = np.split(packed, [4, 16], axis=-1)
        codes = packing.unpack(codes, bits=4, stride=32).astype(np.int8)
        return Superblocks(codes, *_from_six_bits(scales), float16_at(packed, 0), float16_at(packed, 2))


class Q5(Superblock):
    """Q5_K: codes of 5 bits in 8 groups of 32 weights, with s and m of 6 bits.

    >>> q = Q5_K.quantize(np.tile([[-32.0, -16.0, 0.0, 31.0]], 64))
    >>> q.codes[0, 0, :4], q.scales[0, 0, 0], q.minima[0, 0, 0]
    (array([ 0,  8, 16, 31], dtype=int8), np.int8(63), np.int8(63))
    >>> Q5_K.dequantize(q)[0, :4].round(1)
    array([-32.2, -15.9,   0.3,  30.8])
    """

    def pack(self, q: Superblocks) -> UInt8[np.ndarray, "*batch superblocks bytes"]:
        """Pack d and e, then s and m in 6 bits each, then the fifth bits of the codes, then their low four bits."""
        head = [bytes_of(q.d), bytes_of(q.e), _six_bits(q.scales, q.minima)]
        codes = [packing.pack(q.codes >> 4, bits=1, stride=32), packing.pack(q.codes & 15, bits=4, stride=32)]
        return np.concatenate([*head, *codes], axis=-1)

    def unpack(self, packed: UInt8[np.ndarray, "*batch superblocks bytes"]) -> Superblocks:
        _, scales, high, low = np.split(packed, [4, 16, 48], axis=-1)
        codes = packing.unpack(low, bits=4, stride=32) | packing.unpack(high, bits=1, stride=32) << 4
        codes = codes.astype(np.int8)
        return Superblocks(codes, *_from_six_bits(scales), float16_at(packed, 0), float16_at(packed, 2))


class Q6(Superblock):
    """Q6_K: signed codes of 6 bits in 16 groups of 16 weights, with s of 8 bits.

    >>> q = Q6_K.quantize(np.tile([[-32.0, -16.0, 0.0, 31.0]], 64))
    >>> q.codes[0, 0, :4], q.scales[0, 0, 0], q.d
    (array([-32, -16,   0,  31], dtype=int8), np.int8(-128), array([[-0.007812]], dtype=float16))
    >>> Q6_K.dequantize(q)[0, :4].round(1)
    array([-32., -16.,   0.,  31.])
    """

    def pack(self, q: Superblocks) -> UInt8[np.ndarray, "*batch superblocks bytes"]:
        """Pack the low four bits of the codes, then their upper two bits, then s, then d."""
        codes = (q.codes + 32).astype(np.uint8)
        low, high = packing.pack(codes & np.uint8(15), bits=4, stride=64), packing.pack(codes >> 4, bits=2, stride=32)
        return np.concatenate([low, high, q.scales.view(np.uint8), bytes_of(q.d)], axis=-1)

    def unpack(self, packed: UInt8[np.ndarray, "*batch superblocks bytes"]) -> Superblocks:
        low, high, scales, _ = np.split(packed, [128, 192, 208], axis=-1)
        codes = packing.unpack(low, bits=4, stride=64) | packing.unpack(high, bits=2, stride=32) << 4
        return _without_minima(codes.astype(np.int8) - np.int8(32), scales.view(np.int8), packed, 208)


def _without_minima(
    codes: Int8[np.ndarray, "*batch 256"],
    scales: Int8[np.ndarray, "*batch groups"],
    packed: UInt8[np.ndarray, "*batch bytes"],
    at: int,
) -> Superblocks:
    d = float16_at(packed, at)
    return Superblocks(codes, scales, np.zeros_like(scales), d, np.zeros_like(d))


def _six_bits(
    scales: Int8[np.ndarray, "*batch 8"], minima: Int8[np.ndarray, "*batch 8"]
) -> UInt8[np.ndarray, "*batch 12"]:
    """Pack 16 numbers of 6 bits. The upper bits of the last four groups share bytes with the first four."""
    s, m = scales.astype(np.uint8), minima.astype(np.uint8)
    first = [x[..., :4] | x[..., 4:] >> 4 << 6 for x in (s, m)]
    return np.concatenate([*first, s[..., 4:] & np.uint8(15) | m[..., 4:] << 4], axis=-1)


def _from_six_bits(
    packed: UInt8[np.ndarray, "*batch 12"],
) -> tuple[Int8[np.ndarray, "*batch 8"], Int8[np.ndarray, "*batch 8"]]:
    s, m, low = np.split(packed, 3, axis=-1)
    scales = np.concatenate([s & np.uint8(63), low & np.uint8(15) | s >> 6 << 4], axis=-1)
    minima = np.concatenate([m & np.uint8(63), low >> 4 | m >> 6 << 4], axis=-1)
    return scales.astype(np.int8), minima.astype(np.int8)


def _product(
    unit: Float16[np.ndarray, "*batch"], multiples: Shaped[np.ndarray, "*batch groups"]
) -> Float64[np.ndarray, "*batch groups"]:
    return unit.astype(np.float64)[..., None] * multiples


Q2_K = Q2(bits=2, group=16, bytes=84, largest=15)
Q3_K = Q3(bits=3, group=16, bytes=110, largest=-32)
Q4_K = Q4(bits=4, group=32, bytes=144, largest=63)
Q5_K = Q5(bits=5, group=32, bytes=176, largest=63)
Q6_K = Q6(bits=6, group=16, bytes=210, largest=-128)
