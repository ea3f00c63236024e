"""A matrix with a low-rank adapter (LoRA) as a kind of matrix: W x + B (A x), without a copy of W.

So an adapter works on floats and on codes alike, and no op knows of it: `model.ops.products` has one branch, and
`model.weights.params.adapted_params` puts these matrices into a tree of weights.
"""

from typing import NamedTuple

from jaxtyping import Array, Float

from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.gpu_codes import Stacked


class Adapted(NamedTuple):
    """A matrix, and a pair of small matrices for each of the weights that are stacked in it.

    A weight without an adapter has a pair of rank 0. The factor s of LoRA is part of `b`.
    """

    matrix: Float[Array, "rows cols"] | QuantizedMatrix | Stacked
    a: tuple[Float[Array, "_ cols"], ...]  # [rank, cols] each
    b: tuple[Float[Array, "_ _"], ...]  # [rows of the weight, rank] each
