r"""Affine integers: evenly spaced numbers from the smallest weight of a block to the largest.

    N = 2^bits - 1        lo = min(0, min_i w_i)        hi = max(0, max_i w_i)
    s = (hi - lo) / N     z = rint(-lo / s)             q_i = clip(rint(w_i / s) + z, 0, N)      w_i ~ s (q_i - z)

(Jacob et al., 2018, https://arxiv.org/abs/1712.05877; "asymmetric".) The range is extended to include zero,
and the zero point z is an integer, so zero is exact. s is stored in float32, and z and the codes are computed
from the stored s. ONNX's QuantizeLinear and DynamicQuantizeLinear do the same, including ties to even. AWQ and
GPTQ store such numbers.

Guaranteed, for weights of float32 or narrower:  |w - s (q - z)| <= s / 2 + N (2 u s + 2^-150),  u = 2^-24

If no code is clipped, the error is at most half a step. The zero point is rounded as well, so the grid may end up to
half a step short of the largest weight, which is then clipped: again at most half a step. N u s accounts for the
rounding of s, and 2^-150 for a denormal s. If s underflows to 0, all numbers are 0. As in `symmetric`, a float32
quotient gives the same code unless w / s is within u |w / s| of a tie.

While s is normal, multiplying w by a power of two multiplies only s. Quantized weights are a fixed point and Q(-w) =
-Q(w), unless lo / s is within 4 N u of a tie; then rint may leave the last or the first code unused. More bits are
never worse on average, in the sense of `symmetric` and except for the weights at both ends: each weight moves to the
nearest multiple of s, for every z.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, Integer, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import finite, join, split, spread


class Affine(NamedTuple):
    """Codes with the shape of w, and one scale and zero point per block."""

    codes: UInt8[np.ndarray, "*shape"]
    scales: Float32[np.ndarray, "*grid"]
    zeros: UInt8[np.ndarray, "*grid"]


def quantize(w: Float[np.ndarray, "*shape"], *, bits: int, block: tuple[int, ...]) -> Affine:
    """Quantize to uint8 codes and zero points and float32 scales, one per `block` (see `blocks`).

    Raises ValueError for weights that are not finite, a block that does not divide the shape, or bits outside
    2 to 8.

    >>> q = quantize(np.array([[-1.0, 0.0, 0.5, 2.0]]), bits=2, block=(1, 4))
    >>> q.codes, q.scales, q.zeros
    (array([[0, 1, 1, 3]], dtype=uint8), array([[1.]], dtype=float32), array([[1]], dtype=uint8))
    >>> dequantize(q)
    array([[-1.,  0.,  0.,  2.]])
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"affine codes have 2 to 8 bits, got {bits}")
    highest = 2**bits - 1
    blocks = split(finite(w), block)
    lo = np.minimum(np.min(blocks, axis=-1), 0)
    hi = np.maximum(np.max(blocks, axis=-1), 0)
    scales = ((hi - lo) / highest).astype(np.float32)
    zeros = encode(-lo, scales, np.zeros_like(lo), lowest=0, highest=highest)
    codes = encode(blocks, scales[..., None], zeros[..., None], lowest=0, highest=highest)
    return Affine(join(codes, block).astype(np.uint8), scales, zeros.astype(np.uint8))


def dequantize(q: Affine) -> Float64[np.ndarray, "*shape"]:
    """Return s (q - z), which float64 holds exactly."""
    zeros, scales = (spread(a.astype(np.float64), q.codes.shape) for a in (q.zeros, q.scales))
    return (q.codes - zeros) * scales


def encode(
    w: Float64[np.ndarray, "*shape"],
    scales: Float[np.ndarray, "*#shape"],
    zeros: Float[np.ndarray, "*#shape"],
    *,
    lowest: int,
    highest: int,
) -> Float64[np.ndarray, "*shape"]:
    """Compute the codes of `w` on a fixed grid: clip(rint(w / s) + z, lowest, highest). A scale of 0 gives z.

    >>> encode(np.array([0.5, 1.5, 9.0]), np.array([1.0]), np.array([1.0]), lowest=0, highest=3)
    array([1., 3., 3.])
    """
    divisors = np.where(scales == 0, np.inf, scales.astype(np.float64))
    return np.clip(np.rint(w / divisors) + zeros, lowest, highest)


def pack(codes: Integer[np.ndarray, "*batch codes"], *, bits: int) -> UInt8[np.ndarray, "*batch bytes"]:
    """Pack `bits` bits of every code, the first code in the lowest bits."""
    return packing.pack(codes, bits=bits)


def unpack(packed: UInt8[np.ndarray, "*batch bytes"], *, bits: int) -> UInt8[np.ndarray, "*batch codes"]:
    """Restore the codes from `pack`.

    >>> unpack(pack(np.array([15, 1], np.uint8), bits=4), bits=4)
    array([15,  1], dtype=uint8)
    """
    return packing.unpack(packed, bits=bits)
