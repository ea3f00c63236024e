"""`Adapted`, a matrix with a low-rank adapter (LoRA): its product is W x + B (A x), without a changed copy of W.

An adapter works with matrices of floats and of codes, and the other ops need no change: the functions that multiply
have one branch for it. `model.weights.loading` and `model.weights.params.adapted_params` put these matrices into a tree
of weights.

A server has several adapters. All their matrices A are joined along the rank, and all their matrices B as well. A row
of a batch chooses its adapter by `chosen`: A x is set to 0 at the ranks of the other adapters. So every row takes part
in the same two products, and a row's sums have the same terms in the same order, whichever adapters the other rows use.
"""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Bool, Float

from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.gpu_codes import Stacked


class Adapted(NamedTuple):
    """A matrix, and a pair of small matrices (A and B) for each of the weights that are stacked in this matrix.

    A weight without an adapter has a pair of rank 0. The factor s of LoRA is part of `b`.
    """

    matrix: Float[Array, "rows cols"] | QuantizedMatrix | Stacked
    a: tuple[Float[Array, "_ cols"], ...]  # [rank, cols] each
    b: tuple[Float[Array, "_ _"], ...]  # [rows of the weight, rank] each
    chosen: Bool[Array, "batch rank"] | None = None  # the ranks that each sequence uses; None: all


def with_chosen(params: Any, chosen: Bool[Array, "batch rank"]) -> Any:
    """Return a tree of weights in which matrices with adapters use, for each sequence, only the ranks in `chosen`."""

    def choose(leaf: Any) -> Any:
        return leaf._replace(chosen=chosen) if isinstance(leaf, Adapted) else leaf

    return jax.tree.map(choose, params, is_leaf=lambda leaf: isinstance(leaf, Adapted))
