"""Argmax: the index must be exact. If several numbers are equal, it must be the index of the first."""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.argmax import argmax
from llamaspec.verify.bounds.precision import Precision
from llamaspec.verify.contract import Arguments, Claim, Contract, Expected, Large, Law, Trial, beyond, independent
from llamaspec.verify.draws.draw import Values, hidden, hide, sizes, values


def arguments(*, precision: Precision, rows: int, n: int, x: Values, around: float, hidden: str) -> Arguments:
    scores = x.array("x", rows, n, precision=precision, around=around)
    scores[hide(hidden, rows, n)] = -np.inf
    return {"x": scores}


def expect(x: np.ndarray) -> Expected:
    value = argmax(x)
    zeros = np.zeros(value.shape)
    return Expected(value, zeros, zeros, zeros, rounded=False)


def _twice(trial: Trial) -> Claim:
    x = trial.arguments["x"]
    return Claim(trial.again(x=(x / 2).astype(x.dtype))[0], trial.outputs[0], 0.0)


def _zeros(trial: Trial) -> Claim:
    """Pass rows in which -0 and 0 alternate. Since -0 equals 0, the result must be the first index, 0."""
    x = np.zeros_like(trial.arguments["x"])
    x[:, ::2] = -0.0
    return Claim(trial.again(x=x)[0], np.zeros(len(x)), 0.0)


CONTRACT = Contract(
    definition=argmax,
    shapes={"rows": st.sampled_from([1, 2, 3, 5]), "n": sizes(8, 32, 64, 128, 256, 1024, most=2049)},
    values={
        # Some machines flush subnormal numbers to zero, so they are all equal; others distinguish them.
        "x": values(-4, 8, without=["denormal"]),
        "around": st.sampled_from([0.0, -20_000.0, -100.0, 100.0]),
        "hidden": hidden,
    },
    arguments=arguments,
    expect=expect,
    domain="x [rows n], finite or -inf, no subnormal numbers; 0 and -0 are equal",
    bound="exact",
    laws=[
        independent("a row", "x"),
        Law("argmax(x / 2) is argmax(x)", _twice),
        Law("0 and -0 are equal", _zeros),
    ],
    large=Large(
        {"rows": beyond(64, 1024, 8192), "n": (4161, 33_281, 150_001, 300_001)},
        beside={"rows": [2], "n": [17], "x": ["last(0)", "normal(1)", "integers(2)"]},  # last(0): a late maximum
        empty=["rows"],
    ),
)
