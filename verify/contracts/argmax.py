"""The largest of a row, the first of several: what greedy decoding draws."""

import numpy as np
from hypothesis import strategies as st

from reference.argmax import argmax
from verify.contract import Arguments, Claim, Contract, Expected, Law, Trial
from verify.draw import Values, hidden, hide, sizes, values
from verify.laws import alone
from verify.precision import Precision


def arguments(*, precision: Precision, rows: int, n: int, x: Values, around: float, hidden: str) -> Arguments:
    scores = x.array("x", rows, n, precision=precision, around=around)
    scores[hide(hidden, rows, n)] = -np.inf
    return {"x": scores}


def expect(x: np.ndarray) -> Expected:
    value = argmax(x)
    nothing = np.zeros(value.shape)
    return Expected(value, nothing, nothing, nothing, rounded=False)


def _twice(trial: Trial) -> Claim:
    x = trial.arguments["x"]
    return Claim(trial.again(x=(x / 2).astype(x.dtype))[0], trial.outputs[0], 0.0)


CONTRACT = Contract(
    definition=argmax,
    shapes={"rows": st.sampled_from([1, 2, 3, 5]), "n": sizes(8, 32, 64, 128, 256, 1024, most=2049)},
    values={
        # Subnormal numbers are all zero to one machine and all different to another.
        "x": values(-4, 8, without=["denormal"]),
        "around": st.sampled_from([0.0, -20_000.0, -100.0, 100.0]),
        "hidden": hidden,
    },
    arguments=arguments,
    expect=expect,
    domain="x [rows n], finite or -inf, no subnormal numbers; 0 and -0 are equal",
    bound="exact",
    laws=[alone("a row", "x"), Law("argmax(x / 2) is argmax(x)", _twice)],
)
