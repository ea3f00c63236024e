r"""Backward of the embedding: each gradient is added to the row that was looked up.

    x_i = E[t_i]        dE[t] = sum of dx_i over the places i where the token is t

Rows of tokens that do not occur get 0. If a token occurs twice, both gradients are added; assigning instead of adding
is the classic bug. If E is also the weight of the output head (tied embeddings), dE also includes the head's dW.
"""

import numpy as np
from jaxtyping import Float, Int


def embedding_backward(
    tokens: Int[np.ndarray, "*batch"], dx: Float[np.ndarray, "*batch dim"], *, vocab: int
) -> Float[np.ndarray, "vocab dim"]:
    """Compute the gradient of `reference.embedding.embedding` for its table of `vocab` rows, in float64.

    Raises IndexError for an id outside the vocabulary.

    >>> embedding_backward(np.array([2, 0, 2]), np.array([[1.0], [2.0], [3.0]]), vocab=3)
    array([[2.],
           [0.],
           [4.]])
    """
    if np.any(tokens < 0) or np.any(tokens >= vocab):
        raise IndexError(f"token ids must lie in 0..{vocab - 1}, got {tokens.min()}..{tokens.max()}")
    table = np.zeros((vocab, dx.shape[-1]))
    np.add.at(table, tokens.reshape(-1), dx.reshape(-1, dx.shape[-1]).astype(np.float64))
    return table
