"""The embedding: a token's id selects a row of a table.

    x = E[token]

A model with tied embeddings uses the same table again at the end: E times the last hidden state gives one logit per
token of the vocabulary.
"""

import numpy as np
from jaxtyping import Float, Int


def embedding(
    tokens: Int[np.ndarray, "*batch"], table: Float[np.ndarray, "vocab dim"]
) -> Float[np.ndarray, "*batch dim"]:
    """Look up the rows of `table` for `tokens`, in float64.

    Raises IndexError for an id outside the vocabulary, including a negative one.

    >>> embedding(np.array([2, 0]), np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]))
    array([[4., 5.],
           [0., 1.]])
    """
    if np.any(tokens < 0) or np.any(tokens >= len(table)):
        raise IndexError(f"token ids must lie in 0..{len(table) - 1}, got {tokens.min()}..{tokens.max()}")
    return table[tokens].astype(np.float64)
