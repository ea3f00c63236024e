"""A shared expert, computed token by token, and its mutants."""

import numpy as np

from llamaspec.verify.mutant import f32, implementation


def shared_expert(x: np.ndarray, score: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    y = np.full(x.shape, np.nan, np.float32)
    for token in range(len(x)):
        row = f32(x[token])
        logit = f32(score[0]) @ row
        weight = 1 / (1 + np.exp(-logit))
        a, b = f32(gate) @ row, f32(up) @ row
        hidden = a / (1 + np.exp(-a)) * b
        y[token] = weight * (f32(down) @ hidden)
    return y.astype(x.dtype)


IMPLEMENTATION = implementation(
    shared_expert,
    """
not weighed
    - weight * (f32(down) @ hidden)
    + f32(down) @ hidden
weighed by the logit
    - weight * (f32(down) @ hidden)
    + logit * (f32(down) @ hidden)
softmax of one for the sigmoid
    - weight = 1 / (1 + np.exp(-logit))
    + weight = np.exp(logit - logit)
tanh for the sigmoid
    - weight = 1 / (1 + np.exp(-logit))
    + weight = np.tanh(logit)
sign of the score turned
    - np.exp(-logit)
    + np.exp(logit)
score of another token
    - f32(score[0]) @ row
    + f32(score[0]) @ f32(x[(token + 1) % len(x)])
weight of the first token for every token
    - f32(score[0]) @ row
    + f32(score[0]) @ f32(x[0])
weight put before the nonlinearity
    - a, b = f32(gate) @ row, f32(up) @ row
    + a, b = weight * (f32(gate) @ row), f32(up) @ row
weight put on twice
    - weight * (f32(down) @ hidden)
    + weight * (f32(down) @ (weight * hidden))
gate and up swapped
    - a, b = f32(gate) @ row, f32(up) @ row
    + b, a = f32(gate) @ row, f32(up) @ row
GELU for SiLU
    - a / (1 + np.exp(-a)) * b
    + a / (1 + np.exp(-1.702 * a)) * b
logit in float16
    - logit = f32(score[0]) @ row
    + logit = f16(f32(score[0]) @ row)
weight in bfloat16
    - weight * (f32(down) @ hidden)
    + bf16(weight) * (f32(down) @ hidden)
hidden layer in bfloat16 for float32 weights
    - hidden = a / (1 + np.exp(-a)) * b
    + hidden = bf16(a / (1 + np.exp(-a)) * b)
weight of a large negative logit becomes 0
    - weight = 1 / (1 + np.exp(-logit))
    + weight = 1 / (1 + np.exp(-logit)) * (logit > -8)
last hidden number left out
    - f32(down) @ hidden
    + f32(down[:, : max(len(hidden) - 1, 1)]) @ hidden[: max(len(hidden) - 1, 1)]
right up to 64 tokens
    - row = f32(x[token])
    + row = f32(x[token % 64])
right up to 1,024 features
    - logit = f32(score[0]) @ row
    + logit = f32(score[0, :1024]) @ row[:1024]
right up to 256 hidden numbers
    - f32(down) @ hidden
    + f32(down[:, :256]) @ hidden[:256]
right up to 4,096 tokens
    - for token in range(len(x))
    + for token in range(min(len(x), 4096))
""",
)
