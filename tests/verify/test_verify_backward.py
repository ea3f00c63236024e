"""Contracts of backward passes accept JAX's automatic differentiation, which is an independent implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.catalogue import CONTRACTS
from llamaspec.verify.judging.runner import verify


def vjp(function, inputs, dy):
    """Compute in float32 the gradients of `function` for the output gradient `dy`, then round to the inputs' dtype."""
    wide = [jnp.asarray(a, jnp.float32) for a in inputs]
    return tuple(
        np.asarray(g.astype(inputs[0].dtype)) for g in jax.vjp(function, *wide)[1](jnp.asarray(dy, jnp.float32))
    )


def linear_backward(x, weight, dy):
    return vjp(lambda x, w, b: x @ w.T + b, (x, weight, np.zeros(len(weight), x.dtype)), dy)


def rmsnorm_backward(x, weight, dy, *, eps):
    return vjp(lambda x, w: w * x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + eps), (x, weight), dy)


def swiglu_backward(gate, up, dy):
    return vjp(lambda a, b: jax.nn.silu(a) * b, (gate, up), dy)


def embedding_backward(tokens, dx, *, vocab):
    return vjp(lambda table: table[tokens], (np.zeros((vocab, dx.shape[1]), dx.dtype),), dx)[0]


def cross_entropy_backward(logits, targets, weights):
    def loss(logits):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1)[:, 0]

    return vjp(loss, (logits,), weights)[0]


def attention_backward(q, k, v, mask, do):
    group, root = q.shape[2] // k.shape[2], np.float32(1 / np.sqrt(q.shape[-1]))
    hidden = np.isneginf(mask)[:, None]  # if a row sees no key, JAX's softmax has NaN gradients

    def attend(q, k, v):
        k, v = (jnp.repeat(a, group, axis=2) for a in (k, v))
        scores = jnp.where(hidden, -1e30, jnp.einsum("bihd,bjhd->bhij", q * root, k, precision="highest"))
        p = jnp.where(hidden, 0, jax.nn.softmax(scores, axis=-1))
        return jnp.einsum("bhij,bjhd->bihd", p, v, precision="highest")

    return vjp(attend, (q, k, v), do)


FAST = [
    *((swiglu_backward, "float32"), (swiglu_backward, "bfloat16"), (linear_backward, "bfloat16")),
    *((rmsnorm_backward, "bfloat16"), (embedding_backward, "float32"), (cross_entropy_backward, "bfloat16")),
]
SLOW = [
    *((linear_backward, "float32"), (rmsnorm_backward, "float32"), (embedding_backward, "bfloat16")),
    *((cross_entropy_backward, "float32"), (attention_backward, "float32"), (attention_backward, "bfloat16")),
]


@pytest.mark.parametrize(
    ("candidate", "dtype"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_automatic_differentiation_is_within_bounds(candidate, dtype):
    name = candidate.__name__
    report = verify(
        CONTRACTS[name], Direct(candidate, name=name), precision=precision(dtype), examples=40, shapes=3, seed=0
    )
    assert report.outcome == "within bounds", report.worst.finding
