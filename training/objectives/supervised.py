"""The cross entropy of documents: training from scratch, and fine-tuning on examples.

Training updates a dictionary of float32 tensors with Hugging Face's names. The loss builds the model's parameter tree
from it (`params_of`). So a tied head shares the embedding, and a checkpoint is just the dictionary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from llamaspec.model.cache import empty_cache
from llamaspec.model.forward import forward
from llamaspec.model.ops.table import Ops
from llamaspec.model.weights.params import Params, params_of, rope_table
from llamaspec.reference.config import Config
from llamaspec.training.data import Example
from llamaspec.training.loop import Work
from llamaspec.training.objectives.elastic import logits_at_depths, mean_over, names_at
from llamaspec.training.objectives.objective import Objective
from llamaspec.training.packing import packed
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
    """Sum the losses of all predictions in nats, weighted by importance. Computes in `dtype`, with sums in float32.

    The second result is a pair: the unweighted sum over predictions with an importance above 0, and the likeliest id of
    each prediction. The first id of a row is not predicted, so `predicted` is seq - 1.
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
    """Give a loss the signature that `steps.compile_step` expects.

    `loss` is `summed_loss` with its static arguments already bound.
    """

    def of_batch(tensors: Tensors, frozen: Any, ids: Array, importance: Array) -> tuple[Array, Sums]:
        weighed, (plain, _) = loss(tensors, ids, importance)
        return weighed, {"loss": plain}

    return of_batch


def packed_logits(
    params: Params,
    ids: Int[Array, "batch seq"],
    at: Int[Array, "batch seq"],
    *,
    config: Config,
    ops: Ops,
    dtype: np.dtype,
) -> Float[Array, "batch predicted vocab"]:
    """Compute the logits that predict ids 1, 2, … of each row; `at` are the positions within the row's documents."""
    return logits_at_depths(params, ids, at, (config.layers,), config=config, ops=ops, dtype=dtype)[0]


def packed_work(examples: Sequence[Example], *, rows: int, length: int) -> Work:
    """Pack examples into batches of `rows` rows of `length` tokens."""
    batches = list(packed(examples, rows=rows, length=length))
    divisor = sum(float(batch.weights.sum()) for batch in batches)
    return Work(batches, divisor, sum(min(len(example.ids), length) for example in examples))


def supervised(
    params: Callable[[Tensors, Any], Params],
    *,
    config: Config,
    ops: Ops,
    dtype: np.dtype,
    rows: int,
    length: int,
    depths: Sequence[int] = (),
) -> Objective:
    """Make the objective of packed documents: the weighted cross entropy. It reports the share of right ids, too.

    `params` makes the tree of weights from the trained tensors and the frozen arrays. With `depths`, the objective is
    the mean over these depths (see `objectives.elastic`).
    """
    depths = depths or (config.layers,)

    def loss(
        tensors: Tensors,
        frozen: Any,
        ids: Int[Array, "batch seq"],
        at: Int[Array, "batch seq"],
        weights: Float[Array, "batch seq"],
    ) -> tuple[Array, Sums]:
        logits = logits_at_depths(params(tensors, frozen), ids, at, depths, config=config, ops=ops, dtype=dtype)

        def measure(logits: Array) -> Sums:
            nats = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
            right = (jnp.argmax(logits, axis=-1) == ids[:, 1:]) * weights[:, 1:]
            return {"loss": jnp.sum(nats * weights[:, 1:]), "right": jnp.sum(right)}

        return mean_over(depths, logits, measure)

    def work(examples: Sequence[Example]) -> Work:
        return packed_work(examples, rows=rows, length=length)

    return Objective(loss, names_at(("loss", "right"), depths), work)
