"""Backward of a product with a matrix: two more products, and one of them sums over the vectors of a batch."""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.backward.linear import linear_backward
from llamaspec.verify.bounds.precision import TINY, Precision, precision
from llamaspec.verify.bounds.running_error import exactly, gamma, projected
from llamaspec.verify.contract import Arguments, Claim, Contract, Expected, Large, Law, Trial, as_float64, beyond
from llamaspec.verify.draws.draw import Values, sizes, values


def arguments(
    *, precision: Precision, batch: int, rows: int, cols: int, x: Values, weight: Values, dy: Values
) -> Arguments:
    return {
        "x": x.array("x", batch, cols, precision=precision),
        "weight": weight.array("weight", rows, cols, precision=precision),
        "dy": dy.array("dy", batch, rows, precision=precision),
    }


def _product(first: np.ndarray, second: np.ndarray) -> Expected:
    """Multiply first [m n] by the transpose of second [k n], summed in any order."""
    y = projected(exactly(first), second)
    return Expected(y.value, y.error, y.error, np.abs(first) @ np.abs(second).T)


def expect(x: np.ndarray, weight: np.ndarray, dy: np.ndarray) -> tuple[Expected, ...]:
    exact_x, exact_weight, exact_dy = (as_float64(a) for a in (x, weight, dy))
    magnitudes = np.abs(exact_dy).sum(axis=0)
    db_error = gamma(len(dy)) * magnitudes + len(dy) * TINY
    db = Expected(exact_dy.sum(axis=0), db_error, db_error, magnitudes)
    return _product(exact_dy, exact_weight.T), _product(exact_dy.T, exact_x.T), db


def _split(trial: Trial) -> Claim | None:
    """Check that gradients of the weight from two parts of a batch add up to the gradient of the batch."""
    x, dy = trial.arguments["x"], trial.arguments["dy"]
    if len(x) < 2:
        return None
    parts = [trial.again(x=x[part], dy=dy[part])[1] for part in (slice(None, 1), slice(1, None))]
    return Claim(as_float64(parts[0]) + as_float64(parts[1]), trial.outputs[1], 3 * trial.bounds[1] + _rounding(parts))


def _rounding(parts: list[np.ndarray]) -> np.ndarray:
    """Bound the sum of the roundings of the parts' gradients to their dtype.

    If the parts have opposite signs, these roundings may be larger than the rounding of the total gradient.
    """
    dtype = precision(parts[0].dtype.name)
    return np.sum([dtype.unit * np.abs(as_float64(part)) + dtype.smallest for part in parts], axis=0)


CONTRACT = Contract(
    definition=linear_backward,
    shapes={
        "batch": st.sampled_from([1, 2, 3, 7, 8, 9, 33]),
        "rows": sizes(4, 8, 16, 32, most=65),
        "cols": sizes(8, 32, 64, most=129),
    },
    values={"x": values(-8, 8), "weight": values(-8, 8), "dy": values(-8, 8)},
    arguments=arguments,
    expect=expect,
    domain="x [batch cols], weight [rows cols] and dy [batch rows] of one dtype, summed in float32",
    bound="hard and alarm: gamma_n of the sum of magnitudes, n terms in any order: rows for dx, vectors for dW and db",
    laws=[Law("the gradient of a batch is the sum of its parts' gradients", _split)],
    large=Large(
        {"batch": beyond(128, 1024, 8192), "rows": beyond(1024, 8192), "cols": beyond(1024, 8192)},
        beside={"batch": [2], "rows": [3], "cols": [5]},
    ),
)
