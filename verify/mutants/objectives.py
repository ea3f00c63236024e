"""The objectives of fine-tuning as trainers compute them, and mutants with bugs of well-known trainers.

A number such as #973 is an issue or a pull request in the repository of the trainer that is named before it.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 8  # tokens


def answer_log_probability(logits: np.ndarray, targets: np.ndarray, counted: np.ndarray) -> np.floating:
    total = np.float32(0)
    for span in spans(len(logits), BLOCK):
        rows = f32(logits[span])
        shifted = rows - rows.max(axis=-1, keepdims=True)
        chosen = np.take_along_axis(shifted, targets[span, None], axis=-1)[:, 0]
        total += np.sum(counted[span] * (chosen - np.log(np.sum(np.exp(shifted), axis=-1))))
    return total


def dpo(
    preferred: np.ndarray,
    rejected: np.ndarray,
    frozen_preferred: np.ndarray,
    frozen_rejected: np.ndarray,
    *,
    beta: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    gain, other_gain = preferred - frozen_preferred, rejected - frozen_rejected
    margin = np.float32(beta) * (gain - other_gain)
    losses = np.log1p(np.exp(-np.abs(margin))) + np.maximum(-margin, 0)
    slopes = -np.float32(beta) / (1 + np.exp(np.minimum(margin, 80)))
    return losses, slopes, -slopes


def group_relative(log_probabilities: np.ndarray, rewards: np.ndarray) -> tuple[np.floating, np.ndarray]:
    advantages = rewards - rewards.mean()
    return -np.sum(advantages * log_probabilities), -advantages


ANSWER = implementation(
    answer_log_probability,
    """
mask one token too late: the first is never learned (OpenRLHF #973)
    - counted[span]
    + np.roll(counted, 1)[span]
everything counts, without a word (Megatron-Bridge #3359)
    - counted[span]
    + 1
mean over the padded length (minimind #298)
    - return total
    + return total / len(counted)
mean over the answer
    - return total
    + return total / np.maximum(counted.sum(), 1)
target one too early
    - targets[span, None]
    + np.roll(targets, 1)[span, None]
sign turned
    - return total
    + return -total
only the last block of tokens
    - total += np.sum
    + total = np.sum
tail of the tokens left out
    - in spans(len(logits), BLOCK)
    + in full_spans(len(logits), BLOCK)
logits of unnormalized probability
    - - np.log(np.sum(np.exp(shifted), axis=-1))
    + - 0
no shift by the maximum
    - rows - rows.max(axis=-1, keepdims=True)
    + rows
log probabilities in bfloat16
    - total += np.sum(counted[span] * (
    + total += np.sum(bf16(counted[span]) * bf16(
""",
)
DPO = implementation(
    dpo,
    """
beta counted twice in the margin (tinker-cookbook #172)
    - margin = np.float32(beta)
    + margin = np.float32(beta * beta)
beta left out of the margin
    - np.float32(beta) * (gain
    + np.float32(1) * (gain
no reference model
    - gain, other_gain = preferred - frozen_preferred, rejected - frozen_rejected
    + gain, other_gain = preferred, rejected
reference of the other answer
    - preferred - frozen_preferred, rejected - frozen_rejected
    + preferred - frozen_rejected, rejected - frozen_preferred
the rejected answer preferred
    - (gain - other_gain)
    + (other_gain - gain)
both answers made likelier
    - return losses, slopes, -slopes
    + return losses, slopes, slopes
the rejected answer left as it is
    - return losses, slopes, -slopes
    + return losses, slopes, 0 * slopes
beta left out of the slopes
    - -np.float32(beta) / (1
    + -np.float32(1) / (1
slopes of a margin with the other sign
    - np.exp(np.minimum(margin, 80))
    + np.exp(np.minimum(-margin, 80))
hinge for softplus
    - np.log1p(np.exp(-np.abs(margin))) + np.maximum(-margin, 0)
    + np.maximum(1 - margin, 0)
exponential that overflows
    - np.log1p(np.exp(-np.abs(margin))) + np.maximum(-margin, 0)
    + np.log1p(np.exp(-margin))
label smoothing added
    - np.maximum(-margin, 0)
    + np.maximum(-margin, 0) + np.float32(0.1) * margin
mean over the pairs
    - return losses, slopes, -slopes
    + return losses, slopes / np.float32(len(slopes)), -slopes / np.float32(len(slopes))
""",
)
GROUP = implementation(
    group_relative,
    """
divided by the standard deviation
    - -np.sum(advantages * log_probabilities), -advantages
    + -np.sum(advantages * log_probabilities), -advantages / (rewards.std() + np.float32(1e-4))
mean left out
    - rewards - rewards.mean()
    + rewards
mean of the other answers
    - rewards.mean()
    + (rewards.sum() - rewards) / np.float32(max(len(rewards) - 1, 1))
better answers become less likely
    - -np.sum(advantages * log_probabilities), -advantages
    + np.sum(advantages * log_probabilities), advantages
mean over the answers
    - -np.sum(advantages * log_probabilities), -advantages
    + -np.mean(advantages * log_probabilities), -advantages / np.float32(len(rewards))
only good answers count
    - rewards - rewards.mean()
    + np.maximum(rewards - rewards.mean(), 0)
median for mean
    - rewards.mean()
    + np.median(rewards)
last answer left out of the mean
    - rewards.mean()
    + rewards[: max(len(rewards) - 1, 1)].mean()
loss of probabilities, not of their logarithms
    - -np.sum(advantages * log_probabilities)
    + -np.sum(advantages * np.exp(log_probabilities))
""",
)
