from decimal import Decimal, localcontext

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.reference.softmax import Running, running_update, softmax, softmax_online
from tests.support.strategies import U, assert_within, dtypes, noises, sizes

lengths = sizes(8)
# Multiples of 1/8, so that sums and differences of a few numbers are exact.
eighths = st.integers(-16_000, 16_000).map(lambda n: n / 8)
rows = st.lists(eighths | st.just(-np.inf), min_size=1, max_size=20).map(np.array)
finite_rows = st.lists(eighths, min_size=1, max_size=20).map(np.array)


def spread(x: np.ndarray) -> np.ndarray:
    """Return the largest minus the smallest finite score of each row, [*batch, 1]."""
    seen = np.isfinite(x)
    top = np.max(x, axis=-1, keepdims=True, initial=-np.inf, where=seen)
    bottom = np.min(x, axis=-1, keepdims=True, initial=np.inf, where=seen)
    return np.maximum(top - bottom, 0)  # -inf - inf if a row has no finite score


def online_bound(x: np.ndarray, blocks: int) -> np.ndarray:
    """Bound the relative error of `softmax_online`, or of `softmax`, compared with exact probabilities.

    The magnitude of an exponent is at most the spread, so its rounding error is at most u times the spread. The
    exponents that rescale the sum add up to at most the spread, since the maximum only rises from block to block. Each
    rescaling adds 4 u: an exp (2 u), a product and a sum. Then come n terms, their exp, and a quotient.
    """
    return (3 * spread(x) + 4 * blocks + x.shape[-1] + 6) * U


@given(x=finite_rows)
def test_value(x):
    """Softmax agrees with Decimal arithmetic of 50 digits."""
    with localcontext(prec=50):
        weights = [Decimal(float(a)).exp() for a in x]
        exact = np.array([float(w / sum(weights)) for w in weights])
    # A probability may be subnormal in float64, where the spacing of numbers bounds the error.
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
        assert_within(p[seen], exact, exact * 2 * len(x) * U)  # the order of the sum may differ


@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 5)), block=st.integers(1, 6))
def test_a_row_without_scores_is_zeros(shape, block):
    x = np.full(shape, -np.inf)
    np.testing.assert_array_equal(softmax(x), 0)
    np.testing.assert_array_equal(softmax_online(x, block=block), 0)
    x[0] = -20_000.0  # rows are independent, and a row of low scores is not an empty row
    np.testing.assert_array_equal(softmax(x)[1:], 0)
    assert_within(softmax(x)[0], np.full(shape[1], 1 / shape[1]), U)


@given(noise=noises, length=lengths, block=st.integers(1, 18), hidden=st.integers(0, 17), low=st.booleans())
def test_online_equals_one_pass(noise, length, block, hidden, low):
    x = noise(3, length, dtype=np.float64)
    x[:, :hidden] = -np.inf  # hides whole blocks, or all keys
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
