"""The embedding, computed token by token, and its mutants."""

import numpy as np

from llamaspec.verify.mutant import implementation, spans

BLOCK = 32


def embedding(tokens: np.ndarray, table: np.ndarray) -> np.ndarray:
    dim = table.shape[1]
    x = np.full((len(tokens), dim), np.nan, table.dtype)
    for i in range(len(tokens)):
        token = tokens[i]
        for span in spans(dim, BLOCK):
            x[i, span] = table[token, span]
    return x


IMPLEMENTATION = implementation(
    embedding,
    """
row after the token's
    - table[token, span]
    + table[min(token + 1, len(table) - 1), span]
row before the token's
    - table[token, span]
    + table[max(token - 1, 0), span]
last row out of reach
    - token = tokens[i]
    + token = min(tokens[i], max(len(table) - 2, 0))
token as int8
    - token = tokens[i]
    + token = tokens[i].astype(np.int8)
scaled by sqrt(dim), as Gemma does
    - table[token, span]
    + table[token, span] * np.float32(np.sqrt(dim))
token 0 treated as padding
    - table[token, span]
    + table[token, span] * (token != 0)
first token for every token
    - token = tokens[i]
    + token = tokens[0]
table read transposed
    - table[token, span]
    + table.reshape(dim, len(table)).T[token, span]
tail never written
    - spans(dim, BLOCK)
    + full_spans(dim, BLOCK)
rows pass through bfloat16
    - x[i, span] = table[token, span]
    + x[i, span] = bf16(table[token, span])
rows pass through float16
    - x[i, span] = table[token, span]
    + x[i, span] = f16(table[token, span])
token in 16 bits
    - token = tokens[i]
    + token = tokens[i] & 0xFFFF
right up to 1,024 features
    - spans(dim, BLOCK)
    + spans(min(dim, 1024), BLOCK)
right up to 1,024 tokens
    - token = tokens[i]
    + token = tokens[i % 1024]
right up to 4,096 tokens
    - token = tokens[i]
    + token = tokens[i % 4096]
""",
)
