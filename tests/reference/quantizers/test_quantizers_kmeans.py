import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.quantizers import kmeans
from llamaspec.reference.quantizers.kmeans import lloyd, nearest, optimal
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.support.goldens import read_golden
from tests.support.strategies import U, assert_within, roundoff

GOLDENS = read_golden("quantizers/methods")["kmeans"]
U32 = roundoff(np.float32)

weights = st.builds(Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-30, 30))
importances = st.sampled_from([None, Weights("uniform", seed=1), Weights("student", seed=2)])


def importance_of(h: Weights | None, shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape) if h is None else np.abs(h(*shape)).astype(np.float64)


def loss(w: np.ndarray, h: np.ndarray, levels: np.ndarray) -> float:
    return float(np.sum(h * (w - levels[nearest(w, levels)]) ** 2))


@pytest.mark.parametrize("case", GOLDENS["cases"], ids=lambda case: str(case["bits"]))
def test_lloyd_ends_where_scikit_learn_does(case):
    row = Weights("normal", seed=20)(1, GOLDENS["cols"])[0].astype(np.float64)
    levels = lloyd(row, np.ones(len(row)), 1 << case["bits"])
    # A mean of n numbers, summed in any order, has n roundings of their size.
    assert_within(levels, np.array(case["levels"]), 2 * len(row) * U * np.max(np.abs(row)))
    exact = loss(row, np.ones(len(row)), levels)
    assert_within(case["inertia"], exact, 4 * len(row) * U * np.sum(row**2))


@given(weights=weights, h=importances, n=st.integers(1, 7), k=st.integers(1, 4))
def test_no_partition_is_better_than_the_optimum(weights, h, n, k):
    """The optimum's loss is the smallest over all ways to cut the sorted weights into k pieces."""
    w, h = np.sort(weights(n).astype(np.float64)), importance_of(h, (n,))
    least = np.inf
    for cuts in itertools.combinations_with_replacement(range(n + 1), k - 1):
        pieces = list(itertools.pairwise([0, *cuts, n]))
        means = [np.sum(h[i:j] * w[i:j]) / np.sum(h[i:j]) if np.any(h[i:j]) else 0.0 for i, j in pieces]
        least = min(least, sum(np.sum(h[i:j] * (w[i:j] - m) ** 2) for (i, j), m in zip(pieces, means, strict=True)))
    actual = loss(w, h, optimal(w, h, k))
    # Differences of cumulative sums: n roundings of the sum of squares around the mean of all weights, in each of two
    # sums.
    slack = 16 * n * U * np.sum(h * (w - np.mean(w)) ** 2) + n * U**2 * np.sum(h * w**2)
    assert least - slack <= actual <= least + slack


@given(weights=weights, h=importances, n=st.sampled_from([1, 2, 17, 64]), bits=st.integers(1, 4))
def test_lloyd_is_no_better_than_the_optimum_and_improves_on_its_start(weights, h, n, bits):
    w, h = weights(n).astype(np.float64), importance_of(h, (n,))
    k = 1 << bits
    actual, least = loss(w, h, lloyd(w, h, k)), loss(w, h, optimal(w, h, k))
    slack = 16 * n * U * np.sum(h * (w - np.mean(w)) ** 2) + n * U**2 * np.sum(h * w**2)
    assert least <= actual + slack
    order = np.argsort(w, kind="stable")
    shares = np.cumsum(h[order]) / np.sum(h)
    start = w[order][np.minimum(np.searchsorted(shares, (np.arange(k) + 0.5) / k), n - 1)]
    assert actual <= loss(w, h, start) + slack


@given(weights=weights, h=importances, levels=st.sampled_from([lloyd, optimal]), bits=st.integers(1, 4))
def test_codes_are_nearest_and_levels_means(weights, h, levels, bits):
    w = weights(2, 32)
    importance = importance_of(h, w.shape)
    q = kmeans.quantize(w, bits=bits, levels=levels, importance=importance)
    assert q.levels.shape == (2, 1 << bits) and np.all(np.diff(q.levels, axis=-1) >= 0)
    distances = np.abs(w[..., None].astype(np.float64) - q.levels[:, None].astype(np.float64))
    chosen = np.take_along_axis(distances, q.codes[..., None].astype(int), axis=-1)[..., 0]
    np.testing.assert_array_equal(chosen, np.min(distances, axis=-1))
    np.testing.assert_array_equal(kmeans.dequantize(q), np.take_along_axis(q.levels, q.codes.astype(int), axis=-1))
    if levels is lloyd:
        return  # the last levels may be means of other partitions with the same sum
    for row in range(2):
        exact = optimal(w[row].astype(np.float64), importance[row], 1 << bits)
        np.testing.assert_array_equal(q.levels[row], exact.astype(np.float32))
        codes = nearest(w[row].astype(np.float64), exact)
        for code in np.unique(codes):
            has = codes == code
            mean = np.sum(importance[row, has] * w[row, has]) / np.sum(importance[row, has])
            assert_within(exact[code], mean, 64 * U * np.max(np.abs(w[row])))


@given(weights=weights)
def test_few_distinct_weights_are_kept(weights):
    w = np.resize(weights(4), (1, 32))
    q = kmeans.quantize(w, bits=2, levels=optimal)
    np.testing.assert_array_equal(kmeans.dequantize(q), w)


@given(seed=st.integers(0, 2**32 - 1), power=st.integers(-30, 30), levels=st.sampled_from([lloyd, optimal]))
def test_powers_of_two_pass_into_the_levels(seed, power, levels):
    w = Weights("student", seed)(2, 32)
    q, scaled = (kmeans.quantize(a, bits=3, levels=levels) for a in (w, w * np.float32(2.0**power)))
    np.testing.assert_array_equal(scaled.codes, q.codes)
    np.testing.assert_array_equal(scaled.levels, q.levels * np.float32(2.0**power))


def test_importance_changes_the_levels():
    w = Weights("normal", seed=24)(4, 128)
    h = np.where(np.arange(128) < 8, 1000.0, 1.0) * np.ones((4, 1))
    plain, heard = (kmeans.quantize(w, bits=3, levels=optimal, importance=a) for a in (None, h))
    important = [np.sum((kmeans.dequantize(q) - w)[:, :8] ** 2) for q in (plain, heard)]
    assert important[1] < important[0] / 4


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_byte_comes_back(bits):
    every = np.tile(np.arange(256, dtype=np.uint8), bits)
    np.testing.assert_array_equal(kmeans.pack(kmeans.unpack(every, bits=bits), bits=bits), every)


@pytest.mark.parametrize(
    ("w", "bits", "h", "message"),
    [
        (np.array([[np.nan]]), 2, None, "must be finite"),
        (np.ones((1, 4)), 0, None, "codes of 1 to 8 bits, got 0"),
        (np.ones((1, 4)), 9, None, "codes of 1 to 8 bits, got 9"),
        (np.ones((1, 2)), 1, np.array([[1.0, -1.0]]), "importance must be finite and not negative"),
        (np.ones((1, 2)), 1, np.array([[0.0, 0.0]]), "importance must be finite and not negative"),
    ],
)
def test_refusals(w, bits, h, message):
    with pytest.raises(ValueError, match=message):
        kmeans.quantize(w, bits=bits, levels=lloyd, importance=h)
