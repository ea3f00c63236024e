"""Attention on a CPU as XLA compiles it: one query copies no keys, and prompts read few keys at once."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamaspec.model.cache import LayerCache
from llamaspec.model.ops.cpu import PROMPT_SPANS, cpu_attend
from llamaspec.model.ops.table import Positions
from llamaspec.reference.attention import attention, causal_mask
from tests.model.ops.test_decode_hlo import PASSED_ON, written
from tests.support.random_models import SMALL
from tests.support.strategies import Noise, assert_within, attention_bound, noises, share_of

HEADS, HEAD_DIM = 2, 64


def attending(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, start: int, window: int | None = None):
    """Compile attention of q [seq, heads, head_dim], from position `start` on, over k and v [rows, heads, head_dim]."""
    config = replace(SMALL, heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[2])
    cache = LayerCache(*(jnp.asarray(rows.swapaxes(0, 1)[None]) for rows in (k, v)))
    at = jnp.arange(start, start + len(q), dtype=jnp.int32)[None]
    angles = jnp.zeros((1, len(q), q.shape[2] // 2))
    arguments = (jnp.asarray(q[None]), cache, Positions(at, angles, angles))
    program = jax.jit(lambda *arguments: cpu_attend(*arguments, window=window, config=config))
    return program.lower(*arguments).compile(), arguments


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, start: int, window: int | None = None) -> np.ndarray:
    program, arguments = attending(q, k, v, start=start, window=window)
    return np.asarray(program(*arguments)).reshape(q.shape)


@settings(max_examples=share_of(10))  # each example compiles
@given(
    noise=noises,
    capacity=st.sampled_from([64, 70, 192]),
    start=st.integers(0, 60),
    window=st.sampled_from([None, 5]),
)
@example(noise=Noise(0, exponent=10, mean=4), capacity=64, start=0, window=None)  # scores of 10^8
def test_one_query_is_within_the_bound(noise, capacity, start, window):
    q = noise(1, HEADS, HEAD_DIM)
    k, v = noise(capacity, HEADS, HEAD_DIM), noise(capacity, HEADS, HEAD_DIM)
    mask = causal_mask(1, start + 1, offset=start, window=window)
    used = slice(0, start + 1)
    exact = attention(q, k[used], v[used], mask)
    bound = attention_bound(q, k[used], v[used], mask, dtype="float32", sums="float32")
    assert_within(attended(q, k, v, start=start, window=window), exact, bound)


@pytest.mark.parametrize("seq", [1, 3])
def test_no_row_is_read_past_the_span_in_use(seq: int):
    """Attention reads the cache in spans of rows, and reads no row after the last span that has a token.

    A NaN there would reach the result even with weight 0, because 0 times NaN is NaN.
    """
    rng = np.random.default_rng(0)
    capacity, start = 3 * PROMPT_SPANS.longest, PROMPT_SPANS.longest + 10
    q, k, v = (rng.standard_normal((rows, HEADS, HEAD_DIM), np.float32) for rows in (seq, capacity, capacity))
    k[2 * PROMPT_SPANS.longest :], v[2 * PROMPT_SPANS.longest :] = np.nan, np.nan
    assert np.isfinite(attended(q, k, v, start=start)).all()


def test_one_query_copies_no_keys():
    """Attention of one query does not copy the keys out of the cache. XLA's dot would first copy them."""
    q, k, v = (np.zeros((rows, HEADS, HEAD_DIM), np.float32) for rows in (1, 192, 192))
    text = attending(q, k, v, start=0)[0].as_text()
    assert text
    copied = [(name, kind) for name, kind, numbers in written(text) if numbers >= 64 * HEADS * HEAD_DIM]
    assert {kind for _, kind in copied} <= PASSED_ON
    assert "__ynn_fusion" not in text  # starting its threads takes longer than these sums


@pytest.mark.parametrize("kv_heads", [2, 12])
def test_scores_of_a_prompt_are_what_a_dot_writes(kv_heads: int):
    """For a prompt, XLA's dot writes the scores with one row per query.

    If it wrote one row per key, attention would need a transpose that is slower than the dot.
    """
    heads, seq, rows = 12, 4, 192
    q, k, v = (np.zeros((n, of, HEAD_DIM), np.float32) for n, of in ((seq, heads), (rows, kv_heads), (rows, kv_heads)))
    text = attending(q, k, v, start=0)[0].as_text()
    assert text
    written_by_dots = re.findall(r"= f32\[\d+,(\d+),(\d+)\]\S* dot\(", text)
    assert {int(width) for _, width in written_by_dots} == {HEAD_DIM, PROMPT_SPANS.smallest, rows}
    assert {int(queries) for queries, _ in written_by_dots} == {heads // kv_heads * seq}


@pytest.mark.sampled(1)  # 1 s each
@pytest.mark.parametrize(("heads", "dtype"), [(12, "float32"), (8, "float32"), (32, "float32"), (12, "bfloat16")])
def test_both_cores_read_the_cache(heads: int, dtype: str):
    """On two cores, attention of one query uses both, for every number of cache rows that it can choose to read.

    Without our help, XLA would run sums of only 16 numbers on one core.
    """
    q, k, v = (np.zeros((rows, heads, HEAD_DIM), dtype) for rows in (1, 256, 256))
    text = attending(q, k, v, start=0)[0].as_text()
    assert text
    sums = re.findall(rf"= f32\[1,{heads},\d+,[1-9]\d+\]\S* fusion\(.*kind=kLoop.*/(?:add|mul)\".*", text)
    assert len(sums) == 2 * (3 if heads == 32 else 2)  # for keys and values, in each span of at least 64 or 128 rows
    for line in sums:
        assert "outer_dimension_partitions" in line
