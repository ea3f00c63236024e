"""Backward of the embedding: the gradient of a row is a sum over the tokens that looked up the row, or 0."""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.backward.embedding import embedding_backward
from llamaspec.verify.bounds.precision import TINY, Precision
from llamaspec.verify.bounds.running_error import gamma
from llamaspec.verify.contract import Arguments, Claim, Contract, Expected, Large, Law, Trial, as_float64, beyond
from llamaspec.verify.draws.draw import Values, integers, seeds, sizes, values


def arguments(*, precision: Precision, count: int, vocab: int, dim: int, tokens: int, dx: Values) -> Arguments:
    ids = integers(tokens, "tokens", count, below=vocab)
    ids[-1] = vocab - 1
    return {"tokens": ids, "dx": dx.array("dx", count, dim, precision=precision), "vocab": vocab}


def expect(tokens: np.ndarray, dx: np.ndarray, *, vocab: int) -> Expected:
    value = embedding_backward(tokens, dx, vocab=vocab)
    size = embedding_backward(tokens, np.abs(as_float64(dx)), vocab=vocab)
    times = np.bincount(tokens, minlength=vocab)[:, None]
    error = np.where(times > 1, gamma(int(times.max())) * size + times * TINY, 0.0)
    return Expected(value, error, error, size)


def _order(trial: Trial) -> Claim:
    tokens, dx = trial.arguments["tokens"], trial.arguments["dx"]
    again = trial.again(tokens=tokens[::-1].copy(), dx=dx[::-1].copy())
    return Claim(again[0], trial.outputs[0], 2 * trial.bounds[0])


CONTRACT = Contract(
    definition=embedding_backward,
    shapes={
        "count": st.sampled_from([1, 2, 3, 7, 8, 9, 33, 65]),
        "vocab": sizes(8, 64, 256, most=300),
        "dim": sizes(8, 32, 128, most=257),
    },
    values={"tokens": seeds, "dx": values(-8, 8)},
    arguments=arguments,
    expect=expect,
    domain="tokens [count] int32, each from 0 to vocab - 1, the last of them vocab - 1; dx [count dim]; "
    "the result [vocab dim]",
    bound="hard and alarm: gamma_m times the sum of magnitudes, for an id that occurs m times; exact for m = 1",
    laws=[Law("the order of the tokens changes only roundings", _order)],
    large=Large(
        {"count": beyond(1024, 8192), "vocab": (40_000, 150_001), "dim": beyond(1024, 8192)},
        beside={"count": [3], "vocab": [5], "dim": [2]},
    ),
)
