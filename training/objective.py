"""Training as functions: the loss of the functional model, its gradient, AdamW, and the initial weights.

Training changes a dictionary of float32 tensors by Hugging Face's names. The loss puts the model's own tree together
from them (`params_of`), so that a tied head is the embedding, and so that a checkpoint is the dictionary.

A step's documents are cut into small batches of similar lengths. Their gradients add up, so the step is that of all
documents together, while little is padding and little is in memory.
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
from llamaspec.model.running.compile import UNTUNED, compiler_options
from llamaspec.model.tensors import Role, weights
from llamaspec.model.weights.params import params_of, rope_table
from llamaspec.reference.config import Config
from llamaspec.training.parallel import Spread

EMBEDDING_STD = 0.02

Tensors = dict[str, Array]  # weights, or their gradients, by name


def initial_tensors(config: Config, *, seed: int) -> Tensors:
    """Make norms of one, biases of zero, and random matrices that keep the size of their inputs.

    Matrices whose products are added to the residual stream are smaller, so that all layers together add as much as
    one would.
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
    """Make AdamW behind clipped gradients. Only matrices decay.

    The rate rises to `lr` for `warm_up` steps, then falls as a cosine to nothing after `steps`.
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
    """Sum the nats of all predictions, each times its importance, computed in `dtype` with sums in float32.

    The second result holds the plain sum of the nats of predictions that have an importance, and the likeliest ids.
    The first id of a row has no prediction: `predicted` is seq - 1.
    """
    batch, seq = ids.shape
    params = params_of(config, {name: a.astype(dtype) for name, a in tensors.items()}, rope_table(config, seq))
    cache = empty_cache(config, batch=batch, capacity=seq, dtype=dtype)
    logits = forward(params, ids, cache, config=config, ops=ops)[0][:, :-1]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
    importance = importance[:, 1:]
    plain = jnp.sum(jnp.where(importance > 0, nats, 0.0))
    return jnp.sum(nats * importance), (plain, jnp.argmax(logits, axis=-1))


class Step(NamedTuple):
    """The compiled functions of a training; each length that occurs compiles the first and the last anew."""

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
) -> Step:
    """Make the functions of a training that computes in `dtype` with `ops`, on a CPU or a GPU.

    `over` are the devices of a training that runs on several.
    """
    static = {"config": config, "ops": ops, "dtype": dtype}
    loss = over.loss(summed_loss, **static) if over else partial(summed_loss, **static)

    def add_gradient(gradient: Tensors, nats: Array, tensors: Tensors, ids: Array, importance: Array):
        """Add the gradient and the nats of this batch to those of batches before."""
        (_, (more, _)), slopes = jax.value_and_grad(loss, has_aux=True)(tensors, ids, importance)
        return jax.tree.map(jnp.add, gradient, slopes), nats + more

    def update(tensors: Tensors, state: optax.OptState, gradient: Tensors, count: Array):
        """Take a step down the mean loss of `count` predictions; give weights and optimizer."""
        changes, state = transform.update(jax.tree.map(lambda g: g / count, gradient), state, tensors)
        return optax.apply_updates(tensors, changes), state

    # Each length is a program, and tuning a dozen of them took nine minutes.
    options: Any = compiler_options(platform) | (UNTUNED if platform == "gpu" else {})
    return Step(
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
    """Attend as `ops.attend` does, for a cache that holds these sequences alone, from their beginning.

    The queries that share a kv head are the rows of one product, in the layout that they have. On a CPU this and its
    gradient are twice as fast.
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


WHOLE = XLA._replace(attend=attend_whole)


def remat(ops: Ops) -> Ops:
    """Make ops whose insides are computed again for the gradient, rather than kept: less memory, a third more work."""

    def again(op: Callable) -> Callable:
        return lambda *arrays, **static: jax.checkpoint(partial(op, **static))(*arrays)

    return Ops(*(again(op) for op in ops))
