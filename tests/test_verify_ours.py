"""Our own ops, called as the reference is: `llamaspec verify gemv --candidate tests.test_verify_ours:cpu_gemv`, say.

What runs inside the fused ops of a block is verified by walking through models (tests/test_model_against_reference.py).
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from model.cache import LayerCache
from model.ops import Positions, attend, cpu_product, dot
from model.ops import rmsnorm as model_rmsnorm
from model.ops import rope as model_rope
from reference.config import Config
from verify.candidate import Direct
from verify.catalogue import contract_for
from verify.precision import precision
from verify.report import counterexample
from verify.runner import verify

xla_gemv = xla_gemm = jax.jit(dot)
cpu_gemv = jax.jit(cpu_product)
xla_rmsnorm = jax.jit(model_rmsnorm, static_argnames="eps")


@jax.jit
def xla_rope_halves(x, positions, frequencies):
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return model_rope(x, Positions(positions, jnp.cos(angles), jnp.sin(angles)))


@partial(jax.jit, static_argnames="window")
def xla_attention_prefill(q, k, v, offsets, *, window):
    at = offsets[:, None] + jnp.arange(q.shape[1])
    return _attend(q, k, v, at, window=window)


@partial(jax.jit, static_argnames="window")
def xla_attention_decode(q, k, v, lengths, *, window):
    return _attend(q[:, None], k, v, lengths[:, None] - 1, window=window)[:, 0]


def _attend(q, k, v, at, *, window):
    heads, head_dim = q.shape[2:]
    config = Config(
        dim=1,
        layers=1,
        heads=heads,
        kv_heads=k.shape[2],
        head_dim=head_dim,
        ffn=1,
        vocab=1,
        context=1,
        eps=1.0,
        theta=1.0,
    )
    cache = LayerCache(k.swapaxes(1, 2), v.swapaxes(1, 2))
    nowhere = jnp.zeros((*at.shape, 0))
    return attend(q, cache, Positions(at, nowhere, nowhere), window=window, config=config).reshape(q.shape)


# A cache of ours holds leftovers beyond its length, which are finite, and at least one position.
CACHED = {"padding": [0.0, 100.0]}
LENGTHS = {"lengths": [(1,), (7, 8), (33, 1, 16), (17,)]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("op", "candidate", "only"),
    [
        ("gemv", xla_gemv, {}),
        ("gemv", cpu_gemv, {"cols": [16, 128, 513]}),
        ("gemm", xla_gemm, {}),
        ("rmsnorm", xla_rmsnorm, {}),
        ("rope_halves", xla_rope_halves, {}),
        ("attention_prefill", xla_attention_prefill, CACHED),
        ("attention_decode", xla_attention_decode, {**CACHED, **LENGTHS}),
    ],
)
def test_ops_in_jax(op, candidate, only, dtype):
    assert_accepted(op, candidate, dtype, only)


def assert_accepted(op, candidate, dtype, only, *, examples=10, shapes=2):
    report = verify(
        contract_for(op),
        Direct(candidate, arrays="jax"),
        precision=precision(dtype),
        examples=examples,
        seed=7,
        shapes=shapes,
        only=only,
    )
    assert report.outcome == "within bounds", "\n".join(counterexample(report, contract_for(op)))
