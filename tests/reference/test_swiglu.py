from decimal import Decimal, localcontext

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.reference.swiglu import swiglu
from tests.support.strategies import U, assert_within, dtypes, noises

gates = st.floats(-800, 800)
SMALLEST = 2.0**-1074


def bound(gate: float, y: float) -> float:
    """Bound SwiGLU's error: |gate| u from rounding the exponent, 2 u each for logaddexp and exp, and two products."""
    return abs(y) * (abs(gate) + 8) * U + SMALLEST


@given(gate=gates, up=st.floats(-100, 100))
@example(gate=-745.0, up=1.0)
@example(gate=-0.0, up=1.0)
@example(gate=5e-324, up=4.0)
def test_value(gate, up):
    """SwiGLU agrees with Decimal arithmetic of 50 digits."""
    with localcontext(prec=50):
        a = Decimal(gate)
        y = float(a / (1 + (-a).exp()) * Decimal(up))
    # If the sigmoid or its product with the gate is subnormal, the spacing of numbers bounds its error.
    subnormal = (abs(gate * up) + abs(up)) * SMALLEST
    assert_within(swiglu(np.array([gate]), np.array([up])), [y], bound(gate, y) + subnormal)


@given(gate=gates)
def test_silu_of_a_number_less_that_of_its_negative_is_the_number(gate):
    positive, negative = swiglu(np.array([gate, -gate]), np.ones(2))
    assert_within(positive - negative, gate, bound(gate, positive) + bound(gate, negative) + abs(gate) * U)


def test_minimum_is_that_of_silu():
    # The minimum of silu is -W(1/e), at -1 - W(1/e), where W is Lambert's function and W(1/e) = 0.27846...
    lambert = 0.2784645427610738
    at = np.linspace(-20, 20, 40_001)
    assert swiglu(at, np.ones_like(at)).min() >= -lambert
    assert_within(swiglu(np.array([-1 - lambert]), np.ones(1)), [-lambert], 4 * U)


def test_far_from_zero_it_is_off_or_the_identity():
    np.testing.assert_array_equal(swiglu(np.array([1e300, 50.0, 0.0, -1e300]), np.full(4, 0.5)), [5e299, 25, 0, 0])


@given(noise=noises, power=st.integers(-20, 20))
def test_linear_in_up(noise, power):
    gate, up = np.clip(noise(2, 5), -500, 500), noise(2, 5)  # beyond that, results are subnormal and round
    y = swiglu(gate, up)
    np.testing.assert_array_equal(swiglu(gate, -up), -y)
    np.testing.assert_array_equal(swiglu(gate, up * 2.0**power), y * 2.0**power)


@given(noise=noises, dtype=dtypes)
def test_computes_in_float64_whatever_the_inputs(noise, dtype):
    gate, up = noise(2, 5, dtype=dtype), noise(2, 5, dtype=dtype)
    y = swiglu(gate, up)
    assert y.dtype == np.float64
    np.testing.assert_array_equal(y, swiglu(gate.astype(np.float64), up.astype(np.float64)))
