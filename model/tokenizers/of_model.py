"""Finds the tokenizer that belongs to a checkpoint, and adapts the checkpoint's stop ids and unused rows to it."""

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

PADDING = 64  # Models pad their vocabulary for the hardware, by less than 1/64 of its size.
FEW = 16  # number of tokens that a tokenizer may always have beyond a model's rows: Gemma 3 1B has 1, CodeLlama 34B 16


class OtherVocabulary(CheckpointError):
    """Raised if the sizes of a tokenizer's vocabulary and of a model's vocabulary differ by too much."""


def tokenizer_of(checkpoint: Checkpoint, tokenizer: str | Path | None) -> Tokenizer:
    """Open the tokenizer at the path `tokenizer`; for None, open the model's own tokenizer.

    The model's own tokenizer is inside its GGUF file, or else next to the model. The sizes of the two vocabularies may
    differ a little. The model may have unused rows. The tokenizer may have a few tokens for which the model has no
    rows; ordinary text does not need these tokens, and the model refuses their ids. Raises CheckpointError if there is
    no tokenizer, or if the sizes differ by more.
    """
    model = Path(checkpoint.path)
    path = Path(tokenizer) if tokenizer is not None else model if model.is_dir() else model.parent
    inside = tokenizer_inside(checkpoint) if tokenizer is None else None
    chosen = inside or load_tokenizer(path, beside=None if tokenizer is not None or model.is_dir() else checkpoint.path)
    vocab = checkpoint.config.vocab
    if not vocab - vocab // PADDING <= chosen.vocab <= vocab + max(FEW, vocab // PADDING):
        what = f"the tokenizer has {chosen.vocab} tokens, but the model {checkpoint.path} has a vocabulary of {vocab}"
        raise OtherVocabulary(str(refused(path, what)))
    return chosen


def fitted(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Checkpoint:
    """Return a copy of `checkpoint` with two changes for `tokenizer`.

    1. Generation also ends at the tokenizer's eos_token, even if config.json states other ids. vLLM does the same.
    2. If a row of the embedding or the head belongs to no token and is not finite, it reads as 0. `Checkpoint.notes`
       gets a note about such rows, which some programs do not initialize.
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
            what = f"{rows} of {name}, from row {odd[0]} on, have numbers that are not finite; we read them as 0"
            notes.append(str(refused(checkpoint.path, what)))
    return replace(checkpoint, stops=frozenset(stops), tensors=tensors, notes=tuple(notes))


def fitted_if_any(checkpoint: Checkpoint, tokenizer: str | Path | None) -> Checkpoint:
    """Return `fitted(checkpoint, tokenizer)`, or `checkpoint` unchanged if no usable tokenizer is found."""
    with suppress(CheckpointError):
        if chosen := tokenizer_if_any(checkpoint, tokenizer):
            return fitted(checkpoint, chosen)
    return checkpoint


def _not_finite(rows: np.ndarray, first: int) -> np.ndarray:
    """Return the indices of the rows from `first` on that contain a NaN or an infinity."""
    return first + np.flatnonzero(~np.isfinite(rows[first:]).all(axis=1))


def _with_zeros(read: Callable[[], np.ndarray], rows: np.ndarray) -> Callable[[], np.ndarray]:
    """Return a function that reads a matrix and then sets `rows` to 0."""

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
    """Open the tokenizer inside a model's GGUF file; None for other formats, or if the file has no tokenizer."""
    if not checkpoint.format.startswith("gguf"):
        return None
    from llamaspec.model.tokenizers.gguf import read_gguf

    return read_gguf(MappedFile(checkpoint.path))
