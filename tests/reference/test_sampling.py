"""`reference.sampling` agrees with definitions written as loops, with its laws, and with transformers' processors."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.reference.sampling import distribution, draw, keep_min_p, keep_top_k, keep_top_p, penalize, temper
from llamaspec.reference.softmax import softmax
from tests.support.goldens import read_golden
from tests.support.strategies import U, assert_within, noises

GOLDENS = read_golden("sampling")["rows"]

# Small integers divided by their sum, so that ties are frequent.
counts = st.lists(st.integers(0, 6), min_size=1, max_size=12).filter(any)
distributions = counts.map(lambda ns: np.array(ns) / sum(ns))
# Sums of sixteenths are exact, so the order of addition never decides whether a sum is below a threshold.
sixteenths = st.lists(st.integers(0, 15), min_size=0, max_size=7).map(lambda cuts: np.diff([0, *sorted(cuts), 16]) / 16)
logits = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12).map(np.array)
fractions = st.floats(0, 1) | st.sampled_from([n / 16 for n in range(17)])
top_ps = fractions.filter(lambda p: p > 0)
top_ks = st.integers(0, 14)
temperatures = st.sampled_from([0.0, 5e-324, 1e-300, 0.01, 0.5, 1.0, 1.3, 100.0])
penalties = st.sampled_from([0.5, 1.0, 1.1, 2.0])


def renormalized(p, mask):
    total = sum(x for x, keep in zip(p, mask, strict=True) if keep)
    return np.array([x / total if keep else 0.0 for x, keep in zip(p, mask, strict=True)])


def close(actual, exact):
    """Assert that both distributions drop the same tokens, and are equal up to rounding of the renormalizing sum."""
    np.testing.assert_array_equal(actual == 0, exact == 0)
    assert_within(actual, exact, 2 * (len(exact) + 2) * U * exact)


@given(p=distributions, k=top_ks)
def test_top_k_by_loops(p, k):
    """Top-k keeps a token if fewer than k tokens are more probable."""
    close(keep_top_k(p, k=k), renormalized(p, [k == 0 or sum(q > x for q in p) < k for x in p]))


@given(p=sixteenths, top_p=top_ps)
@example(p=np.array([0.25, 0.5, 0.25]), top_p=0.5)  # the first token reaches top_p exactly, so the others are dropped
def test_top_p_by_loops(p, top_p):
    """Top-p keeps a token if the probabilities of all more probable tokens sum to less than top_p."""
    close(keep_top_p(p, top_p=top_p), renormalized(p, [sum(q for q in p if q > x) < top_p or top_p == 1 for x in p]))


@given(p=distributions, min_p=fractions)
def test_min_p_by_loops(p, min_p):
    """Min-p keeps a token if its probability is at least min_p times the largest."""
    close(keep_min_p(p, min_p=min_p), renormalized(p, [x >= min_p * max(p) for x in p]))


@given(logits=logits, penalty=penalties, data=st.data())
def test_penalty_by_loops(logits, penalty, data):
    seen = np.array(data.draw(st.lists(st.booleans(), min_size=len(logits), max_size=len(logits))))
    exact = [x if not s else x / penalty if x > 0 else x * penalty for x, s in zip(logits.tolist(), seen, strict=True)]
    penalized = penalize(logits, seen, penalty=penalty)
    np.testing.assert_array_equal(penalized, exact)
    if penalty >= 1:
        assert np.all(penalized <= logits)


@given(logits=logits, temperature=temperatures)
@example(logits=np.array([2.0, 3.0]), temperature=5e-324)  # both overflow in the division
def test_temperature(logits, temperature):
    p = temper(logits, temperature=temperature)
    if temperature >= 0.01:
        exact = softmax(logits / temperature)
        spread = np.ptp(logits) / temperature
        assert_within(p, exact, exact * (6 * spread + 4 * len(p) + 20) * U + 2.0**-1074)
    elif temperature == 0:
        np.testing.assert_array_equal(p, np.arange(len(p)) == logits.tolist().index(max(logits)))
    else:  # at the lowest temperature only the largest logit remains; it leads by at least 1/8
        np.testing.assert_array_equal(p, (logits == max(logits)) / np.sum(logits == max(logits)))


@given(noise=noises, temperature=temperatures)
def test_temperature_1_is_softmax_and_no_other_overflows(noise, temperature):
    logits = noise(9)
    np.testing.assert_array_equal(temper(logits, temperature=1.0), softmax(logits))
    assert_within(temper(logits, temperature=temperature).sum(), 1, 20 * U)


@given(noise=noises)
def test_greedy_is_the_largest_and_the_first_of_equals(noise):
    logits = noise(9)
    [token] = np.flatnonzero(temper(logits, temperature=0.0))
    assert token == min(i for i in range(9) if logits[i] == max(logits))


@given(p=distributions, top_k=top_ks, top_p=top_ps, min_p=fractions)
def test_each_filter_gives_a_distribution_without_reordering(p, top_k, top_p, min_p):
    for q in (keep_top_k(p, k=top_k), keep_top_p(p, top_p=top_p), keep_min_p(p, min_p=min_p)):
        assert q.dtype == np.float64 and np.all(q >= 0)
        assert_within(q.sum(), 1, 2 * len(p) * U)
        mask = q > 0
        assert mask[p == p.max()].all()  # the most probable tokens always remain
        assert not mask[p == 0].any()
        assert all(mask[p == x].all() or not mask[p == x].any() for x in p)  # ties stay or go together
        assert mask.all() or p[~mask].max() < p[mask].min()
        assert np.all(q[mask] >= p[mask] * (1 - 4 * len(p) * U))


@given(p=distributions, ks=st.tuples(st.integers(1, 14), st.integers(1, 14)), ps=st.tuples(top_ps, top_ps))
def test_looser_filters_keep_more(p, ks, ps):
    (few, many), (low, high) = sorted(ks), sorted(ps)
    assert not np.any((keep_top_k(p, k=few) > 0) & (keep_top_k(p, k=many) == 0))
    assert not np.any((keep_top_p(p, top_p=low) > 0) & (keep_top_p(p, top_p=high) == 0))
    assert not np.any((keep_min_p(p, min_p=high) > 0) & (keep_min_p(p, min_p=low) == 0))


@given(p=distributions, data=st.data(), top_k=top_ks, min_p=fractions)
def test_filters_do_not_depend_on_the_names_of_the_tokens(p, data, top_k, min_p):
    order = np.array(data.draw(st.permutations(range(len(p)))))
    close(keep_top_k(p[order], k=top_k), keep_top_k(p, k=top_k)[order])
    close(keep_min_p(p[order], min_p=min_p), keep_min_p(p, min_p=min_p)[order])


@given(p=sixteenths, top_p=top_ps, data=st.data())
def test_top_p_does_not_depend_on_the_names_of_the_tokens(p, top_p, data):
    order = np.array(data.draw(st.permutations(range(len(p)))))
    close(keep_top_p(p[order], top_p=top_p), keep_top_p(p, top_p=top_p)[order])


@given(p=distributions)
def test_filters_that_keep_all_change_nothing(p):
    np.testing.assert_array_equal(keep_top_k(p, k=0), p)
    np.testing.assert_array_equal(keep_top_k(p, k=len(p)), p)
    np.testing.assert_array_equal(keep_top_p(p, top_p=1.0), p)
    close(keep_min_p(p, min_p=0.0), p)


@given(p=distributions.filter(lambda p: np.sum(p == p.max()) == 1), small=st.floats(1e-300, 1e-3))
def test_the_strictest_filters_are_greedy(p, small):
    greedy = (p == p.max()).astype(np.float64)
    for q in (keep_top_k(p, k=1), keep_top_p(p, top_p=small), keep_min_p(p, min_p=1.0)):
        np.testing.assert_array_equal(q, greedy)


@given(logits=logits, seed=st.integers(0, 99), temperature=temperatures, top_k=top_ks, top_p=top_ps, min_p=fractions)
def test_greedy_survives_every_filter(logits, seed, temperature, top_k, top_p, min_p):
    seen = np.random.default_rng(seed).random(len(logits)) < 0.5
    options = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": 1.3}
    greedy = int(np.argmax(distribution(logits, seen, temperature=0.0, **options)))
    assert greedy == np.argmax(penalize(logits, seen, penalty=1.3))
    assert distribution(logits, seen, temperature=temperature, **options)[greedy] > 0


# Each filter works on the result of the previous one: the first two probabilities become 2/3 and 1/3, the first three
# 1/2, 1/4 and 1/4.
@pytest.mark.parametrize(
    ("options", "p"),
    [
        ({"top_k": 2, "top_p": 0.5}, [1, 0, 0, 0]),  # top-p over all four would keep two: 0.4 is less than 0.5
        ({"top_k": 3, "top_p": 0.74}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 3, "top_p": 0.76}, [1 / 2, 1 / 4, 1 / 4, 0]),
    ],
)
def test_top_k_comes_before_top_p(options, p):
    logits = np.log([0.4, 0.2002, 0.2, 0.1998])  # slightly different, since ties are kept or dropped together
    neutral = {"temperature": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert_within(distribution(logits, np.zeros(4, bool), **neutral, **options), p, 1e-3)


@pytest.mark.parametrize("row", GOLDENS, ids=lambda row: str(row["seen"]))
def test_distributions_of_transformers(row):
    logits = np.array(row["logits"])
    seen = np.isin(np.arange(len(logits)), row["seen"])
    assert len(row["cases"]) == 28
    for case in row["cases"]:
        p = distribution(logits, seen, **case["options"])
        exact = np.array(case["p"])
        np.testing.assert_array_equal(p == 0, exact == 0)
        # Both are float64: on each side, exponents are rounded relative to their size, then 12 terms are added.
        spread = np.ptp(logits) * max(1, case["options"]["repetition_penalty"]) / case["options"]["temperature"]
        assert_within(p, exact, exact * (12 * spread + 100) * U)


@given(ns=counts)
def test_draws_are_as_frequent_as_probable(ns):
    """Drawing once for each u of an even grid draws each token exactly as often as its probability says."""
    total = sum(ns)
    p = np.array(ns) / total
    grid = [(2 * i + 1) / (2 * total) for i in range(total)]
    assert np.bincount([draw(p, u) for u in grid], minlength=len(ns)).tolist() == ns


@given(p=sixteenths)
def test_draw_is_the_inverse_of_the_cumulative_distribution(p):
    """The drawn token is the first one with a cumulative probability above u.

    The test takes multiples of 1/16 as u, and the floats just below and above them.
    """
    upto = [sum(map(Fraction, p[: i + 1].tolist())) for i in range(len(p))]
    for step in np.arange(16) / 16:
        for u in (float(np.nextafter(step, 0)), float(step), float(np.nextafter(step, 1))):
            assert draw(p, u) == next(token for token, mass in enumerate(upto) if mass > Fraction(u))


@given(p=distributions, u=st.floats(0, 1, exclude_max=True))
def test_draw_never_gives_what_has_no_probability(p, u):
    for at in (0.0, u, float(np.nextafter(1, 0))):
        assert p[draw(p, at)] > 0
    assert draw(p, u / 2) <= draw(p, u)


@given(p=distributions, u=st.floats(0, 1, exclude_max=True))
def test_draw_does_not_need_a_sum_of_1(p, u):
    assert draw(p * 0.5, u) == draw(p, u) == draw(p * 4, u)
