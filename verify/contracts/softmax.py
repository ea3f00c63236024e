"""Softmax, including probabilities of 0, scores at which exp overflows, and rows with only hidden scores."""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.softmax import softmax
from llamaspec.verify.bounds.precision import TINY, Precision, U, precision
from llamaspec.verify.bounds.running_error import softmaxed
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
from llamaspec.verify.draws.draw import Values, hidden, hide, sizes, values

BLOCKS = 64  # most blocks of a row in an online softmax


def arguments(*, precision: Precision, rows: int, n: int, x: Values, around: float, hidden: str) -> Arguments:
    scores = x.array("x", rows, n, precision=precision, around=around)
    scores[hide(hidden, rows, n)] = -np.inf
    return {"x": scores}


def expect(x: np.ndarray) -> Expected:
    exact = as_float64(x)
    size = np.where(np.isneginf(exact), 0, np.abs(exact))
    # An implementation may compute e^(x - m) as 2^(x log2 e - m log2 e), and round each product before the difference.
    p, hard = softmaxed(exact, 4 * U * size, blocks=min(BLOCKS, x.shape[-1]))
    furthest = np.max(size, axis=-1, keepdims=True, initial=0)
    alarm = (16 + 2 * np.sqrt(x.shape[-1]) + 8 * furthest) * U * p + 2 * TINY

    def sums() -> Roundings:
        model = roundings(p, lambda weights: weights.sum(axis=-1, keepdims=True))  # of weights with the sum 1
        return Roundings(model.running * p, model.blocked * p, model.terms)

    return Expected(p, hard, alarm, p, sums=sums)


def _sums_to_one(trial: Trial) -> Claim:
    seen = np.any(np.isfinite(as_float64(trial.arguments["x"])), axis=-1)
    return Claim(as_float64(trial.outputs[0]).sum(axis=-1), seen * 1.0, trial.bounds[0].sum(axis=-1) + 1e-12)


def _order(trial: Trial) -> Claim:
    again = trial.again(x=np.ascontiguousarray(trial.arguments["x"][:, ::-1]))
    return Claim(again[0][:, ::-1], trial.outputs[0], 2 * trial.bounds[0])


def _shift(trial: Trial) -> Claim | None:
    x = trial.arguments["x"]
    shifted = (x + 4).astype(x.dtype)
    if not np.array_equal(as_float64(shifted), as_float64(x) + 4):
        return None
    p = as_float64(trial.outputs[0])
    return Claim(trial.again(x=shifted)[0], p, 2 * trial.bounds[0] + 64 * U * p)


def _single_score(trial: Trial) -> Claim:
    """Hide all scores but one: this reveals a number added to the sum, such as an epsilon in the divisor."""
    x = np.full_like(trial.arguments["x"], -np.inf)
    x[:, -1] = 0
    p = trial.again(x=x)[0]
    return Claim(p[:, -1], np.ones(len(p)), 8 * U + precision(p.dtype.name).unit)


CONTRACT = Contract(
    definition=softmax,
    shapes={"rows": st.sampled_from([1, 2, 3, 5]), "n": sizes(8, 16, 32, 64, 128, 256, most=513)},
    values={
        "x": values(-6, 6),
        "around": st.sampled_from([0.0, -20_000.0, 20_000.0, -100.0, 100.0]),
        "hidden": hidden,
    },
    arguments=arguments,
    expect=expect,
    domain="x [rows n], finite or -inf; a row with only -inf gives zeros",
    bound="hard: p (e^(2 a) (1 + s) / (1 - s) - 1), a = (4 |x| + 6 (max - x)) u for scores, s = (n + 10 b) u for an "
    "online softmax of b = min(n, 64) blocks; alarm: (16 + 2 sqrt(n) + 8 max|x|) u p, and "
    "u A p more for a running sum, with A = n / 2 for equal terms (verify/bounds/summation.py)",
    laws=[
        independent("a row", "x"),
        Law("probabilities sum to 1, or to 0 if every score is -inf", _sums_to_one),
        Law("reversing the scores reverses the probabilities", _order),
        Law("softmax(x + 4) equals softmax(x)", _shift),
        Law("the only finite score of a row has probability 1", _single_score),
    ],
    large=Large(
        {"rows": beyond(64, 1024, 8192), "n": beyond(1024, 4096, 8192, 32_768)},
        beside={"rows": [2], "n": [17]},
        empty=["rows"],
    ),
)
