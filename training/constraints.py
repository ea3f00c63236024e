"""Constraints on trained weights: rounding while they learn (QAT), and masks that keep pruned weights at 0.

`reference.quantizers` defines both: `symmetric` and `qat` the rounding and its gradient, `pruning` the masks.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from llamaspec.model.checkpoints.checkpoint import Checkpoint, refused
from llamaspec.model.tensors import Role, quantizable, weights
from llamaspec.reference.quantizers.pruning import fine_grained, n_of_m
from llamaspec.reference.quantizers.schemes import SCHEMES

ROUNDED = ("q8", "q8_row", "q4")  # schemes of integers, which all weights can learn to live with


class Constraint(NamedTuple):
    """A function that each tensor passes before the model uses it, and arrays that the function needs."""

    arrays: Any
    apply: Callable[[str, Array, Any], Array]  # takes the tensor's name, the tensor, and `arrays`


FREE = Constraint(None, lambda name, weight, arrays: weight)


def rounding(checkpoint: Checkpoint, scheme: str) -> Constraint:
    """Round the matrices of a model by a scheme of integers; the gradient passes the rounding unchanged."""
    matrices = quantizable(checkpoint.config)
    group, largest = SCHEMES[scheme].group, 2 ** (SCHEMES[scheme].code_bits - 1) - 1
    return Constraint(None, lambda name, weight, _: rounded(weight, group, largest) if name in matrices else weight)


def rounded(weight: Float[Array, "rows cols"], group: int | None, largest: int) -> Float[Array, "rows cols"]:
    """Round a matrix to integers up to `largest` times a scale per `group` columns (None: per row).

    The scale makes the largest weight of a group `largest`, so nothing is clipped, and every gradient passes.

    >>> rounded(jnp.array([[0.5, -1.75, 0.1]]), None, 7)
    Array([[ 0.5 , -1.75,  0.  ]], dtype=float32)
    """
    rows, cols = weight.shape
    size = group or cols
    blocks = jnp.pad(weight, ((0, 0), (0, -cols % size))).reshape(rows, -1, size)
    scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / largest
    codes = jnp.clip(jnp.rint(blocks / jnp.where(scales == 0, 1.0, scales)), -largest, largest)
    values = (codes * scales).reshape(rows, -1)[:, :cols]
    return lax.stop_gradient(values) + (weight - lax.stop_gradient(weight))


def pruning(checkpoint: Checkpoint, kept: float | tuple[int, int]) -> Constraint:
    """Keep the largest weights of each matrix of the blocks: a share `kept` of them, or n of every m.

    The masks come from the weights at the start and stay. Raises CheckpointError if the rows of a matrix do not fill
    groups of m.
    """
    masks = {}
    for weight in weights(checkpoint.config):
        if weight.role not in (Role.MATRIX, Role.EXPERT):
            continue
        values = checkpoint.tensors[weight.name].read().astype(np.float32)
        try:
            if isinstance(kept, tuple):
                masks[weight.name] = jnp.asarray(n_of_m(values, n=kept[0], m=kept[1]))
            else:
                masks[weight.name] = jnp.asarray(fine_grained(values, keep=max(1, round(kept * values.size))))
        except ValueError as error:
            raise refused(checkpoint.path, f"{weight.name}: {error}") from None

    def apply(name: str, weight: Array, masks: Mapping[str, Array]) -> Array:
        return jnp.where(masks[name], weight, 0.0) if name in masks else weight

    return Constraint(masks, apply)
