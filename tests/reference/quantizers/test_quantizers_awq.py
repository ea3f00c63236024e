import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from llamaspec.reference.linear import linear
from llamaspec.reference.quantizers import affine, awq
from llamaspec.reference.quantizers.blocks import spread
from llamaspec.verify.bounds import running_error
from tests.goldens.quantizers import make_awq_search
from tests.goldens.quantizers.make_methods import inputs
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.support.goldens import read_golden
from tests.support.strategies import U, assert_within, roundoff

SEARCHED = read_golden("quantizers/awq_search")
GOLDENS = read_golden("quantizers/methods")["awq"]
U32 = roundoff(np.float32)

weights = st.builds(Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-10, 10))


def rounded(w: np.ndarray) -> np.ndarray:
    return affine.dequantize(awq.quantize(w, group=16))


def test_rounding_is_that_of_autoawq():
    """Codes and scales equal AutoAWQ's float32 results, in groups that have weights of both signs."""
    w = Weights("normal", seed=20)(*GOLDENS["shape"])
    q = awq.quantize(w, group=GOLDENS["group"])
    assert_within(np.array(GOLDENS["scales"]), q.scales, 4 * U32 * q.scales)
    np.testing.assert_array_equal(GOLDENS["zeros"], q.zeros)
    exact = affine.dequantize(q)
    x = w / np.repeat(q.scales.astype(np.float64), GOLDENS["group"], axis=1)
    tie = np.abs(np.abs(x - np.trunc(x)) - 0.5) < 8 * U32 * np.abs(x)
    assert not tie.any()
    assert_within(np.array(GOLDENS["rounded"]), exact, 8 * U32 * np.abs(exact))


@pytest.mark.parametrize("case", make_awq_search.CASES)
def test_the_search_ends_where_autoawqs_does(case):
    """Our search and AutoAWQ's choose the same alpha among twenty. The losses are equal within float32's rounding."""
    kind, rows, cols, tokens = case
    golden = SEARCHED["cases"][make_awq_search.key(*case)]
    w, x = kind(rows, cols), inputs(tokens, cols)
    s = awq.search(w, x, rounded=rounded)
    roundings = 2 * (tokens + 16)  # of a mean and a power, and of the maximum and minimum under a root
    assert_within(np.array(golden["scales"]), s, roundings * U32 * s)
    assert int(np.argmin(golden["losses"])) > 0
    means, exact = np.mean(np.abs(x.astype(np.float64)), axis=0), linear(x, w)
    for alpha, golden_loss in zip(awq.ALPHAS, golden["losses"], strict=True):
        factors = awq.scales(means, alpha=alpha)
        q = rounded(w * factors) / factors
        loss = np.mean((linear(x, q) - exact) ** 2)
        noise = running_error.gamma(2 * (cols + roundings)) * linear(np.abs(x), np.abs(w) + np.abs(q))
        off = np.sqrt(np.mean(noise**2))
        assert_within(golden_loss, loss, 2 * np.sqrt(loss) * off + off**2)


def test_words_are_read_as_autoawq_does():
    words = {name: np.array(array) for name, array in GOLDENS["words"].items()}
    packed = awq.PackedTensors(
        words["qweight"].astype(np.int32), words["qzeros"].astype(np.int32), words["scales"].astype(np.float16)
    )
    q = awq.unpack(packed)
    # AutoAWQ multiplies in float16.
    exact = affine.dequantize(q).T
    assert_within(np.array(GOLDENS["read"]), exact, 2.0**-11 * np.abs(exact))
    for before, after in zip(packed, awq.pack(q), strict=True):
        np.testing.assert_array_equal(before, after)
        assert before.dtype == after.dtype


@given(weights=weights, rows=st.sampled_from([8, 24]))
@example(weights=Weights("outliers", seed=0, exponent=20), rows=8)  # a scale beyond float16
def test_packing_keeps_everything_but_digits_of_the_scales(weights, rows):
    q = awq.quantize(weights(rows, 32), group=16)
    if np.max(q.scales) >= 65520:  # rounds to 2^16 in float16
        with pytest.raises(ValueError, match="the largest float16 is 65504"):
            awq.pack(q)
        return
    again = awq.unpack(awq.pack(q))
    np.testing.assert_array_equal(again.codes, q.codes)
    np.testing.assert_array_equal(again.zeros, q.zeros)
    assert_within(again.scales, q.scales, np.maximum(2.0**-11 * q.scales, 2.0**-25))


@given(w=weights, seed=st.integers(0, 2**32 - 1), outliers=st.booleans())
def test_the_search_is_never_worse_than_rounding(w, seed, outliers):
    w, x = w(8, 32), Weights("outliers" if outliers else "normal", seed)(16, 32)
    s = awq.search(w, x, rounded=rounded)
    assert s.shape == (32,) and np.all(s > 0)
    assert_within(np.max(s) * np.min(s), 1.0, 8 * U)
    exact = linear(x, w)
    plain, searched = (linear(a, b) - exact for a, b in ((x, rounded(w)), (x / s, rounded(w * s))))
    assert np.sum(searched**2) <= np.sum(plain**2) * (1 + 1e3 * U) + 1e3 * U * np.sum(exact**2) * U


@given(w=weights, seed=st.integers(0, 2**32 - 1))
def test_the_error_is_that_of_affine_over_the_factors(w, seed):
    w, x = w(8, 32), Weights("normal", seed)(16, 32)
    s = awq.search(w, x, rounded=rounded)
    q = awq.quantize(w * s, group=16)
    steps = spread(q.scales.astype(np.float64), w.shape)
    bound = steps / 2 + 15 * (2 * U32 * steps + 2.0**-150) + 8 * U * np.abs(w * s)
    assert_within(affine.dequantize(q) / s, w, bound / s)


@given(w=weights, seed=st.integers(0, 2**32 - 1), power=st.integers(-20, 20))
def test_powers_of_two_in_weights_leave_the_factors(w, seed, power):
    assume(w.kind != "denormal")
    w, x = w(8, 32), Weights("normal", seed)(16, 32)
    s, scaled = (awq.search(a, x, rounded=rounded) for a in (w, w * np.float32(2.0**power)))
    np.testing.assert_array_equal(scaled, s)


def test_the_search_gains():
    w, x = Weights("normal", seed=20)(16, 64), inputs(64, 64)
    x[:, ::16] *= 16  # salient features
    s = awq.search(w, x, rounded=rounded)
    exact = linear(x, w)
    assert np.sum((linear(x / s, rounded(w * s)) - exact) ** 2) < np.sum((linear(x, rounded(w)) - exact) ** 2) / 2
    assert np.argmax(s) % 16 == 0


def test_inactive_features_do_no_harm():
    w, x = Weights("normal", seed=29)(8, 32), Weights("normal", seed=30)(16, 32)
    x[:, 5] = 0
    s = awq.search(w, x, rounded=rounded)
    assert np.all(np.isfinite(s)) and np.all(s > 0)


def test_refusals():
    with pytest.raises(ValueError, match="inputs must be finite"):
        awq.search(np.ones((8, 16)), np.full((1, 16), np.nan), rounded=rounded)
    with pytest.raises(ValueError, match=r"multiple of 8\b.*\b12\b"):
        awq.pack(awq.quantize(np.ones((12, 16)), group=16))
    with pytest.raises(ValueError, match="must be finite"):
        awq.quantize(np.full((8, 16), np.nan), group=16)
