"""`Embedding`, a quantized token embedding on the device."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from llamaspec.model.weights.codes import QuantizedMatrix


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Embedding:
    """A quantized matrix [vocab, dim]. Indexing with token ids decodes only the rows of these tokens."""

    matrix: QuantizedMatrix
    dim: int = field(metadata={"static": True})
    dtype: np.dtype = field(metadata={"static": True})  # dtype of the rows

    def __getitem__(self, tokens: Int[Array | np.ndarray, "*batch"]) -> Float[Array, "*batch dim"]:
        tokens = jnp.asarray(tokens)
        rows = jax.tree.map(lambda array: array[tokens.reshape(-1)], self.matrix)
        return rows.weights()[:, : self.dim].reshape(*tokens.shape, self.dim).astype(self.dtype)
