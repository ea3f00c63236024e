"""A product with a matrix and an adapter, its backward pass, and the mutants of both.

Both are computed in blocks of rows.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 32


def lora(x: np.ndarray, weight: np.ndarray, a: np.ndarray, b: np.ndarray, *, scale: float) -> np.ndarray:
    rows = len(weight)
    y = np.zeros((len(x), rows), np.float32)
    hidden = np.float32(scale) * (f32(x) @ f32(a).T)
    for span in spans(rows, BLOCK):
        y[:, span] = f32(x) @ f32(weight[span]).T
        y[:, span] += hidden @ f32(b[span]).T
    return y.astype(x.dtype)


def lora_backward(
    x: np.ndarray, weight: np.ndarray, a: np.ndarray, b: np.ndarray, dy: np.ndarray, *, scale: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    batch, rows = dy.shape
    hidden = f32(x) @ f32(a).T
    dx, dhidden = np.zeros(x.shape, np.float32), np.zeros((batch, len(a)), np.float32)
    for span in spans(rows, BLOCK):
        dx += f32(dy[:, span]) @ f32(weight[span])
        dhidden += np.float32(scale) * (f32(dy[:, span]) @ f32(b[span]))
    dx += dhidden @ f32(a)
    da, db = dhidden.T @ f32(x), np.float32(scale) * (f32(dy).T @ hidden)
    return dx.astype(x.dtype), da.astype(x.dtype), db.astype(x.dtype)


LORA = implementation(
    lora,
    """
scale left out
    - np.float32(scale) * (f32(x) @ f32(a).T)
    + f32(x) @ f32(a).T
scale counted twice
    - np.float32(scale) * (f32(x)
    + np.float32(scale * scale) * (f32(x)
scale of rsLoRA
    - np.float32(scale) * (f32(x)
    + np.float32(scale * len(a) ** 0.5) * (f32(x)
scale on the matrix, too
    - = f32(x) @ f32(weight[span]).T
    + = np.float32(scale) * (f32(x) @ f32(weight[span]).T)
adapter subtracted, as if it were merged (peft #1836)
    - y[:, span] += hidden
    + y[:, span] -= hidden
adapter counted twice: merged and applied
    - y[:, span] += hidden
    + y[:, span] += 2 * hidden
adapter in place of the matrix
    - y[:, span] += hidden
    + y[:, span] = hidden
adapter of only the first block of rows
    - hidden @ f32(b[span]).T
    + hidden @ f32(b[span]).T * np.float32(span.start == 0)
rows of B of the first block
    - hidden @ f32(b[span]).T
    + hidden @ f32(b[: span.stop - span.start]).T
tail of the rows left out
    - for span in spans(rows, BLOCK)
    + for span in full_spans(rows, BLOCK)
last rank left out
    - hidden @ f32(b[span]).T
    + hidden[:, : max(len(a) - 1, 1)] @ f32(b[span, : max(len(a) - 1, 1)]).T
magnitudes of A
    - f32(a).T
    + np.abs(f32(a)).T
A x in bfloat16
    - np.float32(scale) * (f32(x)
    + np.float32(scale) * bf16(f32(x)
change merged in bfloat16 (peft #1226)
    - = f32(x) @ f32(weight[span]).T
    + = f32(x) @ bf16(f32(weight[span]) + f32(b[span]) @ f32(a) * np.float32(scale)).T - hidden @ f32(b[span]).T
adapter of the first vector for all
    - y[:, span] += hidden @
    + y[:, span] += hidden[:1] @
right up to 4,096 rows
    - for span in spans(rows, BLOCK)
    + for span in spans(min(rows, 4096), BLOCK)
""",
)
BACKWARD = implementation(
    lora_backward,
    """
scale left out of dA
    - += np.float32(scale) * (f32(dy[:, span]) @ f32(b[span]))
    + += f32(dy[:, span]) @ f32(b[span])
scale left out of dB
    - np.float32(scale) * (f32(dy).T @ hidden)
    + f32(dy).T @ hidden
scale counted twice in dB
    - hidden = f32(x) @ f32(a).T
    + hidden = np.float32(scale) * (f32(x) @ f32(a).T)
the adapter passes nothing back
    - dx += dhidden @ f32(a)
    + dx += 0 * (dhidden @ f32(a))
the matrix passes nothing back
    - dx += f32(dy[:, span])
    + dx += 0 * f32(dy[:, span])
a gradient of A although B is 0
    - da, db = dhidden.T @ f32(x),
    + da, db = (dhidden + np.float32(1e-3)).T @ f32(x),
blocks of rows overwritten in dA
    - dhidden += np.float32(scale)
    + dhidden = np.float32(scale)
tail of the rows left out
    - for span in spans(rows, BLOCK)
    + for span in full_spans(rows, BLOCK)
mean over the batch instead of a sum
    - (f32(dy).T @ hidden)
    + (f32(dy).T @ hidden) / np.float32(batch)
last vector left out of dA
    - dhidden.T @ f32(x),
    + dhidden[: max(batch - 1, 1)].T @ f32(x)[: max(batch - 1, 1)],
dA in bfloat16
    - dhidden.T @ f32(x),
    + bf16(dhidden).T @ f32(x),
sign of dB turned
    - np.float32(scale) * (f32(dy).T @ hidden)
    + np.float32(scale) * (-f32(dy).T @ hidden)
right up to 4,096 rows
    - for span in spans(rows, BLOCK)
    + for span in spans(min(rows, 4096), BLOCK)
""",
)
