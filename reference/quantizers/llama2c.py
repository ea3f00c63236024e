r"""llama2.c's Q8_0 (https://github.com/karpathy/llama2.c), which differs from ggml's Q8_0.

    s = max |w| / 127        q_i = rint(w_i / s)        w_i ~ s q_i

A group consists of consecutive weights of the flattened tensor, as in export.py for files of version 2. All steps,
including w / s, are computed in float32. So a code may differ by 1 from the code of `symmetric`, if w / s is within
2^-24 |w / s| of a tie. In the file, the codes of a tensor come first, then its scales.

export.py starts with a group size of 64 and halves it until it divides dim. For stories15M, with a dim of 288, it is
32. The size should also divide hidden_dim, but export.py does not check that. In a product, runq.c quantizes the vector
in groups of the same size, and reads scales as if every row of W started with a new group. With 172 columns in groups
of 64 (stories260K), runq.c never quantizes the last 44 numbers of the vector, and uses the scales of other rows for
every row after the first. The weights in such a file are still well defined, and `dequantize` returns them. Our
`group_size` considers the widths of all rows.

Guaranteed, with u = 2^-24 and for weights of float32: |w - s q| <= (1/2 + 256 u) s + 64 2^-149. Reasons: Before it is
rounded to an integer, w / s has an error of about 127 u. The last term is for a denormal s. A group of zeros has s = 0
and codes 0 here. (export.py divides 0 by 0.)

Q(w) = s q are the dequantized weights. Powers of two: the weights 2^k w have the same codes as w, and the scale 2^k s,
while both scales are normal. Fixed point: Q(Q(w)) = Q(w) while s is normal. Sign: Q(-w) = -Q(w).
"""

import numpy as np
from jaxtyping import Float, Float64, UInt8

from llamaspec.reference.quantizers.blocks import Quantized, finite


def group_size(*widths: int, largest: int = 64) -> int:
    """Return the largest power of two that divides all `widths`, but at most `largest`, which is a power of two.

    >>> group_size(288), group_size(64, 172)
    (32, 4)
    """
    group = largest
    while any(width % group for width in widths):
        group //= 2
    return group


def quantize(w: Float[np.ndarray, "*shape"], *, group: int) -> Quantized:
    """Quantize to int8 codes and float32 scales, one per `group` of the flattened tensor.

    Raises ValueError for weights that are not finite, or incomplete groups.

    >>> q = quantize(np.array([[1.0, -0.5], [0.0, 0.0]]), group=2)
    >>> q.codes.tolist(), q.scales.shape
    ([[127, -64], [0, 0]], (2,))
    """
    if group < 1 or w.size % group:
        raise ValueError(f"{w.size} weights do not fill groups of {group}")
    groups = finite(w).astype(np.float32).reshape(-1, group)
    scales = np.max(np.abs(groups), axis=-1) / np.float32(127)
    codes = np.rint(groups / np.where(scales == 0, np.float32(np.inf), scales)[:, None]).clip(-127, 127)
    return Quantized(codes.astype(np.int8).reshape(w.shape), scales)


def dequantize(q: Quantized) -> Float64[np.ndarray, "*shape"]:
    """Return each code times the scale of its group. float64 holds these products exactly."""
    groups = q.codes.reshape(q.scales.size, -1) * q.scales.astype(np.float64)[:, None]
    return groups.reshape(q.codes.shape)


def pack(q: Quantized) -> UInt8[np.ndarray, " bytes"]:
    """Pack the codes, then the scales as little-endian float32.

    >>> len(pack(quantize(np.ones((2, 4)), group=4)))
    16
    """
    return np.concatenate([q.codes.reshape(-1).view(np.uint8), q.scales.astype("<f4").view(np.uint8)])


def unpack(packed: UInt8[np.ndarray, " bytes"], *, shape: tuple[int, ...], group: int) -> Quantized:
    """Undo `pack`. Raises ValueError for a wrong number of bytes."""
    size = int(np.prod(shape))
    if len(packed) != size + 4 * (size // group) or size % group:
        raise ValueError(f"{len(packed)} bytes do not fit a tensor of shape {shape} in groups of {group}")
    scales = packed[size:].copy().view("<f4").astype(np.float32)
    return Quantized(packed[:size].view(np.int8).reshape(shape), scales)
