"""Training as functions: the loss of the functional model, its gradient, AdamW, and the initial weights.

Training updates a dictionary of float32 tensors with Hugging Face's names. The loss builds the model's parameter tree
from it (`params_of`). So a tied head shares the embedding, and a checkpoint is just the dictionary.

We cut a step's documents into small batches of similar lengths and add their gradients. The result is the gradient of
all documents together, with little padding and little memory.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from llamaspec.model.cache import LayerCache, empty_cache
from llamaspec.model.forward import forward
from llamaspec.model.ops.block import score_scale, transform_scores
from llamaspec.model.ops.table import Ops, Positions
from llamaspec.model.ops.xla import XLA
from llamaspec.model.running.compile import untuned_options
from llamaspec.model.tensors import Role, weights
from llamaspec.model.weights.params import params_of, rope_table
from llamaspec.reference.config import Config
from llamaspec.training.parallel import Spread

EMBEDDING_STD = 0.02

Tensors = dict[str, Array]  # weights or gradients by name


def initial_tensors(config: Config, *, seed: int) -> Tensors:
    """Make norms of one, biases of zero, and random matrices that preserve the scale of their inputs.

    The matrices that write to the residual stream are smaller, so that all layers together add as much as one layer.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for weight in weights(config):
        if weight.role is Role.BIAS:
            values = np.zeros(weight.shape)
        elif weight.role is Role.NORM:
            values = np.ones(weight.shape)
        else:
            std = EMBEDDING_STD if weight.role is Role.EMBEDDING else weight.shape[1] ** -0.5
            if weight.part in ("o", "down", "expert_down"):
                std /= math.sqrt(2 * config.layers)
            values = rng.normal(0.0, std, weight.shape)
        tensors[weight.name] = jnp.asarray(values, jnp.float32)
    return tensors


def optimizer(*, lr: float, steps: int, warm_up: int, decay: float) -> optax.GradientTransformation:
    """Make AdamW with gradient clipping. Weight decay applies only to matrices.

    The learning rate rises to `lr` during `warm_up` steps, then falls along a cosine to 0 at `steps`.
    """
    rate = optax.warmup_cosine_decay_schedule(0.0, lr, warm_up, max(steps, warm_up + 1))
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b1=0.9, b2=0.99, weight_decay=decay, mask=lambda t: jax.tree.map(lambda a: a.ndim > 1, t)),
    )


def summed_loss(
    tensors: Tensors,
    ids: Int[Array, "batch seq"],
    importance: Float[Array, "batch seq"],
    *,
    config: Config,
    ops: Ops,
    dtype: np.dtype,
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Int[Array, "batch predicted"]]]:
    """Sum the nats of all predictions, each times its importance. Computes in `dtype`, with sums in float32.

    The second result has the unweighted sum over predictions with importance above 0, and the likeliest ids. The
    first id of a row has no prediction, so `predicted` is seq - 1.
    """
    batch, seq = ids.shape
    params = params_of(config, {name: a.astype(dtype) for name, a in tensors.items()}, rope_table(config, seq))
    cache = empty_cache(config, batch=batch, capacity=seq, dtype=dtype)
    logits = forward(params, ids, cache, config=config, ops=ops)[0][:, :-1]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
    importance = importance[:, 1:]
    plain = jnp.sum(jnp.where(importance > 0, nats, 0.0))
    return jnp.sum(nats * importance), (plain, jnp.argmax(logits, axis=-1))


class TrainingFunctions(NamedTuple):
    """The compiled functions of a training. `add_gradient` and `score` compile once per sequence length."""

    add_gradient: Callable[..., tuple[Tensors, Array]]
    update: Callable[..., tuple[Tensors, optax.OptState]]
    score: Callable[..., tuple[Array, tuple[Array, Array]]]  # `summed_loss`


def compile_step(
    config: Config,
    transform: optax.GradientTransformation,
    *,
    ops: Ops,
    dtype: np.dtype,
    platform: str,
    over: Spread | None = None,
) -> TrainingFunctions:
    """Compile the functions of a training that computes in `dtype` with `ops`, on a CPU or a GPU.

    `over` describes the devices, if there are several.
    """
    static = {"config": config, "ops": ops, "dtype": dtype}
    loss = over.loss(summed_loss, **static) if over else partial(summed_loss, **static)

    def add_gradient(gradient: Tensors, nats: Array, tensors: Tensors, ids: Array, importance: Array):
        """Add the gradient and the nats of this batch to the sums of the batches before."""
        (_, (more, _)), slopes = jax.value_and_grad(loss, has_aux=True)(tensors, ids, importance)
        return jax.tree.map(jnp.add, gradient, slopes), nats + more

    def update(tensors: Tensors, state: optax.OptState, gradient: Tensors, count: Array):
        """Take an optimizer step for the mean loss of `count` predictions. Returns weights and optimizer state."""
        changes, state = transform.update(jax.tree.map(lambda g: g / count, gradient), state, tensors)
        return optax.apply_updates(tensors, changes), state

    # Each length compiles a program, and autotuning a dozen programs took nine minutes, so we switch autotuning off.
    options: Any = untuned_options(platform)
    return TrainingFunctions(
        add_gradient=jax.jit(add_gradient, donate_argnums=0, compiler_options=options),
        update=jax.jit(update, donate_argnums=(0, 1), compiler_options=options),
        score=jax.jit(loss, compiler_options=options),
    )


def attend_whole(
    q: Float[Array, "batch seq heads head_dim"],
    cache: LayerCache,
    positions: Positions,
    *,
    window: int | None,
    config: Config,
) -> Float[Array, "batch seq width"]:
    """Attend like `ops.attend`, for a cache with exactly these sequences, from their first token.

    Queries that share a kv head become the rows of one product, without a transpose. On a CPU, this and its gradient
    are twice as fast.
    """
    batch, seq, heads, head_dim = q.shape
    shared = heads // config.kv_heads
    rows = q.astype(jnp.float32).swapaxes(1, 2).reshape(batch, config.kv_heads, shared * seq, head_dim)
    k, v = (a.astype(jnp.float32) for a in cache)
    scores = jnp.matmul(rows * score_scale(config), k.swapaxes(2, 3), precision=lax.Precision.HIGHEST)
    scores = transform_scores(scores, config)
    i, j = jnp.arange(seq)[:, None], jnp.arange(seq)
    seen = j <= i if window is None else (j <= i) & (j > i - window)
    p = jax.nn.softmax(jnp.where(jnp.tile(seen, (shared, 1)), scores, -jnp.inf), axis=-1)
    h = jnp.matmul(p, v, precision=lax.Precision.HIGHEST)  # [batch, kv_heads, shared * seq, head_dim]
    return h.reshape(batch, heads, seq, head_dim).swapaxes(1, 2).reshape(batch, seq, -1).astype(cache.k.dtype)


WHOLE_ATTENTION = XLA._replace(attend=attend_whole)


def remat(ops: Ops) -> Ops:
    """Make ops that recompute their intermediate results for the gradient: less memory, a third more work."""

    def again(op: Callable) -> Callable:
        return lambda *arrays, **static: jax.checkpoint(partial(op, **static))(*arrays)

    return Ops(*(again(op) for op in ops))
