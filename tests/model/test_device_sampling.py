"""Sampling on the device agrees with `reference.sampling`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume, example, given
from hypothesis import strategies as st

from llamaspec.model.options import SamplingOptions
from llamaspec.model.sampling import (
    as_arrays,
    distribution,
    draw,
    largest_in_one,
    largest_in_two,
    random_key,
    sample,
    sample_by_row,
    smallest,
    uniform,
)
from llamaspec.reference import sampling as reference
from tests.support.strategies import seeds

VOCAB = 300
DISTRIBUTION, DRAW, UNIFORM = map(jax.jit, (distribution, draw, uniform))
SAMPLE = jax.jit(sample, static_argnames="greedy")
SAMPLE_BY_ROW = jax.jit(sample_by_row)
LARGEST = tuple(map(jax.jit, (largest_in_two, largest_in_one)))

options = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([1e-30, 0.1, 0.8, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB - 1, VOCAB, VOCAB + 1]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


def draw_logits(seed: int, ties: int) -> np.ndarray:
    """Draw logits with a spread of a few units; if `ties` is set, round them so that many are equal."""
    logits = np.random.default_rng(seed).normal(0, 2, VOCAB)
    return (np.round(logits * ties) / ties if ties else logits).astype(np.float32)


@given(seed=seeds, ties=st.sampled_from([0, 1, 4]), options=options)
@example(seed=0, ties=0, options=SamplingOptions(temperature=1e-45))  # a subnormal, which the device flushes to 0
def test_filters_are_those_of_the_reference(seed, ties, options):
    logits = draw_logits(seed, ties)
    expected = reference.distribution(
        logits,
        np.zeros(VOCAB, bool),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=1.0,
    )
    actual = np.asarray(DISTRIBUTION(logits[None], as_arrays(options)))[0]
    # If float32 and float64 round a threshold to different sides, whole tokens are kept or dropped.
    assume(np.array_equal(actual > 0, expected.astype(np.float32) > 0) or not near_threshold(logits, options))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-30)


@given(
    seed=seeds,
    ties=st.sampled_from([0, 1, 4]),
    ties_at=st.lists(st.tuples(st.integers(0, VOCAB - 1), st.sampled_from([-np.inf, np.inf, np.nan, 0.0, -0.0]))),
)
@example(seed=0, ties=1, ties_at=[(i, -np.inf) for i in range(VOCAB)])
def test_the_largest_in_one_reduction_and_in_two(seed, ties, ties_at):
    """`largest` finds the same token in one reduction, as on a GPU, and in two, as on a CPU."""
    logits = draw_logits(seed, ties)
    for i, value in ties_at:
        logits[i] = value
    for dtype in (np.float32, jnp.bfloat16):
        rounded = logits.astype(dtype)
        expected = VOCAB if np.isnan(logits).any() else int(np.argmax(rounded))
        assert [int(largest(rounded[None])[0]) for largest in LARGEST] == [expected, expected]


@given(ways=st.sampled_from([2, 4, 16]), bounds=st.lists(st.integers(-1, 2**30), min_size=3, max_size=3), seed=seeds)
@example(16, [-1, 0, 0], 0)
@example(16, [-1, 2**30, 2**30], 0)
@example(2, [5, 6, 2**30], 0)
def test_the_smallest_that_is_enough(ways, bounds, seed):
    """`smallest` finds the same number whether a step halves a range, as on a CPU, or cuts it into 16, as on a GPU."""
    low, goal, high = sorted(bounds)
    assume(low < goal)
    random_goals = np.random.default_rng(seed).integers(low + 1, high + 1, 3)
    goal = jnp.asarray([[goal], *random_goals[:, None]], jnp.int32)
    bounds = (jnp.full_like(goal, bound) for bound in (low, high))
    np.testing.assert_array_equal(smallest(lambda t: t >= goal, *bounds, ways=ways), goal)


def near_threshold(logits: np.ndarray, options: SamplingOptions) -> bool:
    """Return whether a factor of 1 - 1e-5 or 1 + 1e-5 on top_p and min_p changes which tokens the reference keeps.

    For such logits, thresholds computed in float32 may keep different tokens.
    """
    survivors = []
    for nudge in (1 - 1e-5, 1 + 1e-5):
        nudged = {"top_p": min(options.top_p * nudge, 1.0), "min_p": min(options.min_p * nudge, 1.0)}
        p = reference.distribution(
            logits,
            np.zeros(VOCAB, bool),
            temperature=options.temperature,
            top_k=options.top_k,
            repetition_penalty=1.0,
            **nudged,
        )
        survivors.append(p > 1e-37)
    return not np.array_equal(*survivors)


@given(seed=seeds, ties=st.sampled_from([0, 1]), penalty=st.sampled_from([0.5, 1.0, 1.3]))
def test_greedy_takes_the_lowest_id_after_the_penalty(seed, ties, penalty):
    logits = draw_logits(seed, ties)
    seen = np.random.default_rng(seed).random(VOCAB) < 0.5
    expected = np.argmax(reference.penalize(logits, seen, penalty=float(np.float32(penalty))).astype(np.float32))
    chosen = SAMPLE(
        logits[None],
        seen[None],
        random_key(seed)[None],
        np.array([5], np.int32),
        as_arrays(SamplingOptions(temperature=0.0, repetition_penalty=penalty)),
        greedy=True,
    )
    assert int(chosen[0]) == expected


@given(seed=seeds, support=st.integers(1, VOCAB), u=st.floats(0, 1, exclude_max=True, width=32))
@example(seed=0, support=1, u=0.0)
@example(seed=0, support=VOCAB, u=1 - 2**-24)
def test_the_draw_inverts_the_cumulative_distribution(seed, support, u):
    p = np.random.default_rng(seed).exponential(size=VOCAB).astype(np.float32)
    p[np.argsort(p)[: VOCAB - support]] = 0
    p /= p.sum()
    token = int(DRAW(p[None], np.array([u], np.float32))[0])
    cumulative = np.cumsum(p.astype(np.float64))
    slack = VOCAB * 2.0**-24  # gamma_n of the device's sum
    assert p[token] > 0
    assert cumulative[token] >= (u - slack) * cumulative[-1]
    assert cumulative[token] - p[token] <= (u + slack) * cumulative[-1]


def test_logits_that_are_not_numbers_give_no_token():
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 3] = np.nan
    for options in (SamplingOptions(temperature=0.0), SamplingOptions(temperature=1.0)):
        arguments = (np.zeros((1, VOCAB), bool), random_key(0)[None], np.array([0], np.int32))
        assert int(SAMPLE(logits, *arguments, as_arrays(options), greedy=options.greedy)[0]) == VOCAB


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**20))
def test_random_numbers_are_those_of_jax(seed, position):
    key = jax.random.wrap_key_data(jnp.array([seed >> 32, seed % 2**32], jnp.uint32), impl="threefry2x32")
    expected = float(jax.random.uniform(jax.random.fold_in(key, position)))
    assert float(UNIFORM(random_key(seed), np.int32(position))) == expected
    if seed < 2**31:  # for larger seeds, JAX's key() needs 64-bit integers enabled
        assert np.array_equal(random_key(seed), jax.random.key_data(jax.random.key(seed)))


def test_draws_have_the_probabilities_of_the_distribution():
    """In 3,000 draws at different positions, token counts are within five standard deviations of expected counts."""
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    trials = 3000
    tokens = SAMPLE(
        np.tile(logits, (trials, 1)),
        np.zeros((trials, 4), bool),
        np.tile(random_key(1), (trials, 1)),
        np.arange(trials, dtype=np.int32),
        as_arrays(SamplingOptions(temperature=1.0, top_p=1.0)),
        greedy=False,
    )
    p = np.exp(logits)
    counts = np.bincount(np.asarray(tokens), minlength=4)
    assert np.all(np.abs(counts - trials * p) < 5 * np.sqrt(trials * p * (1 - p)))


def by_row(rows: list[SamplingOptions]) -> Any:
    """Stack the sampling options of several rows into arrays [rows, 1]; greedy rows get temperature 0."""
    scalars = [as_arrays(row) for row in rows]
    arrays = type(scalars[0])(*(np.array(column)[:, None] for column in zip(*scalars, strict=True)))  # type: ignore
    return arrays._replace(temperature=np.array([[0.0 if row.greedy else row.temperature] for row in rows], np.float32))


@given(seed=seeds, rows=st.lists(options | st.just(SamplingOptions(temperature=0.0)), min_size=5, max_size=5))
def test_a_row_uses_its_own_options_and_ignores_its_neighbors(seed, rows):
    logits = np.stack([draw_logits(seed + i, ties=i % 3) for i in range(5)])
    keys = np.stack([random_key(seed % 1000 + i) for i in range(5)])
    positions = np.arange(5, dtype=np.int32)
    together = np.asarray(SAMPLE_BY_ROW(logits, keys, positions, by_row(rows)))
    seen = np.zeros((1, VOCAB), bool)
    for i, row in enumerate(rows):
        place = slice(i, i + 1)
        single = SAMPLE(logits[place], seen, keys[place], positions[place], as_arrays(row), greedy=row.greedy)
        assert int(single[0]) == together[i]
        options_by_row = [SamplingOptions(temperature=0.5, top_k=j, top_p=0.5) for j in range(5)]
        options_by_row[i] = row
        assert np.asarray(SAMPLE_BY_ROW(logits, keys, positions, by_row(options_by_row)))[i] == together[i]


def test_a_filter_leaves_the_other_rows_as_they_are():
    """In a batch, top-k and top-p of some rows do not change the bits of rows without a filter.

    Normalizing an already normalized distribution again could change its bits.
    """
    logits = np.stack([draw_logits(seed, 0) for seed in range(4)])
    rows = [SamplingOptions(temperature=0.8, top_p=1.0)] * 4
    filtered = [rows[0], SamplingOptions(temperature=0.8, top_p=0.5), rows[2], SamplingOptions(top_k=3, top_p=1.0)]
    plain, mixed = (np.asarray(DISTRIBUTION(logits, by_row(row_options))) for row_options in (rows, filtered))
    np.testing.assert_array_equal(mixed[[0, 2]], plain[[0, 2]])
    assert (mixed[1] > 0).sum() < VOCAB and (mixed[3] > 0).sum() == 3
