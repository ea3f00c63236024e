import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.quantizers import pruning, symmetric
from tests.goldens.quantizers.weights import KINDS, Weights

weights = st.builds(
    Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-140, 127)
)
patterns = st.sampled_from([(2, 4), (1, 4), (4, 8), (0, 2), (2, 2)])


@given(weights=weights, keep=st.integers(0, 12))
def test_the_smallest_of_the_tensor_go(weights, keep):
    w = weights(3, 4)
    mask = pruning.fine_grained(w, keep=keep)
    assert mask.sum() == keep
    assert not (0 < keep < 12) or np.min(np.abs(w)[mask]) >= np.max(np.abs(w)[~mask])
    np.testing.assert_array_equal(pruning.fine_grained(w * mask, keep=keep) & (w != 0), mask & (w != 0))


@given(weights=weights, keep=st.integers(0, 3))
def test_the_smallest_rows_go(weights, keep):
    w = weights(3, 4)
    mask = pruning.channels(w, keep=keep)
    assert mask.sum() == 4 * keep and np.all(mask == mask[:, :1])
    norms = np.linalg.norm(w.astype(np.float64), axis=-1)
    if 0 < keep < 3:
        assert np.min(norms[mask[:, 0]]) >= np.max(norms[~mask[:, 0]]) * (1 - 2.0**-48)


@given(weights=weights, pattern=patterns)
def test_the_smallest_of_every_group_go(weights, pattern):
    n, m = pattern
    w = weights(2, 16)
    mask = pruning.n_of_m(w, n=n, m=m)
    groups, kept_rows = np.abs(w).reshape(-1, m), mask.reshape(-1, m)
    assert np.all(kept_rows.sum(axis=-1) == n)
    for size, stays in zip(groups.astype(np.float64), kept_rows, strict=True):
        best = max((np.sum(size[list(chosen)]) for chosen in itertools.combinations(range(m), n)), default=0)
        assert np.sum(size[stays]) >= best * (1 - 2.0**-50)


def test_pruning_keeps_the_first_of_equal_weights():
    w = np.array([[1.0, -1.0, 1.0, -1.0]])
    np.testing.assert_array_equal(pruning.fine_grained(w, keep=2), [[True, True, False, False]])
    np.testing.assert_array_equal(pruning.n_of_m(w, n=1, m=2), [[True, False, True, False]])
    np.testing.assert_array_equal(pruning.channels(np.ones((3, 2)), keep=2)[:, 0], [True, True, False])


def test_rows_of_any_size():
    """Channels are ranked correctly, even if the squares of their weights overflow or underflow."""
    for size in (1e300, 1e-300):
        w = np.array([[1.0, 1.0], [2.0, 1.0]]) * min(size, 1e38)
        np.testing.assert_array_equal(pruning.channels(w, keep=1)[:, 0], [False, True])


@given(weights=weights, pattern=patterns)
def test_compression_keeps_what_stays(weights, pattern):
    n, m = pattern
    w = weights(2, 16)
    mask = pruning.n_of_m(w, n=n, m=m)
    small = pruning.compress(w, mask, n=n, m=m)
    assert small.values.shape == small.places.shape == (2, 16 // m * n)
    if n:
        np.testing.assert_array_equal(pruning.expand(small, n=n, m=m), w * mask)


@given(seed=st.integers(0, 2**32 - 1), pattern=st.sampled_from([(2, 4), (1, 4), (4, 8), (2, 2)]))
def test_the_product_of_kept_weights_is_the_product_of_the_pruned_matrix(seed, pattern):
    n, m = pattern
    rng = np.random.default_rng(seed)
    w, x = rng.integers(-9, 10, (5, 16)).astype(np.float32), rng.integers(-9, 10, (3, 16)).astype(np.float32)
    mask = pruning.n_of_m(w, n=n, m=m)
    compressed = pruning.compress(w, mask, n=n, m=m)
    # Integers, so that no sum is rounded
    np.testing.assert_array_equal(pruning.sparse_linear(x, compressed, n=n, m=m), x @ (w * mask).T)
    with pytest.raises(ValueError, match="do not fit 15 inputs"):
        pruning.sparse_linear(x[:, :15], compressed, n=n, m=m)


@given(weights=weights)
def test_codes_can_be_pruned_too(weights):
    q = symmetric.quantize(weights(2, 16), bits=4, block=(1, 16))
    mask = pruning.n_of_m(symmetric.dequantize(q), n=2, m=4)
    small = pruning.compress(q.codes, mask, n=2, m=4)
    assert small.values.dtype == np.int8
    np.testing.assert_array_equal(pruning.expand(small, n=2, m=4), q.codes * mask)


def test_places_are_packed():
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(pruning.pack(pruning.unpack(every)), every)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pruning.fine_grained(np.full((1, 2), np.nan), keep=1), "must be finite"),
        (lambda: pruning.channels(np.full((1, 2), np.inf), keep=1), "must be finite"),
        (lambda: pruning.n_of_m(np.full((1, 4), np.inf), n=2, m=4), "must be finite"),
        (lambda: pruning.fine_grained(np.ones((2, 2)), keep=5), "cannot keep 5 of 4"),
        (lambda: pruning.channels(np.ones((2, 2)), keep=-1), "cannot keep -1 of 2"),
        (lambda: pruning.n_of_m(np.ones((2, 6)), n=2, m=4), "rows of 6 weights do not fill groups of 4"),
        (lambda: pruning.n_of_m(np.ones((2, 4)), n=5, m=4), "cannot keep 5 of 4"),
        (lambda: pruning.compress(np.ones((1, 4)), np.ones((1, 4), bool), n=2, m=4), "does not keep 2 of every 4"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
