"""Cross entropy over a vocabulary, and its gradient. At the target, p - 1 cancels: the bound there is absolute."""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.losses import cross_entropy, cross_entropy_backward, log_softmax
from llamaspec.verify.bounds.precision import TINY, Precision, U
from llamaspec.verify.bounds.running_error import ELEMENTARY, gamma, softmaxed
from llamaspec.verify.contract import (
    Arguments,
    Claim,
    Contract,
    Expected,
    Large,
    Law,
    Trial,
    as_float64,
    beyond,
    independent,
)
from llamaspec.verify.draws.draw import Values, integers, seeds, sizes, values


def arguments(
    *, precision: Precision, tokens: int, vocab: int, logits: Values, around: float, targets: int, uncounted: str
) -> Arguments:
    ids = integers(targets, "targets", tokens, below=vocab)
    ids[-1] = vocab - 1
    weights = (1 + np.arange(tokens) % 3 / 2).astype(np.float32)
    weights[:1] *= uncounted == "none"
    return {
        "logits": logits.array("logits", tokens, vocab, precision=precision, around=around),
        "targets": ids,
        "weights": weights,
    }


def _moved(logits: np.ndarray) -> np.ndarray:
    """Bound the error of each score x if a kernel computes e^(x - m) as 2^(x log2 e - m log2 e).

    m is the largest score of the row. The kernel rounds both products.
    """
    return 4 * U * np.abs(as_float64(logits))


def expect(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> Expected:
    exact, w = as_float64(logits), as_float64(weights)
    tokens, vocab = exact.shape
    _, p_error = softmaxed(exact, _moved(logits))
    top, target = np.max(exact, axis=-1), np.take_along_axis(exact, targets[:, None], axis=-1)[:, 0]
    # lse = top + log(sum): a relative error of the sum is an absolute error of its log, which adds its own error.
    total = np.log(np.sum(np.exp(exact - top[:, None]), axis=-1))
    error = np.sum(p_error, axis=-1) + gamma(vocab + 4) + ELEMENTARY * (1 + total)
    error = error + 4 * U * (np.abs(top) + np.abs(target) + total) + np.max(_moved(logits), axis=-1)
    nats = -np.take_along_axis(log_softmax(logits), targets[:, None], axis=-1)[:, 0]
    size = np.sum(w * nats)
    hard = np.sum(w * error) * (1 + gamma(tokens + 1)) + gamma(tokens + 1) * size + TINY
    return Expected(np.asarray(cross_entropy(logits, targets, weights)), np.asarray(hard), np.asarray(hard), size)


def expect_backward(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> Expected:
    exact, w = as_float64(logits), as_float64(weights)[:, None]
    p, p_error = softmaxed(exact, _moved(logits), blocks=min(64, logits.shape[-1]))
    target = np.arange(logits.shape[-1]) == targets[:, None]
    error = w * (p_error * (1 + 2 * U) + 2 * U * (p + target) + 4 * TINY)
    furthest = np.max(np.abs(exact), axis=-1, keepdims=True)
    alarm = w * ((16 + 2 * np.sqrt(logits.shape[-1]) + 8 * furthest) * U * p + 4 * U * (p + target) + 4 * TINY)
    return Expected(cross_entropy_backward(logits, targets, weights), error, alarm, w * (p + target))


def _sums_to_nothing(trial: Trial) -> Claim:
    """Check that a gradient of logits sums to 0: adding a constant to all logits changes no probability."""
    slopes = as_float64(trial.outputs[0])
    return Claim(slopes.sum(axis=-1), np.zeros(len(slopes)), trial.bounds[0].sum(axis=-1) + 1e-12)


def _uncounted(trial: Trial) -> Claim:
    """Check that tokens of weight 0 have a gradient of 0."""
    return Claim(trial.again(weights=np.zeros_like(trial.arguments["weights"]))[0], 0 * trial.bounds[0], 0.0)


SHAPES = {"tokens": st.sampled_from([1, 2, 3, 5, 9]), "vocab": sizes(8, 16, 32, 64, 128, 256, most=513)}
VALUES = {
    "logits": values(-6, 6),
    "around": st.sampled_from([0.0, -1000.0, 1000.0, 100.0]),
    "targets": seeds,
    "uncounted": st.sampled_from(["none", "first"]),  # tokens of weight 0
}
DOMAIN = "logits [tokens vocab], targets [tokens] int32 from 0 to vocab - 1, weights [tokens] float32, 0 or more"
LARGE = Large(
    {"tokens": beyond(128, 1024, 8192), "vocab": beyond(1024, 8192, 131_072)}, beside={"tokens": [2], "vocab": [5]}
)

CROSS_ENTROPY = Contract(
    definition=cross_entropy,
    shapes=SHAPES,
    values=VALUES,
    arguments=arguments,
    expect=expect,
    domain=DOMAIN,
    bound="hard and alarm, for each token: the sum of softmax's bounds, gamma_(vocab+4), and 4 u (1 + |max| + |target| "
    "+ max |l| + 2 log of the sum); gamma_(tokens+1) of their sum",
    large=LARGE,
)
BACKWARD = Contract(
    definition=cross_entropy_backward,
    shapes=SHAPES,
    values=VALUES,
    arguments=arguments,
    expect=expect_backward,
    domain=DOMAIN,
    bound="hard: w (softmax's bound + 2 u (p + e_y)); alarm: w ((16 + 2 sqrt(n) + 8 max|l|) u p + 4 u (p + e_y))",
    laws=[
        independent("a token", "logits", "targets", "weights"),
        Law("the gradient of a token's logits sums to 0", _sums_to_nothing),
        Law("tokens of weight 0 have a gradient of 0", _uncounted),
    ],
    large=LARGE,
)
