"""Sampling, computed with sorts, and its mutants."""

import numpy as np

from llamaspec.verify.mutant import f32, implementation


def distribution(
    logits: np.ndarray,
    seen: np.ndarray,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
) -> np.ndarray:
    scores = f32(logits)
    penalty = np.float32(repetition_penalty)
    scores = np.where(seen, np.where(scores > 0, scores / penalty, scores * penalty), scores)
    if temperature == 0:
        return (np.arange(len(scores)) == np.argmax(scores)).astype(logits.dtype)
    p = np.exp((scores - np.max(scores)) / np.float32(temperature))
    p = p / np.sum(p)
    if 0 < top_k < len(p):
        p = np.where(p >= np.sort(p)[-top_k], p, 0)
        p = p / np.sum(p)
    if top_p < 1:
        levels, at, counts = np.unique(p, return_inverse=True, return_counts=True)
        above = np.append(np.cumsum((levels * f32(counts))[::-1])[::-1], 0)  # mass from each level up
        p = np.where(above[at + 1] < np.float32(top_p), p, 0)
        p = p / np.sum(p)
    p = np.where(p >= np.float32(min_p) * np.max(p), p, 0)
    return (p / np.sum(p)).astype(logits.dtype)


def draw(p: np.ndarray, u: float) -> int:
    total = np.sum(p)
    passed = np.float32(0)
    last = 0
    for token in range(len(p)):
        passed += p[token]
        if p[token] > 0:
            last = token
        if passed > np.float32(u) * total:
            return token
    return last


DISTRIBUTION = implementation(
    distribution,
    """
penalty always divides
    - np.where(scores > 0, scores / penalty, scores * penalty)
    + scores / penalty
penalty multiplies
    - np.where(scores > 0, scores / penalty, scores * penalty)
    + np.where(scores > 0, scores * penalty, scores / penalty)
penalty on tokens that were not seen
    - np.where(seen, np
    + np.where(~seen, np
penalty left out
    - np.where(seen, np.where(scores > 0, scores / penalty, scores * penalty), scores)
    + scores
penalty subtracted
    - np.where(scores > 0, scores / penalty, scores * penalty)
    + scores - (penalty - 1)
temperature multiplies
    - / np.float32(temperature)
    + * np.float32(temperature)
temperature after the softmax
    - p = np.exp((scores - np.max(scores)) / np.float32(temperature))
    + p = np.exp(scores - np.max(scores)) / np.float32(temperature)
maximum not subtracted
    - (scores - np.max(scores))
    + (scores - np.float32(0))
a temperature of 0 becomes 1e-6
    - if temperature == 0:
    + temperature = max(temperature, 1e-6)
    +     if False:
greedy chooses the last of equal logits
    - np.arange(len(scores)) == np.argmax(scores)
    + np.arange(len(scores)) == len(scores) - 1 - np.argmax(scores[::-1])
top-k keeps one too many
    - np.sort(p)[-top_k]
    + np.sort(p)[-min(top_k + 1, len(p))]
top-k keeps one too few
    - np.sort(p)[-top_k]
    + np.sort(p)[-max(top_k - 1, 1)]
top-k drops ties of the last
    - p = np.where(p >= np.sort(p)[-top_k], p, 0)
    + p = np.where(np.argsort(np.argsort(-p, kind="stable")) < top_k, p, 0)
top-k keeps the least probable
    - p >= np.sort(p)[-top_k]
    + p <= np.sort(p)[top_k - 1]
not renormalized after top-k
    - p = np.where(p >= np.sort(p)[-top_k], p, 0)
    -         p = p / np.sum(p)
    + p = np.where(p >= np.sort(p)[-top_k], p, 0)
top-p leaves out the token that reaches it
    - above[at + 1] < np.float32(top_p)
    + (above[at + 1] + p < np.float32(top_p)) | (p == np.max(p))
top-p counts a token's own probability twice
    - above[at + 1]
    + above[at]
top-p left out
    - if top_p < 1:
    + if False:
top-p from the least probable on
    - above[at + 1]
    + (np.cumsum(levels * f32(counts)) - levels * f32(counts))[at]
min-p of 1 for min-p of the largest
    - np.float32(min_p) * np.max(p)
    + min(np.float32(min_p), np.max(p))
min-p left out
    - p >= np.float32(min_p) * np.max(p)
    + p >= 0
min-p before top-p
    - if top_p < 1:
    + p = np.where(p >= np.float32(min_p) * np.max(p), p, 0)
    +     p = p / np.sum(p)
    +     if top_p < 1:
not normalized at the end
    - return (p / np.sum(p)).astype
    + return p.astype
probabilities in float16
    - p = np.exp((scores - np.max(scores)) / np.float32(temperature))
    + p = f16(np.exp((scores - np.max(scores)) / np.float32(temperature)))
right up to 1,024 tokens
    - return (p / np.sum(p)).astype(logits.dtype)
    + p[1024:] = 0
    +     return (p / np.sum(p)).astype(logits.dtype)
right up to 65,536 tokens
    - return (p / np.sum(p)).astype(logits.dtype)
    + p[65_536:] = 0
    +     return (p / np.sum(p)).astype(logits.dtype)
""",
)
DRAW = implementation(
    draw,
    """
token before
    - return token
    + return max(token - 1, 0)
token after
    - return token
    + return min(token + 1, len(p) - 1)
u reached instead of passed
    - passed > np.float32(u) * total
    + passed >= np.float32(u) * total
sum assumed to be 1
    - np.float32(u) * total
    + np.float32(u)
from the end
    - passed += p[token]
    + passed += p[len(p) - 1 - token]
the most probable
    - return token
    + return int(np.argmax(p))
summed in bfloat16
    - passed += p[token]
    + passed = bf16(passed + p[token])
first token never drawn
    - passed += p[token]
    + passed += p[token] * (token > 0 or len(p) == 1)
token in 16 bits
    - return token
    -     return last
    + return token & 0xFFFF
    +     return last
right up to 4,096 tokens
    - for token in range(len(p)):
    + for token in range(min(len(p), 4096)):
""",
)
