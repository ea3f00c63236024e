"""Clamped SwiGLU, element by element: the gate has an upper limit, and `up` has a lower and an upper limit."""

import numpy as np

from llamaspec.reference.clamped_swiglu import LIMIT, clamped_swiglu
from llamaspec.verify.bounds.running_error import clamped_gated
from llamaspec.verify.contract import Claim, Law, Trial
from llamaspec.verify.contracts.parts.gating import gating_contract


def _limits(trial: Trial) -> Claim:
    gate, up = trial.arguments["gate"], trial.arguments["up"]
    limit = gate.dtype.type(LIMIT)
    return Claim(trial.again(gate=np.minimum(gate, limit), up=np.clip(up, -limit, limit))[0], trial.outputs[0], 0.0)


def _zero_output(trial: Trial) -> Claim:
    up = np.full_like(trial.arguments["up"], -1)
    return Claim(trial.again(up=up)[0], np.zeros_like(up), 0.0)


CONTRACT = gating_contract(
    clamped_swiglu,
    clamped_gated,
    low=-40.0,
    bound="hard and alarm: (9 + 5 max(-1.702 gate, 1)) u |y|, from the slope, exp, sums, quotient and two products",
    laws=[
        Law("clamping gate and up to the limits beforehand does not change the result, bit for bit", _limits),
        Law("an up of -1 gives 0", _zero_output),
    ],
)
