"""`Adapted`, a matrix with a low-rank adapter (LoRA): its product is W x + B (A x), without a changed copy of W.

An adapter works with matrices of floats and of codes, and the other ops need no change. `model.ops.products` has one
branch for it, and `model.weights.params.adapted_params` puts these matrices into a tree of weights.
"""

from typing import NamedTuple

from jaxtyping import Array, Float

from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.gpu_codes import Stacked


class Adapted(NamedTuple):
    """A matrix, and a pair of small matrices (A and B) for each of the weights that are stacked in this matrix.

    A weight without an adapter has a pair of rank 0. The factor s of LoRA is part of `b`.
    """

    matrix: Float[Array, "rows cols"] | QuantizedMatrix | Stacked
    a: tuple[Float[Array, "_ cols"], ...]  # [rank, cols] each
    b: tuple[Float[Array, "_ _"], ...]  # [rows of the weight, rank] each
