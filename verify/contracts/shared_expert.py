"""A shared expert: a SwiGLU layer with its output multiplied by a sigmoid of the token."""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.linear import linear
from llamaspec.reference.moe import shared_expert
from llamaspec.verify.bounds.precision import Precision, U, precision
from llamaspec.verify.bounds.running_error import exactly, flushed, gated, projected, rounded, sigmoid
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


def arguments(
    *, precision: Precision, tokens: int, dim: int, ffn: int, x: Values, score: Values, weights: Values
) -> Arguments:
    return {
        "x": x.array("x", tokens, dim, precision=precision),
        "score": score.array("score", 1, dim, precision=precision),
        "gate": weights.array("gate", ffn, dim, precision=precision),
        "up": weights.array("up", ffn, dim, precision=precision),
        "down": weights.array("down", dim, ffn, precision=precision),
    }


def expect(x: np.ndarray, score: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> Expected:
    unit = precision(x.dtype.name).unit
    row, matrices = exactly(x), [as_float64(a) for a in (score, gate, up, down)]
    hidden = rounded(gated(projected(row, matrices[1]), projected(row, matrices[2])), unit)
    out, weight = projected(hidden, matrices[3]), sigmoid(projected(row, matrices[0]))
    error = weight.size * out.size * (1 + U) - np.abs(weight.value * out.value) + flushed(weight.size, out.size)
    sizes = weight.value * linear(linear(np.abs(row.value), np.abs(matrices[2])), np.abs(matrices[3]))
    return Expected(weight.value * out.value, error, error, sizes)


def _sign(trial: Trial) -> Claim:
    return Claim(trial.again(down=-trial.arguments["down"])[0], -trial.outputs[0], 0.0)


CONTRACT = Contract(
    definition=shared_expert,
    shapes={"tokens": st.sampled_from([1, 2, 3, 5]), "dim": sizes(8, 16, most=33), "ffn": sizes(8, most=17)},
    values={"x": values(-4, 2), "score": values(-4, 4), "weights": values(-4, 2)},
    arguments=arguments,
    expect=expect,
    domain="x [tokens dim], score [1 dim], gate and up [ffn dim], down [dim ffn] of one dtype",
    bound="hard and alarm: running error analysis of four products, SwiGLU, the sigmoid and its product",
    laws=[independent("a token", "x"), Law("-down gives -y, bit for bit", _sign)],
    large=Large(
        {"tokens": beyond(8, 64, 8192), "dim": beyond(64, 1024, 8192), "ffn": beyond(32, 256, 8192)},
        beside={
            **{"tokens": [3], "dim": [24], "ffn": [5], "x": ["normal(1)", "normal(2)"]},
            **{"score": ["normal(3) * 2**-5"], "weights": ["normal(5) * 2**-4", "normal(6) * 2**-3"]},
        },
    ),
)
