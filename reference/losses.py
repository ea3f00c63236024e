r"""Losses: the functions that training minimizes, each with its gradient.

Symbols: l are the logits of a position, p = softmax(l), y is the id of the target token, and w the weight of the
position. lse(l) = log(sum_j exp(l_j)). e_y is 1 at index y and 0 elsewhere. KL(p || q) = sum_i p_i log(p_i / q_i)
measures how far p is from q; it is 0 if they are equal. softplus(a) is log(1 + exp(a)), and its slope is sigmoid(a) = 1
/ (1 + exp(-a)).

    cross entropy        w (lse(l) - l_y)                                    dl = w (p - e_y)
    log p of an answer   s = sum over its ids of (l_y - lse(l))              dl = g (e_y - p)         for ds = g
    DPO                  softplus(-m), m = b [(s+ - r+) - (s- - r-)]         ds+ = -b sigmoid(-m) = -ds-
    distillation         T^2 KL(softmax(t / T) || softmax(l / T))            dl = T (softmax(l / T) - softmax(t / T))
    reverse KL           KL(p || q), q = softmax(t)                          dl = p (log(p / q) - KL)
    GRPO, on policy      - sum_i (r_i - mean r) s_i                          ds_i = -(r_i - mean r)

A loss is a sum over positions, each with a weight w; w = 0 excludes a position. To get a mean, divide once by the sum
of all weights of a step. A mean of means would give long texts less weight.

DPO is from Rafailov et al., 2023 (https://arxiv.org/abs/2305.18290), equations 7 and 8. s and r are the log
probabilities of the preferred (+) and the rejected (-) answer, s under the model and r under a frozen reference model;
b is the paper's beta. Distillation is from Hinton et al., 2015 (https://arxiv.org/abs/1503.02531): t are the teacher's
logits, T is a temperature, and the factor T^2 keeps the size of the gradients as T grows. The reverse KL, from the
student's p to the teacher's q, is one of the losses of GKD (https://arxiv.org/abs/2306.13649).

GRPO is from Shao et al., 2024 (https://arxiv.org/abs/2402.03300), equation 3: the model writes several answers to one
question, s_i are their log probabilities at the temperature at which they were drawn, and r_i their rewards. The paper
clips the ratio of new to old probability; if each answer serves for one update, the ratio is 1, and nothing is clipped.
We leave out its KL term, and its division by the standard deviation of the rewards, as Dr. GRPO does
(https://arxiv.org/abs/2503.20783).
"""

import numpy as np
from jaxtyping import Float, Int

from llamaspec.reference.softmax import softmax


def log_softmax(logits: Float[np.ndarray, "*batch vocab"]) -> Float[np.ndarray, "*batch vocab"]:
    """Compute the log probabilities l - lse(l), in float64. They are accurate even if p underflows to 0.

    >>> log_softmax(np.array([0.0, -2000.0]))
    array([    0., -2000.])
    """
    logits = logits.astype(np.float64, copy=False)
    top = np.max(logits, axis=-1, keepdims=True)
    # We subtract the maximum first: in `logsumexp` a large maximum would round away the logarithm added to it.
    return logits - top - np.log(np.sum(np.exp(logits - top), axis=-1, keepdims=True))


def cross_entropy(
    logits: Float[np.ndarray, "*batch vocab"],
    targets: Int[np.ndarray, "*batch"],
    weights: Float[np.ndarray, "*batch"],
) -> float:
    """Compute the weighted sum of -log p of `targets`, in nats and in float64.

    >>> round(cross_entropy(np.log([[1.0, 3.0]]), np.array([1]), np.array([2.0])), 6)  # 2 log(4 / 3)
    0.575364
    """
    return -float(np.sum(weights * _at_targets(log_softmax(logits), targets)))


def cross_entropy_backward(
    logits: Float[np.ndarray, "*batch vocab"],
    targets: Int[np.ndarray, "*batch"],
    weights: Float[np.ndarray, "*batch"],
) -> Float[np.ndarray, "*batch vocab"]:
    """Compute the gradient of `cross_entropy` for the logits, in float64.

    >>> cross_entropy_backward(np.log([[1.0, 3.0]]), np.array([1]), np.array([2.0]))
    array([[ 0.5, -0.5]])
    """
    return weights[..., None].astype(np.float64) * (softmax(logits) - _one_hot(targets, logits.shape[-1]))


def answer_log_probability(
    logits: Float[np.ndarray, "seq vocab"], targets: Int[np.ndarray, " seq"], counted: Float[np.ndarray, " seq"]
) -> float:
    """Compute the log probability s of an answer: the sum over positions where `counted` is 1. Padding has 0.

    >>> round(answer_log_probability(np.log([[1.0, 3.0], [1.0, 1.0]]), np.array([1, 0]), np.array([1.0, 0.0])), 6)
    -0.287682
    """
    return -cross_entropy(logits, targets, counted)


def dpo(
    preferred: Float[np.ndarray, " pairs"],
    rejected: Float[np.ndarray, " pairs"],
    frozen_preferred: Float[np.ndarray, " pairs"],
    frozen_rejected: Float[np.ndarray, " pairs"],
    *,
    beta: float,
) -> tuple[Float[np.ndarray, " pairs"], Float[np.ndarray, " pairs"], Float[np.ndarray, " pairs"]]:
    """Compute the DPO loss of each pair of answers, and its gradients for the model's two log probabilities.

    Before training, s = r, so the margin m is 0 and the loss is log 2.

    >>> dpo(np.array([-3.0]), np.array([-5.0]), np.array([-3.0]), np.array([-5.0]), beta=0.1)
    (array([0.69314718]), array([-0.05]), array([0.05]))
    """
    answers = (preferred, rejected, frozen_preferred, frozen_rejected)
    s, s_rejected, r, r_rejected = (np.asarray(a, np.float64) for a in answers)
    margins = beta * ((s - r) - (s_rejected - r_rejected))
    slopes = -beta * np.exp(-np.logaddexp(0.0, margins))  # -beta sigmoid(-m), without overflow
    return np.logaddexp(0.0, -margins), slopes, -slopes


def group_relative(
    log_probabilities: Float[np.ndarray, " answers"], rewards: Float[np.ndarray, " answers"]
) -> tuple[float, Float[np.ndarray, " answers"]]:
    """Compute the GRPO loss of the answers to one question, and the loss's gradient for their log probabilities.

    A training step makes an answer likelier if its reward is above the mean. If all rewards are equal, the gradient is
    0.

    >>> group_relative(np.array([-2.0, -3.0]), np.array([1.0, 0.0]))
    (-0.5, array([-0.5,  0.5]))
    """
    rewards = rewards.astype(np.float64)
    advantages = rewards - np.mean(rewards)
    return -float(np.sum(advantages * log_probabilities)), -advantages


def distillation(
    logits: Float[np.ndarray, "*batch vocab"],
    teacher: Float[np.ndarray, "*batch vocab"],
    weights: Float[np.ndarray, "*batch"],
    *,
    temperature: float,
) -> float:
    """Compute the weighted sum over positions of T^2 KL(teacher || student) at temperature T, in float64.

    >>> student, teacher, one = np.log([[1.0, 1.0]]), np.log([[1.0, 3.0]]), np.array([1.0])
    >>> round(distillation(student, teacher, one, temperature=1.0), 4)  # log(1/2) / 4 + 3 log(3/2) / 4
    0.1308
    """
    student_log, teacher_log = log_softmax(logits / temperature), log_softmax(teacher / temperature)
    divergence = np.sum(np.exp(teacher_log) * (teacher_log - student_log), axis=-1)
    return temperature**2 * float(np.sum(weights * divergence))


def distillation_backward(
    logits: Float[np.ndarray, "*batch vocab"],
    teacher: Float[np.ndarray, "*batch vocab"],
    weights: Float[np.ndarray, "*batch"],
    *,
    temperature: float,
) -> Float[np.ndarray, "*batch vocab"]:
    """Compute the gradient of `distillation` for the student's logits, in float64.

    >>> distillation_backward(np.log([[1.0, 1.0]]), np.log([[1.0, 3.0]]), np.array([1.0]), temperature=1.0)
    array([[ 0.25, -0.25]])
    """
    student, target = softmax(logits / temperature), softmax(teacher / temperature)
    return weights[..., None].astype(np.float64) * temperature * (student - target)


def reverse_kl(
    logits: Float[np.ndarray, "*batch vocab"],
    teacher: Float[np.ndarray, "*batch vocab"],
    weights: Float[np.ndarray, "*batch"],
) -> float:
    """Compute the weighted sum over positions of KL(student || teacher), in float64.

    >>> student, teacher, one = np.log([[1.0, 1.0]]), np.log([[1.0, 3.0]]), np.array([1.0])
    >>> round(reverse_kl(student, teacher, one), 4)  # log(2) / 2 + log(2/3) / 2
    0.1438
    """
    return float(np.sum(weights * _reverse_kl(logits, teacher)[0]))


def reverse_kl_backward(
    logits: Float[np.ndarray, "*batch vocab"],
    teacher: Float[np.ndarray, "*batch vocab"],
    weights: Float[np.ndarray, "*batch"],
) -> Float[np.ndarray, "*batch vocab"]:
    """Compute the gradient of `reverse_kl` for the student's logits, in float64.

    >>> reverse_kl_backward(np.log([[1.0, 1.0]]), np.log([[1.0, 3.0]]), np.array([1.0])).round(4)
    array([[ 0.2747, -0.2747]])
    """
    divergence, ratio = _reverse_kl(logits, teacher)
    return weights[..., None].astype(np.float64) * softmax(logits) * (ratio - divergence[..., None])


def _reverse_kl(logits: np.ndarray, teacher: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the divergence at each position, and log(p / q) for each id."""
    ratio = log_softmax(logits) - log_softmax(teacher)
    return np.sum(softmax(logits) * ratio, axis=-1), ratio


def _at_targets(values: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, targets[..., None].astype(np.int64), axis=-1)[..., 0]


def _one_hot(targets: np.ndarray, vocab: int) -> np.ndarray:
    return (np.arange(vocab) == targets[..., None]).astype(np.float64)
