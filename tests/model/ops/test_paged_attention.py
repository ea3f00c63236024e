"""Paged attention with XLA's ops and with the CPU's op equals the reference. No row's bits depend on other rows."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.cache import LayerPages, extended, from_int8, to_int8
from llamaspec.model.ops.cpu import cpu_attend
from llamaspec.model.ops.paged_attention import attend_pages
from llamaspec.model.ops.table import Positions
from llamaspec.reference.attention import attention, causal_mask
from llamaspec.reference.config import Config
from tests.support.strategies import seeds

HEADS, KV_HEADS, WIDTH, PAGE, BLOCKS, BATCH = 6, 2, 16, 4, 5, 5
CONFIG = Config(
    dim=16, layers=1, heads=HEADS, kv_heads=KV_HEADS, head_dim=WIDTH, ffn=8, vocab=8, context=20, eps=1e-5, theta=1e4
)
ATTEND = jax.jit(partial(attend_pages, config=CONFIG), static_argnames="window")


@partial(jax.jit, static_argnames="window")
def attend_listed(q: jax.Array, cache: LayerPages, at: jax.Array, window: int | None) -> jax.Array:
    """Compute paged attention with the CPU's op, with one query head for each key head."""
    assert q.shape[1:3] == (1, KV_HEADS)
    positions = Positions(at, jnp.zeros(()), jnp.zeros(()))
    return cpu_attend(q, cache, positions, window=window, config=replace(CONFIG, heads=KV_HEADS))


FORMS = pytest.mark.parametrize(("attend", "heads"), [(ATTEND, HEADS), (attend_listed, KV_HEADS)])


def draw_pages(seed: int, *, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw the pages of keys and of values, and a shuffled page table."""
    rng = np.random.default_rng(seed)
    shape = (1 + rows * BLOCKS, KV_HEADS, PAGE, WIDTH)
    k, v = rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)
    table = 1 + rng.permutation(rows * BLOCKS).reshape(rows, BLOCKS).astype(np.int32)
    return k, v, table


def contiguous(pages: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return one sequence's keys or values from its pages, [capacity, kv_heads, head_dim]."""
    return pages[table].swapaxes(1, 2).reshape(-1, KV_HEADS, WIDTH)


def spoil(pages: np.ndarray, table: np.ndarray, used: int) -> None:
    """Write NaN to page 0, and to a sequence's positions from `used` on."""
    pages[0] = np.nan
    for place in range(used, BLOCKS * PAGE):
        pages[table[place // PAGE], :, place % PAGE] = np.nan


@FORMS
@given(
    seed=seeds,
    seq=st.sampled_from([1, 3]),
    starts=st.lists(st.integers(-1, BLOCKS * PAGE - 3), min_size=BATCH, max_size=BATCH),
    window=st.sampled_from([None, 3]),
)
def test_each_row_attends_to_its_own_pages(attend, heads, seed, seq, starts, window):
    seq = 1 if attend is attend_listed else seq
    k, v, table = draw_pages(seed, rows=BATCH)
    q = np.random.default_rng(seed + 1).normal(size=(BATCH, seq, heads, WIDTH)).astype(np.float32)
    for row, start in enumerate(starts):
        for pages in (k, v):
            spoil(pages, table[row], start + seq if start >= 0 else 0)
    at = np.array([[start + i if start >= 0 else -1 for i in range(seq)] for start in starts], np.int32)
    h = np.asarray(attend(q, LayerPages(*map(jnp.asarray, (k, v, table))), at, window=window))
    for row, start in enumerate(starts):
        if start < 0:
            np.testing.assert_array_equal(h[row], 0)
            continue
        used = start + seq
        mask = causal_mask(seq, used, offset=start, window=window)
        keys, values = (contiguous(pages, table[row])[:used] for pages in (k, v))
        np.testing.assert_allclose(h[row], attention(q[row], keys, values, mask).reshape(seq, -1), atol=2e-6)


@FORMS
@given(seed=seeds, starts=st.lists(st.integers(-1, BLOCKS * PAGE - 1), min_size=BATCH, max_size=BATCH))
def test_a_row_has_the_same_bits_at_any_place_and_in_any_pages(attend, heads, seed, starts):
    k, v, table = draw_pages(seed, rows=BATCH)
    q = np.random.default_rng(seed + 1).normal(size=(BATCH, 1, heads, WIDTH)).astype(np.float32)
    at = np.array(starts, np.int32)[:, None]
    together = np.asarray(attend(q, LayerPages(*map(jnp.asarray, (k, v, table))), at, window=None))
    rng = np.random.default_rng(seed + 2)
    renumbered = np.append(0, 1 + rng.permutation(len(k) - 1))  # page i moves to renumbered[i]
    moved = [np.empty_like(pages) for pages in (k, v)]
    for new, old in zip(moved, (k, v), strict=True):
        new[renumbered] = old
    for row in range(BATCH):
        place = int(rng.integers(BATCH))
        own_positions = np.full_like(at, -1)
        own_positions[place] = at[row]
        own_table = np.zeros_like(table)
        own_table[place] = renumbered[table[row]]
        queries = rng.normal(size=q.shape).astype(np.float32)
        queries[place] = q[row]
        h = np.asarray(attend(queries, LayerPages(*map(jnp.asarray, (*moved, own_table))), own_positions, window=None))
        np.testing.assert_array_equal(h[place], together[row])


@given(seed=seeds, starts=st.lists(st.integers(-1, BLOCKS * PAGE - 3), min_size=BATCH, max_size=BATCH))
@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_new_keys_and_values_are_where_the_table_says(dtype, seed, starts):
    k, v, table = draw_pages(seed, rows=BATCH)
    new = np.random.default_rng(seed + 1).normal(size=(2, BATCH, 3, KV_HEADS, WIDTH)).astype(np.float32)
    table[:, -1] = 0  # the row has no such page
    pages = [jnp.asarray(a) if dtype == np.float32 else to_int8(jnp.asarray(a)) for a in (k, v)]
    at = np.array([[start + i if start >= 0 else -1 for i in range(3)] for start in starts], np.int32)
    before = LayerPages(pages[0], pages[1], jnp.asarray(table))
    after = extended(before, jnp.asarray(new[0]), jnp.asarray(new[1]), jnp.asarray(at))
    for old, now, rows in zip(pages, after[:2], new, strict=True):
        expected = np.array(old)
        for row, start in enumerate(starts):
            for i in range(3 if start >= 0 else 0):
                value = jnp.asarray(rows[row, i]) if dtype == np.float32 else to_int8(jnp.asarray(rows[row, i]))
                if page := table[row, (start + i) // PAGE]:
                    expected[page, :, (start + i) % PAGE] = value
        np.testing.assert_array_equal(np.asarray(now), expected)


def test_xla_knows_that_no_two_places_are_written_at_once():
    """The HLO of a write to the cache states that its indices are unique.

    Without this statement, a GPU would write a chunk with atomic operations.
    """
    k, v, table = draw_pages(0, rows=BATCH)
    new, at = jnp.zeros((BATCH, 3, KV_HEADS, WIDTH)), jnp.full((BATCH, 3), -1)
    hlo = jax.jit(extended).lower(LayerPages(k, v, table), new, new, at).as_text()  # type: ignore
    assert hlo.count('"stablehlo.scatter"') == hlo.count("unique_indices = true") == 2


def test_a_cache_of_int8_is_read_by_its_scales():
    k, v, table = draw_pages(0, rows=BATCH)
    q = np.random.default_rng(1).normal(size=(BATCH, 1, HEADS, WIDTH)).astype(np.float32)
    at = jnp.full((BATCH, 1), 11, jnp.int32)
    stored = LayerPages(to_int8(jnp.asarray(k)), to_int8(jnp.asarray(v)), jnp.asarray(table))

    def levels(rows):
        codes, scales = from_int8(rows)
        return codes * scales[..., None]

    h = ATTEND(q, stored, at, window=None)
    expected = ATTEND(q, LayerPages(levels(stored.k), levels(stored.v), stored.table), at, window=None)
    np.testing.assert_allclose(h, expected, atol=1e-5)


def test_the_form_for_a_cpu_knows_sinks_and_caps():
    config = replace(CONFIG, heads=KV_HEADS, attention_cap=2.0)
    k, v, table = draw_pages(3, rows=BATCH)
    rng = np.random.default_rng(4)
    q = rng.normal(size=(BATCH, 1, KV_HEADS, WIDTH)).astype(np.float32)
    at = jnp.array([[0], [7], [-1], [19], [4]], jnp.int32)
    cache, sinks = LayerPages(*map(jnp.asarray, (k, v, table))), jnp.asarray(rng.normal(size=KV_HEADS), jnp.float32)
    positions = Positions(at, jnp.zeros(()), jnp.zeros(()))
    h = cpu_attend(jnp.asarray(q), cache, positions, window=3, config=config, sinks=sinks)
    expected = attend_pages(jnp.asarray(q), cache, at, window=3, config=config, sinks=sinks)
    np.testing.assert_allclose(h, expected, atol=2e-6)
