"""Constraints on trained weights: rounding while they learn (QAT), and masks that keep pruned weights at 0.

In `reference.quantizers`, `symmetric` and `qat` define the rounding and its gradient, and `pruning` defines the masks.
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
    """A function that changes each trained tensor before the model uses it, and arrays that the function needs."""

    arrays: Any
    apply: Callable[[str, Array, Any], Array]  # takes the tensor's name, the tensor, and `arrays`


FREE = Constraint(None, lambda name, weight, arrays: weight)


def rounding(checkpoint: Checkpoint, scheme: str) -> Constraint:
    """Make the constraint that rounds the matrices of a model by an integer scheme.

    The gradient of the loss with respect to a rounded weight is used unchanged for the weight itself.
    """
    matrices = quantizable(checkpoint.config)
    group, largest = SCHEMES[scheme].group, 2 ** (SCHEMES[scheme].code_bits - 1) - 1
    return Constraint(None, lambda name, weight, _: rounded(weight, group, largest) if name in matrices else weight)


def rounded(weight: Float[Array, "rows cols"], group: int | None, largest: int) -> Float[Array, "rows cols"]:
    """Round a matrix to multiples of a scale. The multipliers are the integers from -`largest` to `largest`.

    Each group of `group` columns of a row has its own scale. If `group` is None, each row has one scale. The scale of a
    group is the largest magnitude of its weights, divided by `largest`. So no weight is clipped, and every weight gets
    its gradient.

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


def pruning(checkpoint: Checkpoint, remaining: float | tuple[int, int]) -> Constraint:
    """Make the constraint that sets the smallest weights of each matrix in the blocks to 0, at each training step.

    `remaining` is the share of weights to keep, or a pair (n, m): keep n of every m weights. The masks depend only on
    the weights at the start. Raises CheckpointError if the number of columns of a matrix is not a multiple of m.
    """
    masks = {}
    for weight in weights(checkpoint.config):
        if weight.role not in (Role.MATRIX, Role.EXPERT):
            continue
        values = checkpoint.tensors[weight.name].read().astype(np.float32)
        try:
            if isinstance(remaining, tuple):
                masks[weight.name] = jnp.asarray(n_of_m(values, n=remaining[0], m=remaining[1]))
            else:
                masks[weight.name] = jnp.asarray(fine_grained(values, keep=max(1, round(remaining * values.size))))
        except ValueError as error:
            raise refused(checkpoint.path, f"{weight.name}: {error}") from None

    def apply(name: str, weight: Array, masks: Mapping[str, Array]) -> Array:
        return jnp.where(masks[name], weight, 0.0) if name in masks else weight

    return Constraint(masks, apply)
