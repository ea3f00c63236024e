r"""Magnitude pruning: the smallest weights become zero (Han et al., 2015, https://arxiv.org/abs/1506.02626).

Three functions make a mask of the kept weights. They differ in the pattern of the mask:

    fine_grained    the largest |w| of the tensor                            any of them
    channels        the rows of largest norm                                 whole rows: a smaller matrix
    n_of_m          the n largest |w| of every m along a row                 2 of 4: NVIDIA's sparse tensor cores
                    (Mishra et al., 2021, https://arxiv.org/abs/2104.08378)

Guaranteed: exactly the requested number of weights is kept, and on ties the first ones. No mask of the same pattern
with the same number of weights has a smaller sum of squared errors. The reason is that a pruned weight has at most the
magnitude of a kept one, so exchanging the two cannot lower the sum. Kept weights do not change, so the error of a
weight is 0 or |w|, and the error of an output is |sum_(pruned) w_j x_j|.

Fixed point: pruning w * mask gives w * mask again. Powers of two: 2^k w has the same mask as w. Sign: -w has the same
mask, so Q(-w) = -Q(w) for Q(w) = w * mask. More weights: the mask for a larger number contains the mask for every
smaller number.

`compress` stores the kept weights of an n_of_m mask, and the position of each among its m weights. For 2 of 4, this
takes half the memory of w, plus 2 bits per kept weight. The product does not need the zeros: each kept weight selects
its x among the m of its group. With the values v and the places p,

    y = sum_k v_k x_(m floor(k / n) + p_k)

NVIDIA's sparse tensor cores do this for 2 of 4, with half the multiplications and half the bytes of W.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Shaped, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import finite


def fine_grained(w: Float[np.ndarray, "*shape"], *, keep: int) -> Bool[np.ndarray, "*shape"]:
    """Make the mask of the `keep` largest weights of the tensor.

    Raises ValueError for weights that are not finite, and if there are fewer than `keep` weights.

    >>> fine_grained(np.array([[1.0, -3.0], [2.0, 0.0]]), keep=2)
    array([[False,  True],
           [ True, False]])
    """
    return _largest(np.abs(finite(w)).reshape(1, -1), keep).reshape(w.shape)


def channels(w: Float[np.ndarray, "rows cols"], *, keep: int) -> Bool[np.ndarray, "rows cols"]:
    """Make the mask of the `keep` rows with the largest norms.

    Raises ValueError for weights that are not finite, and if there are fewer than `keep` rows.

    >>> channels(np.array([[1.0, -3.0], [2.0, 2.0]]), keep=1)
    array([[ True,  True],
           [False, False]])
    """
    w = finite(w)
    scale = np.max(np.abs(w)) or 1.0  # scaled so that squares neither overflow nor underflow
    norms = np.sum((w / scale) ** 2, axis=-1)
    return np.broadcast_to(_largest(norms[None], keep)[0][:, None], w.shape).copy()


def n_of_m(w: Float[np.ndarray, "*batch cols"], *, n: int, m: int) -> Bool[np.ndarray, "*batch cols"]:
    """Make the mask of the `n` largest of every `m` weights of a row.

    Raises ValueError for weights that are not finite, and if the length of a row is not a multiple of `m`.

    >>> n_of_m(np.array([[1.0, -3.0, 2.0, 0.0]]), n=2, m=4)
    array([[False,  True,  True, False]])
    """
    if m < 1 or w.shape[-1] % m:
        raise ValueError(f"rows of {w.shape[-1]} weights do not fill groups of {m}")
    return _largest(np.abs(finite(w)).reshape(*w.shape[:-1], -1, m), n).reshape(w.shape)


class Compressed(NamedTuple):
    """The kept weights in order, and the position of each in its group of m."""

    values: Shaped[np.ndarray, "*batch kept"]
    places: UInt8[np.ndarray, "*batch kept"]


def compress(
    w: Shaped[np.ndarray, "*batch cols"], mask: Bool[np.ndarray, "*batch cols"], *, n: int, m: int
) -> Compressed:
    """Store the entries of `w` (weights or codes) that `mask` keeps.

    Raises ValueError unless `mask` keeps `n` of every `m`.

    >>> w = np.array([[1.0, -3.0, 2.0, 0.0]])
    >>> compress(w, n_of_m(w, n=2, m=4), n=2, m=4)
    Compressed(values=array([[-3.,  2.]]), places=array([[1, 2]], dtype=uint8))
    """
    if w.shape[-1] % m or np.any(mask.reshape(*mask.shape[:-1], -1, m).sum(axis=-1) != n):
        raise ValueError(f"the mask does not keep {n} of every {m} weights in each row")
    shape = (*w.shape[:-1], w.shape[-1] // m * n)
    return Compressed(w[mask].reshape(shape), (np.nonzero(mask)[-1] % m).astype(np.uint8).reshape(shape))


def expand(compressed: Compressed, *, n: int, m: int) -> Shaped[np.ndarray, "*batch cols"]:
    """Restore the tensor with its zeros.

    >>> expand(Compressed(np.array([[-3.0, 2.0]]), np.array([[1, 2]], np.uint8)), n=2, m=4)
    array([[ 0., -3.,  2.,  0.]])
    """
    *batch, entries = compressed.values.shape
    w = np.zeros((*batch, entries // n, m), compressed.values.dtype)
    places = compressed.places.astype(np.int64).reshape(*batch, -1, n)
    np.put_along_axis(w, places, compressed.values.reshape(*batch, -1, n), axis=-1)
    return w.reshape(*batch, -1)


def pack(places: UInt8[np.ndarray, "*batch kept"]) -> UInt8[np.ndarray, "*batch bytes"]:
    """Pack 2 bits for each position among 4, the first in the lowest bits.

    >>> pack(np.array([1, 2, 0, 3], np.uint8))
    array([201], dtype=uint8)
    """
    return packing.pack(places, bits=2)


def unpack(packed: UInt8[np.ndarray, "*batch bytes"]) -> UInt8[np.ndarray, "*batch kept"]:
    """Restore the positions from `pack`."""
    return packing.unpack(packed, bits=2)


def sparse_linear(
    x: Float[np.ndarray, "*batch cols"], compressed: Compressed, *, n: int, m: int
) -> Float64[np.ndarray, "*batch rows"]:
    """Compute W x from the kept weights [rows, kept], in float64.

    Raises ValueError unless the groups of the weights fill the length of x.

    >>> w = Compressed(np.array([[-3.0, 2.0]]), np.array([[1, 2]], np.uint8))
    >>> sparse_linear(np.array([9.0, 1.0, 10.0, 9.0]), w, n=2, m=4)
    array([17.])
    """
    kept = compressed.values.shape[-1]
    if kept * m != x.shape[-1] * n:
        raise ValueError(f"{kept} kept weights, {n} of every {m}, do not fit {x.shape[-1]} inputs")
    columns = np.arange(kept) // n * m + compressed.places  # [rows, kept]
    selected = x.astype(np.float64)[..., columns]  # [*batch, rows, kept]
    return np.sum(selected * compressed.values, axis=-1)


def _largest(sizes: Float[np.ndarray, "*batch members"], keep: int) -> Bool[np.ndarray, "*batch members"]:
    """Return a mask of the `keep` largest numbers of each group. On ties, the first ones are kept."""
    if not 0 <= keep <= sizes.shape[-1]:
        raise ValueError(f"cannot keep {keep} of {sizes.shape[-1]}: expected 0 to {sizes.shape[-1]}")
    order = np.argsort(-sizes, axis=-1, kind="stable")
    mask = np.zeros(sizes.shape, bool)
    np.put_along_axis(mask, order[..., :keep], True, axis=-1)
    return mask
