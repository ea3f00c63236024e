import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.quantizers import affine, qat, symmetric
from llamaspec.reference.quantizers.blocks import spread
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.support.goldens import read_golden
from tests.support.strategies import U, assert_within

GOLDENS = read_golden("quantizers/methods")["fake_quantize"]

weights = st.builds(Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-20, 20))


@pytest.mark.parametrize("case", GOLDENS["cases"], ids=lambda case: f"{case['scale']}-{case['zero']}")
def test_both_passes_are_those_of_pytorch(case):
    x = np.array(case["x"], np.float32)
    fake = qat.fake_quantize(x, np.array(case["scale"]), np.array(float(case["zero"])), lowest=-128, highest=127)
    np.testing.assert_array_equal(fake.values, case["y"])
    np.testing.assert_array_equal(fake.passes, case["passes"])
    np.testing.assert_array_equal(qat.gradient(2 * np.ones(x.shape), fake), 2.0 * np.array(case["passes"]))


@given(weights=weights, bits=st.integers(2, 8))
def test_the_forward_pass_is_what_is_stored(weights, bits):
    w = weights(2, 8)
    q = symmetric.quantize(w, bits=bits, block=(1, 8))
    if np.all(q.scales > 0):
        largest = symmetric.largest_code(bits)
        fake = qat.fake_quantize(w, q.scales, np.zeros((2, 1)), lowest=-largest, highest=largest)
        np.testing.assert_array_equal(fake.values, symmetric.dequantize(q))
    a = affine.quantize(w, bits=bits, block=(1, 8))
    if np.all(a.scales > 0):
        zeros = a.zeros.astype(np.float64)
        fake = qat.fake_quantize(w, a.scales, zeros, lowest=0, highest=2**bits - 1)
        np.testing.assert_array_equal(fake.values, affine.dequantize(a))


@given(weights=weights, scale=st.sampled_from([0.01, 0.3, 1.0]), zero=st.integers(-8, 7), channels=st.booleans())
def test_laws(weights, scale, zero, channels):
    x = weights(2, 8)
    scales = np.array([[scale], [2 * scale]]) if channels else np.array(scale)
    grid = {"scales": scales, "zeros": np.array(float(zero)), "lowest": -8, "highest": 7}
    fake = qat.fake_quantize(x, **grid)
    np.testing.assert_array_equal(qat.fake_quantize(fake.values, **grid).values, fake.values)
    steps = spread(scales, x.shape) if channels else np.full(x.shape, scale)
    error = np.abs(fake.values - x)
    assert np.all(error[fake.passes] <= (steps / 2 + 4 * U * np.abs(x))[fake.passes])
    assert np.all(error[~fake.passes] >= (steps / 2 - 4 * U * np.abs(x))[~fake.passes])


@given(seed=st.integers(0, 2**32 - 1))
def test_the_gradient_is_that_of_the_clip(seed):
    """The straight-through gradient equals the slope of the quantizer over a distance of many steps."""
    x = np.random.RandomState(seed).uniform(-2, 2, 32)
    grid = {"scales": np.array(2.0**-10), "zeros": np.array(0.0), "lowest": -1024, "highest": 1023}
    slope = (qat.fake_quantize(x + 0.125, **grid).values - qat.fake_quantize(x - 0.125, **grid).values) / 0.25
    inside, outside = np.abs(x) < 0.8, np.abs(x) > 1.2
    gradient = qat.gradient(np.ones(32), qat.fake_quantize(x, **grid))
    assert_within(slope[inside], gradient[inside], 2.0**-10 / 0.25)
    np.testing.assert_array_equal(slope[outside], gradient[outside])


@given(weights=weights, scale=st.sampled_from([0.01, 0.3, 1.0]), zero=st.integers(-8, 7), power=st.integers(-60, 60))
def test_powers_of_two_and_signs(weights, scale, zero, power):
    x, factor = weights(2, 8), 2.0**power

    def read(x: np.ndarray, scale: float, zero: int, lowest: int) -> np.ndarray:
        return qat.fake_quantize(x, np.array(scale), np.array(float(zero)), lowest=lowest, highest=7).values

    scaled = read(x * factor, scale * factor, zero, -8)
    np.testing.assert_array_equal(scaled, read(x, scale, zero, -8) * factor)
    np.testing.assert_array_equal(read(-x, scale, 0, -7), -read(x, scale, 0, -7))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(wrong):
    grid = {"scales": np.array(1.0), "zeros": np.array(0.0), "lowest": -8, "highest": 7}
    with pytest.raises(ValueError, match=r"float32.*\(1,\).*(nan|inf)"):
        qat.fake_quantize(np.array([0.0, wrong]), **grid)
    fake = qat.fake_quantize(np.array([0.0, 100.0]), **grid)
    np.testing.assert_array_equal(qat.gradient(np.array([wrong, wrong]), fake), [wrong, 0.0])


@pytest.mark.parametrize(
    ("scale", "zero"), [(0.0, 0.0), (-1.0, 0.0), (1.0, 0.5), (1.0, 200.0), (np.nan, 0.0), (np.inf, 0.0), (1.0, np.nan)]
)
def test_refusals(scale, zero):
    with pytest.raises(ValueError, match=r"scales.*zero points.*-128.*127"):
        qat.fake_quantize(np.ones(2), np.array(scale), np.array(zero), lowest=-128, highest=127)
