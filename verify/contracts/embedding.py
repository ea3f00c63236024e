"""The embedding: it copies rows, so the result is exact."""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.embedding import embedding
from llamaspec.verify.bounds.precision import Precision
from llamaspec.verify.contract import Arguments, Claim, Contract, Expected, Large, Law, Trial, beyond
from llamaspec.verify.draws.draw import Values, integers, seeds, sizes, values


def arguments(*, precision: Precision, count: int, vocab: int, dim: int, tokens: int, table: Values) -> Arguments:
    ids = integers(tokens, "tokens", count, below=vocab)
    ids[-1] = vocab - 1
    return {"tokens": ids, "table": table.array("table", vocab, dim, precision=precision)}


def expect(tokens: np.ndarray, table: np.ndarray) -> Expected:
    value = embedding(tokens, table)
    zeros = np.zeros(value.shape)
    return Expected(value, zeros, zeros, np.abs(value), rounded=False)


def _repeated(trial: Trial) -> Claim:
    tokens = trial.arguments["tokens"]
    rows = trial.again(tokens=np.full_like(tokens, tokens[-1]))[0]
    return Claim(rows, np.broadcast_to(trial.outputs[0][-1], rows.shape), 0.0)


CONTRACT = Contract(
    definition=embedding,
    shapes={
        "count": st.sampled_from([1, 2, 3, 7, 8, 9]),
        "vocab": sizes(8, 64, 256, most=300),
        "dim": sizes(8, 32, 128, most=257),
    },
    values={"tokens": seeds, "table": values(without=["denormal"])},
    arguments=arguments,
    expect=expect,
    domain="tokens [count] int32, each from 0 to vocab - 1, the last of them vocab - 1; table [vocab dim]",
    bound="exact",
    laws=[Law("the same token gives the same row everywhere", _repeated)],
    large=Large(
        {"count": beyond(64, 1024, 8192), "vocab": (1025, 33_281, 70_001, 150_001), "dim": beyond(1024, 4096, 8192)},
        beside={"count": [5], "vocab": [40], "dim": [8]},
    ),
)
