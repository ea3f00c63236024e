r"""The index of the largest number of a row: the token that greedy decoding chooses.

    argmax_i x_i

If several are equal, the first one wins, so all implementations generate the same text. 0 and -0 are equal.
"""

import numpy as np
from jaxtyping import Float, Int


def argmax(x: Float[np.ndarray, "rows n"]) -> Int[np.ndarray, " rows"]:
    """Return the index of the largest number of each row: the lowest index on ties, and 0 for a row with only -inf.

    >>> argmax(np.array([[1.0, 3.0, 3.0], [-0.0, 0.0, -1.0]]))
    array([1, 0])
    """
    return np.argmax(x, axis=-1)
