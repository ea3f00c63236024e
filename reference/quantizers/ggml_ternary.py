r"""ggml's ternary blocks: TQ1_0 and TQ2_0, for models that were trained to be ternary (see `bitnet`).

256 weights of a row share a float16 scale. Both types store the same numbers:

    d = max |w|        t = round(w / d)  in {-1, 0, 1}        w ~ d t

As in ggml, we compute in float32: w / d is w fl(1 / d), and `round` rounds ties away from zero, so d / 2 becomes d.

Guaranteed, where d' is d after rounding to float16: |w - d' t| <= (1/2 + 2^-20) d + |t| |d' - d| + 2^-120. Reasons: t
is within 1/2 of w / d. 2^-20 is for float32 rounding, and 2^-120 for an overflow of 1 / d. Reading gives d' t in place
of d t.

Q(w) = d' t are the dequantized weights. Fixed point: Q(Q(w)) = Q(w), because the largest magnitude of Q(w) is d', which
is exact in float16. Sign: Q(-w) = -Q(w). Powers of two: the weights 2^k w have the same codes as w, and the scale 2^k
d', while both scales are normal.

TQ2_0 uses 2 bits per weight. TQ1_0 packs five codes into a byte: the numbers t + 1 are the digits of a number n to the
base 3, and n < 3^5 = 243. The byte is 256 n / 243, rounded up. So byte / 256 is a fraction near n / 243. The fraction
times 3 has the first digit as its integer part, and its fractional part gives the next digits in the same way. So
reading needs no division.
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
    """TQ2_0: a byte stores code + 1 of four weights, in two bits each. The indices of these weights differ by 32.

    The scale d comes after the codes of a block.

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
    """TQ1_0: the numbers code + 1, stored as digits to the base 3, and then the scale d.

    5 n consecutive weights fill n bytes. A byte has five weights, and their indices differ by n.

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
        """Restore codes and scales. No byte is invalid: every byte is a fraction that gives five digits."""
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
