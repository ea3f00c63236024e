"""Finds the tokenizer that belongs to a checkpoint, and fits the checkpoint to it."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from llamaspec.model.checkpoints.checkpoint import Checkpoint, CheckpointError, refused
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.tensors import EMBEDDING, HEAD
from llamaspec.model.tokenizers.load import load_tokenizer, tokenizer_in
from llamaspec.model.tokenizers.tokenizer import Tokenizer

PADDING = 64  # Models round their vocabulary up for the hardware, by less than 1/64.
FEW = 16  # tokens that a tokenizer may have beyond the rows of a model, at least: Gemma 3 1B has 1, CodeLlama 34B 16


class OtherVocabulary(CheckpointError):
    """Raised for a tokenizer with another number of tokens than the model has."""


def tokenizer_of(checkpoint: Checkpoint, tokenizer: str | Path | None) -> Tokenizer:
    """Open the tokenizer at a path. For None, open the one inside the model's file (GGUF), else the one next to it.

    The tokenizer may have a few more tokens than the model has rows. Ordinary text does not need these tokens, and the
    model refuses their ids. Raises CheckpointError if there is no tokenizer, or if its vocabulary is not the model's.
    """
    model = Path(checkpoint.path)
    path = Path(tokenizer) if tokenizer is not None else model if model.is_dir() else model.parent
    inside = tokenizer_inside(checkpoint) if tokenizer is None else None
    chosen = inside or load_tokenizer(path, beside=None if tokenizer is not None or model.is_dir() else checkpoint.path)
    vocab = checkpoint.config.vocab
    if not vocab - vocab // PADDING <= chosen.vocab <= vocab + max(FEW, vocab // PADDING):
        what = f"a vocabulary of {chosen.vocab} tokens, but the model {checkpoint.path} has {vocab}"
        raise OtherVocabulary(str(refused(path, what)))
    return chosen


def fitted(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Checkpoint:
    """Return `checkpoint` as it runs with `tokenizer`.

    1. A text also ends at the tokenizer's eos_token, even if config.json names other ids, as in vLLM.
    2. Rows of the embedding and the head beyond the tokenizer's tokens are read as 0 if they are not finite. Some
       programs leave such rows as they were allocated, and no token uses them. A note says so.
    """
    eos, vocab = tokenizer.eos, checkpoint.config.vocab
    stops = checkpoint.stops | ({eos} if eos is not None and eos < vocab else set())
    tensors, notes = dict(checkpoint.tensors), list(checkpoint.notes)
    for name in (EMBEDDING, HEAD):
        tensor = tensors.get(name)
        if tensor is None or tensor.codes or tokenizer.vocab >= vocab:
            continue
        odd = _not_finite(tensor.read(), tokenizer.vocab)
        if len(odd):
            tensors[name] = tensor._replace(read=_with_zeros(tensor.read, odd))
            rows = f"{len(odd)} row{'s' if len(odd) > 1 else ''} that no token uses"
            what = f"{rows} of {name}, from row {odd[0]} on, have numbers that are not finite, and are read as 0"
            notes.append(str(refused(checkpoint.path, what)))
    return replace(checkpoint, stops=frozenset(stops), tensors=tensors, notes=tuple(notes))


def fitted_if_any(checkpoint: Checkpoint, tokenizer: str | Path | None) -> Checkpoint:
    """Fit `checkpoint` to its tokenizer; return it unchanged if it has none that can be used."""
    with suppress(CheckpointError):
        if chosen := tokenizer_if_any(checkpoint, tokenizer):
            return fitted(checkpoint, chosen)
    return checkpoint


def _not_finite(rows: np.ndarray, first: int) -> np.ndarray:
    """Return the numbers of the rows from `first` on that hold a NaN or an infinity."""
    return first + np.flatnonzero(~np.isfinite(rows[first:]).all(axis=1))


def _with_zeros(read: Callable[[], np.ndarray], rows: np.ndarray) -> Callable[[], np.ndarray]:
    """Make a function that reads a matrix and sets `rows` to 0."""

    def read_with_zeros() -> np.ndarray:
        matrix = np.array(read())
        matrix[rows] = 0
        return matrix

    return read_with_zeros


def tokenizer_if_any(checkpoint: Checkpoint, tokenizer: str | Path | None) -> Tokenizer | None:
    """Open the tokenizer as `tokenizer_of` does; return None if `tokenizer` is None and the model has no tokenizer."""
    beside = Path(checkpoint.path)
    folder = beside if beside.is_dir() else beside.parent
    if tokenizer is None and not tokenizer_in(folder) and not tokenizer_inside(checkpoint):
        return None
    return tokenizer_of(checkpoint, tokenizer)


def tokenizer_inside(checkpoint: Checkpoint) -> Tokenizer | None:
    """Open the tokenizer inside a model's GGUF file; None where there is none."""
    if not checkpoint.format.startswith("gguf"):
        return None
    from llamaspec.model.tokenizers.gguf import read_gguf

    return read_gguf(MappedFile(checkpoint.path))
