r"""Measures how well a model predicts a text, and how far its predictions are from another model's.

    loss           -1/n sum_t ln p(token t | tokens before it in its window)      nats per token
    perplexity     exp(loss)
    bits per byte  n loss / ln 2 / bytes of the n tokens                          does not depend on the tokenizer
    divergence     KL(p' || p) = sum_v p'(v) ln(p'(v) / p(v))                     nats per position; p' is the base

A text longer than the context is read in windows of the context's length. Each window begins `stride` tokens after the
previous one, and a token is scored in the first window that contains it. So every token except the first of the text is
counted once, and after the first window every token is predicted from at least context - stride tokens. This is Hugging
Face's definition (https://huggingface.co/docs/transformers/perplexity), with the mean over tokens. The default stride,
half of the context, is from the example on that page.

llama.cpp's windows do not overlap: it scores the second half of each window, and puts BOS in front of every window
(https://github.com/ggml-org/llama.cpp/tree/master/tools/perplexity). Its perplexity is higher, because it predicts some
tokens from fewer tokens. Our divergence is defined as in llama.cpp's `--kl-divergence`.
"""

import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float64

from llamaspec.model.checkpoints.checkpoint import Checkpoint, os_errors, refused
from llamaspec.model.running.backend import check_logits
from llamaspec.model.text import read_text
from llamaspec.model.tokenizers.of_model import tokenizer_of
from llamaspec.model.tokenizers.tokenizer import encode_text
from llamaspec.model.weights.loading import Progress, no_progress

IN_MEMORY = 64 << 20  # bytes of logits that we keep in memory; the rest goes to a file

Rows = Float[np.ndarray, "rows vocab"]  # logits


@runtime_checkable
class Predictor(Protocol):
    """A model that computes logits, on the JAX backend or on the reference backend."""

    def logits_in_parts(self, ids: Sequence[int], *, after: int = 0) -> Iterator[np.ndarray]:
        """Yield the logits [rows, vocab] after each of `ids` except the first `after`, some rows at a time."""
        ...

    def with_weights(self, checkpoint: Checkpoint, *, read_from: Checkpoint | None = None) -> "Predictor":
        """Return the same model with the weights of `checkpoint`, which has tensors of the same shapes.

        `read_from` is the checkpoint of the current weights. If it is given, tensors that both checkpoints share need
        not be read again.
        """
        ...


class EvalText(NamedTuple):
    """A tokenized text to evaluate a model on."""

    ids: list[int]
    bytes: int  # bytes of all tokens except the first, which is not predicted

    @property
    def tokens(self) -> int:
        """The number of tokens that are predicted: all except the first."""
        return len(self.ids) - 1


class Window(NamedTuple):
    """A part of a text: tokens `begin` to `end` (excluded). We score only the tokens from `scored` on."""

    begin: int
    scored: int
    end: int


class Evaluation(NamedTuple):
    """The loss of a model on a text."""

    tokens: int
    bytes: int
    loss: float  # nats per token

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits per byte of the text."""
        return self.tokens * self.loss / math.log(2) / self.bytes


class Divergence(NamedTuple):
    """The distance of a model's predictions from its base model's: KL divergences over a text's positions, in nats."""

    mean: float
    median: float
    p99: float
    most: float
    same_top: float  # share of positions at which both models have the same likeliest token


class Comparison(NamedTuple):
    """The results of a model and of its base on the same text."""

    model: Evaluation
    base: Evaluation
    divergence: Divergence


def text_for(models: Sequence[Checkpoint], path: str | Path, *, tokenizer: str | Path | None = None) -> EvalText:
    """Read and tokenize a text file for all of `models`.

    `tokenizer` is the path of a tokenizer for all models; None means the tokenizer of each model. Raises
    CheckpointError for a file of fewer than two tokens, and ValueError if the models have different vocabularies or
    tokenize the text differently.
    """
    text, first = read_text(path), models[0]
    vocabularies = [tokenizer_of(model, tokenizer) for model in models]
    encoded = [encode_text(vocabulary, text) for vocabulary in vocabularies]
    for model, ids in zip(models, encoded, strict=True):
        paths = f"{first.path} and {model.path}"
        if model.config.vocab != first.config.vocab:
            raise ValueError(
                f"{paths} have {first.config.vocab} and {model.config.vocab} tokens in their vocabularies, so we "
                "cannot compare their predictions"
            )
        if ids != encoded[0]:
            at = next(
                (i for i, pair in enumerate(zip(ids, encoded[0], strict=False)) if pair[0] != pair[1]), len(encoded[0])
            )
            what = f"tokenize the text differently, from token {at:,} on, so we cannot compare their predictions"
            raise ValueError(f"{paths} {what}; --tokenizer sets one tokenizer for both")
    ids, start = encoded[0], vocabularies[0].bytes_of(encoded[0][0]) if encoded[0] else b""
    if vocabularies[0].dummy_prefix:
        start = start.removeprefix(b" ")
    if len(ids) < 2:
        raise refused(path, "has only one token: expected at least two, because the first is not predicted")
    return EvalText(ids, len(text.encode()) - len(start))


def choose_stride(stride: int | None, context: int) -> int:
    """Return the distance between the beginnings of two windows, by default half the context.

    Raises ValueError if `context` or `stride` is out of range.

    >>> choose_stride(None, 1024)
    512
    """
    if context < 2:
        raise ValueError(f"context must be at least 2 (one token to read and one to predict), got {context}")
    if stride is not None and not 1 <= stride < context:
        raise ValueError(f"stride must be between 1 and {context - 1} (so that windows overlap), got {stride}")
    return stride or context // 2


def windows(tokens: int, *, context: int, stride: int) -> Iterator[Window]:
    """Cut a text of `tokens` tokens into windows, so that every token except the first is scored once.

    >>> [tuple(window) for window in windows(9, context=4, stride=2)]
    [(0, 1, 4), (2, 4, 6), (4, 6, 8), (6, 8, 9)]
    """
    scored, begin = 1, 0
    while scored < tokens:
        end = min(begin + context, tokens)
        yield Window(begin, scored, end)
        scored, begin = end, begin + stride


def scored_logits(
    model: Predictor, text: EvalText, *, context: int, stride: int | None = None, progress: Progress = no_progress
) -> Iterator[Rows]:
    """Yield the logits that predict every token of a text except the first, in order, some rows at a time.

    `context` must be at most the model's capacity. Raises ValueError if `context` or `stride` is out of range.
    """
    done = 0
    for window in windows(len(text.ids), context=context, stride=choose_stride(stride, context)):
        ids, after = text.ids[window.begin : window.end - 1], window.scored - 1 - window.begin
        for rows in model.logits_in_parts(ids, after=after):
            yield rows
            done += len(rows)
            progress("evaluating", done / text.tokens)


class Recorded:
    """Logits in a file, in parts, so that we can iterate over them several times."""

    def __init__(self, parts: Iterable[Rows], file: IO[bytes]):
        self._file = file
        self._parts: list[tuple[tuple[int, ...], np.dtype]] = []
        for rows in parts:
            file.write(rows.tobytes())
            self._parts.append((rows.shape, rows.dtype))

    def __iter__(self) -> Iterator[Rows]:
        at = 0
        for shape, dtype in self._parts:
            self._file.seek(at)  # another iterator may have moved the file's position
            raw = self._file.read(math.prod(shape) * dtype.itemsize)
            at += len(raw)
            yield np.frombuffer(raw, dtype).reshape(shape)


@contextmanager
def recorded(parts: Iterable[Rows]) -> Iterator[Recorded]:
    """Store the `scored_logits` of a base model while the body compares several models with it.

    Up to `IN_MEMORY` bytes stay in memory; more than that go to a temporary file. Raises CheckpointError on a full
    disk.
    """
    with os_errors(tempfile.gettempdir()), tempfile.SpooledTemporaryFile(max_size=IN_MEMORY) as file:
        yield Recorded(parts, file)


def evaluate(
    model: Predictor, text: EvalText, *, context: int, stride: int | None = None, progress: Progress = no_progress
) -> Evaluation:
    """Measure perplexity and bits per byte. Raises ValueError if `context` or `stride` is out of range."""
    losses, targets = [], iter(text.ids[1:])
    for rows in scored_logits(model, text, context=context, stride=stride, progress=progress):
        losses.append(_losses(_log_softmax(rows), targets))
    return _evaluation(losses, bytes=text.bytes)


def compare(
    model: Predictor,
    base: Predictor | Recorded,
    text: EvalText,
    *,
    context: int,
    stride: int | None = None,
    progress: Progress = no_progress,
) -> Comparison:
    """Evaluate a model and its base, and measure the divergence between their predictions.

    `base` is a model, or the `recorded` logits of a model for the same text.
    """
    rows = scored_logits(model, text, context=context, stride=stride, progress=progress)
    base_rows = base if isinstance(base, Recorded) else scored_logits(base, text, context=context, stride=stride)
    return comparison(rows, base_rows, text.ids[1:], bytes=text.bytes)


def comparison(
    logits: Iterable[Rows], base_logits: Iterable[Rows], targets: Sequence[int], *, bytes: int
) -> Comparison:
    """Compare a model and its base by the logits that predict `targets`.

    The logits of both models come in parts of the same lengths.
    """
    losses, base_losses, kl, same_best = [], [], [], []
    ids, base_ids = iter(targets), iter(targets)
    for rows, base_rows in zip(logits, base_logits, strict=True):
        log_q, log_p = _log_softmax(rows), _log_softmax(base_rows)
        losses.append(_losses(log_q, ids))
        base_losses.append(_losses(log_p, base_ids))
        kl.append(_divergences(log_p, log_q))
        same_best.append(log_p.argmax(axis=-1) == log_q.argmax(axis=-1))
    model, base = _evaluation(losses, bytes=bytes), _evaluation(base_losses, bytes=bytes)
    return Comparison(model, base, _divergence(kl, same_best))


def _log_softmax(logits: np.ndarray) -> Float64[np.ndarray, "rows vocab"]:
    shifted = check_logits(logits).astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _losses(log_p: Float64[np.ndarray, "rows vocab"], targets: Iterator[int]) -> Float64[np.ndarray, " rows"]:
    """Take the next id of `targets` for each row, and return the row's loss for that id."""
    ids = np.array(list(islice(targets, len(log_p))))
    return -np.take_along_axis(log_p, ids[:, None], axis=-1)[:, 0]


def _divergences(
    log_p: Float64[np.ndarray, "rows vocab"], log_q: Float64[np.ndarray, "rows vocab"]
) -> Float64[np.ndarray, " rows"]:
    """Compute the KL divergence of each row. Where rounding makes it negative, returns 0."""
    return np.maximum(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1), 0)


def _evaluation(losses: Sequence[np.ndarray], *, bytes: int) -> Evaluation:
    all_losses = np.concatenate(losses)
    return Evaluation(len(all_losses), bytes, float(all_losses.mean()))


def _divergence(kl: Sequence[np.ndarray], same_best: Sequence[np.ndarray]) -> Divergence:
    divergences = np.concatenate(kl)
    median, p99 = np.quantile(divergences, [0.5, 0.99])
    return Divergence(
        float(divergences.mean()),
        float(median),
        float(p99),
        float(divergences.max()),
        float(np.concatenate(same_best).mean()),
    )
