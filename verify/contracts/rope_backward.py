"""Backward of RoPE: the inverse rotation, with the bound of the forward rotation."""

import numpy as np

from llamaspec.reference.backward.rope import rope_halves_backward
from llamaspec.verify.contract import Arguments, Claim, Contract, Expected, Law, Trial, as_float64, independent
from llamaspec.verify.contracts.rope import HALVES


def arguments(**drawn) -> Arguments:
    named = HALVES.arguments(**drawn)
    return {"dy": named["x"], "positions": named["positions"], "frequencies": named["frequencies"]}


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
    laws=[independent("a sequence", "dy", "positions"), Law("position 0 changes nothing", _still, sets=("start",))],
    large=HALVES.large,
)
