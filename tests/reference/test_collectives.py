"""Laws of `reference.collectives`: ring and tree algorithms give the right results in the stated number of steps."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import DTypeLike

from llamaspec.reference import collectives as c
from tests.support.strategies import seeds

U32 = 2.0**-24
devices = st.integers(1, 9)


def drawn(seed: int, n: int, length: int, dtype: DTypeLike = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=n * length).astype(dtype) for _ in range(n)]


def bound(arrays: list[np.ndarray]) -> np.ndarray:
    """Bound the error of n - 1 additions in any order by Higham's gamma."""
    k = len(arrays) - 1
    return k * U32 / (1 - k * U32) * np.sum([np.abs(a.astype(np.float64)) for a in arrays], axis=0)


@given(seed=seeds, n=devices, length=st.integers(1, 4))
@example(seed=0, n=2, length=1)
def test_a_ring_gives_every_device_the_same_bits_of_the_sum(seed, n, length):
    arrays = drawn(seed, n, length)
    result = c.ring_all_reduce(arrays)
    for array, exact in zip(result.arrays, c.all_reduce(arrays), strict=True):
        assert array.dtype == np.float32
        assert (np.abs(array - exact) <= bound(arrays)).all()
        np.testing.assert_array_equal(array, result.arrays[0])
    assert result.steps == 2 * (n - 1)
    assert result.sent == 2 * (n - 1) * arrays[0].nbytes // n


@given(seed=seeds, n=devices, length=st.integers(1, 4))
def test_a_tree_gives_the_sum_in_logarithmically_many_steps(seed, n, length):
    arrays = drawn(seed, n, length)
    result = c.tree_all_reduce(arrays)
    for array, exact in zip(result.arrays, c.all_reduce(arrays), strict=True):
        assert (np.abs(array - exact) <= bound(arrays)).all()
    assert result.steps == 2 * math.ceil(math.log2(n))


@given(seed=seeds, n=devices, length=st.integers(1, 4))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(seed, n, length):
    arrays = drawn(seed, n, length, np.float64)
    for summed, parts in zip(c.all_reduce(arrays), c.all_gather(c.reduce_scatter(arrays)), strict=True):
        np.testing.assert_array_equal(summed, parts)


@given(n=devices, length=st.integers(1, 4))
def test_rings_move_the_parts_that_they_claim(n, length):
    arrays = [np.arange(n * length) * 1000 + device for device in range(n)]  # integers: sums are exact
    for actual, exact in zip(c.ring_reduce_scatter(arrays).arrays, c.reduce_scatter(arrays), strict=True):
        np.testing.assert_array_equal(actual, exact)
    for actual, exact in zip(c.ring_all_gather(arrays).arrays, c.all_gather(arrays), strict=True):
        np.testing.assert_array_equal(actual, exact)


@given(seed=seeds, n=devices, length=st.integers(1, 3))
def test_all_to_all_twice_changes_nothing(seed, n, length):
    arrays = drawn(seed, n, length)
    for actual, array in zip(c.all_to_all(c.all_to_all(arrays)), arrays, strict=True):
        np.testing.assert_array_equal(actual, array)


@pytest.mark.parametrize("root", [0, 2])
def test_a_broadcast_is_a_copy(root):
    arrays = [np.array([device]) for device in range(3)]
    copies = c.broadcast(arrays, root=root)
    copies[0][0] = 7
    assert [a[0] for a in copies[1:]] == [root, root] and arrays[root][0] == root


def test_a_sum_is_of_float64_whatever_the_arrays():
    arrays = [np.array([2.0**12], np.float16), np.array([1.0], np.float16), np.array([1.0], np.float16)]
    np.testing.assert_array_equal(c.all_reduce(arrays)[0], [4098.0])  # float16 would stay at 4096
    assert c.ring_all_reduce([np.full(2, 1.0, np.float16)] * 2).arrays[0].dtype == np.float16


def test_the_ring_wins_for_large_arrays_and_loses_for_small_ones():
    link = {"alpha": 1e-6, "beta": 1 / 370e9}
    assert c.ring_seconds(8, 1e9, **link) < c.tree_seconds(8, 1e9, **link) < c.one_shot_seconds(8, 1e9, **link)
    assert c.one_shot_seconds(8, 1e3, **link) < c.tree_seconds(8, 1e3, **link) < c.ring_seconds(8, 1e3, **link)
