"""LayerNorm: RMSNorm of centered values. The error of the mean adds to every feature's error."""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.layernorm import layernorm
from llamaspec.verify.bounds.precision import Precision, U
from llamaspec.verify.bounds.running_error import exactly, flushed, layer_normalized
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


def arguments(
    *,
    precision: Precision,
    rows: int,
    dim: int,
    x: Values,
    around: float,
    weight: Values,
    bias: Values | None,
    eps: float,
) -> Arguments:
    return {
        "x": x.array("x", rows, dim, precision=precision, around=around),
        "weight": weight.array("weight", dim, precision=precision),
        "bias": bias and bias.array("bias", dim, precision=precision),
        "eps": eps,
    }


def expect(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, *, eps: float) -> Expected:
    values, scale = as_float64(x), np.abs(as_float64(weight))
    shift = None if bias is None else as_float64(bias)
    y = layer_normalized(exactly(x), as_float64(weight), shift, eps=eps)
    n, added = values.shape[-1], 0.0 if shift is None else np.abs(shift)
    centered = np.abs(values - np.mean(values, axis=-1, keepdims=True))
    root = 1 / np.sqrt(np.mean(centered**2, axis=-1, keepdims=True) + eps)
    # An error of the mean changes a feature directly, and by less than itself through the variance.
    off = (4 * np.sqrt(n) + 2) * U * np.mean(np.abs(values), axis=-1, keepdims=True) + 2 * U * centered
    unit = centered * root
    alarm = scale * (root * off * (1 + unit) + (8 + 2 * np.sqrt(n)) * U * unit) + 2 * U * (scale * unit + added)
    alarm = np.minimum(alarm + flushed(centered, scale, root), y.error)
    size = scale * root * (np.abs(values) + np.mean(np.abs(values), axis=-1, keepdims=True)) + added
    return Expected(y.value, y.error, np.where(of_one_size(np.abs(values))[..., None], y.error, alarm), size)


def _scale(trial: Trial) -> Claim | None:
    x, eps = trial.arguments["x"], trial.arguments["eps"]
    with np.errstate(over="ignore"):
        larger = (x * 4).astype(x.dtype)
    if not np.array_equal(as_float64(larger) / 4, as_float64(x)):  # some overflow, or are subnormal
        return None
    return Claim(trial.again(x=larger, eps=eps * 16)[0], trial.outputs[0], 2 * trial.bounds[0])


def _sign(trial: Trial) -> Claim:
    x, bias = trial.arguments["x"], trial.arguments["bias"]
    return Claim(trial.again(x=-x, bias=None if bias is None else -bias)[0], -trial.outputs[0], 0.0)


CONTRACT = Contract(
    definition=layernorm,
    shapes={
        "rows": st.sampled_from([1, 2, 3, 5]),
        "dim": sizes(8, 16, 32, 64, 128, 256, most=513),
    },
    values={
        "x": values(-12, 12),
        "around": st.sampled_from([0.0, 1.0, -100.0, 10_000.0]),
        "weight": values(-4, 4),
        "bias": st.none() | values(-6, 4),
        "eps": st.sampled_from([1e-5, 1e-6, 0.5]),
    },
    arguments=arguments,
    expect=expect,
    domain="x [rows dim], weight [dim] and bias [dim] or None, of one dtype, |x| up to 2^24, eps above 0",
    bound="hard: running error analysis of the mean, gamma_(n + 1) mean |x|, and of RMSNorm of the differences; "
    "alarm: (4 sqrt(n) + 2) u mean |x| for the mean, (8 + 2 sqrt(n)) u for the rest, not for equal magnitudes",
    laws=[
        independent("a row", "x"),
        Law("layernorm(4 x, 16 eps) equals layernorm(x, eps)", _scale, sets=("eps",)),
        Law("negating x and the bias negates the result, bit for bit", _sign),
    ],
    large=Large(
        {"rows": beyond(64, 1024, 8192), "dim": beyond(1024, 2048, 4096, 8192)},
        beside={"rows": [3], "dim": [17]},
        empty=["rows"],
    ),
)
