import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.attention import attention, causal_mask
from llamaspec.reference.cached_attention import attention_decode, attention_paged, attention_prefill
from tests.support.strategies import noises

windows = st.none() | st.integers(1, 5)


def draw_qkv(noise, queries: int, keys: int):
    return noise(2, queries, 4, 3), noise(2, keys, 2, 3), noise(2, keys, 2, 3)


@given(noise=noises, offset=st.integers(0, 5), queries=st.integers(1, 4), spare=st.integers(0, 3), window=windows)
def test_prefill_is_causal_attention_at_an_offset(noise, offset, queries, spare, window):
    used = offset + queries
    q, k, v = draw_qkv(noise, queries, used + spare)
    k[:, used:] = v[:, used:] = np.nan
    o = attention_prefill(q, k, v, np.array([offset, offset]), window=window)
    mask = causal_mask(queries, used, offset=offset, window=window)
    np.testing.assert_array_equal(o, attention(q, k[:, :used], v[:, :used], np.stack([mask, mask])))


@given(noise=noises, length=st.integers(1, 6), window=windows)
def test_decoding_is_prefill_of_one_query(noise, length, window):
    q, k, v = draw_qkv(noise, 1, 7)
    lengths = np.array([length, length + 1])
    decoded = attention_decode(q[:, 0], k, v, lengths, window=window)
    np.testing.assert_allclose(decoded, attention_prefill(q, k, v, lengths - 1, window=window)[:, 0], rtol=1e-12)


@given(noise=noises, order=st.permutations(range(6)), lengths=st.tuples(st.integers(0, 6), st.integers(0, 6)))
def test_pages_may_lie_anywhere(noise, order, lengths):
    q, k, v = draw_qkv(noise, 1, 6)
    table = np.array(order).reshape(2, 3)
    k_pages, v_pages = (np.empty((6, 2, *a.shape[2:])) for a in (k, v))
    k_pages[table], v_pages[table] = (a.reshape(2, 3, 2, *a.shape[2:]) for a in (k, v))
    paged = attention_paged(q[:, 0], k_pages, v_pages, table, np.array(lengths))
    np.testing.assert_array_equal(paged, attention_decode(q[:, 0], k, v, np.array(lengths), window=None))
