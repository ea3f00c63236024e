"""Contracts of gated nonlinearities: a function of one half of the hidden layer times the other half."""

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st

from llamaspec.verify.bounds.precision import Precision
from llamaspec.verify.bounds.running_error import Approx, exactly
from llamaspec.verify.contract import Arguments, Claim, Contract, Expected, Large, Law, Trial, beyond, independent
from llamaspec.verify.draws.draw import Values, sizes, values


def gating_contract(
    definition: Callable,
    running: Callable[[Approx, Approx], Approx],
    *,
    low: float,
    bound: str,
    laws: Sequence[Law] | None = None,
) -> Contract:
    """Make the contract of `definition(gate, up)`, which is 0 if the gate is 0.

    Without `laws`, the contract has one law: changing the sign of `up` changes the sign of the result. `running`
    computes the function with an error bound. `low` is a gate for which the function is near 0, but not 0.
    """

    def expect(gate: np.ndarray, up: np.ndarray) -> Expected:
        y = running(exactly(gate), exactly(up))
        return Expected(y.value, y.error, y.error, np.abs(y.value))

    name = definition.__name__
    odd = Law(f"{name}(gate, -up) equals -{name}(gate, up), bit for bit", _sign)
    return Contract(
        definition=definition,
        shapes={"rows": st.sampled_from([1, 2, 3, 5]), "ffn": sizes(8, 32, 128, 256, most=513)},
        values={
            "gate": values(-8, 6),
            "around": st.sampled_from([0.0, -100.0, 100.0, low, 10.0]),
            "up": values(-8, 8),
        },
        arguments=_arguments,
        expect=expect,
        domain="gate and up [rows ffn] of one dtype, |gate| up to 2^17",
        bound=bound,
        laws=[
            independent("a row", "gate", "up"),
            *([odd] if laws is None else laws),
            Law("a gate of 0 gives 0", _zero),
        ],
        large=Large(
            {"rows": beyond(64, 1024, 8192), "ffn": beyond(1024, 4096, 8192)},
            beside={"rows": [3], "ffn": [17]},
            empty=["rows"],
        ),
    )


def _arguments(*, precision: Precision, rows: int, ffn: int, gate: Values, around: float, up: Values) -> Arguments:
    return {
        "gate": gate.array("gate", rows, ffn, precision=precision, around=around),
        "up": up.array("up", rows, ffn, precision=precision),
    }


def _sign(trial: Trial) -> Claim:
    return Claim(trial.again(up=-trial.arguments["up"])[0], -trial.outputs[0], 0.0)


def _zero(trial: Trial) -> Claim:
    result = trial.again(gate=np.zeros_like(trial.arguments["gate"]))[0]
    return Claim(result, np.zeros_like(result), 0.0)
