"""Contracts of nonlinearities without a gate: functions of each element."""

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from llamaspec.verify.bounds.precision import Precision
from llamaspec.verify.bounds.running_error import Approx, exactly
from llamaspec.verify.contract import Arguments, Claim, Contract, Expected, Large, Law, Trial, beyond, independent
from llamaspec.verify.draws.draw import Values, sizes, values


def activation_contract(
    definition: Callable, running: Callable[[Approx], Approx], *, low: float, bound: str
) -> Contract:
    """Make the contract of `definition(x)`, which is 0 at 0.

    `running` computes it with an error bound. `low` is a negative number for which the function is near 0.
    """

    def expect(x: np.ndarray) -> Expected:
        y = running(exactly(x))
        return Expected(y.value, y.error, y.error, np.abs(y.value))

    return Contract(
        definition=definition,
        shapes={"rows": st.sampled_from([1, 2, 3, 5]), "ffn": sizes(8, 32, 128, 256, most=513)},
        values={"x": values(-8, 6), "around": st.sampled_from([0.0, -100.0, 100.0, low, 10.0])},
        arguments=_arguments,
        expect=expect,
        domain="x [rows ffn], |x| up to 2^17",
        bound=bound,
        laws=[independent("a row", "x"), Law(f"{definition.__name__}(0) equals 0", _zero)],
        large=Large(
            {"rows": beyond(64, 1024, 8192), "ffn": beyond(1024, 4096, 8192)}, beside={"rows": [3], "ffn": [17]}
        ),
    )


def _arguments(*, precision: Precision, rows: int, ffn: int, x: Values, around: float) -> Arguments:
    return {"x": x.array("x", rows, ffn, precision=precision, around=around)}


def _zero(trial: Trial) -> Claim:
    result = trial.again(x=np.zeros_like(trial.arguments["x"]))[0]
    return Claim(result, np.zeros_like(result), 0.0)
