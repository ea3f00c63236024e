"""Products with a matrix: for sums in any order, the error is at most gamma_n times the sum of magnitudes."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from jaxtyping import Bool

from llamaspec.reference.linear import gemm, gemv, linear
from llamaspec.verify.bounds.precision import TINY, Precision, U
from llamaspec.verify.bounds.running_error import exactly, projected
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


def expect(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> Expected:
    exact, n = as_float64(weight), x.shape[-1]
    y = projected(exactly(x), exact, None if bias is None else as_float64(bias))
    size = linear(np.abs(as_float64(x)), np.abs(exact))
    if bias is not None:
        size = size + np.abs(as_float64(bias))
    tiny = 4 * TINY * (n + 1) * (1 + np.max(np.abs(exact), initial=0)) * (1 + np.max(np.abs(as_float64(x)), initial=0))
    alarm = (4 * np.sqrt(n) + 2) * U * size + tiny
    return Expected(y.value, y.error, np.where(systematic(x, exact), y.error, alarm), size)


def systematic(x: np.ndarray, weight: np.ndarray) -> Bool[np.ndarray, "... rows"]:
    """Find the results of W x that are sums of equally large terms (see `verify.contract.of_one_size`)."""
    return of_one_size(np.abs(as_float64(x))[..., None, :] * np.abs(weight))


def linear_arguments(
    *, precision: Precision, batch: int, rows: int, cols: int, x: Values, weight: Values, bias: Values | None
) -> Arguments:
    return {
        "x": x.array("x", batch, cols, precision=precision),
        "weight": weight.array("weight", rows, cols, precision=precision),
        "bias": bias and bias.array("bias", rows, precision=precision),
    }


def gemm_arguments(*, precision: Precision, batch: int, rows: int, cols: int, x: Values, weight: Values) -> Arguments:
    return {
        "x": x.array("x", batch, cols, precision=precision),
        "weight": weight.array("weight", rows, cols, precision=precision),
    }


def gemv_arguments(*, precision: Precision, rows: int, cols: int, x: Values, weight: Values) -> Arguments:
    return {
        "x": x.array("x", cols, precision=precision),
        "weight": weight.array("weight", rows, cols, precision=precision),
    }


def _twice(trial: Trial) -> Claim | None:
    x = trial.arguments["x"]
    doubled = (2 * x).astype(x.dtype)
    if trial.arguments.get("bias") is not None or not np.array_equal(as_float64(doubled), 2 * as_float64(x)):
        return None
    return Claim(as_float64(trial.again(x=doubled)[0]), 2 * as_float64(trial.outputs[0]), 3 * trial.bounds[0])


def _column(trial: Trial) -> Claim | None:
    unit = np.zeros_like(trial.arguments["x"])
    unit[..., -1] = 1
    column = trial.arguments["weight"][:, -1]
    if trial.arguments.get("bias") is not None:
        return None
    return Claim(trial.again(x=unit)[0], np.broadcast_to(column, (*unit.shape[:-1], len(column))), TINY)


LAWS = [
    Law("twice the vector gives twice the product", _twice),
    Law("the last unit vector gives the last column of the matrix, bit for bit", _column),
]
COLS = sizes(8, 32, 64, 128, 256, most=513)
ROWS = sizes(4, 8, 16, 32, most=65)
BATCH = st.sampled_from([1, 2, 3, 7, 8, 9])
LARGE = Large(
    {"batch": beyond(16, 64, 8192), "rows": beyond(128, 1024, 8192), "cols": beyond(1024, 2048, 4096, 8192)},
    beside={"batch": [2], "rows": [9], "cols": [17]},
)
BOUND = "hard: gamma_n |W| |x|, n roundings in any order; alarm: (4 sqrt(n) + 2) u |W| |x|, not for equal magnitudes"
DRAWN = {"x": values(-8, 8), "weight": values(-8, 8)}

LINEAR = Contract(
    definition=linear,
    shapes={"batch": BATCH, "rows": ROWS, "cols": COLS},
    values={**DRAWN, "bias": st.none() | values(-8, 8)},
    arguments=linear_arguments,
    expect=expect,
    domain="x [batch cols], weight [rows cols] and bias [rows] or None, of one dtype, summed in float32",
    bound=BOUND + "; a bias is one more term of |W| |x|",
    laws=[independent("a vector", "x"), *LAWS],
    large=replace(LARGE, beside={**LARGE.beside, "bias": ["normal(1)", None]}),
)
GEMM = Contract(
    definition=gemm,
    shapes={"batch": BATCH, "rows": ROWS, "cols": COLS},
    values=DRAWN,
    arguments=gemm_arguments,
    expect=expect,
    domain="x [batch cols] and weight [rows cols] of one dtype, summed in float32",
    bound=BOUND,
    laws=[independent("a vector", "x"), *LAWS],
    large=LARGE,
)
GEMV = Contract(
    definition=gemv,
    shapes={"rows": ROWS, "cols": COLS},
    values=DRAWN,
    arguments=gemv_arguments,
    expect=expect,
    domain="x [cols] and weight [rows cols] of one dtype, summed in float32",
    bound=BOUND,
    laws=LAWS,
    large=Large({name: LARGE.sizes[name] for name in ("rows", "cols")}, beside={"rows": [9], "cols": [17]}),
)
