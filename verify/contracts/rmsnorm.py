"""RMSNorm: a sum of squares cannot cancel, so every bound is relative."""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.rmsnorm import rmsnorm
from llamaspec.verify.bounds.precision import Precision, U
from llamaspec.verify.bounds.running_error import exactly, flushed, normalized
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
    of_one_size,
)
from llamaspec.verify.draws.draw import Values, sizes, values


def arguments(*, precision: Precision, rows: int, dim: int, x: Values, weight: Values, eps: float) -> Arguments:
    return {
        "x": x.array("x", rows, dim, precision=precision),
        "weight": weight.array("weight", dim, precision=precision),
        "eps": eps,
    }


def expect(x: np.ndarray, weight: np.ndarray, *, eps: float) -> Expected:
    y = normalized(exactly(x), as_float64(weight), eps=eps)
    size, magnitudes = np.abs(y.value), np.abs(as_float64(x))
    root = 1 / np.sqrt(np.mean(magnitudes**2, axis=-1, keepdims=True) + eps)
    alarm = (8 + 2 * np.sqrt(x.shape[-1])) * U * size + flushed(magnitudes, np.abs(as_float64(weight)), root)
    return Expected(y.value, y.error, np.where(of_one_size(magnitudes)[..., None], y.error, alarm), size)


def _scale(trial: Trial) -> Claim | None:
    x, eps = trial.arguments["x"], trial.arguments["eps"]
    with np.errstate(over="ignore"):
        larger = (x * 4).astype(x.dtype)
    if not np.array_equal(as_float64(larger) / 4, as_float64(x)):  # some overflow, or are subnormal
        return None
    return Claim(trial.again(x=larger, eps=eps * 16)[0], trial.outputs[0], 2 * trial.bounds[0])


def _sign(trial: Trial) -> Claim:
    return Claim(trial.again(x=-trial.arguments["x"])[0], -trial.outputs[0], 0.0)


CONTRACT = Contract(
    definition=rmsnorm,
    shapes={
        "rows": st.sampled_from([1, 2, 3, 5]),
        "dim": sizes(8, 16, 32, 64, 128, 256, most=513),
    },
    values={
        "x": values(-12, 12),
        "weight": values(-4, 4),
        "eps": st.sampled_from([1e-5, 1e-6, 0.5]),
    },
    arguments=arguments,
    expect=expect,
    domain="x [rows dim] and weight [dim] of one dtype, |x| up to 2^24, eps above 0",
    bound="hard: (n/2 + 9) u |y|, from the roundings of squares, sum, mean, eps, root and two products; "
    "alarm: (8 + 2 sqrt(n)) u |y|, not for rows of equal magnitudes",
    laws=[
        independent("a row", "x"),
        Law("rmsnorm(4 x, 16 eps) equals rmsnorm(x, eps)", _scale, sets=("eps",)),
        Law("rmsnorm(-x) equals -rmsnorm(x), bit for bit", _sign),
    ],
    large=Large(
        {"rows": beyond(64, 1024, 8192), "dim": beyond(1024, 2048, 4096, 8192)},
        beside={"rows": [3], "dim": [17]},
        empty=["rows"],
    ),
)
