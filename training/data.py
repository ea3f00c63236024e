"""Training documents: where they come from, and how they are put into batches."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from llamaspec.model.checkpoints.checkpoint import os_errors, refused
from llamaspec.model.checkpoints.huggingface.companions import companions
from llamaspec.model.text import read_text
from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.training.recipe import Recipe, check_context

# Control tokens that end a document, in the order of preference.
ENDS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "<|im_end|>")
LENGTHS = range(32, 1025, 32)  # documents are padded to these lengths, because each length needs its own program
COARSE = range(128, 1025, 128)  # lengths for batches of several documents, which need padding anyway


class Example(NamedTuple):
    """A document to train on."""

    ids: list[int]
    weights: list[float]  # weight in the loss of the prediction of each id; 0: not counted


class Batch(NamedTuple):
    """Examples of similar lengths, padded at the end to one length."""

    ids: Int[np.ndarray, "batch seq"]
    weights: Float[np.ndarray, "batch seq"]

    @property
    def counted(self) -> Bool[np.ndarray, "batch predicted"]:
        """A mask of the predictions that the loss counts, from the second id on. (The first id is not predicted.)"""
        return self.weights[:, 1:] > 0


@runtime_checkable
class Source(Protocol):
    """A source of documents, with their tokenizer."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the documents and of the model."""
        ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """Files to store with the model's weights: their bytes by name."""
        ...

    @property
    def bos(self) -> int | None:
        """The id that begins a document."""
        ...

    @property
    def eos(self) -> int | None:
        """The id that ends a document."""
        ...

    @property
    def digests(self) -> Mapping[str, str]:
        """Digests of everything that determines the documents, except the recipe. The keys are words such as "text"."""
        ...

    @property
    def floor(self) -> float | None:
        """A lower bound on the mean loss: the entropy of held-out documents in nats per counted token.

        None if unknown.
        """
        ...

    def training(self, step: int, recipe: Recipe) -> list[Example]:
        """Return the documents of a step. They depend only on `step` and `recipe`."""
        ...

    def held_out(self) -> list[Example]:
        """Return documents that no step trains on."""
        ...

    def questions(self) -> list[Example]:
        """Return held-out questions. In each, only the ids of the single right answer have a weight."""
        ...


class Text:
    """The paragraphs of a file as documents, in a new order in each epoch. Every twentieth document is held out."""

    def __init__(self, file: str | Path, tokenizer: Tokenizer, files: Mapping[str, bytes], *, context: int):
        """Read a UTF-8 file, and cut each document to `context` tokens.

        Raises CheckpointError for a file that cannot be read or has fewer than two paragraphs.
        """
        check_context(context)
        text = read_text(file).replace("\r\n", "\n").replace("\r", "\n")
        self.tokenizer, self.files = tokenizer, files
        self.bos = tokenizer.bos
        self.eos = end_of_text(tokenizer, files)
        self.floor = None
        self.digests = {"text": digest(text.encode()), "tokenizer": tokenizer_digest(tokenizer, files)}
        paragraphs = [paragraph.strip() for paragraph in re.split(r"\n\s*\n", text)]
        all = [part for text in paragraphs if text for part in self._documents(text, context)]
        if len(all) < 2:
            raise refused(file, "has fewer than two paragraphs: training needs one to train on and one to hold out")
        self._held_out, self._training = all[::20], [d for i, d in enumerate(all) if i % 20]

    def _documents(self, text: str, context: int) -> list[Example]:
        ids = [*self.tokenizer.encode(text), *([] if self.eos is None else [self.eos])]
        begin = [] if self.bos is None else [self.bos]
        size = context - len(begin)
        parts = [[*begin, *ids[i : i + size]] for i in range(0, len(ids), size)]
        predicting = [part for part in parts if len(part) > 1]  # without BOS, nothing predicts the first id
        return [Example(part, [float(i >= len(begin)) for i in range(len(part))]) for part in predicting]

    def training(self, step: int, recipe: Recipe) -> list[Example]:
        """Return the documents of a step. They depend only on `step` and `recipe`."""
        indices = indices_of_step(len(self._training), step, batch=recipe.batch, seed=recipe.seed)
        return [self._training[i] for i in indices]

    def held_out(self) -> list[Example]:
        """Return every twentieth document."""
        return self._held_out

    def questions(self) -> list[Example]:
        """Return an empty list, because a plain text has no known answers."""
        return []


def end_of_text(tokenizer: Tokenizer, files: Mapping[str, bytes]) -> int | None:
    """Return the id that ends a document: the first of `ENDS` in the vocabulary, or the eos_token in `files`, or None.

    `files` are the files next to the tokenizer. One of them, tokenizer_config.json, may name the eos_token.
    """
    try:
        stated = json.loads(files.get("tokenizer_config.json", b"{}")).get("eos_token")
    except (ValueError, AttributeError):  # A broken file is refused when the model is loaded.
        stated = None
    stated = stated.get("content") if isinstance(stated, dict) else stated
    names = (*ENDS, stated) if isinstance(stated, str) else ENDS
    return next((tokenizer.special[name] for name in names if name in tokenizer.special), None)


def digest(*parts: bytes) -> str:
    """Return the SHA-256 of byte strings. The length of a string is hashed before it, so the boundaries matter, too.

    >>> digest(b"ab", b"c") == digest(b"a", b"bc")
    False
    """
    sums = hashlib.sha256()
    for part in parts:
        sums.update(len(part).to_bytes(8, "little") + part)
    return sums.hexdigest()


def tokenizer_digest(tokenizer: Tokenizer, files: Mapping[str, bytes]) -> str:
    """Return a digest of a tokenizer: its pieces, its control tokens, and all `files` except chat templates."""
    pieces = json.dumps([tokenizer.piece(id) for id in range(tokenizer.vocab)])
    control = json.dumps([dict(sorted(tokenizer.special.items())), tokenizer.bos])
    own = [files[name] for name in sorted(files) if not name.endswith(".jinja")]
    return digest(pieces.encode("utf-8", "surrogatepass"), control.encode(), *own)


def stops(source: Source) -> frozenset[int]:
    """Return the ids with which a model trained on `source` ends a text."""
    return frozenset() if source.eos is None else frozenset([source.eos])


def files_beside(tokenizer: str | Path) -> dict[str, bytes]:
    """Read the files of a tokenizer and of chat templates. Returns their bytes by their paths in the model's folder.

    Raises CheckpointError for a link to a file outside the folder.
    """
    place = Path(tokenizer)
    folder = place if place.is_dir() else place.parent
    with os_errors(place):
        names, left_out = companions(folder)
        if place.is_dir() and left_out:
            raise refused(place, left_out[0])
        return {name: (folder / name).read_bytes() for name in names if place in (folder, folder / name)}


def batches(examples: Iterable[Example], *, rows: int, context: int) -> Iterator[Batch]:
    """Sort `examples` by length and yield them in batches of `rows`.

    The last batch is filled with empty rows. Examples are cut after `context` ids.
    """
    ordered = sorted(examples, key=lambda example: len(example.ids))
    for start in range(0, len(ordered), rows):
        part = ordered[start : start + rows]
        length = padded(min(len(part[-1].ids), context), LENGTHS if rows == 1 else COARSE)
        cut = [Example(example.ids[:context], example.weights[:context]) for example in part]
        yield padded_rows(cut, rows=rows, length=length)


def padded_rows(examples: Sequence[Example], *, rows: int, length: int) -> Batch:
    """Put each example into its own row of `length` tokens. Examples are cut after `length` ids.

    The batch has `rows` rows; rows without an example have no weights.
    """
    ids, weights = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.float32)
    for row, example in enumerate(examples):
        size = min(len(example.ids), length)
        ids[row, :size], weights[row, :size] = example.ids[:size], example.weights[:size]
    return Batch(ids, weights)


def indices_of_step(count: int, step: int, *, batch: int, seed: int) -> list[int]:
    """Return the indices of a step's examples. Each epoch uses all `count` examples once, in a new random order.

    >>> sorted(indices_of_step(4, 0, batch=2, seed=0) + indices_of_step(4, 1, batch=2, seed=0))
    [0, 1, 2, 3]
    """
    numbers = range(step * batch, (step + 1) * batch)
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(count) for epoch in {n // count for n in numbers}}
    return [int(orders[n // count][n % count]) for n in numbers]


def padded(length: int, lengths: Iterable[int]) -> int:
    """Round a length up to one of `lengths`, or to a power of two if all `lengths` are smaller.

    With few different lengths, few programs are compiled.

    >>> padded(225, LENGTHS), padded(257, LENGTHS), padded(257, COARSE), padded(1025, COARSE)
    (256, 288, 384, 2048)
    """
    return next((size for size in lengths if size >= length), 1 << (length - 1).bit_length())
