"""The cross entropy of documents: training from scratch, and fine-tuning on examples.

Training updates a dictionary of float32 tensors with Hugging Face's names. The loss builds the model's parameter tree
from it (`params_of`). So a tied head shares the embedding, and a checkpoint is just the dictionary.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from llamaspec.model.cache import empty_cache
from llamaspec.model.forward import forward
from llamaspec.model.ops.table import Ops
from llamaspec.model.weights.params import params_of, rope_table
from llamaspec.reference.config import Config
from llamaspec.training.steps import Sums, Tensors


def summed_loss(
    tensors: Tensors,
    ids: Int[Array, "batch seq"],
    importance: Float[Array, "batch seq"],
    *,
    config: Config,
    ops: Ops,
    dtype: np.dtype,
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Int[Array, "batch predicted"]]]:
    """Sum the losses of all predictions in nats, each times its importance. Computes in `dtype`, with sums in float32.

    The second result is the unweighted sum over predictions with an importance above 0, and the likeliest ids. The
    first id of a row is not predicted, so `predicted` is seq - 1.
    """
    batch, seq = ids.shape
    params = params_of(config, {name: a.astype(dtype) for name, a in tensors.items()}, rope_table(config, seq))
    cache = empty_cache(config, batch=batch, capacity=seq, dtype=dtype)
    logits = forward(params, ids, cache, config=config, ops=ops)[0][:, :-1]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
    importance = importance[:, 1:]
    plain = jnp.sum(jnp.where(importance > 0, nats, 0.0))
    return jnp.sum(nats * importance), (plain, jnp.argmax(logits, axis=-1))


def of_documents(loss: Callable) -> Callable:
    """Turn `summed_loss`, without its static arguments, into the loss of `steps.compile_step`."""

    def of_batch(tensors: Tensors, frozen: Any, ids: Array, importance: Array) -> tuple[Array, Sums]:
        weighed, (plain, _) = loss(tensors, ids, importance)
        return weighed, {"loss": plain}

    return of_batch
