r"""Packing: several documents in one sequence. A model computes each document as if the others did not exist.

Documents of n_1, n_2, … tokens stand one after the other. Positions and the mask start anew in each document:

    positions     0, 1, …, n_1 - 1,  0, 1, …, n_2 - 1,  …
    mask_ij       0 if i and j are in the same document and j <= i, otherwise -inf

All layers except attention treat tokens one by one, so nothing else must change in the model. In the loss, the
prediction of a document's first token from the previous document has weight 0. Without the mask, tokens would attend to
other documents, and training would use contexts that no prompt has.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from llamaspec.reference.attention import causal_mask


def packed_positions(lengths: Sequence[int]) -> Int[np.ndarray, " seq"]:
    """The position of each token within its document.

    >>> packed_positions([3, 2])
    array([0, 1, 2, 0, 1])
    """
    return np.concatenate([np.zeros(0, int), *(np.arange(length) for length in lengths)])


def packed_mask(lengths: Sequence[int], *, window: int | None = None) -> Float[np.ndarray, "seq seq"]:
    """The mask to add to attention scores. With `window`, a token sees only the last `window` tokens, its own included.

    >>> packed_mask([2, 1])
    array([[  0., -inf, -inf],
           [  0.,   0., -inf],
           [-inf, -inf,   0.]])
    """
    document = np.repeat(np.arange(len(lengths)), lengths)
    same_document = document[:, None] == document
    return np.where(same_document, causal_mask(len(document), len(document), window=window), -np.inf)


def packed_weights(weights: Sequence[Sequence[float]]) -> Float[np.ndarray, " seq"]:
    """The weight of each token's prediction in the loss: as in `weights`, but 0 for the first token of each document.

    >>> packed_weights([[1.0, 1.0, 0.0], [1.0, 2.0]])
    array([0., 1., 0., 0., 2.])
    """
    return np.concatenate([np.zeros(0), *([0.0, *document[1:]] for document in weights if len(document))])
