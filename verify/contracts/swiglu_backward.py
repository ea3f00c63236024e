"""Backward of SwiGLU. The formula silu'(a) = s (1 + a (1 - s)), where s = sigmoid(a), loses digits if s is nearly 1.

The derivative is 0 near a = -1.28.
"""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.backward.swiglu import swiglu_backward
from llamaspec.verify.bounds.precision import Precision, U, precision
from llamaspec.verify.bounds.running_error import ELEMENTARY, flushed, gamma
from llamaspec.verify.contract import Arguments, Claim, Contract, Expected, Large, Law, Trial, as_float64, beyond
from llamaspec.verify.draws.draw import Values, sizes, values


def arguments(
    *, precision: Precision, rows: int, ffn: int, gate: Values, around: float, up: Values, dy: Values
) -> Arguments:
    return {
        "gate": gate.array("gate", rows, ffn, precision=precision, around=around),
        "up": up.array("up", rows, ffn, precision=precision),
        "dy": dy.array("dy", rows, ffn, precision=precision),
    }


def expect(gate: np.ndarray, up: np.ndarray, dy: np.ndarray) -> tuple[Expected, ...]:
    dgate, dup = swiglu_backward(gate, up, dy)
    a, b, slope = (as_float64(x) for x in (gate, up, dy))
    size, product = np.abs(a), np.abs(slope * b)
    small = np.exp(-size)
    s = np.where(a < 0, small, 1) / (1 + small)
    complement = np.where(a < 0, 1, small) / (1 + small)  # 1 - s
    off = (
        ELEMENTARY + 2 * U + 2 * U * np.maximum(-a, 1)
    )  # error of s: an exp computed as a power of 2 has an error from its argument
    # 1 - s, as a difference, has the error of s and a rounding, even if it is small.
    derivative = s * (1 + size * complement) * (off + gamma(6)) + size * s * (s * off + 2 * U)
    tiny = flushed(size, np.abs(b), np.abs(slope))
    dgate_error = product * derivative + tiny
    dup_error = np.abs(slope * a) * s * (off + gamma(3)) + tiny
    return (
        Expected(dgate, dgate_error, dgate_error, product * s * (1 + size * complement)),
        Expected(dup, dup_error, dup_error, np.abs(dup)),
    )


def _linear(trial: Trial) -> Claim:
    return Claim(trial.again(dy=-trial.arguments["dy"])[0], -trial.outputs[0], 0.0)


def _halfway(trial: Trial) -> Claim:
    """Set the gate to 0: the sigmoid and the derivative are 1/2."""
    up, dy = as_float64(trial.arguments["up"]), as_float64(trial.arguments["dy"])
    again = trial.again(gate=np.zeros_like(trial.arguments["gate"]))[0]
    dtype = precision(again.dtype.name)
    tolerance = (dtype.unit + 16 * U) * np.abs(up * dy) + flushed(np.abs(up), np.abs(dy)) + dtype.smallest
    return Claim(again, up * dy / 2, tolerance)


CONTRACT = Contract(
    definition=swiglu_backward,
    shapes={"rows": st.sampled_from([1, 2, 3, 5]), "ffn": sizes(8, 32, 128, 256, most=513)},
    values={
        "gate": values(-8, 6),
        "around": st.sampled_from([0.0, -1.25, -100.0, 100.0, -80.0, 10.0]),
        "up": values(-8, 6),
        "dy": values(-8, 6),
    },
    arguments=arguments,
    expect=expect,
    domain="gate, up and dy [rows ffn] of one dtype, |gate| up to 2^17",
    bound="hard and alarm, with e = (6 + 2 max(-a, 1)) u for the sigmoid: |dy b| s ((1 + |a| (1 - s)) (e + 6 u) + "
    "|a| (s e + 2 u)) for dgate, (e + 3 u) |y| for dup",
    laws=[
        Law("negating dy negates dgate and dup, bit for bit", _linear),
        Law("a gate of 0 gives dgate = dy up / 2", _halfway),
    ],
    large=Large(
        {"rows": beyond(1024, 8192), "ffn": beyond(1024, 8192)}, beside={"rows": [2], "ffn": [5]}, empty=["rows"]
    ),
)
