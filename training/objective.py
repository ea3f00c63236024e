"""Training as functions: the loss of the functional model, its gradient, AdamW, and the weights' beginning.

What is trained is a dictionary of tensors by Hugging Face's names, in float32. The model's own tree is put together
from them inside the loss (`params_of`), so that a tied head is the embedding, and that a checkpoint is the dictionary.

A step's documents are cut into small batches of similar lengths. Their gradients add up, so the step is that of all
documents together, while little is padding and little is in memory.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from model.cache import LayerCache, empty_cache
from model.checkpoints.checkpoint import tensor_shapes
from model.forward import forward
from model.ops.block import XLA, Ops, Positions
from model.running.compile import compiler_options
from model.weights.params import params_of, rope_table
from reference.config import Config

EMBEDDING_STD = 0.02
LENGTHS = range(32, 1025, 32)  # what documents are padded to: each is a program to compile

Tensors = dict[str, Array]  # weights, or their gradients, by name


class Example(NamedTuple):
    """A document to train on."""

    ids: list[int]
    weights: list[float]  # of the prediction of this id in the loss; 0: not counted


class Batch(NamedTuple):
    """Examples of similar lengths, padded at the end."""

    ids: Int[np.ndarray, "batch seq"]
    weights: Float[np.ndarray, "batch seq"]

    @property
    def counted(self) -> Bool[np.ndarray, "batch predicted"]:
        return self.weights[:, 1:] > 0


def batches(examples: Iterable[Example], *, rows: int, context: int) -> Iterator[Batch]:
    """`examples` sorted by length, `rows` at a time; empty rows fill the last batch. The end of a long one is cut."""
    ordered = sorted(examples, key=lambda example: len(example.ids))
    for start in range(0, len(ordered), rows):
        part = ordered[start : start + rows]
        length = padded(min(len(part[-1].ids), context))
        ids, weights = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.float32)
        for row, example in enumerate(part):
            seq = min(len(example.ids), context)
            ids[row, :seq], weights[row, :seq] = example.ids[:seq], example.weights[:seq]
        yield Batch(ids, weights)


def padded(length: int) -> int:
    """
    >>> padded(225), padded(257), padded(1025)
    (256, 288, 2048)
    """
    return next((size for size in LENGTHS if size >= length), 1 << (length - 1).bit_length())


def initial_tensors(config: Config, *, seed: int) -> Tensors:
    """Norms of one, biases of zero, matrices that keep the size of what they multiply.

    What is added to the residual stream is smaller, so that it has the size of one layer's after all of them.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if name.endswith(".bias"):
            values = np.zeros(shape)
        elif len(shape) == 1:
            values = np.ones(shape)
        else:
            std = EMBEDDING_STD if "embed" in name else shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
                std /= math.sqrt(2 * config.layers)
            values = rng.normal(0.0, std, shape)
        tensors[name] = jnp.asarray(values, jnp.float32)
    return tensors


def optimizer(*, lr: float, steps: int, warm_up: int, decay: float) -> optax.GradientTransformation:
    """AdamW behind clipped gradients; the rate rises for `warm_up` steps, then falls as a cosine, to nothing at the
    end. Only matrices decay."""
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
    """Nats of all predictions, each times its importance, computed in `dtype` with sums in float32.

    Beside them the nats of all that have an importance, as they are, and the likeliest ids. The first id of a row has
    no prediction: `predicted` is seq - 1.
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


def compile_step(config: Config, transform: optax.GradientTransformation, *, ops: Ops, dtype: np.dtype) -> Step:
    loss = partial(summed_loss, config=config, ops=ops, dtype=dtype)

    def add_gradient(gradient: Tensors, nats: Array, tensors: Tensors, ids: Array, importance: Array):
        """`gradient` and `nats`, of batches before, with those of this one."""
        (_, (more, _)), slopes = jax.value_and_grad(loss, has_aux=True)(tensors, ids, importance)
        return jax.tree.map(jnp.add, gradient, slopes), nats + more

    def update(tensors: Tensors, state: optax.OptState, gradient: Tensors, count: Array):
        """Weights and optimizer after a step down the mean of `count` predictions' losses."""
        changes, state = transform.update(jax.tree.map(lambda g: g / count, gradient), state, tensors)
        return optax.apply_updates(tensors, changes), state

    options: Any = compiler_options(jax.default_backend())
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
    """`ops.attend` where the cache holds just these sequences, from their beginning.

    The queries that share a kv head are the rows of one product, and no other layout is asked for: on a CPU this is
    twice as fast, with its gradient.
    """
    batch, seq, heads, head_dim = q.shape
    shared = heads // config.kv_heads
    rows = q.astype(jnp.float32).swapaxes(1, 2).reshape(batch, config.kv_heads, shared * seq, head_dim)
    k, v = (a.astype(jnp.float32) for a in cache)
    scores = jnp.matmul(rows * head_dim**-0.5, k.swapaxes(2, 3), precision=lax.Precision.HIGHEST)
    i, j = jnp.arange(seq)[:, None], jnp.arange(seq)
    seen = j <= i if window is None else (j <= i) & (j > i - window)
    p = jax.nn.softmax(jnp.where(jnp.tile(seen, (shared, 1)), scores, -jnp.inf), axis=-1)
    h = jnp.matmul(p, v, precision=lax.Precision.HIGHEST)  # [batch, kv_heads, shared * seq, head_dim]
    return h.reshape(batch, heads, seq, head_dim).swapaxes(1, 2).reshape(batch, seq, -1).astype(cache.k.dtype)


WHOLE = XLA._replace(attend=attend_whole)


def remat(ops: Ops) -> Ops:
    """Ops whose insides are computed again for the gradient, rather than kept: less memory, a third more work."""

    def again(op: Callable) -> Callable:
        return lambda *arrays, **static: jax.checkpoint(partial(op, **static))(*arrays)

    return Ops(*(again(op) for op in ops))
