"""Log-sum-exp: if the relative error of each exponential is at most r, the logarithm changes by at most about r."""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.logsumexp import logsumexp
from llamaspec.reference.softmax import softmax
from llamaspec.verify.bounds.precision import TINY, Precision, U
from llamaspec.verify.bounds.running_error import ELEMENTARY, gamma
from llamaspec.verify.bounds.summation import Roundings, roundings
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
from llamaspec.verify.contracts.softmax import BLOCKS
from llamaspec.verify.draws.draw import HIDDEN, Values, hide, sizes, values


def arguments(*, precision: Precision, rows: int, n: int, x: Values, around: float, hidden: str) -> Arguments:
    scores = x.array("x", rows, n, precision=precision, around=around)
    hides = hide(hidden, rows, n)
    return {"x": np.where(hides & ~np.all(hides, axis=-1, keepdims=True), precision.dtype.type(-np.inf), scores)}


def expect(x: np.ndarray) -> Expected:
    exact, n = as_float64(x), x.shape[-1]
    value = logsumexp(exact)
    top = np.max(exact, axis=-1, keepdims=True)
    finite = np.isfinite(exact)
    below, size = np.where(finite, top - exact, 0), np.where(finite, np.abs(exact), 0)
    # A term's error comes from its exponent, which rounds once, or once per product in 2^(x log2 e - m log2 e). An
    # online softmax rescales the term by exponents that add up to the spread of the row.
    off = U * (4 * (size + np.abs(top)) + 6 * np.max(below, axis=-1, keepdims=True))
    blocks = min(BLOCKS, n)
    slack = 2 * blocks * ELEMENTARY + gamma(n + 2 * blocks)
    moved = np.log(np.sum(softmax(exact) * np.exp(np.minimum(off, 100)), axis=-1)) - np.log1p(-slack)
    log_sum = value - top[:, 0]
    hard = (moved + ELEMENTARY * (log_sum + moved)) * (1 + U) + 2 * U * np.abs(value) + 4 * TINY
    furthest = np.max(size, axis=-1)
    alarm = (16 + 2 * np.sqrt(n) + 8 * furthest + 4 * log_sum) * U + 2 * U * np.abs(value) + 4 * TINY
    size = np.abs(top[:, 0]) + log_sum

    def sums() -> Roundings:
        model = roundings(softmax(exact), lambda weights: weights.sum(axis=-1, keepdims=True))
        return model.map(lambda part: part[..., 0])

    return Expected(value, hard, np.minimum(alarm, hard), size, sums=sums)


def _shift(trial: Trial) -> Claim | None:
    x = trial.arguments["x"]
    shifted = (x + 4).astype(x.dtype)
    if not np.array_equal(as_float64(shifted), as_float64(x) + 4):
        return None
    y = as_float64(trial.outputs[0])
    return Claim(as_float64(trial.again(x=shifted)[0]) - 4, y, 2 * trial.bounds[0] + 64 * U + _coarser(trial, y))


def _coarser(trial: Trial, y: np.ndarray) -> np.ndarray:
    """Bound the rounding of y + 4 to the output's dtype; it may be larger than the rounding of y."""
    return 2 * 2.0**-8 * (np.abs(y) + 4) if trial.outputs[0].dtype.itemsize == 2 else 8 * U * (np.abs(y) + 4)


def _one_score(trial: Trial) -> Claim:
    x = np.full_like(trial.arguments["x"], -np.inf)
    x[:, -1] = 2
    return Claim(trial.again(x=x)[0], np.full(len(x), 2.0), 8 * U)


CONTRACT = Contract(
    definition=logsumexp,
    shapes={"rows": st.sampled_from([1, 2, 3, 5]), "n": sizes(8, 16, 32, 64, 128, 256, most=513)},
    values={
        "x": values(-6, 6),
        "around": st.sampled_from([0.0, -20_000.0, 20_000.0, -100.0, 100.0]),
        "hidden": st.sampled_from([name for name in HIDDEN if name not in ("first row", "all")]),
    },
    arguments=arguments,
    expect=expect,
    domain="x [rows n], finite or -inf, and no row with only -inf",
    bound="hard: a + s + 4 u log(sum) + 2 u |L|, a = (4 |x| + 4 |max| + 6 (max - x)) u for scores, s = (n + 10 b) u "
    "for sums of b = min(n, 64) blocks; alarm: (16 + 2 sqrt(n) + 8 max|x| + 4 log(sum) + 2 |L|) u, "
    "and u A more for a running sum, with A = n / 2 for equal terms (verify/bounds/summation.py)",
    laws=[
        independent("a row", "x"),
        Law("logsumexp(x + 4) equals logsumexp(x) + 4", _shift),
        Law("the only finite score of a row is its log-sum-exp", _one_score),
    ],
    large=Large(
        {"rows": beyond(64, 1024, 8192), "n": beyond(1024, 4096, 8192, 131_072)},
        beside={"rows": [2], "n": [17]},
        empty=["rows"],
    ),
)
