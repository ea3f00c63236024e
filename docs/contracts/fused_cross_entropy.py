"""Cross entropy fused with the last product, so that no logits are stored. Its bound is composed of two pieces.

Kernels walk through the vocabulary in blocks, with a running maximum. The definition uses a different formula, so the
bound cannot be derived from it step by step. `projected` bounds the logits, and `softmaxed` the rest.
"""

import numpy as np

from llamaspec.verify.bounds.precision import TINY, U
from llamaspec.verify.bounds.running_error import ELEMENTARY, exactly, gamma, projected, softmaxed
from llamaspec.verify.contract import Expected, as_float64, independent
from llamaspec.verify.declare import Ids, declare, sizes, values
from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 16


def fused_cross_entropy(x: np.ndarray, head: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """-log softmax(head x)[target] of each token, in nats."""
    logits = x.astype(np.float64) @ head.astype(np.float64).T
    top = np.max(logits, axis=-1)
    target_logit = np.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return top + np.log(np.sum(np.exp(logits - top[:, None]), axis=-1)) - target_logit


def expect(x: np.ndarray, head: np.ndarray, targets: np.ndarray) -> Expected:
    """Bound the error. A logit may be wrong by its element of `moved`.

    This changes the log-sum-exp by at most the largest element of `moved`, and the target's logit by its own element.
    """
    value = fused_cross_entropy(x, head, targets)
    logits = projected(exactly(x), as_float64(head))
    top, target_logit = np.max(logits.size, axis=-1), np.take_along_axis(logits.size, targets[:, None], axis=-1)[:, 0]
    moved = logits.error + 4 * U * logits.size  # e^(a - m) may be 2^(a log2 e - m log2 e)
    _, p_error = softmaxed(logits.value, moved, blocks=min(64, head.shape[0]))
    error = np.sum(p_error, axis=-1) + np.max(moved, axis=-1) + np.take_along_axis(moved, targets[:, None], -1)[:, 0]
    error = error + gamma(len(head) + 8) + ELEMENTARY * (1 + np.abs(value) + top) + 4 * U * (top + target_logit) + TINY
    return Expected(value, error, error, np.abs(value) + top)


CONTRACT = declare(
    fused_cross_entropy,
    arrays={"x": "tokens dim", "head": "vocab dim", "targets": Ids("tokens", below="vocab")},
    sizes={"tokens": [1, 2, 3, 7], "dim": sizes(8, 16, most=33), "vocab": sizes(8, 16, 64, most=129)},
    draws={"x": values(-4, 1), "head": values(-4, 1)},
    expect=expect,
    bound="hard and alarm: gamma_n |head| |x| for logits, an online softmax of 64 blocks, a logarithm",
    laws=[independent("a token", "x", "targets")],
    large={"tokens": [65, 1041], "dim": [1041], "vocab": [1041, 4161, 70_001]},
)


def right(x: np.ndarray, head: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Walk through the vocabulary in blocks, with a running maximum."""
    rows = f32(x)
    maximum, total = np.full(len(x), -np.inf, np.float32), np.zeros(len(x), np.float32)
    target_logit = np.zeros(len(x), np.float32)
    for span in spans(len(head), max(BLOCK, len(head) // 60)):
        logits = rows @ f32(head[span]).T
        new = np.maximum(maximum, np.max(logits, axis=1))
        total = total * np.exp(maximum - new) + np.sum(np.exp(logits - new[:, None]), axis=1)
        inside = (targets >= span.start) & (targets < span.stop)
        target_logit[inside] = logits[inside, targets[inside] - span.start]
        maximum = new
    return (maximum + np.log(total) - target_logit).astype(x.dtype)


MUTANTS = implementation(
    right,
    """
total not rescaled
    - total * np.exp(maximum - new) +
    + total +
maximum starts at 0
    - np.full(len(x), -np.inf, np.float32)
    + np.zeros(len(x), np.float32)
target of the block's end
    - (targets >= span.start)
    + (targets > span.start)
target left out
    - np.log(total) - target_logit
    + np.log(total)
logarithm to base 2
    - np.log(total)
    + np.log2(total)
ids in 16 bits
    - logits[inside, targets[inside] - span.start]
    + logits[inside, (targets[inside] & 0x7FFF) % len(logits[0])]
logits in bfloat16
    - logits = rows @ f32(head[span]).T
    + logits = bf16(rows @ f32(head[span]).T)
right up to 4,096 words
    - in spans(len(head), max
    + in spans(min(len(head), 4096), max
""",
    op="fused_cross_entropy",
)
