"""Our own ops, called as the reference is: `llamaspec verify gemv --candidate tests.test_verify_ours:cpu_gemv`, say.

What runs inside the fused ops of a block is verified by walking through models (tests/test_model_against_reference.py).
A kernel of attention takes seconds an example in the interpreter: those are candidates here, but no tests.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from model.cache import LayerCache
from model.ops import Positions, attend, cpu_product, dot
from model.ops import rmsnorm as model_rmsnorm
from model.ops import rope as model_rope
from pallas_kernels import (
    add,
    argmax,
    attention_decode,
    attention_paged,
    attention_prefill,
    gemv,
    rmsnorm,
    rope,
    softmax,
    swiglu,
)
from pallas_kernels.compat import interpreter
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


def interpreted(kernel):
    """A kernel for GPUs, run on the CPU."""

    def candidate(*arrays, **named):
        with interpreter():
            return jax.block_until_ready(kernel(*arrays, **named))

    return candidate


pallas_add = interpreted(add.add)
pallas_argmax = interpreted(argmax.argmax)
pallas_rmsnorm = interpreted(rmsnorm.rmsnorm)
pallas_softmax = interpreted(softmax.softmax)
pallas_swiglu = interpreted(lambda gate, up: swiglu.swiglu(jnp.concatenate([gate, up], axis=-1)))
pallas_gemv = interpreted(lambda x, weight: gemv.gemv(weight, x[None])[0])


@interpreted
def pallas_rope_halves(x, positions, frequencies):
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return rope.rope(x, jnp.cos(angles), jnp.sin(angles))


@interpreted
def pallas_attention_decode(q, k, v, lengths, *, window):
    return attention_decode.attention_decode(q, _cached(k), _cached(v), lengths, window=window).reshape(q.shape)


@interpreted
def pallas_attention_prefill(q, k, v, offsets, *, window):
    return attention_prefill.attention_prefill(q, _cached(k), _cached(v), offsets, window=window).reshape(q.shape)


@interpreted
def pallas_attention_paged(q, k_pages, v_pages, table, lengths):
    k, v = k_pages.swapaxes(1, 2), v_pages.swapaxes(1, 2)
    return attention_paged.attention_paged(q, k, v, table, lengths).reshape(q.shape)


def _cached(a):
    """In the layout of a cache of ours, whose capacity is a multiple of 8."""
    return jnp.pad(a.swapaxes(1, 2), ((0, 0), (0, 0), (0, -a.shape[1] % 8), (0, 0)), constant_values=jnp.nan)


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


@pytest.mark.parametrize(
    ("op", "candidate", "only"),
    [
        ("add", pallas_add, {}),
        ("argmax", pallas_argmax, {}),
        ("rmsnorm", pallas_rmsnorm, {}),
        ("softmax", pallas_softmax, {}),
        ("swiglu", pallas_swiglu, {}),
        ("gemv", pallas_gemv, {"rows": [8], "cols": [256]}),
        ("rope_halves", pallas_rope_halves, {"pairs": [32]}),
    ],
)
def test_kernels_in_the_interpreter(op, candidate, only):
    assert_accepted(op, candidate, "float32", only, examples=3, shapes=1)


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
