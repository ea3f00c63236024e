"""A wrong softmax. Comparisons on random normal numbers accept it, but `llamaspec verify` finds the mistake."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def softmax(x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    """Compute the softmax of the last axis, with the maximum wrongly started at 0."""
    e = jnp.exp(x - jnp.maximum(x.max(axis=-1, keepdims=True), 0))
    return e / e.sum(axis=-1, keepdims=True)
