r"""Compares the log-probabilities of a server with the definition, position by position.

The server writes greedily and reports the log-probabilities of these tokens and of other likely tokens. The definition
reads the same tokens (teacher forcing), so that a difference at one position does not depend on the choices before it.
With the server's numbers l_i, the exact ones e_i, and samples s_ki in the claimed arithmetic (`judge.arithmetic`),

    ratio = sqrt(sum_i (l_i - e_i)^2 / sum_i mean_k (s_ki - e_i)^2)        i: the tokens reported at this position

A position is explained if the ratio is at most `EXPLAINED`, not explained if it is above `WRONG`, and undecided in
between. Different engines round in different places and orders, so the ratio of a correct engine may be a few times 1
(docs/conform.md has a table). Faults that change the model make it 10 to 1,000,000.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from llamaspec.judge.arithmetic import Definition
from llamaspec.judge.client import Choice, Named, Step
from llamaspec.model.tokenizers.tokenizer import Tokenizer, is_byte
from llamaspec.reference.logsumexp import logsumexp

EXPLAINED, WRONG = 4.0, 16.0
SAMPLES = 6  # runs in rounded arithmetic
SMALLEST = 2.0**-24  # absolute error of a log-probability as a float32 number near 1
IMPOSSIBLE = -1000.0  # servers write a number below this, such as -9999, in place of -inf

Explained = Literal["explained", "undecided", "not explained"]


class Position(NamedTuple):
    """One position of an answer, compared with the definition."""

    trace: str  # the name of the request
    position: int  # in the prompt and its answer
    exact: float  # the exact log-probability of the server's token
    difference: float  # the largest, in nats
    ratio: float
    behind: float  # how much less likely the server's token is than the likeliest, in nats, exact
    tie: float  # how much of that the arithmetic explains

    @property
    def verdict(self) -> Explained:
        return "explained" if self.ratio <= EXPLAINED else "undecided" if self.ratio <= WRONG else "not explained"

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the likeliest, or so near that rounding may choose it."""
        return self.behind <= self.tie


class Spellings:
    """Finds the token that a server means by a text."""

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        self._ids: dict[str, list[int]] = {}
        for id in range(min(vocab, tokenizer.vocab)):
            piece = tokenizer.piece(id)
            texts = {piece, piece.replace("\u2581", " ")}
            if not is_byte(piece):
                texts.add(tokenizer.bytes_of(id).decode(errors="replace"))
            for text in texts:
                self._ids.setdefault(text, []).append(id)
        self._bytes = {
            tokenizer.bytes_of(id): id for id in range(min(vocab, tokenizer.vocab)) if is_byte(tokenizer.piece(id))
        }

    def ids(self, token: Named) -> list[int]:
        """Return the ids that `token` may mean, or an empty list if we find no id for its text."""
        if token.id is not None:
            return [token.id]
        for text in (token.text, f" {token.text}"):
            if ids := self._ids.get(text):
                return ids
        spelled = self._bytes.get(token.bytes or token.text.encode())
        return [] if spelled is None else [spelled]


@dataclass(frozen=True, eq=False)
class Trace:
    """The tokens of a request and its answer, and the log-probabilities that the server reports for them."""

    name: str
    ids: list[int]  # the prompt and the answer
    start: int  # the number of ids of the prompt
    entries: list[dict[int, float]]  # for each id of the answer, the log-probabilities that the server reports
    squares: list[np.ndarray] = field(default_factory=list)  # for each entry, what the claimed arithmetic explains
    counted: int | None = None  # tokens of the prompt, as the server counts them


def trace_of(name: str, prompt: Sequence[int], choice: Choice, spellings: Spellings, definition: Definition) -> Trace:
    """Read a server's answer, up to the first token with a text that our tokenizer does not know."""
    ids, entries = list(prompt), []
    for step in choice.steps:
        drawn = spellings.ids(step.token)
        if not drawn or not 0 <= drawn[0] < definition.config.vocab:
            break
        if len(drawn) > 1:  # two tokens with one text: we take the likelier
            row = definition.log_probabilities([*ids, drawn[0]], len(ids))[0]
            drawn = [max(drawn, key=lambda id: row[id])]
        entries.append({drawn[0]: step.logprob} | _others(step, drawn[0], spellings, definition.config.vocab))
        ids.append(drawn[0])
    return Trace(name, ids, len(prompt), entries)


def _others(step: Step, drawn: int, spellings: Spellings, vocab: int) -> dict[int, float]:
    likeliest = {}
    for token, logprob in step.top:
        ids = spellings.ids(token)
        if len(ids) == 1 and ids[0] != drawn and ids[0] < vocab:
            likeliest[ids[0]] = logprob
    return likeliest


def explained_by(trace: Trace, definition: Definition, *, samples: int | None = None) -> Trace:
    """Measure how far the claimed arithmetic may move each number of a trace. `samples` None means `SAMPLES`."""
    if not trace.entries:
        return trace
    samples = samples or SAMPLES
    exact = chosen(definition.log_probabilities(trace.ids, trace.start), trace)
    squares = [np.full(len(entries), SMALLEST**2) for entries in trace.entries]
    for rows in definition.samples(trace.ids, trace.start, count=samples):
        for square, sampled, expected in zip(squares, chosen(rows, trace), exact, strict=True):
            square += (sampled - expected) ** 2 / samples
    return replace(trace, squares=squares)


def chosen(rows: Float[np.ndarray, "positions vocab"], trace: Trace) -> list[Float[np.ndarray, " entries"]]:
    """Pick the log-probabilities of the tokens that the server reports."""
    return [row[list(entries)] for row, entries in zip(rows, trace.entries, strict=True)]


def compare(
    trace: Trace,
    definition: Definition,
    *,
    ids: Callable[[list[int]], list[int]] = lambda prompt: prompt,
    temperature: float = 1.0,
) -> list[Position]:
    """Compare a trace with a definition.

    `ids` changes the ids of the prompt, to test a different way in which the server may have read the prompt. With a
    `temperature`, we divide the logits by it, to test whether the server does so before it computes log-probabilities.
    """
    if not trace.entries:
        return []
    prompt = ids(trace.ids[: trace.start])
    rows = definition.log_probabilities([*prompt, *trace.ids[trace.start :]], len(prompt))
    if temperature != 1:
        rows = rows / temperature - logsumexp(rows / temperature)[:, None]
    positions = []
    for i, (row, entries, squares) in enumerate(zip(rows, trace.entries, trace.squares, strict=True)):
        expected, actual = row[list(entries)], np.array(list(entries.values()))
        off = np.abs(np.where(actual > IMPOSSIBLE, actual, -np.inf) - expected)
        ratio = float(np.sqrt(np.sum(off**2) / np.sum(squares)))
        behind, tie = float(np.max(row) - expected[0]), 2 * EXPLAINED * float(np.sqrt(np.max(squares)))
        positions.append(
            Position(trace.name, trace.start + i, float(expected[0]), float(np.max(off)), ratio, behind, tie)
        )
    return positions


def worst(positions: Sequence[Position]) -> float:
    """Return the largest ratio, or infinity if there are no positions."""
    return max((position.ratio for position in positions), default=np.inf)
