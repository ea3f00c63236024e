import math

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from llamaspec.reference.attention import attention, attention_weights, causal_mask
from tests.support.strategies import Noise, assert_within, attention_bound, dtypes, noises, sizes

HEAD_DIM = 4
lengths = sizes(4)
ratios = st.sampled_from([1, 3, 7])  # query heads per key head
kv_heads = st.integers(1, 3)
windows = st.none() | st.integers(1, 9)


def naive(q, k, v, mask):
    """Compute attention from its definition with loops over single numbers, for arrays without a batch axis."""
    queries, heads, head_dim = q.shape
    keys, kv_heads, _ = k.shape
    q, k, v = (a.astype(np.float64).tolist() for a in (q, k, v))
    o = np.zeros((queries, heads, head_dim))
    for i in range(queries):
        for h in range(heads):
            g = h * kv_heads // heads
            seen = [j for j in range(keys) if mask[i, j] > -math.inf]
            scores = [
                math.fsum(a * b for a, b in zip(q[i][h], k[j][g], strict=True)) / math.sqrt(head_dim)
                + float(mask[i, j])
                for j in seen
            ]
            weights = [math.exp(score - max(scores)) for score in scores]
            for f in range(head_dim):
                values = (w * v[j][g][f] for j, w in zip(seen, weights, strict=True))
                o[i, h, f] = math.fsum(values) / math.fsum(weights) if seen else 0
    return o


def draw_qkv(noise, queries, keys, kv_heads, ratio, dtype=np.float32):
    shapes = [(queries, kv_heads * ratio), (keys, kv_heads), (keys, kv_heads)]
    return [noise(*shape, HEAD_DIM, dtype=dtype) for shape in shapes]


@given(noise=noises, queries=lengths, past=lengths, kv_heads=kv_heads, ratio=ratios, window=windows, dtype=dtypes)
@example(noise=Noise(0, exponent=6), queries=5, past=8, kv_heads=2, ratio=3, window=None, dtype=np.dtype("float32"))
def test_definition(noise, queries, past, kv_heads, ratio, window, dtype):
    q, k, v = draw_qkv(noise, queries, past + queries, kv_heads, ratio, dtype)
    mask = causal_mask(queries, past + queries, offset=past, window=window)
    o = attention(q, k, v, mask)
    assert o.dtype == np.float64
    assert_within(o, naive(q, k, v, mask), 2 * attention_bound(q, k, v, mask))


@given(queries=lengths, keys=lengths, offset=st.integers(-3, 9), window=windows)
def test_causal_mask(queries, keys, offset, window):
    mask = causal_mask(queries, keys, offset=offset, window=window)
    assert mask.shape == (queries, keys)
    for i, j in np.ndindex(queries, keys):
        position = offset + i
        seen = range(0 if window is None else max(0, position - window + 1), position + 1)
        assert mask[i, j] == (0 if j in seen else -np.inf)


def test_scores_are_divided_by_the_root_of_head_dim():
    q = np.array([[[2.0, 0.0, 0.0, 0.0]]])
    k = np.array([[[math.log(3), 9.0, 9.0, 9.0]], [[0.0, 9.0, 9.0, 9.0]]])
    v = np.array([[[1.0, 0.0, 4.0, 8.0]], [[0.0, 1.0, 4.0, 0.0]]])
    # The scores are ln 3 and 0, so the probabilities are 3/4 and 1/4.
    assert_within(attention(q, k, v, np.zeros((1, 2))), [[[0.75, 0.25, 4.0, 6.0]]], 1e-15)


@given(noise=noises, seq=st.integers(2, 9), at=st.integers(1, 8), ratio=ratios)
def test_no_query_sees_what_comes_after_it(noise, seq, at, ratio):
    assume(at < seq)
    q, k, v = draw_qkv(noise, seq, seq, 2, ratio)
    mask = causal_mask(seq, seq)
    before = attention(q, k, v, mask)[:at]
    k[at:], v[at:] = 1e9, -1e9
    np.testing.assert_array_equal(attention(q, k, v, mask)[:at], before)


@given(noise=noises, queries=lengths, keys=lengths, blind=st.lists(st.booleans(), min_size=9, max_size=9))
def test_a_query_that_sees_nothing_gives_0(noise, queries, keys, blind):
    q, k, v = draw_qkv(noise, queries, keys, 1, 3)
    rows = np.array(blind[:queries])
    mask = np.where(rows[:, None], -np.inf, np.zeros((queries, keys)))
    o = attention(q, k, v, mask)
    np.testing.assert_array_equal(o[rows], 0)
    np.testing.assert_array_equal(o[~rows], attention(q, k, v, np.zeros((queries, keys)))[~rows])


@given(noise=noises, queries=lengths, keys=lengths, kv_heads=kv_heads, ratio=ratios)
def test_grouped_queries_are_as_many_heads_with_keys_repeated(noise, queries, keys, kv_heads, ratio):
    q, k, v = draw_qkv(noise, queries, keys, kv_heads, ratio)
    mask = np.zeros((queries, keys))
    repeated = attention(q, np.repeat(k, ratio, axis=1), np.repeat(v, ratio, axis=1), mask)
    assert_within(attention(q, k, v, mask), repeated, 2 * attention_bound(q, k, v, mask))


@given(noise=noises, queries=lengths, kv_heads=kv_heads, ratio=ratios)
def test_a_single_key_gives_its_value(noise, queries, kv_heads, ratio):
    q, k, v = draw_qkv(noise, queries, 1, kv_heads, ratio)
    exact = np.broadcast_to(np.repeat(v, ratio, axis=1), q.shape)
    np.testing.assert_array_equal(attention(q, k, v, np.zeros((queries, 1))), exact)


@given(noise=noises, queries=lengths, keys=lengths, ratio=ratios)
def test_queries_of_zeros_give_the_mean(noise, queries, keys, ratio):
    q, k, v = draw_qkv(noise, queries, keys, 2, ratio)
    q[:] = 0
    mask = causal_mask(queries, keys)
    exact = np.stack([v[: i + 1].astype(np.float64).mean(axis=0) for i in range(queries)])
    assert_within(attention(q, k, v, mask), np.repeat(exact, ratio, axis=1), 2 * attention_bound(q, k, v, mask))


@given(noise=noises, queries=lengths, keys=lengths, ratio=ratios, value=st.integers(-9, 9))
def test_equal_values_are_the_outcome(noise, queries, keys, ratio, value):
    q, k, v = draw_qkv(noise, queries, keys, 2, ratio)
    v[:] = value
    mask = causal_mask(queries, keys)
    assert_within(attention(q, k, v, mask), np.full(q.shape, value), attention_bound(q, k, v, mask))


@given(noise=noises, queries=lengths, keys=lengths, data=st.data())
def test_order_of_the_keys_does_not_matter(noise, queries, keys, data):
    q, k, v = draw_qkv(noise, queries, keys, 2, 3)
    mask = causal_mask(queries, keys, offset=keys // 2, window=3)
    order = np.array(data.draw(st.permutations(range(keys))))
    again = attention(q, k[order], v[order], mask[:, order])
    assert_within(again, attention(q, k, v, mask), 2 * attention_bound(q, k, v, mask))


@given(noise=noises, queries=lengths, keys=lengths, times=st.integers(2, 3))
def test_keys_that_are_there_twice_change_nothing(noise, queries, keys, times):
    q, k, v = draw_qkv(noise, queries, keys, 2, 3)
    mask = causal_mask(queries, keys, offset=keys // 2)
    many_k, many_v = (np.repeat(a, times, axis=0) for a in (k, v))
    again = attention(q, many_k, many_v, np.repeat(mask, times, axis=1))
    assert_within(again, attention(q, k, v, mask), 2 * times * attention_bound(q, k, v, mask))


@given(noise=noises, seq=lengths, at=st.integers(0, 9), window=windows)
def test_in_two_parts_as_at_once(noise, seq, at, window):
    """Attention of the first `at` queries, and then of the other queries at their offset, equals one call for all."""
    assume(at <= seq)
    q, k, v = draw_qkv(noise, seq, seq, 2, 3)
    mask = causal_mask(seq, seq, window=window)
    early = attention(q[:at], k[:at], v[:at], causal_mask(at, at, window=window)) if at else np.zeros_like(q[:0])
    late = attention(q[at:], k, v, causal_mask(seq - at, seq, offset=at, window=window))
    assert_within(np.concatenate([early, late]), attention(q, k, v, mask), 2 * attention_bound(q, k, v, mask))


@given(noise=noises, seq=lengths, window=st.integers(1, 9))
def test_what_has_left_the_window_does_not_matter(noise, seq, window):
    q, k, v = draw_qkv(noise, seq, seq, 1, 3)
    last = attention(q, k, v, causal_mask(seq, seq, window=window))[-1]
    inside = slice(max(0, seq - window), None)
    exact = attention(q[-1:], k[inside], v[inside], np.zeros((1, min(window, seq))))[0]
    assert_within(last, exact, 2 * attention_bound(q, k, v, np.zeros((1, 1))))


@given(noise=noises, queries=lengths, keys=lengths, power=st.integers(-20, 20))
def test_scale_moves_between_queries_and_keys(noise, queries, keys, power):
    q, k, v = draw_qkv(noise, queries, keys, 2, 3)
    mask = causal_mask(queries, keys)
    again = attention(q * 2.0**power, k * 2.0**-power, v, mask)
    np.testing.assert_array_equal(again, attention(q, k, v, mask))  # exact, since powers of two do not round


@pytest.mark.parametrize("low", [-20_000.0, 20_000.0])
def test_large_scores_of_either_sign(low):
    """Attention is right for scores at which exp overflows or underflows, since only their differences count."""
    q = np.full((1, 1, HEAD_DIM), 2.0 / HEAD_DIM)
    k = np.full((2, 1, HEAD_DIM), low)
    k[1] += math.log(3)
    v = np.array([0.0, 1.0])[:, None, None] * np.ones(HEAD_DIM)
    mask = np.zeros((1, 2))
    assert_within(attention(q, k, v, mask), np.full((1, 1, HEAD_DIM), 0.75), attention_bound(q, k, v, mask))


@given(noise=noises, shape=st.sampled_from([(1,), (2,), (2, 3)]), own=st.booleans())
def test_sequences_of_a_batch_are_independent(noise, shape, own):
    q, k, v = (noise(*shape, seq, heads, HEAD_DIM) for seq, heads in [(3, 6), (5, 2), (5, 2)])
    offsets = np.arange(math.prod(shape)) % 3 if own else np.full(math.prod(shape), 2)
    masks = np.stack([causal_mask(3, 5, offset=int(offset)) for offset in offsets]).reshape(*shape, 3, 5)
    o = attention(q, k, v, masks if own else masks[(0,) * len(shape)])
    for i in np.ndindex(*shape):
        assert_within(o[i], attention(q[i], k[i], v[i], masks[i]), 2 * attention_bound(q[i], k[i], v[i], masks[i]))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (2, 3), (1, 2), (7, 4)])
def test_refuses_heads_that_cannot_be_shared_evenly(heads, kv_heads):
    q, k = np.zeros((1, heads, HEAD_DIM)), np.zeros((1, kv_heads, HEAD_DIM))
    with pytest.raises(ValueError, match=f"{heads} query heads cannot share {kv_heads} key heads evenly"):
        attention(q, k, k, np.zeros((1, 1)))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_the_weights_are_given_back(queries, kv_heads, group, seed):
    """Each row of `attention_weights` sums to 1, hidden keys get 0, and the weighted mean of values is the output."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(queries, kv_heads * group, 2)), rng.normal(size=(queries + 2, kv_heads, 2))
    mask = causal_mask(queries, queries + 2, offset=1)
    p = attention_weights(q, k, mask)
    assert p.shape == (kv_heads * group, queries, queries + 2)
    np.testing.assert_allclose(p.sum(-1), 1.0, rtol=4e-16 * p.shape[-1])
    assert not p[:, np.isinf(mask)].any()
    mean = np.einsum("hij,jhd->ihd", p, k.repeat(group, axis=1))
    np.testing.assert_allclose(attention(q, k, k, mask), mean, atol=1e-14)
    zeros = attention_weights(q, k, np.full((queries, queries + 2), -np.inf))
    assert not zeros.any()
