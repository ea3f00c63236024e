"""Backward of softmax, from its probabilities."""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.backward.softmax import softmax_backward
from llamaspec.reference.softmax import softmax
from llamaspec.verify.bounds.precision import Precision, precision
from llamaspec.verify.bounds.running_error import flushed, gamma
from llamaspec.verify.contract import (
    Arguments,
    Claim,
    Contract,
    Expected,
    Large,
    Law,
    Trial,
    as_float64,
    beyond,
    independent,
)
from llamaspec.verify.draws.draw import Values, hidden, hide, sizes, values


def arguments(*, precision: Precision, rows: int, n: int, x: Values, hidden: str, dp: Values) -> Arguments:
    scores = as_float64(x.array("x", rows, n, precision=precision))
    scores[hide(hidden, rows, n)] = -np.inf
    return {"p": softmax(scores).astype(precision.dtype), "dp": dp.array("dp", rows, n, precision=precision)}


def expect(p: np.ndarray, dp: np.ndarray) -> Expected:
    n = p.shape[-1]
    exact, size = as_float64(p), np.abs(as_float64(dp))
    total = np.sum(exact * size, axis=-1, keepdims=True)
    error = exact * (gamma(3) * size + gamma(n + 3) * total) + 2 * n * flushed(exact, np.max(size, -1, keepdims=True))
    return Expected(softmax_backward(p, dp), error, error, exact * (size + total))


def _constant(trial: Trial) -> Claim:
    """Add the same number to all of dp. The gradient must not change, because the probabilities have a constant sum."""
    p = trial.arguments["p"]
    again = trial.again(dp=np.ones_like(p))[0]
    exact, dtype = as_float64(p), precision(again.dtype.name)
    product = exact * (1 - exact.sum(axis=-1, keepdims=True))
    tolerance = exact * gamma(p.shape[-1] + 6) * 2 + dtype.unit * 2 * np.abs(product) + 4 * dtype.smallest
    return Claim(again, product, tolerance)


def _zero_probability(trial: Trial) -> Claim | None:
    """Check that a probability of 0 has a gradient of 0, bit for bit."""
    seen = as_float64(trial.arguments["p"]) != 0
    return None if seen.all() else Claim(np.where(seen, 0, as_float64(trial.outputs[0])), np.zeros(seen.shape), 0.0)


CONTRACT = Contract(
    definition=softmax_backward,
    shapes={"rows": st.sampled_from([1, 2, 3, 5]), "n": sizes(8, 16, 32, 64, 128, 256, most=513)},
    values={"x": values(-6, 4), "hidden": hidden, "dp": values(-8, 8)},
    arguments=arguments,
    expect=expect,
    domain="p [rows n], the output of softmax (a row may have only zeros), and dp [rows n], of one dtype",
    bound="hard and alarm: p (3 u |dp| + gamma_(n+3) sum p |dp|)",
    laws=[
        independent("a row", "p", "dp"),
        Law("adding the same number to all of dp does not change the gradient", _constant),
        Law("a probability of 0 has a gradient of 0", _zero_probability),
    ],
    large=Large({"rows": beyond(1024, 8192), "n": beyond(1024, 8192)}, beside={"rows": [2], "n": [5]}, empty=["rows"]),
)
