"""Backward of RoPE: the rotation the other way, with the forward rotation's bound."""

import numpy as np

from llamaspec.reference.backward.rope import rope_halves_backward
from llamaspec.verify.contract import Arguments, Claim, Contract, Expected, Law, Trial, alone, as_float64
from llamaspec.verify.contracts.rope import HALVES


def arguments(**drawn) -> Arguments:
    given = HALVES.arguments(**drawn)
    return {"dy": given["x"], "positions": given["positions"], "frequencies": given["frequencies"]}


def expect(dy: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> Expected:
    forward = HALVES.expect(dy, positions, frequencies)
    assert isinstance(forward, Expected)
    return forward._replace(value=rope_halves_backward(dy, positions, as_float64(frequencies)))


def _still(trial: Trial) -> Claim:
    again = trial.again(positions=np.zeros_like(trial.arguments["positions"]))
    return Claim(again[0], trial.arguments["dy"], 2.0**-126)


CONTRACT = Contract(
    definition=rope_halves_backward,
    shapes=HALVES.shapes,
    values=HALVES.values,
    arguments=arguments,
    expect=expect,
    domain=HALVES.domain.replace("x [", "dy ["),
    bound=HALVES.bound,
    laws=[alone("a sequence", "dy", "positions"), Law("position 0 changes nothing", _still, sets=("start",))],
    large=HALVES.large,
)
