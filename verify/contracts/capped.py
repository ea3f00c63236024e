"""Soft caps, element by element. The result is exact near 0, and never beyond the cap."""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.capped import capped
from llamaspec.verify.bounds.precision import Precision
from llamaspec.verify.bounds.running_error import exactly, soft_capped
from llamaspec.verify.contract import Arguments, Claim, Contract, Expected, Large, Law, Trial, beyond, independent
from llamaspec.verify.draws.draw import Values, sizes, values

CAPS = st.sampled_from([50.0, 30.0, 0.5, 1000.0])


def arguments(*, precision: Precision, rows: int, n: int, x: Values, cap: float) -> Arguments:
    return {"x": x.array("x", rows, n, precision=precision), "cap": cap}


def expect(x: np.ndarray, *, cap: float) -> Expected:
    y = soft_capped(exactly(x), cap)
    return Expected(y.value, y.error, y.error, np.abs(y.value))


def _sign(trial: Trial) -> Claim:
    return Claim(trial.again(x=-trial.arguments["x"])[0], -trial.outputs[0], 0.0)


CONTRACT = Contract(
    definition=capped,
    shapes={"rows": st.sampled_from([1, 2, 3, 5]), "n": sizes(8, 32, 128, 256, most=513)},
    values={"x": values(-12, 16), "cap": CAPS},
    arguments=arguments,
    expect=expect,
    domain="x [rows n], |x| up to 2^28; cap above 0",
    bound="hard and alarm: the change of c tanh(x / c) if x changes by 2 u |x|, and 9 u |y| for tanh and the product",
    laws=[
        independent("a row", "x"),
        Law("capped(-x) equals -capped(x), bit for bit", _sign),
    ],
    large=Large(
        {"rows": beyond(64, 1024, 8192), "n": beyond(1024, 4096, 8192, 32_768)},
        beside={"rows": [3], "n": [17]},
        empty=["rows"],
    ),
)
