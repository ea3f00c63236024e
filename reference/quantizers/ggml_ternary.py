r"""ggml's ternary blocks: TQ1_0 and TQ2_0, for models that were trained to be ternary (see `bitnet`).

256 weights of a row share a float16 scale. Both types store the same numbers:

    d = max |w|        t = round(w / d)  in {-1, 0, 1}        w ~ d t

in float32, as in ggml: w fl(1 / d), with ties away from zero, so half of d becomes d.

Guaranteed, with the stored scale d':  |w - d' t| <= (1/2 + 2^-20) d + |t| |d' - d| + 2^-120. t is within 1/2 of w / d
(2^-20 covers float32 rounding, 2^-120 an overflow of 1 / d), and d t becomes d' t. Quantized weights are a fixed
point: their largest magnitude is d', which is exact in float16. Q(-w) = -Q(w), and multiplying w by a power of two
multiplies only d', while d' is normal.

TQ2_0 uses 2 bits per weight. TQ1_0 packs five trits into a byte, because 3^5 = 243 < 256: the byte is their number
in base 3 as a fraction of 243, rounded up to 256ths. After multiplying the fraction by 3, its integer part is the
first trit, and the fractional part gives the next ones. So reading needs no division.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float16, Float64, Int8, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import in_float16
from llamaspec.reference.quantizers.ggml_blocks import (
    bytes_of,
    float16_at,
    in_blocks,
    in_rows,
    round_away,
    times_reciprocal,
)

BLOCK = 256
RUNS = (160, 80, 16)  # weights of TQ1_0 with interleaved trits: 5 per byte in 32 and in 16 bytes, 4 per byte in 4
BYTES = (32, 16, 4)  # their number in bytes


class Trits(NamedTuple):
    """Quantized weights: codes -1, 0 and 1, and a float16 scale for each block."""

    codes: Int8[np.ndarray, "*batch blocks 256"]
    scales: Float16[np.ndarray, "*batch blocks"]


def quantize(w: Float[np.ndarray, "*batch cols"]) -> Trits:
    """Quantize weights. Raises ValueError for incomplete blocks, and for weights that are not finite or exceed 65504.

    >>> quantize(np.repeat([[1.0, -2.0, 0.5, 0.0]], 64, axis=1)).codes[0, 0, [0, 64, 128, 192]]
    array([ 1, -1,  0,  0], dtype=int8)
    """
    blocks = in_blocks(w, BLOCK)
    d = np.max(np.abs(blocks), axis=-1)
    return Trits(round_away(times_reciprocal(blocks, d)).astype(np.int8), in_float16(d))


def dequantize(q: Trits) -> Float64[np.ndarray, "*batch cols"]:
    return in_rows(q.codes * q.scales.astype(np.float64)[..., None])


@dataclass(frozen=True)
class TwoBits:
    """TQ2_0: a byte holds t + 1 of four weights, 32 apart, in two bits each. d follows the bytes of a block.

    >>> q = TQ2_0.unpack(TQ2_0.pack(quantize(np.eye(1, 256))))
    >>> TQ2_0.dequantize(q)[0, :2]
    array([1., 0.])
    """

    weights = BLOCK
    bytes = 66

    quantize = staticmethod(quantize)
    dequantize = staticmethod(dequantize)

    def pack(self, q: Trits) -> UInt8[np.ndarray, "*batch blocks bytes"]:
        return np.concatenate([packing.pack(q.codes + 1, bits=2, stride=32), bytes_of(q.scales)], axis=-1)

    def unpack(self, packed: UInt8[np.ndarray, "*batch blocks bytes"]) -> Trits:
        """Restore codes and scales. The bits 11, which `pack` never writes, give the code 2."""
        codes = packing.unpack(packed[..., :64], bits=2, stride=32).astype(np.int8) - np.int8(1)
        return Trits(codes, float16_at(packed, 64))


@dataclass(frozen=True)
class BaseThree:
    """TQ1_0: t + 1 as digits in base 3, then d. A run of 5 n weights fills n bytes: a byte has five weights, n apart.

    >>> q = TQ1_0.unpack(TQ1_0.pack(quantize(np.eye(1, 256))))
    >>> TQ1_0.dequantize(q)[0, :2]
    array([1., 0.])
    """

    weights = BLOCK
    bytes = 54

    quantize = staticmethod(quantize)
    dequantize = staticmethod(dequantize)

    def pack(self, q: Trits) -> UInt8[np.ndarray, "*batch blocks bytes"]:
        runs = np.split((q.codes + 1).astype(np.uint16), np.cumsum(RUNS)[:-1], axis=-1)
        packed = []
        for run, n in zip(runs, BYTES, strict=True):
            digits = run.reshape(*run.shape[:-1], -1, n)  # [*batch, blocks, 5 or 4, n]
            powers = 3 ** np.arange(4, 4 - digits.shape[-2], -1, dtype=np.uint16)
            numbers = np.sum(digits * powers[:, None], axis=-2, dtype=np.uint16)
            packed.append(((numbers * 256 + 242) // 243).astype(np.uint8))
        return np.concatenate([*packed, bytes_of(q.scales)], axis=-1)

    def unpack(self, packed: UInt8[np.ndarray, "*batch blocks bytes"]) -> Trits:
        """Restore codes and scales. No byte is invalid: each one is a fraction that gives five digits."""
        runs = np.split(packed, np.cumsum(BYTES), axis=-1)[:-1]
        codes = []
        for run, n, weights in zip(runs, BYTES, RUNS, strict=True):
            powers = 3 ** np.arange(weights // n, dtype=np.uint8)
            fractions = run[..., None, :] * powers[:, None]  # modulo 256, without the integer parts
            digits = fractions.astype(np.uint16) * 3 >> 8
            codes.append(digits.reshape(*run.shape[:-1], weights).astype(np.int8) - np.int8(1))
        return Trits(np.concatenate(codes, axis=-1), float16_at(packed, 52))


TQ1_0 = BaseThree()
TQ2_0 = TwoBits()
