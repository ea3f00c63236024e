r"""llama2.c's Q8_0 (https://github.com/karpathy/llama2.c), which is not ggml's.

    s = max |w| / 127        q_i = rint(w_i / s)        w_i ~ s q_i

over groups of consecutive weights of the flattened tensor, as export.py does for files of version 2: all in
float32, the quotient too, so that a code may differ by 1 from `symmetric` where w / s is within 2^-24 |w / s|
of a tie. In the file the codes of a tensor come first, then its scales.

The group is 64, halved until it divides dim: 32 for stories15M, whose dim is 288. hidden_dim ought to
divide, too. runq.c quantizes the vector that a matrix is multiplied with in groups of the same size, and
takes scales as if groups began with each row: with 172 columns in groups of 64 (stories260K), the last 44
numbers of the vector are never quantized, and every row but the first reads scales of its neighbors.
What such a file stands for is well defined nevertheless, and is what `dequantize` gives. `group_size`
lets every width of a row count.

Guaranteed, with u = 2^-24 and for weights of float32:  |w - s q| <= (1/2 + 256 u) s + 64 2^-149. The quotient
may be off by 127 u or so before it is rounded; the last term is for s among the denormals of float32. A group
of zeros, which is 0 / 0 in export.py, has s = 0 and codes 0. While s is normal, powers of two pass into it
and quantized weights are a fixed point; Q(-w) = -Q(w).
"""

import numpy as np
from jaxtyping import Float, Float64, UInt8

from llamaspec.reference.quantizers.blocks import Quantized, finite


def group_size(*widths: int, largest: int = 64) -> int:
    """The largest power of two that divides `widths` all, at most `largest`, itself a power of two.

    >>> group_size(288), group_size(64, 172)
    (32, 4)
    """
    group = largest
    while any(width % group for width in widths):
        group //= 2
    return group


def quantize(w: Float[np.ndarray, "*shape"], *, group: int) -> Quantized:
    """Codes int8 of w's shape and scales float32, one for each `group` of the flattened tensor.

    Raises ValueError for weights that are not finite, or that are no whole groups.

    >>> q = quantize(np.array([[1.0, -0.5], [0.0, 0.0]]), group=2)
    >>> q.codes.tolist(), q.scales.shape
    ([[127, -64], [0, 0]], (2,))
    """
    if group < 1 or w.size % group:
        raise ValueError(f"{w.size} weights are no whole groups of {group}")
    groups = finite(w).astype(np.float32).reshape(-1, group)
    scales = np.max(np.abs(groups), axis=-1) / np.float32(127)
    codes = np.rint(groups / np.where(scales == 0, np.float32(np.inf), scales)[:, None]).clip(-127, 127)
    return Quantized(codes.astype(np.int8).reshape(w.shape), scales)


def dequantize(q: Quantized) -> Float64[np.ndarray, "*shape"]:
    """s q, which float64 holds exactly."""
    groups = q.codes.reshape(q.scales.size, -1) * q.scales.astype(np.float64)[:, None]
    return groups.reshape(q.codes.shape)


def pack(q: Quantized) -> UInt8[np.ndarray, " bytes"]:
    """The codes, then the scales as little-endian float32.

    >>> len(pack(quantize(np.ones((2, 4)), group=4)))
    16
    """
    return np.concatenate([q.codes.reshape(-1).view(np.uint8), q.scales.astype("<f4").view(np.uint8)])


def unpack(packed: UInt8[np.ndarray, " bytes"], *, shape: tuple[int, ...], group: int) -> Quantized:
    """Undo `pack`. Raises ValueError unless the bytes are as many as they should be."""
    size = int(np.prod(shape))
    if len(packed) != size + 4 * (size // group) or size % group:
        raise ValueError(f"{len(packed)} bytes are no tensor of shape {shape} in groups of {group}")
    scales = packed[size:].copy().view("<f4").astype(np.float32)
    return Quantized(packed[:size].view(np.int8).reshape(shape), scales)
