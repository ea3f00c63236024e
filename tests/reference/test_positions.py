"""Sinusoidal positions and ALiBi: known values, and how each encodes distance."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.alibi import alibi_mask, alibi_slopes
from llamaspec.reference.attention import attention_weights
from llamaspec.reference.rope import frequencies, rope_interleaved
from llamaspec.reference.sinusoidal import sinusoidal
from tests.support.strategies import U, assert_within

places = st.integers(0, 5000)
dims = st.integers(1, 8).map(lambda pairs: 2 * pairs)


@given(m=places, n=places, dim=dims)
def test_rotating_back_by_n_gives_the_position_n_earlier(m, n, dim):
    """Rotating a sinusoidal position back by n gives the position n earlier, within the roundings of three angles."""
    at, turns = sinusoidal(np.array([m]), dim=dim), frequencies(dim, theta=10_000.0)
    turned = rope_interleaved(at[:, None], np.array([n]), turns)[0, 0]
    before = sinusoidal(np.array([m - n]), dim=dim)[0]
    assert_within(turned, before, np.repeat((m + n + abs(m - n)) * turns + 8, 2) * U)


@given(m=places, n=places, dim=dims)
def test_products_depend_on_the_distance_only(m, n, dim):
    at_m, at_n = sinusoidal(np.array([m, n]), dim=dim)
    turns = frequencies(dim, theta=10_000.0)
    bound = np.sum((m + n + abs(m - n)) * turns + dim + 8) * U
    assert_within(at_m @ at_n, np.sum(np.cos((m - n) * turns)), bound)
    assert_within(at_m @ at_m, dim / 2, (dim + 4) * dim * U)


def test_slopes_are_those_of_the_paper_and_of_its_code():
    np.testing.assert_array_equal(alibi_slopes(8), [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256])
    sixteen = alibi_slopes(16)
    np.testing.assert_array_equal(alibi_slopes(12), [*alibi_slopes(8), *sixteen[0:8:2]])  # every other of 16 slopes
    np.testing.assert_array_equal(alibi_slopes(1), [2.0**-8])
    with pytest.raises(ValueError, match="at least one head"):
        alibi_slopes(0)


@given(heads=st.integers(1, 9), queries=st.integers(1, 4), offset=st.integers(0, 50))
def test_alibi_weights_depend_on_distance_and_ignore_later_keys(heads, queries, offset):
    keys = offset + queries
    q, k = np.zeros((heads, queries, 1, 2)), np.ones((heads, keys, 1, 2))
    p = attention_weights(q, k, alibi_mask(heads, queries, keys, offset=offset))[:, 0]  # [heads, queries, keys]
    assert not np.triu(p, offset + 1).any()
    last = p[:, -1]
    ratio = np.exp(-alibi_slopes(heads))[:, None]  # weight of a key over the weight of the next key
    assert_within(last[:, :-1], last[:, 1:] * ratio, last[:, 1:] * (4 * keys + 8) * U)
    # Shifting a row of scores changes nothing, so one bias per key serves every query.
    by_key = alibi_slopes(heads)[:, None, None] * np.arange(keys) + np.where(
        alibi_mask(heads, queries, keys, offset=offset) < -1e300, -np.inf, 0
    )
    assert_within(attention_weights(q, k, by_key)[:, 0], p, p * (8 * keys + 8) * U)
