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
how to choose the numbers. `quantize` chooses them as ggml does (ggml/src/ggml-quants.c), bit for bit:

1. A search of `ggml_search` finds a step a and a minimum b >= 0 for each group (b = 0 in Q3_K and Q6_K). Errors of
   large weights count more: in Q3_K and Q6_K, c is w^2; in Q4_K and Q5_K, it is |w| plus the root mean square of the
   group; Q2_K takes |error| instead of the square, and c = |w|.
2. d is the a of largest magnitude divided by the largest s, and e the largest b divided by the largest m. s and m are
   the integers nearest to a / d and b / e. Then d and e are rounded to float16.
3. q is the integer nearest to (w + e m) / (d s), in float32. If d s is 0, q remains the code that the search found.

With an importance of each column (see `quantize`), c is importance sqrt(v + w^2), where v is twice the mean square of
the superblock (in Q2_K, the mean square itself). In Q6_K, c is the importance. In the other types, a second search
finds d and s for the steps a, and e and m for the minima b; the c of a step is the sum over its group.

Guaranteed: if d s is not 0, a code is the one nearest to w for the stored scales, up to float32 rounding. So a weight
within the range of the codes moves by little more than |d s| / 2, and a weight outside the range moves to its end.
`quantize` refuses a superblock if d or e is too large for float16.

Powers of two: the weights 2^k w have the same codes, s and m as w, with 2^k d and 2^k e, while all of these are normal
and no sum of a search overflows. Sign: Q(-w) = -Q(w) in Q6_K, where Q(w) are the dequantized weights, because -w has
the scale -d. The other types do not have this law: the search of Q3_K improves only groups with a negative w*, and m is
never negative. Dequantized weights are not a fixed point, because a second search may find a different step.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float16, Float32, Float64, Int8, Int32, Shaped, UInt8

from llamaspec.reference.quantizers import ggml_search, packing
from llamaspec.reference.quantizers.blocks import in_float16
from llamaspec.reference.quantizers.ggml_blocks import bytes_of, float16_at, in_blocks, in_rows

BLOCK = 256
AT_ONCE = 256  # superblocks that `quantize` searches at once: these arrays fit into the cache of a processor's core


class Superblocks(NamedTuple):
    """Quantized weights: q per weight, s and m per group, d and e per superblock. Unused m and e are 0."""

    codes: Int8[np.ndarray, "*batch superblocks 256"]
    scales: Int8[np.ndarray, "*batch superblocks groups"]
    minima: Int8[np.ndarray, "*batch superblocks groups"]
    d: Float16[np.ndarray, "*batch superblocks"]
    e: Float16[np.ndarray, "*batch superblocks"]


@dataclass(frozen=True)
class Superblock:
    """The common part of the five types: everything except the search for steps and the layout in bytes."""

    bits: int
    group: int
    bytes: int
    largest: int  # the code of the largest scale: 15 or 63; -32 or -128 in types without minima

    weights = BLOCK
    unused = 0  # s of all groups if d is 0

    @property
    def minima(self) -> bool:
        return self.largest > 0

    @property
    def lowest(self) -> int:
        """Return the smallest code. A packed code is the difference from this code."""
        return 0 if self.minima else -(1 << self.bits - 1)

    @property
    def highest(self) -> int:
        return self.lowest + (1 << self.bits) - 1

    def quantize(
        self, w: Float[np.ndarray, "*batch cols"], importance: Float[np.ndarray, " cols"] | None = None
    ) -> Superblocks:
        """Quantize weights.

        `importance` says how much an error in a column counts. llama.cpp's importance matrix has the mean square of the
        numbers that multiply the column. Raises ValueError for rows that are not complete superblocks, and for weights
        that are not finite or too large.
        """
        blocks = in_blocks(w, BLOCK)
        in_float16(np.max(np.abs(blocks), axis=-1) / np.float32(2 * (1 << self.bits) * self.largest))
        rows = blocks.reshape(-1, BLOCK)
        of_columns = None if importance is None else importance.astype(np.float32).reshape(-1, BLOCK)
        parts: list[Superblocks] = []
        with np.errstate(all="ignore"):  # sums of weights above about 10^5 overflow, as in ggml
            for start in range(0, len(rows), AT_ONCE):
                part, c = rows[start : start + AT_ONCE], None
                if of_columns is not None:
                    c = self._importances(part, of_columns[np.arange(start, start + len(part)) % len(of_columns)])
                parts.append(self._quantize_part(part, c))
        arrays = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        return Superblocks(*(array.reshape(*blocks.shape[:-1], *array.shape[1:]) for array in arrays))

    def _quantize_part(
        self, blocks: Float32[np.ndarray, "superblocks 256"], c: Float32[np.ndarray, "members groups"] | None
    ) -> Superblocks:
        w = self._columns(blocks)
        fit = self._search(w, c)
        d, scales = self._in_units(fit.step, c)
        e, minima = self._in_units(fit.minimum, c) if self.minima else (np.zeros_like(d), np.zeros_like(scales))
        step, floor = (
            unit.astype(np.float32)[:, None] * x.astype(np.float32) for unit, x in ((d, scales), (e, minima))
        )
        step, floor = step.reshape(-1), floor.reshape(-1)
        codes = ggml_search.nearest((w + floor) / np.where(step == 0, 1, step)).clip(self.lowest, self.highest)
        codes = np.where(step == 0, fit.codes, codes).T.reshape(blocks.shape)
        codes, scales, minima = (array.astype(np.int8) for array in (codes, scales, minima))
        return Superblocks(codes, scales, minima, d, e)

    def dequantize(self, q: Superblocks) -> Float64[np.ndarray, "*batch cols"]:
        groups = q.codes.astype(np.float64).reshape(*q.scales.shape, -1)
        weights = _product(q.d, q.scales)[..., None] * groups - _product(q.e, q.minima)[..., None]
        return in_rows(weights.reshape(q.codes.shape))

    def _columns(self, blocks: Float32[np.ndarray, "superblocks 256"]) -> Float32[np.ndarray, "members groups"]:
        """Return the groups as columns, in the order of their superblocks."""
        return np.ascontiguousarray(blocks.reshape(-1, self.group).T)

    def _importances(
        self, blocks: Float32[np.ndarray, "superblocks 256"], of_columns: Float32[np.ndarray, "superblocks 256"]
    ) -> Float32[np.ndarray, "members groups"]:
        """Return how much the squared error of each weight counts, from the importances of the columns."""
        count = BLOCK if self.bits == 2 else BLOCK // 2
        return self._columns(ggml_search.importances(blocks, of_columns, count=count))

    def _search(
        self, w: Float32[np.ndarray, "members groups"], c: Float32[np.ndarray, "members groups"] | None
    ) -> ggml_search.Fit:
        """Find the steps and minima of the groups. `c` says how much the squared error of a weight counts.

        If `c` is None, the type uses its own rule.
        """
        raise NotImplementedError

    def _in_units(
        self, x: Float32[np.ndarray, " groups"], c: Float32[np.ndarray, "members groups"] | None
    ) -> tuple[Float16[np.ndarray, " superblocks"], Int32[np.ndarray, "superblocks own_groups"]]:
        """Return a float16 unit for each superblock, and x in multiples of the unit."""
        of_block = x.reshape(-1, BLOCK // self.group).T
        if c is not None:
            counts = ggml_search.total(c).reshape(-1, BLOCK // self.group).T
            if self.minima:
                fit = ggml_search.positive(of_block, counts, most=self.largest)
            else:
                fit = ggml_search.signed(of_block, counts, most=-self.largest)
            return in_float16(fit.step), fit.codes.T
        top = ggml_search.largest(of_block)
        inverse = np.float32(self.largest) / np.where(top == 0, 1, top)
        unit = top / np.float32(self.largest) if self.minima else 1 / inverse
        multiples = ggml_search.nearest(inverse * of_block).clip(*self._ends)
        return in_float16(np.where(top == 0, 0, unit)), np.where(top == 0, self.unused, multiples).T

    @property
    def _ends(self) -> tuple[int, int]:
        """Return the smallest and the largest code of s and m."""
        return (0, self.largest) if self.minima else (self.largest, -self.largest - 1)


@dataclass(frozen=True)
class WithMinima(Superblock):
    """The common part of Q2_K, Q4_K and Q5_K."""

    starts: tuple[float, float, int]  # of `evenly`: how far the tries of the search extend the range of the codes

    def _search(
        self, w: Float32[np.ndarray, "members groups"], c: Float32[np.ndarray, "members groups"] | None
    ) -> ggml_search.Fit:
        if c is not None:
            return ggml_search.shifted(w, c, most=self.highest, starts=ggml_search.STARTS)
        c = np.abs(w)
        if self.bits > 2:
            c = np.sqrt(ggml_search.total(w * w) / np.float32(self.group)) + c
        starts = ggml_search.evenly(*self.starts)
        return ggml_search.shifted(w, c, most=self.highest, starts=starts, absolute=self.bits == 2)


class Q2(WithMinima):
    """Q2_K: codes of 2 bits in 16 groups of 16 weights, with s and m of 4 bits.

    >>> q = Q2_K.quantize(np.tile([[-32.0, -16.0, 0.0, 31.0]], 64))
    >>> q.codes[0, 0, :4], q.scales[0, 0, 0], q.minima[0, 0, 0]
    (array([0, 1, 2, 3], dtype=int8), np.int8(15), np.int8(15))
    >>> Q2_K.dequantize(q)[0, :4].round(1)
    array([-32., -11.,  10.,  31.])
    """

    def pack(self, q: Superblocks) -> UInt8[np.ndarray, "*batch superblocks bytes"]:
        """Pack the integers s and m of each group in one byte, then the codes, then the superblock's d and e."""
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
    (array([-4, -2,  0,  3], dtype=int8), np.int8(-32), array([[-0.2742]], dtype=float16))
    >>> Q3_K.dequantize(q)[0, :4].round(1)
    array([-35.1, -17.5,   0. ,  26.3])
    """

    unused = -32

    def _search(
        self, w: Float32[np.ndarray, "members groups"], c: Float32[np.ndarray, "members groups"] | None
    ) -> ggml_search.Fit:
        if c is None:
            return ggml_search.descended(w, most=-self.lowest)
        return ggml_search.signed(w, c, most=-self.lowest)

    def pack(self, q: Superblocks) -> UInt8[np.ndarray, "*batch superblocks bytes"]:
        """Pack the third bits of the codes, their low bits, the low four and upper two bits of each s + 32, and d."""
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


class Q4(WithMinima):
    """Q4_K: codes of 4 bits in 8 groups of 32 weights, with s and m of 6 bits.

    >>> q = Q4_K.quantize(np.tile([[-32.0, -16.0, 0.0, 31.0]], 64))
    >>> q.codes[0, 0, :4], q.scales[0, 0, 0], q.minima[0, 0, 0]
    (array([ 0,  4,  8, 15], dtype=int8), np.int8(63), np.int8(63))
    >>> Q4_K.dequantize(q)[0, :4].round(1)
    array([-32.5, -15.6,   1.2,  30.6])
    """

    def pack(self, q: Superblocks) -> UInt8[np.ndarray, "*batch superblocks bytes"]:
        """Pack d and e, then s and m of each group in 6 bits each, then the codes."""
        head = [bytes_of(q.d), bytes_of(q.e), _six_bits(q.scales, q.minima)]
        return np.concatenate([*head, packing.pack(q.codes, bits=4, stride=32)], axis=-1)

    def unpack(self, packed: UInt8[np.ndarray, "*batch superblocks bytes"]) -> Superblocks:
        _, scales, codes = np.split(packed, [4, 16], axis=-1)
        codes = packing.unpack(codes, bits=4, stride=32).astype(np.int8)
        return Superblocks(codes, *_from_six_bits(scales), float16_at(packed, 0), float16_at(packed, 2))


class Q5(WithMinima):
    """Q5_K: codes of 5 bits in 8 groups of 32 weights, with s and m of 6 bits.

    >>> q = Q5_K.quantize(np.tile([[-32.0, -16.0, 0.0, 31.0]], 64))
    >>> q.codes[0, 0, :4], q.scales[0, 0, 0], q.minima[0, 0, 0]
    (array([ 0,  8, 16, 31], dtype=int8), np.int8(63), np.int8(63))
    >>> Q5_K.dequantize(q)[0, :4].round(1)
    array([-32.1, -15.9,   0.4,  30.9])
    """

    def pack(self, q: Superblocks) -> UInt8[np.ndarray, "*batch superblocks bytes"]:
        """Pack d and e, then s and m of each group in 6 bits each, then the fifth and the low bits of the codes."""
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

    def _importances(
        self, blocks: Float32[np.ndarray, "superblocks 256"], of_columns: Float32[np.ndarray, "superblocks 256"]
    ) -> Float32[np.ndarray, "members groups"]:
        return self._columns(of_columns)

    def _search(
        self, w: Float32[np.ndarray, "members groups"], c: Float32[np.ndarray, "members groups"] | None
    ) -> ggml_search.Fit:
        """Find the steps as `signed` does. If all steps of a superblock are tiny, treat its weights as zeros."""
        fit = ggml_search.signed(w, w * w if c is None else c, most=-self.lowest)
        steps = np.abs(fit.step).reshape(-1, BLOCK // self.group)
        zero = np.repeat(np.max(steps, axis=-1) < ggml_search.TINY, BLOCK // self.group)
        return fit._replace(step=np.where(zero, 0, fit.step), codes=np.where(zero, self.lowest, fit.codes))

    def _in_units(
        self, x: Float32[np.ndarray, " groups"], c: Float32[np.ndarray, "members groups"] | None
    ) -> tuple[Float16[np.ndarray, " superblocks"], Int32[np.ndarray, "superblocks own_groups"]]:
        return super()._in_units(x, None)

    def pack(self, q: Superblocks) -> UInt8[np.ndarray, "*batch superblocks bytes"]:
        """Pack the low four bits of the codes, then their upper two bits, then s of each group, then d."""
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
    """Pack 16 numbers of 6 bits. The upper bits of the last four groups are in the bytes of the first four groups."""
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


Q2_K = Q2(bits=2, group=16, bytes=84, largest=15, starts=(-0.5, 0.1, 16))
Q3_K = Q3(bits=3, group=16, bytes=110, largest=-32)
Q4_K = Q4(bits=4, group=32, bytes=144, largest=63, starts=(-1.0, 0.1, 21))
Q5_K = Q5(bits=5, group=32, bytes=176, largest=63, starts=(-0.5, 0.1, 16))
Q6_K = Q6(bits=6, group=16, bytes=210, largest=-128)
