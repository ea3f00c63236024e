r"""Magnitude pruning: the weights that are nearest to zero become zero (Han et al., 2015,
https://arxiv.org/abs/1506.02626).

Three patterns, from the freest to the one that hardware likes best. Each is a mask of what stays:

    fine_grained    the largest |w| of the tensor                            any of them
    channels        the rows of largest norm                                 whole rows: a smaller matrix
    n_of_m          the n largest |w| of every m along a row                 2 of 4: NVIDIA's sparse tensor cores
                    (Mishra et al., 2021, https://arxiv.org/abs/2104.08378)

Guaranteed: the number that stays is exact, of equal weights the first stay, and of all masks of the
pattern none leaves a smaller sum of squares: to exchange what stays for what goes, a smaller or equal |w|, does not
lower the sum of what goes. w * mask is a fixed point. What stays is not changed, so the
error of a weight is 0 or |w|, and that of an output |sum_(pruned) w_j x_j|. Powers of two and signs of w leave the
mask as it is, so that Q(-w) = -Q(w). A mask that keeps more keeps all that one keeps which keeps fewer.

`compress` stores what stays of n_of_m, with its place among the m: 2 of 4 take half the memory and 2 bits
a weight.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Shaped, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import finite


def fine_grained(w: Float[np.ndarray, "*shape"], *, keep: int) -> Bool[np.ndarray, "*shape"]:
    """`keep` weights of the tensor. Raises ValueError for weights that are not finite, and impossible counts.

    >>> fine_grained(np.array([[1.0, -3.0], [2.0, 0.0]]), keep=2)
    array([[False,  True],
           [ True, False]])
    """
    return _largest(np.abs(finite(w)).reshape(1, -1), keep).reshape(w.shape)


def channels(w: Float[np.ndarray, "rows cols"], *, keep: int) -> Bool[np.ndarray, "rows cols"]:
    """All weights of `keep` rows. Raises ValueError for weights that are not finite, and impossible counts.

    >>> channels(np.array([[1.0, -3.0], [2.0, 2.0]]), keep=1)
    array([[ True,  True],
           [False, False]])
    """
    w = finite(w)
    scale = np.max(np.abs(w)) or 1.0  # squares neither overflow nor vanish
    norms = np.sum((w / scale) ** 2, axis=-1)
    return np.broadcast_to(_largest(norms[None], keep)[0][:, None], w.shape).copy()


def n_of_m(w: Float[np.ndarray, "*batch cols"], *, n: int, m: int) -> Bool[np.ndarray, "*batch cols"]:
    """`n` weights of every `m`. Raises ValueError unless m divides the rows, and for weights that are not finite.

    >>> n_of_m(np.array([[1.0, -3.0, 2.0, 0.0]]), n=2, m=4)
    array([[False,  True,  True, False]])
    """
    if m < 1 or w.shape[-1] % m:
        raise ValueError(f"rows of {w.shape[-1]} weights are no whole groups of {m}")
    return _largest(np.abs(finite(w)).reshape(*w.shape[:-1], -1, m), n).reshape(w.shape)


class Compressed(NamedTuple):
    """The weights that stay, in order, and the place of each within its group."""

    values: Shaped[np.ndarray, "*batch kept"]
    places: UInt8[np.ndarray, "*batch kept"]


def compress(
    w: Shaped[np.ndarray, "*batch cols"], mask: Bool[np.ndarray, "*batch cols"], *, n: int, m: int
) -> Compressed:
    """Keep what `mask`, `n` of every `m`, leaves of `w`, weights or their codes. Raises ValueError for other masks.

    >>> w = np.array([[1.0, -3.0, 2.0, 0.0]])
    >>> compress(w, n_of_m(w, n=2, m=4), n=2, m=4)
    Compressed(values=array([[-3.,  2.]]), places=array([[1, 2]], dtype=uint8))
    """
    if w.shape[-1] % m or np.any(mask.reshape(*mask.shape[:-1], -1, m).sum(axis=-1) != n):
        raise ValueError(f"the mask does not keep {n} of every {m}")
    shape = (*w.shape[:-1], w.shape[-1] // m * n)
    return Compressed(w[mask].reshape(shape), (np.nonzero(mask)[-1] % m).astype(np.uint8).reshape(shape))


def expand(compressed: Compressed, *, n: int, m: int) -> Shaped[np.ndarray, "*batch cols"]:
    """The tensor with its zeros.

    >>> expand(Compressed(np.array([[-3.0, 2.0]]), np.array([[1, 2]], np.uint8)), n=2, m=4)
    array([[ 0., -3.,  2.,  0.]])
    """
    *batch, entries = compressed.values.shape
    w = np.zeros((*batch, entries // n, m), compressed.values.dtype)
    places = compressed.places.astype(np.int64).reshape(*batch, -1, n)
    np.put_along_axis(w, places, compressed.values.reshape(*batch, -1, n), axis=-1)
    return w.reshape(*batch, -1)


def pack(places: UInt8[np.ndarray, "*batch kept"]) -> UInt8[np.ndarray, "*batch bytes"]:
    """2 bits for each place among 4, the first lowest.

    >>> pack(np.array([1, 2, 0, 3], np.uint8))
    array([201], dtype=uint8)
    """
    return packing.pack(places, bits=2)


def unpack(packed: UInt8[np.ndarray, "*batch bytes"]) -> UInt8[np.ndarray, "*batch kept"]:
    """The places of `pack`."""
    return packing.unpack(packed, bits=2)


def _largest(sizes: Float[np.ndarray, "*batch members"], keep: int) -> Bool[np.ndarray, "*batch members"]:
    """The `keep` largest of each group, of equals the first."""
    if not 0 <= keep <= sizes.shape[-1]:
        raise ValueError(f"{keep} of {sizes.shape[-1]} cannot be kept")
    order = np.argsort(-sizes, axis=-1, kind="stable")
    mask = np.zeros(sizes.shape, bool)
    np.put_along_axis(mask, order[..., :keep], True, axis=-1)
    return mask
