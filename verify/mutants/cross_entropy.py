"""Cross entropy, and its mutants.

It runs in blocks of the vocabulary, fused with its gradient as in training kernels.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 64


def cross_entropy(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.floating:
    tokens, vocab = logits.shape
    nats = np.zeros(tokens, np.float32)
    for token in range(tokens):
        top, total = np.float32(-np.inf), np.float32(0)
        for span in spans(vocab, BLOCK):
            part = f32(logits[token, span])
            larger = np.maximum(top, part.max())
            total = total * np.exp(top - larger) + np.sum(np.exp(part - larger))
            top = larger
        nats[token] = np.log(total) + (top - f32(logits[token, targets[token]]))
    return np.sum(f32(weights) * nats)


def cross_entropy_backward(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
    tokens, vocab = logits.shape
    slopes = np.full((tokens, vocab), np.nan, logits.dtype)
    for token in range(tokens):
        top, total = np.float32(-np.inf), np.float32(0)
        for span in spans(vocab, BLOCK):
            part = f32(logits[token, span])
            larger = np.maximum(top, part.max())
            total = total * np.exp(top - larger) + np.sum(np.exp(part - larger))
            top = larger
        for out in spans(vocab, BLOCK):
            p = np.exp(f32(logits[token, out]) - top) / total
            target = np.arange(out.start, out.stop) == targets[token]
            slopes[token, out] = f32(weights[token]) * (p - target)
    return slopes


CROSS_ENTROPY = implementation(
    cross_entropy,
    """
mean for sum
    - np.sum(f32(weights) * nats)
    + np.mean(f32(weights) * nats)
weights left out
    - np.sum(f32(weights) * nats)
    + np.sum(nats)
divided by the sum of the weights
    - np.sum(f32(weights) * nats)
    + np.sum(f32(weights) * nats) / np.maximum(np.sum(f32(weights)), np.float32(1))
maximum not added again
    - np.log(total) + (top - f32(logits[token, targets[token]]))
    + np.log(total) - f32(logits[token, targets[token]])
target one too early
    - targets[token]]
    + max(targets[token] - 1, 0)]
target's logit left out
    - np.log(total) + (top - f32(logits[token, targets[token]]))
    + np.log(total) + top
log to the base 2
    - np.log(total)
    + np.log2(total)
no shift by the maximum
    - larger = np.maximum(top, part.max())
    + larger = np.float32(0) * np.maximum(top, part.max())
a maximum that starts at 0
    - np.float32(-np.inf), np.float32(0)
    + np.float32(0), np.float32(0)
sum not rescaled by a new maximum
    - total * np.exp(top - larger) + np.sum
    + total + np.sum
tail of the vocabulary left out
    - for span in spans(vocab, BLOCK)
    + for span in full_spans(vocab, BLOCK)
last token left out
    - np.sum(f32(weights) * nats)
    + np.sum((f32(weights) * nats)[: max(tokens - 1, 1)])
label smoothing added
    - (top - f32(logits[token, targets[token]]))
    + (top - np.float32(0.9) * f32(logits[token, targets[token]]) - np.float32(0.1) * f32(logits[token]).mean())
exponentials in float16
    - np.sum(np.exp(part - larger))
    + np.sum(f16(np.exp(part - larger)))
sum in bfloat16
    - total = total * np.exp(top - larger) + np.sum(np.exp(part - larger))
    + total = bf16(total * np.exp(top - larger) + np.sum(np.exp(part - larger)))
right up to 4,096 tokens
    - for token in range(tokens)
    + for token in range(min(tokens, 4096))
right up to 65,536 classes
    - spans(vocab, BLOCK)
    + spans(min(vocab, 65_536), BLOCK)
""",
)
BACKWARD = implementation(
    cross_entropy_backward,
    """
target not subtracted
    - (p - target)
    + p
sign turned
    - (p - target)
    + (target - p)
weight only on the target
    - f32(weights[token]) * (p - target)
    + (p - f32(weights[token]) * target)
weight left out
    - f32(weights[token]) * (p - target)
    + (p - target)
weight of the first token for all
    - f32(weights[token])
    + f32(weights[0])
mean over the tokens
    - f32(weights[token]) * (p - target)
    + f32(weights[token]) * (p - target) / np.float32(tokens)
not divided by the sum
    - np.exp(f32(logits[token, out]) - top) / total
    + np.exp(f32(logits[token, out]) - top)
target of its place in the block
    - np.arange(out.start, out.stop)
    + np.arange(out.stop - out.start)
target of the first token for all
    - == targets[token]
    + == targets[0]
tail left out of the sum
    - for span in spans(vocab, BLOCK)
    + for span in full_spans(vocab, BLOCK)
tail never written
    - for out in spans(vocab, BLOCK)
    + for out in full_spans(vocab, BLOCK)
sum not rescaled by a new maximum
    - total * np.exp(top - larger) + np.sum
    + total + np.sum
only the maximum of the last block
    - larger = np.maximum(top, part.max())
    + larger = part.max()
ids in 8 bits
    - == targets[token]
    + == targets[token] % 256
probabilities in bfloat16
    - (p - target)
    + (bf16(p) - target)
exponentials in float16
    - np.sum(np.exp(part - larger))
    + np.sum(f16(np.exp(part - larger)))
right up to 4,096 tokens
    - for token in range(tokens)
    + for token in range(min(tokens, 4096))
""",
)
