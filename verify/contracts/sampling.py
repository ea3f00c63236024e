"""Sampling: if a rounding could change the decision of a filter, both outcomes are right.

Every probability has a lower and an upper bound. Every filter gives two sets: the tokens that it certainly keeps, and
the tokens that it may keep. Any outcome in between is right.
"""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from jaxtyping import Bool, Float

from llamaspec.reference.sampling import distribution, draw, penalize
from llamaspec.verify.bounds.precision import TINY, Precision, U, precision
from llamaspec.verify.bounds.running_error import gamma, softmaxed
from llamaspec.verify.contract import Arguments, Claim, Contract, Expected, Large, Law, Trial, as_float64
from llamaspec.verify.draws.draw import HIDDEN, Values, hide, integers, seeds, sizes, values


class Between(NamedTuple):
    """A distribution, with a lower and an upper bound for each probability."""

    low: Float[np.ndarray, " vocab"]
    high: Float[np.ndarray, " vocab"]

    def keep(self, surely: Bool[np.ndarray, " vocab"], maybe: Bool[np.ndarray, " vocab"]) -> "Between":
        """Apply a filter that certainly keeps the tokens `surely` and may keep `maybe`, then divide by the total."""
        low, high = np.where(surely, self.low, 0), np.where(maybe, self.high, 0)
        slack = gamma(len(low) + 2)
        return Between(
            low * (1 - slack) / max(float(np.sum(high)), TINY),
            np.minimum(high * (1 + slack) / max(float(np.sum(low)), TINY), 1 + slack),
        )


def arguments(
    *,
    precision: Precision,
    vocab: int,
    logits: Values,
    around: float,
    hidden: str,
    seen: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
) -> Arguments:
    scores = logits.array("logits", vocab, precision=precision, around=around)
    hides = hide(hidden, 2, vocab)[1]
    if not np.all(hides):  # otherwise no token is left to draw
        scores[hides] = -np.inf
    return {
        "logits": scores,
        "seen": integers(seen, "seen", vocab, below=2).astype(bool),
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }


def expect(
    logits: np.ndarray,
    seen: np.ndarray,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
) -> Expected:
    options = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
    value = distribution(logits, seen, temperature=temperature, **options)
    scores = penalize(logits, seen, penalty=repetition_penalty)
    off = np.where(
        np.isneginf(scores) | (repetition_penalty == 1), 0, 3 * U * np.abs(scores)
    )  # with the rounding of the penalty itself
    # Tokens with the same logit, both seen or both not, have the same probability in every implementation.
    groups = 2 * np.unique(as_float64(logits), return_inverse=True)[1] + seen
    p = _greedy(scores, off, groups) if temperature == 0 else _tempered(scores, off, temperature)
    if 0 < top_k < len(scores):
        p = p.keep(*(_ahead(p, groups, sure, counted=True) < top_k for sure in (True, False)))
    if top_p < 1:
        slack = 1 + gamma(len(scores) + 2)
        p = p.keep(_ahead(p, groups, True) * slack < top_p, _ahead(p, groups, False) / slack < top_p)
    largest = Between(np.max(p.low, keepdims=True), np.max(p.high, keepdims=True))
    surely = p.low >= min_p * largest.high * (1 + 2 * U)
    p = p.keep(surely | (np.sum(p.high > 0) == 1), p.high >= min_p * largest.low * (1 - 2 * U))
    hard = np.maximum(p.high - value, value - p.low) + 4 * TINY
    return Expected(value, hard, hard, value)


def _greedy(scores: np.ndarray, off: np.ndarray, groups: np.ndarray) -> Between:
    """Give probability 1 to the token with the largest score (the first one on ties)."""
    candidates = np.flatnonzero(scores + off >= np.max(scores - off))
    best = np.zeros(len(scores), bool)
    best[candidates[np.unique(groups[candidates], return_index=True)[1]]] = True
    return Between(np.where(best & (np.sum(best) == 1), 1.0, 0.0), best * 1.0)


def _tempered(scores: np.ndarray, off: np.ndarray, temperature: float) -> Between:
    size = np.where(np.isneginf(scores), 0, np.abs(scores))
    with np.errstate(over="ignore"):
        exponents = np.where(np.isneginf(scores), -np.inf, (scores - np.max(scores)) / temperature)
        # Any of several scores may be the largest. An error common to all exponents changes nothing.
        moved = (off + np.max(off) + 4 * U * (size + np.max(size))) / temperature
    p, error = softmaxed(exponents[None], moved[None])
    return Between(np.maximum(p - error, 0)[0], np.minimum(p + error, 1)[0])


def _ahead(p: Between, groups: np.ndarray, sure: bool, *, counted: bool = False) -> Float[np.ndarray, " vocab"]:
    """For each token, sum the probabilities of all more probable tokens. With `counted`, count these tokens instead.

    Returns an upper bound of each sum or count if `sure`, otherwise a lower bound. Tokens with the same number in
    `groups` are equally probable, so we do not count them as more probable than each other.
    """
    rival, own, bound = (p.high, p.low, p.high) if sure else (p.low, p.high, p.low)
    masses = np.ones_like(bound) if counted else bound
    levels, rank = np.unique(rival, return_inverse=True)
    above = np.searchsorted(levels, own, side="right")  # the first level that is ahead

    def ahead(group: np.ndarray) -> np.ndarray:
        """For each token, sum the probabilities of all more probable tokens in the same group."""
        place = group * (len(levels) + 1)
        order = np.argsort(place + rank)
        total = np.append(0, np.cumsum(masses[order]))
        first, end = (np.searchsorted((place + rank)[order], place + level) for level in (above, len(levels)))
        return total[end] - total[first]

    return ahead(np.zeros_like(groups)) - ahead(groups)


def draw_arguments(*, precision: Precision, vocab: int, p: Values, u: float) -> Arguments:
    weights = np.abs(p.array("p", vocab, precision=precision).astype(np.float32))
    if not np.any(weights):
        weights[-1] = 1
    return {"p": weights, "u": u}


def expect_draw(p: np.ndarray, u: float) -> Expected:
    """Expect the token at which the cumulative sum of p passes u, or any token at which a rounded sum may pass it."""
    value = draw(p, u)
    cumulative = np.cumsum(as_float64(p))
    total = cumulative[-1]
    integral = bool(np.all(as_float64(p) == np.rint(as_float64(p)))) and total < 2**20 and u * 1024 % 1 == 0
    off = 0.0 if integral else 2 * gamma(len(p) + 2) * total + TINY * len(p)
    first = int(np.argmax(cumulative > u * total - off))
    passes = cumulative > u * total + off
    last = int(np.argmax(passes)) if np.any(passes) else int(np.flatnonzero(p)[-1])
    either = np.asarray(float(max(value - first, last - value, 0)))
    return Expected(np.asarray(value), either, either, np.asarray(0.0), rounded=False)


def _scaled(trial: Trial) -> Claim:
    return Claim(trial.again(p=trial.arguments["p"] * np.float32(4))[0], trial.outputs[0], 2 * trial.bounds[0])


def _sums_to_one(trial: Trial) -> Claim:
    total = as_float64(trial.outputs[0]).sum()
    return Claim(np.asarray(total), np.asarray(1.0), (len(trial.outputs[0]) + 8) * U + _rounding(trial))


def _rounding(trial: Trial) -> float:
    """Bound the error of a sum of probabilities that are rounded one by one."""
    returned = precision(trial.outputs[0].dtype.name)
    return returned.unit + len(trial.outputs[0]) * returned.smallest


VOCAB = sizes(8, 32, 64, 256, most=257)
DISTRIBUTION = Contract(
    definition=distribution,
    shapes={"vocab": VOCAB},
    values={
        # A filter matters only if several tokens share the mass: small logits, and rarely only one token.
        "logits": values(-6, 0, without=["denormal"]),
        "around": st.sampled_from([0.0, -100.0, 100.0]),
        "hidden": st.sampled_from([which for which in HIDDEN if which != "all but the last"]),
        "seen": seeds,
        "temperature": st.sampled_from([1.0, 0.7, 1.5, 4.0, 16.0, 0.125, 0.0]),
        "top_k": st.sampled_from([0, 2, 5, 40, 100, 1]),
        "top_p": st.sampled_from([1.0, 0.9, 0.5, 0.125]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.25, 2.0]),
    },
    arguments=arguments,
    expect=expect,
    domain="logits [vocab], finite or -inf but not all -inf, seen [vocab] bool; a temperature of 0 is greedy, a top_k "
    "of 0 and a top_p of 1 keep all tokens; tokens of equal probability are kept or dropped together",
    bound="hard and alarm: intervals; if a rounding could change which tokens a filter keeps, both outcomes are right",
    laws=[Law("probabilities sum to 1", _sums_to_one)],
    large=Large({"vocab": (1041, 4161, 8321, 33_281, 150_001)}),
)
DRAW = Contract(
    definition=draw,
    shapes={"vocab": VOCAB},
    values={
        "p": values(0, 0, without=["denormal"]),
        "u": st.sampled_from([0.0, 0.5, 0.25, 0.75, 0.3, 0.9, 0.001, 0.9990234375]),
    },
    arguments=draw_arguments,
    expect=expect_draw,
    domain="p [vocab] float32, not negative and not all 0, of any sum; u from 0 to below 1",
    bound="exact, except for tokens so near u that an error of gamma_n of the sum could decide",
    laws=[Law("p times 4 gives the same token as p", _scaled)],
    large=Large({"vocab": (1041, 4161, 33_281, 150_001)}),
)
