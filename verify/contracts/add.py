"""The residual connection: the sum is rounded once."""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.add import add
from llamaspec.verify.bounds.precision import TINY, Precision, U
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
from llamaspec.verify.draws.draw import Values, sizes, values


def arguments(*, precision: Precision, rows: int, dim: int, x: Values, y: Values) -> Arguments:
    return {
        "x": x.array("x", rows, dim, precision=precision),
        "y": y.array("y", rows, dim, precision=precision),
    }


def expect(x: np.ndarray, y: np.ndarray) -> Expected:
    value = add(x, y)
    hard = U * np.abs(value) + 3 * TINY
    return Expected(value, hard, hard, np.abs(as_float64(x)) + np.abs(as_float64(y)))


def _commutes(trial: Trial) -> Claim:
    x, y = trial.arguments["x"], trial.arguments["y"]
    return Claim(trial.again(x=y, y=x)[0], trial.outputs[0], 0.0)


CONTRACT = Contract(
    definition=add,
    shapes={"rows": st.sampled_from([1, 2, 3, 5]), "dim": sizes(8, 32, 128, 256, most=513)},
    values={"x": values(-12, 12), "y": values(-12, 12)},
    arguments=arguments,
    expect=expect,
    domain="x and y [rows dim] of one dtype",
    bound="hard and alarm: u |x + y|, one rounding",
    laws=[independent("a row", "x", "y"), Law("add(y, x) equals add(x, y), bit for bit", _commutes)],
    large=Large(
        {"rows": beyond(64, 1024, 8192), "dim": beyond(1024, 4096, 8192)},
        beside={"rows": [3], "dim": [17]},
        empty=["rows"],
    ),
)
