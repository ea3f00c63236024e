"""Scores a model on held-out documents."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.device import default_device
from llamaspec.model.weights.loading import Progress, check_weights, no_progress
from llamaspec.reference.config import Config
from llamaspec.training.data import Batch, Example, Source, batches
from llamaspec.training.objectives.supervised import summed_loss
from llamaspec.training.ops import WHOLE_ATTENTION
from llamaspec.training.steps import Tensors


class HeldOutLoss(NamedTuple):
    """The loss on held-out documents, and the number of correct answers."""

    loss: float  # nats per counted token of held-out documents
    floor: float | None  # a lower bound on the loss of any model
    right: int  # questions about a story that greedy decoding answers exactly
    questions: int

    def __str__(self):
        """
        >>> print(HeldOutLoss(0.2, 0.19, 181, 200))
        held-out loss 0.2000 (floor 0.1900, +5.3 %), 181 of 200 questions
        """
        floor = f" (floor {self.floor:.4f}, {self.loss / self.floor - 1:+.1%})".replace("%", " %") if self.floor else ""
        answers = f", {self.right} of {self.questions} questions" if self.questions else ""
        return f"held-out loss {self.loss:.4f}{floor}{answers}"


def rows_at_once(platform: str) -> int:
    """Return the number of documents per batch: 1 on a CPU, because one document fits into the caches without padding.

    On a GPU it is 8. Documents are sorted by length. Of 16 documents, the 8 shorter ones are padded to a smaller length
    than the 8 longer ones, and take a quarter of their time.
    """
    return 1 if platform == "cpu" else 8


def evaluate(
    tensors: Tensors,
    config: Config,
    source: Source,
    *,
    score: Callable,
    rows: int,
    progress: Progress = no_progress,
) -> HeldOutLoss:
    """Score `tensors` on the held-out documents and the questions of `source`, with `rows` documents per batch.

    `score` is the compiled `summed_loss` for this configuration. An answer is right if each of its ids is the
    likeliest id.
    """
    documents, questions = source.held_out(), source.questions()

    def scored(examples: list[Example], done: int) -> Iterator[tuple[Batch, tuple]]:
        for batch in batches(examples, rows=rows, context=config.context):
            progress("evaluating", done / (len(documents) + len(questions)))
            yield batch, score(tensors, batch.ids, batch.weights)[1]
            done += rows

    nats, count = 0.0, 0
    for batch, (loss, _) in scored(documents, 0):
        nats += float(loss)
        count += int(batch.counted.sum())
    right = 0
    for batch, (_, ids) in scored(questions, len(documents)):
        likeliest = np.asarray(ids)  # [batch, seq - 1]
        wrong = np.any((likeliest != batch.ids[:, 1:]) & batch.counted, axis=1)
        scorable = np.any(batch.counted, axis=1)  # False for an empty row, and for an answer beyond the context
        right += int(np.sum(scorable & ~wrong))
    return HeldOutLoss(nats / count, source.floor, right, len(questions))


def evaluate_model(path: str | Path, source: Source, *, progress: Progress = no_progress) -> HeldOutLoss:
    """Score the model in a file or directory.

    Raises CheckpointError if its vocabulary is too small for the documents.
    """
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    if config.vocab < source.tokenizer.vocab:
        ids = source.tokenizer.vocab
        raise refused(path, f"has a vocabulary of {config.vocab} tokens, but the tokenizer of the documents has {ids}")
    if config.sinks:
        raise refused(path, "has attention sinks, which training does not support")
    check_weights(checkpoint)
    tensors = {name: jnp.asarray(tensor.read(), jnp.float32) for name, tensor in checkpoint.tensors.items()}
    score = jax.jit(partial(summed_loss, config=config, ops=WHOLE_ATTENTION, dtype=np.dtype(np.float32)))
    rows = rows_at_once(default_device().platform)
    return evaluate(tensors, config, source, score=score, rows=rows, progress=progress)
