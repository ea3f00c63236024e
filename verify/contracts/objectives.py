"""Objectives of fine-tuning: an answer's log probability, DPO's loss of pairs, and GRPO's loss of a group."""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.losses import answer_log_probability, dpo, group_relative
from llamaspec.verify.bounds.precision import TINY, Precision, U
from llamaspec.verify.bounds.running_error import gamma
from llamaspec.verify.contract import Arguments, Claim, Contract, Expected, Large, Law, Trial, as_float64, beyond
from llamaspec.verify.contracts import cross_entropy
from llamaspec.verify.draws.draw import Values, integers, seeds, sizes, values

COUNTED = ["all", "answer", "padded"]


def answer_arguments(
    *, precision: Precision, tokens: int, vocab: int, logits: Values, targets: int, counted: str
) -> Arguments:
    at = np.arange(tokens)
    begin, end = (0, tokens) if counted == "all" else (tokens // 3, tokens - (tokens // 3) * (counted == "padded"))
    return {
        "logits": logits.array("logits", tokens, vocab, precision=precision),
        "targets": integers(targets, "targets", tokens, below=vocab),
        "counted": ((begin <= at) & (at < end)).astype(np.float32),
    }


def expect_answer(logits: np.ndarray, targets: np.ndarray, counted: np.ndarray) -> Expected:
    loss = cross_entropy.expect(logits, targets, counted)
    return loss._replace(value=-loss.value)


def _padding(trial: Trial) -> Claim:
    """Check that tokens that do not count, such as padding and the question, may have any logits."""
    logits, counted = trial.arguments["logits"], trial.arguments["counted"]
    changed = np.where(counted[:, None] > 0, logits, -logits).astype(logits.dtype)
    return Claim(trial.again(logits=changed)[0], trial.outputs[0], 2 * trial.bounds[0])


def log_probabilities(drawn: Values, name: str, count: int, precision: Precision) -> np.ndarray:
    """Draw log probabilities of answers, which are at most 0, in float32."""
    return -np.abs(as_float64(drawn.array(name, count, precision=precision))).astype(np.float32)


def dpo_arguments(*, precision: Precision, pairs: int, beta: float, **answers: Values) -> Arguments:
    arrays = {name: log_probabilities(drawn, name, pairs, precision) for name, drawn in answers.items()}
    return {**arrays, "beta": beta}


def expect_dpo(
    preferred: np.ndarray,
    rejected: np.ndarray,
    frozen_preferred: np.ndarray,
    frozen_rejected: np.ndarray,
    *,
    beta: float,
) -> tuple[Expected, ...]:
    scores = [as_float64(a) for a in (preferred, rejected, frozen_preferred, frozen_rejected)]
    losses, slopes, other_slopes = dpo(*scores, beta=beta)
    size = beta * np.sum(np.abs(scores), axis=0)
    moved = gamma(5) * size + TINY  # three differences, beta rounded to float32, and its product
    # softplus has a slope of at most 1, and the sigmoid of at most 1 / 4.
    error = moved + 8 * U * (1 + losses)
    slope_error = beta * (moved / 4 + 8 * U) + TINY
    return (
        Expected(losses, error, error, size + losses),
        *(Expected(slope, slope_error, slope_error, np.full_like(slope, beta)) for slope in (slopes, other_slopes)),
    )


def _constant(trial: Trial) -> Claim:
    """Check that the model at the start, which is its own reference, has the loss log 2 and the slopes -+ beta / 2."""
    arguments = trial.arguments
    frozen = {"frozen_preferred": arguments["preferred"], "frozen_rejected": arguments["rejected"]}
    losses, *slopes = trial.again(**frozen)
    beta = np.full(len(losses), arguments["beta"])
    outputs = np.concatenate([as_float64(a) for a in (losses, *slopes)])
    expected = np.concatenate([np.full(len(losses), np.log(2)), -beta / 2, beta / 2])
    # The four scores may be added in any order, so the margin may differ from 0 by a rounding of the scores.
    scores = (np.abs(as_float64(arguments[name])) for name in ("preferred", "rejected"))
    moved = 2 * gamma(5) * beta * sum(scores)
    slope = beta * moved / 4
    return Claim(outputs, expected, 32 * U * (1 + np.abs(expected)) + np.concatenate([moved, slope, slope]))


def group_arguments(*, precision: Precision, answers: int, scores: Values, rewards: str, seed: int) -> Arguments:
    levels = 2 if rewards == "exact" else 2001
    draws = integers(seed, "rewards", answers, below=levels) * (1 if rewards == "exact" else 0.01)
    return {
        "log_probabilities": log_probabilities(scores, "log_probabilities", answers, precision),
        "rewards": (np.ones(answers) if rewards == "equal" else draws).astype(np.float32),
    }


def expect_group(log_probabilities: np.ndarray, rewards: np.ndarray) -> tuple[Expected, ...]:
    scores, exact_rewards = as_float64(log_probabilities), as_float64(rewards)
    answers = len(rewards)
    loss, slopes = group_relative(scores, exact_rewards)
    largest = np.abs(exact_rewards) + np.mean(np.abs(exact_rewards))
    error = gamma(answers + 2) * largest + TINY
    size = float(np.sum(largest * np.abs(scores)))
    flushed = TINY * (2 * answers + np.sum(np.abs(scores)) + np.sum(largest))  # factors and products below TINY
    total = gamma(2 * answers + 4) * size + flushed
    return Expected(np.asarray(loss), np.asarray(total), np.asarray(total), np.asarray(size)), Expected(
        slopes, error, error, largest
    )


def _no_advantage(trial: Trial) -> Claim:
    """Check that a constant added to all rewards changes no slope: only differences within the group count."""
    rewards = trial.arguments["rewards"]
    size = np.abs(as_float64(rewards)) + np.mean(np.abs(as_float64(rewards))) + 2
    tolerance = trial.bounds[1] + 2 * gamma(len(rewards) + 3) * size
    return Claim(trial.again(rewards=(rewards + np.float32(1)).astype(np.float32))[1], trial.outputs[1], tolerance)


ANSWER = Contract(
    definition=answer_log_probability,
    shapes={"tokens": st.sampled_from([1, 2, 3, 5, 9]), "vocab": sizes(8, 16, 32, 64, most=129)},
    values={"logits": values(-6, 6), "targets": seeds, "counted": st.sampled_from(COUNTED)},
    arguments=answer_arguments,
    expect=expect_answer,
    domain="logits [tokens vocab], targets [tokens] int32 from 0 to vocab - 1, counted [tokens] float32, 0 or 1",
    bound="hard and alarm: the bound of cross_entropy with the weights `counted`",
    laws=[Law("tokens that do not count may have any logits", _padding)],
    large=Large({"tokens": beyond(128, 1024), "vocab": beyond(1024, 8192)}, beside={"tokens": [2], "vocab": [5]}),
)
DPO = Contract(
    definition=dpo,
    shapes={"pairs": st.sampled_from([1, 2, 3, 8, 9])},
    values={
        **{name: values(-3, 8) for name in ("preferred", "rejected", "frozen_preferred", "frozen_rejected")},
        "beta": st.sampled_from([0.1, 0.01, 0.5, 2.0]),
    },
    arguments=dpo_arguments,
    expect=expect_dpo,
    domain="four arrays [pairs] of log probabilities, float32 and at most 0; beta above 0",
    bound="hard and alarm: e = gamma_5 beta times the sum of magnitudes; e + 8 u (1 + loss) for the loss, "
    "beta (e / 4 + 8 u) for the slopes",
    laws=[Law("a model that equals its reference has the loss log 2 and the slopes -beta / 2 and beta / 2", _constant)],
    large=Large({"pairs": beyond(128, 1024, 8192)}, beside={}),
)
GROUP = Contract(
    definition=group_relative,
    shapes={"answers": st.sampled_from([1, 2, 3, 4, 8, 9])},
    values={
        "scores": values(-3, 8),
        "rewards": st.sampled_from(["exact", "graded", "equal"]),  # 0 or 1; 2,001 numbers from 0 to 20; all 1
        "seed": seeds,
    },
    arguments=group_arguments,
    expect=expect_group,
    domain="log_probabilities [answers] and rewards [answers], float32",
    bound="hard and alarm: gamma_(n + 2) (|r| + mean |r|) for the slopes, gamma_(2 n + 4) of the sum of their products "
    "with |s| for the loss",
    laws=[Law("a constant added to all rewards changes no slope", _no_advantage)],
    large=Large({"answers": beyond(64, 1024, 8192)}, beside={}),
)
