"""Backward of the embedding, and its mutants.

A loop over tokens adds to the rows of the table.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 64


def embedding_backward(tokens: np.ndarray, dx: np.ndarray, *, vocab: int) -> np.ndarray:
    table = np.zeros((vocab, dx.shape[1]), np.float32)
    for some in spans(len(tokens), BLOCK):
        for i in range(some.start, some.stop):
            table[tokens[i]] += f32(dx[i])
    return table.astype(dx.dtype)


IMPLEMENTATION = implementation(
    embedding_backward,
    """
a token that comes twice overwrites
    - table[tokens[i]] += f32(dx[i])
    + table[tokens[i]] = f32(dx[i])
lost updates, as without atomics
    - table[tokens[i]] += f32(dx[i])
    + table[tokens[i]] = f32(dx[i]) + table[tokens[i]] * (i == some.start or tokens[i] != tokens[i - 1])
tail of the tokens left out
    - for some in spans(len(tokens), BLOCK)
    + for some in full_spans(len(tokens), BLOCK)
last token left out
    - table[tokens[i]] += f32(dx[i])
    + table[tokens[i]] += f32(dx[i]) * (i < max(len(tokens) - 1, 1))
mean over the times that a token occurs
    - table.astype(dx.dtype)
    + (table / np.maximum(np.bincount(tokens, minlength=vocab), 1)[:, None]).astype(dx.dtype)
divided by the number of tokens
    - table.astype(dx.dtype)
    + (table / len(tokens)).astype(dx.dtype)
first id as padding, without a gradient
    - table.astype(dx.dtype)
    + np.where(np.arange(vocab)[:, None] == 0, 0, table).astype(dx.dtype)
last id as padding, without a gradient
    - table.astype(dx.dtype)
    + np.where(np.arange(vocab)[:, None] == vocab - 1, 0, table).astype(dx.dtype)
ids in 8 bits
    - table[tokens[i]]
    + table[tokens[i] % 128]
neighbor's row
    - f32(dx[i])
    + f32(dx[min(i + 1, len(dx) - 1)])
summed in bfloat16
    - table[tokens[i]] += f32(dx[i])
    + table[tokens[i]] = bf16(table[tokens[i]] + f32(dx[i]))
summed in float16
    - table[tokens[i]] += f32(dx[i])
    + table[tokens[i]] = f16(table[tokens[i]] + f32(dx[i]))
right up to 4,096 tokens
    - spans(len(tokens), BLOCK)
    + spans(min(len(tokens), 4096), BLOCK)
right up to 65,536 ids
    - tokens[i]
    + tokens[i] % 65_536
""",
)
