import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.rope import (
    LinearScaling,
    Llama3Scaling,
    Scaling,
    frequencies,
    halves_to_interleaved,
    interleaved_to_halves,
    rope_halves,
    rope_interleaved,
)
from tests.support.goldens import read_golden
from tests.support.strategies import U, assert_within, dtypes, noises, roundoff

GOLDENS = read_golden("rope")["cases"]

ropes = st.sampled_from([rope_halves, rope_interleaved])
head_dims = st.sampled_from([2, 4, 6, 14, 16])
thetas = st.sampled_from([10_000.0, 500_000.0])
positions = st.integers(0, 100_000)
llama3_scalings = st.builds(
    Llama3Scaling,
    factor=st.sampled_from([2.0, 3.0, 8.0, 32.0]),
    low_frequency=st.sampled_from([0.5, 1.0, 2.0]),
    high_frequency=st.sampled_from([4.0, 5.0]),
    original_context=st.sampled_from([100, 8192]),
)


def pair_lengths(x: np.ndarray, rope) -> np.ndarray:
    """Return the length of each RoPE pair, at both of the pair's features."""
    interleaved = rope is rope_interleaved
    pairs = x.reshape(*x.shape[:-1], -1, 2) if interleaved else np.stack(np.split(x, 2, axis=-1), axis=-1)
    lengths = np.hypot(*np.moveaxis(pairs.astype(np.float64), -1, 0))
    return np.repeat(lengths, 2, axis=-1) if interleaved else np.tile(lengths, 2)


def turn_bound(x: np.ndarray, rope, *turns: int | np.ndarray) -> np.ndarray:
    """Bound the error of `x` after RoPE rotations by each of `turns` (in positions), one after another.

    The angle in radians is at most the number of positions. So rounding it moves a pair by at most this number times u
    times the pair's length. cos, sin, the products and the sum add 6 u times the length.
    """
    return (sum(np.abs(turn) for turn in turns) + 6 * len(turns)) * U * pair_lengths(x, rope)


@given(rope=ropes, noise=noises, head_dim=head_dims, theta=thetas, position=positions, dtype=dtypes)
def test_value(rope, noise, head_dim, theta, position, dtype):
    """RoPE multiplies each pair, read as a complex number, by exp(i m f), as Meta's code does.

    m is the position and f the pair's frequency.
    """
    x = noise(1, 2, head_dim, dtype=dtype)
    turns = frequencies(head_dim, theta=theta)
    exact = np.asarray(x, np.float64)
    pairs = exact.reshape(1, 2, -1, 2) if rope is rope_interleaved else exact.reshape(1, 2, 2, -1).swapaxes(-1, -2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * position * turns)
    order = -1 if rope is rope_interleaved else -2
    exact = np.stack([turned.real, turned.imag], axis=order).reshape(x.shape)
    y = rope(x, np.array([position]), turns)
    assert y.dtype == np.float64
    assert_within(y, exact, 2 * turn_bound(x, rope, position))


@given(rope=ropes, noise=noises, head_dim=head_dims, theta=thetas, position=positions)
def test_lengths_are_kept(rope, noise, head_dim, theta, position):
    x = noise(1, 2, head_dim)
    y = rope(x, np.array([position]), frequencies(head_dim, theta=theta))
    # cos^2 + sin^2 is 1 up to roundings, for any angle.
    assert_within(pair_lengths(y, rope), pair_lengths(x, rope), 8 * U * pair_lengths(x, rope))


@given(rope=ropes, noise=noises, head_dim=head_dims, theta=thetas, m=positions, n=positions, shift=positions)
def test_scores_depend_on_the_distance_alone(rope, noise, head_dim, theta, m, n, shift):
    q, k = noise(1, 1, head_dim), noise(1, 1, head_dim)
    turns = frequencies(head_dim, theta=theta)

    def score(m, n):
        return np.sum(rope(q, np.array([m]), turns) * rope(k, np.array([n]), turns))

    size = np.sum(pair_lengths(q, rope) * pair_lengths(k, rope)) / 2  # each pair counts twice
    angles = 2 * (m + n + shift) + 4 * 6 + 2 * head_dim
    assert_within(score(m, n), score(m + shift, n + shift), 2 * angles * U * size)


@given(rope=ropes, noise=noises, head_dim=head_dims, m=positions, n=positions)
def test_rotations_add_up(rope, noise, head_dim, m, n):
    x = noise(1, 2, head_dim)
    turns = frequencies(head_dim, theta=10_000.0)
    once = rope(x, np.array([m + n]), turns)
    twice = rope(rope(x, np.array([m]), turns), np.array([n]), turns)
    assert_within(twice, once, 2 * turn_bound(x, rope, m, n, m + n))


@given(rope=ropes, noise=noises, head_dim=head_dims)
def test_position_0_is_the_identity(rope, noise, head_dim):
    x = noise(2, 3, head_dim)
    np.testing.assert_array_equal(rope(x, np.zeros(2, int), frequencies(head_dim, theta=10_000.0)), x)


@given(rope=ropes, noise=noises, at=st.lists(positions, min_size=6, max_size=6))
def test_every_token_turns_to_its_own_position(rope, noise, at):
    x, at = noise(2, 3, 2, 8), np.array(at).reshape(2, 3)
    turns = frequencies(8, theta=10_000.0)
    y = rope(x, at, turns)
    for place in np.ndindex(2, 3):
        np.testing.assert_array_equal(y[place], rope(x[place][None], at[place][None], turns)[0])


@given(noise=noises, head_dim=head_dims, heads=st.integers(1, 3), position=positions)
def test_both_pairings_agree_after_the_permutation(noise, head_dim, heads, position):
    """RoPE in halves and interleaved RoPE give the same result if the rows of a projection are permuted."""
    weight, x = noise(heads * head_dim, 5), noise(5)
    turns = frequencies(head_dim, theta=10_000.0)
    rows = interleaved_to_halves(weight @ x, heads=heads)  # a vector [heads * head_dim], such as a bias
    np.testing.assert_array_equal(rows.reshape(heads, 2, -1)[:, 0], (weight @ x).reshape(heads, -1)[:, 0::2])

    interleaved = rope_interleaved((weight @ x).reshape(1, heads, head_dim), np.array([position]), turns)
    halves = rope_halves(rows.reshape(1, heads, head_dim), np.array([position]), turns)
    np.testing.assert_array_equal(halves.ravel(), interleaved_to_halves(interleaved.ravel(), heads=heads))
    np.testing.assert_array_equal(interleaved.ravel(), halves_to_interleaved(halves.ravel(), heads=heads))


@given(pairs=st.integers(1, 8), heads=st.integers(1, 4), cols=st.integers(1, 3))
def test_the_permutations_undo_each_other(pairs, heads, cols):
    rows = np.arange(heads * pairs * 2 * cols).reshape(-1, cols)
    there = interleaved_to_halves(rows, heads=heads)
    assert sorted(there[:, 0]) == sorted(rows[:, 0])
    np.testing.assert_array_equal(there // cols % (2 * pairs * heads) // (2 * pairs), rows // cols // (2 * pairs))
    np.testing.assert_array_equal(halves_to_interleaved(there, heads=heads), rows)
    np.testing.assert_array_equal(interleaved_to_halves(halves_to_interleaved(rows, heads=heads), heads=heads), rows)


def scaling_of(parameters: dict) -> Scaling | None:
    match parameters:
        case {"rope_type": "default"}:
            return None
        case {"rope_type": "linear", "factor": factor}:
            return LinearScaling(factor)
        case _:
            names = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
            return Llama3Scaling(*(parameters[name] for name in names))


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda g: f"{g['head_dim']} {g['theta']:g} {g['parameters']}")
def test_frequencies_of_transformers(golden):
    scaling = scaling_of(golden["parameters"])
    actual = frequencies(golden["head_dim"], theta=golden["theta"], scaling=scaling)
    # transformers raises theta to the power 2i/d in float32. The exponent is off by up to u, which changes the power by
    # ln(theta) u. A power, its reciprocal, a division by the factor, and the decimals of the file follow.
    relative = (np.log(golden["theta"]) + 6) * roundoff(np.float32)
    bound = actual * relative
    if isinstance(scaling, Llama3Scaling):
        # Between low and high, the share that is kept also depends on the frequency, which multiplies its error by up
        # to high / (high - low).
        low, high = scaling.low_frequency, scaling.high_frequency
        unscaled = frequencies(golden["head_dim"], theta=golden["theta"])
        bound = bound + unscaled * (relative + 4 * roundoff(np.float32)) * high / (high - low)
    assert_within(golden["frequencies"], actual, bound)


@given(head_dim=head_dims, theta=thetas)
def test_frequencies_are_a_geometric_sequence_from_1(head_dim, theta):
    turns = frequencies(head_dim, theta=theta)
    assert turns.shape == (head_dim // 2,)
    assert turns[0] == 1
    ratio = theta ** (-2 / head_dim)
    assert_within(turns[1:] / turns[:-1], np.full(head_dim // 2 - 1, ratio), 40 * U * ratio)


@given(noise=noises, factor=st.sampled_from([2, 4, 8]), position=st.integers(0, 10_000), rope=ropes)
def test_linear_scaling_divides_positions(noise, factor, position, rope):
    x = noise(1, 2, 8)
    stretched = frequencies(8, theta=10_000.0, scaling=LinearScaling(float(factor)))
    y = rope(x, np.array([position * factor]), stretched)
    np.testing.assert_array_equal(y, rope(x, np.array([position]), frequencies(8, theta=10_000.0)))


@given(scaling=llama3_scalings, theta=thetas)
def test_llama3_scaling_keeps_fast_pairs_and_stretches_slow_ones(scaling, theta):
    before, after = frequencies(128, theta=theta), frequencies(128, theta=theta, scaling=scaling)
    wavelengths = 2 * np.pi / before
    fast = wavelengths < scaling.original_context / scaling.high_frequency
    slow = wavelengths > scaling.original_context / scaling.low_frequency
    assert fast.any() and slow.any()
    np.testing.assert_array_equal(after[fast], before[fast])
    np.testing.assert_array_equal(after[slow], before[slow] / scaling.factor)
    between = ~fast & ~slow
    assert np.all(after[between] <= before[between])
    assert np.all(after[between] >= before[between] / scaling.factor * (1 - 4 * U))
    assert np.all(np.diff(after) < 0)
