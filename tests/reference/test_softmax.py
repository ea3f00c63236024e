from decimal import Decimal, localcontext

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.reference.softmax import Running, running_update, softmax, softmax_online
from tests.support.strategies import U, assert_within, dtypes, noises, sizes

lengths = sizes(8)
# Eighths, so that sums and differences of a few are exact.
eighths = st.integers(-16_000, 16_000).map(lambda n: n / 8)
rows = st.lists(eighths | st.just(-np.inf), min_size=1, max_size=20).map(np.array)
finite_rows = st.lists(eighths, min_size=1, max_size=20).map(np.array)


def spread(x: np.ndarray) -> np.ndarray:
    """How far the finite scores of each row are apart, [*batch, 1]."""
    seen = np.isfinite(x)
    top = np.max(x, axis=-1, keepdims=True, initial=-np.inf, where=seen)
    bottom = np.min(x, axis=-1, keepdims=True, initial=np.inf, where=seen)
    return np.maximum(top - bottom, 0)  # -inf where there are none


def online_bound(x: np.ndarray, blocks: int) -> np.ndarray:
    """How far `softmax_online`, or `softmax`, may be from the exact probabilities, relatively.

    Each exponent is rounded by at most u times its size, which is at most the spread; the exponents that rescale the
    sum round likewise, but only once together, since from block to block the maximum only rises. Each rescaling is an
    exp (2 u), a product and a sum; then there are n terms, their own exp, and a quotient.
    """
    return (3 * spread(x) + 4 * blocks + x.shape[-1] + 6) * U


@given(x=finite_rows)
def test_value(x):
    """Against 50 digits."""
    with localcontext(prec=50):
        weights = [Decimal(float(a)).exp() for a in x]
        exact = np.array([float(w / sum(weights)) for w in weights])
    # A probability may be too small for a float64, where the spacing of subnormal numbers takes over.
    assert_within(softmax(x), exact, exact * online_bound(x, 0) + 2.0**-1074)


@given(x=rows, shift=eighths)
def test_shift_changes_nothing(x, shift):
    np.testing.assert_array_equal(softmax(x + shift), softmax(x))


@given(noise=noises, length=lengths, dtype=dtypes)
def test_is_a_distribution(noise, length, dtype):
    x = noise(3, length, dtype=dtype)
    p = softmax(x)
    assert p.dtype == np.float64
    assert np.all(p >= 0)
    assert_within(p.sum(axis=-1), np.ones(3), (2 * length + 2) * U)


@given(noise=noises, length=lengths)
def test_keeps_the_order(noise, length):
    x = noise(length)
    order = np.argsort(x)
    assert np.all(np.diff(softmax(x)[order]) >= 0)


@given(x=rows)
@example(x=np.array([-np.inf]))
def test_minus_infinity_is_no_score(x):
    seen = np.isfinite(x)
    p = softmax(x)
    np.testing.assert_array_equal(p[~seen], 0)
    if seen.any():
        exact = softmax(x[seen])
        assert_within(p[seen], exact, exact * 2 * len(x) * U)  # the sum may be in another order


@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 5)), block=st.integers(1, 6))
def test_a_row_without_scores_is_zeros(shape, block):
    x = np.full(shape, -np.inf)
    np.testing.assert_array_equal(softmax(x), 0)
    np.testing.assert_array_equal(softmax_online(x, block=block), 0)
    x[0] = -20_000.0  # a row does not change the others, and a row of low scores is not a row without scores
    np.testing.assert_array_equal(softmax(x)[1:], 0)
    assert_within(softmax(x)[0], np.full(shape[1], 1 / shape[1]), U)


@given(noise=noises, length=lengths, block=st.integers(1, 18), hidden=st.integers(0, 17), low=st.booleans())
def test_online_equals_one_pass(noise, length, block, hidden, low):
    x = noise(3, length, dtype=np.float64)
    x[:, :hidden] = -np.inf  # whole blocks, or all
    if low:
        x[-1] -= 20_000.0
    p = softmax(x)
    assert_within(softmax_online(x, block=block), p, p * 2 * online_bound(x, -(-length // block)) + 2.0**-1074)


@given(noise=noises, blocks=st.lists(st.integers(1, 5), min_size=1, max_size=5), data=st.data())
def test_order_of_the_blocks_does_not_matter(noise, blocks, data):
    noise.blank = False
    scores = [noise(1, n, dtype=np.float64)[0] for n in blocks]
    order = data.draw(st.permutations(scores))

    def run(blocks):
        running = Running(np.array(-np.inf), np.array(0.0))
        for block in blocks:
            running = running_update(running, block)
        return running

    state, reordered = run(scores), run(order)
    assert state.maximum == reordered.maximum == max(block.max() for block in scores)
    assert_within(
        state.total,
        reordered.total,
        reordered.total * 2 * online_bound(np.concatenate(scores), len(blocks)),
    )
