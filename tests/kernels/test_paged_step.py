"""Attention kernels in the serving engine's two programs with a paged cache, compared with XLA's attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamaspec.model.cache import LayerPages, Pages
from llamaspec.model.ops.gpu import calls, pallas_ops
from llamaspec.model.ops.gpu_products import MOST_SEQUENCES
from llamaspec.model.ops.paged_attention import attend_pages
from llamaspec.model.ops.table import Positions
from llamaspec.model.weights.loading import abstract_params
from llamaspec.pallas_kernels.parts.compat import interpreter
from llamaspec.reference.config import Config
from tests.support.refusals import mentions

TINY = Config(dim=256, layers=1, heads=4, kv_heads=2, head_dim=64, ffn=256, vocab=64, context=128, eps=1e-5, theta=1e4)
BFLOAT16 = np.dtype(jnp.bfloat16)
PAGE, BLOCKS, WIDTH = 64, 2, 3
PAGES = Pages(1 + WIDTH * BLOCKS, PAGE)
PARAMS = abstract_params(TINY, dtype=BFLOAT16, positions=PAGE * BLOCKS)
SIZES = {"batch": WIDTH, "capacity": PAGE * BLOCKS, "pages": PAGES}


def drawn(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, BFLOAT16)


@pytest.mark.sampled(1)  # 5 s each
@pytest.mark.parametrize("rows", ["a step", "a chunk"])
def test_attention_is_that_of_the_plain_form(rows):
    """Kernels agree with XLA for a step with an idle row and for a prompt chunk. Unused rows of the pages hold NaN."""
    at = np.array([[70], [-1], [3]], np.int32) if rows == "a step" else 60 + np.arange(64, dtype=np.int32)[None]
    table = np.array([[4, 1], [0, 0], [2, 5]], np.int32)[: len(at)]
    k, v = (np.array(drawn(seed, PAGES.number, TINY.kv_heads, PAGE, TINY.head_dim)) for seed in (0, 1))
    for pages in (k, v):
        pages[[0, 3, 6]] = np.nan
    cache = LayerPages(*map(jnp.asarray, (k, v, table)))
    q = drawn(2, *at.shape, TINY.heads, TINY.head_dim)
    angles = jnp.zeros((*at.shape, TINY.head_dim // 2))
    with interpreter():
        ops, reasons = pallas_ops(TINY, PARAMS, **SIZES)
        for call in calls(TINY, PARAMS, **SIZES):  # every op accepts its call
            op = partial(getattr(ops, call.op), **call.fixed)
            jax.eval_shape(op, *call.arguments)
        h = ops.attend(q, cache, Positions(jnp.asarray(at), angles, angles), window=None, config=TINY)
    expected = attend_pages(q, cache, jnp.asarray(at), window=None, config=TINY)
    np.testing.assert_allclose(np.asarray(h, np.float32), np.asarray(expected, np.float32), atol=0.02)
    assert reasons["attend"] is None
    assert mentions(reasons["norm_qkv"] or "", f"floats {MOST_SEQUENCES} vectors 3 XLA")
