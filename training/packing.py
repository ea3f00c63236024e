"""Packing: several short documents in one row of a batch, so that little of it is padding.

`reference.packing` defines a row: tokens attend only to their own document, and positions begin at 0 in each document.
So the loss and its gradient are the same as for separate documents.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from llamaspec.training.data import Example


class PackedBatch(NamedTuple):
    """Rows of documents, padded at the end of each row. A document begins wherever the position is 0."""

    ids: Int[np.ndarray, "batch seq"]
    at: Int[np.ndarray, "batch seq"]  # positions within the documents
    weights: Float[np.ndarray, "batch seq"]  # of the prediction of each id; 0 for a document's first id


def fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Assign documents to rows of `room` tokens: the longest first, each to the first row with enough room left.

    >>> fit([2, 5, 3, 6], 8)
    [[3, 0], [1, 2]]
    """
    rows: list[list[int]] = []
    room_left: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((row for row, space in enumerate(room_left) if space >= lengths[i]), len(rows))
        if row == len(rows):
            rows.append([])
            room_left.append(room)
        rows[row].append(i)
        room_left[row] -= lengths[i]
    return rows


def packed(examples: Sequence[Example], *, rows: int, length: int) -> Iterator[PackedBatch]:
    """Yield batches of `rows` rows of `length` tokens. Examples are cut after `length` ids."""
    cut = [Example(e.ids[:length], e.weights[:length]) for e in examples]
    groups = fit([len(example.ids) for example in cut], length)
    for start in range(0, len(groups), rows):
        ids, at = np.zeros((2, rows, length), np.int32)
        weights = np.zeros((rows, length), np.float32)
        for row, members in enumerate(groups[start : start + rows]):
            end = 0
            for member in members:
                example = cut[member]
                begin, end = end, end + len(example.ids)
                ids[row, begin:end], at[row, begin:end] = example.ids, np.arange(len(example.ids))
                weights[row, begin:end] = [0.0, *example.weights[1:]]
        yield PackedBatch(ids, at, weights)
