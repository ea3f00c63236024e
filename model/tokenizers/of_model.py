"""Finds the tokenizer that belongs to a checkpoint."""

from pathlib import Path

from llamaspec.model.checkpoints.checkpoint import Checkpoint, CheckpointError, refused
from llamaspec.model.checkpoints.mapped import MappedFile
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
