"""A mixture of experts.

We judge the choice of experts only if no rounding could change it, and then it must be exact.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.linear import linear
from llamaspec.reference.llama import Experts
from llamaspec.reference.moe import Biases, biased_moe, moe, route
from llamaspec.verify.bounds.precision import Precision, precision
from llamaspec.verify.bounds.running_error import NO_BOUND, clamped_gated, exactly, mixed, projected, routed, softmaxed
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
from llamaspec.verify.draws.draw import Values, sizes, values

# Weights of the chosen experts: divided by their sum, as Mixtral does, or probabilities among all experts.
SHARES = ("renormalized", "of all")


def route_arguments(
    *,
    precision: Precision,
    tokens: int,
    dim: int,
    experts: int,
    chosen: int,
    x: Values,
    router: Values,
    shares: str,
) -> Arguments:
    return {
        "x": x.array("x", tokens, dim, precision=precision),
        "router": router.array("router", experts, dim, precision=precision),
        "experts_per_token": min(chosen, experts),
        "renormalized": shares == SHARES[0],
    }


def expect_route(
    x: np.ndarray, router: np.ndarray, *, experts_per_token: int, renormalized: bool = True
) -> tuple[Expected, Expected]:
    exact, matrix = as_float64(x), as_float64(router)
    logits = projected(exactly(x), matrix)
    p, p_error = softmaxed(logits.value, logits.error)
    chosen, weights = routed(exact, matrix, p, p_error, experts_per_token=experts_per_token, renormalized=renormalized)
    # A choice is clear if each chosen expert leads the next one by more than any rounding, or if equal logits come from
    # zeros, because their products are exact: then the lower index comes first. If some of those logits may be -0 and
    # others not, a sort by bits distinguishes them, and either order is right.
    order = np.argsort(-p, axis=-1, kind="stable")
    ranked, errors = (np.take_along_axis(a, order, axis=-1) for a in (p, p_error))
    ahead = ranked[:, :-1] - errors[:, :-1] > ranked[:, 1:] + errors[:, 1:]
    negative = np.all(np.signbit(exact)[:, None] != np.signbit(matrix), axis=-1)  # all terms of a logit are -0
    ties = ~np.any(exact, axis=-1) & (np.all(negative, axis=-1) | ~np.any(negative, axis=-1))
    clear = np.all(ahead[:, :experts_per_token], axis=-1) | ties
    either = np.broadcast_to(np.where(clear, 0.0, NO_BOUND)[:, None], chosen.shape)
    return (
        Expected(chosen, either, either, np.zeros(chosen.shape), rounded=False),
        Expected(weights.value, weights.error, weights.error, weights.value),
    )


def _weights_sum_to_one(trial: Trial) -> Claim | None:
    if not trial.arguments["renormalized"]:
        return None
    weights = as_float64(trial.outputs[1])
    return Claim(weights.sum(axis=-1), np.ones(len(weights)), trial.bounds[1].sum(axis=-1))


def moe_arguments(
    *,
    precision: Precision,
    tokens: int,
    dim: int,
    ffn: int,
    experts: int,
    chosen: int,
    x: Values,
    router: Values,
    weights: Values,
    shares: str,
) -> Arguments:
    sizes = {"tokens": tokens, "dim": dim, "experts": experts, "chosen": chosen}
    return {
        **route_arguments(precision=precision, **sizes, x=x, router=router, shares=shares),
        "gate": weights.array("gate", experts, ffn, dim, precision=precision),
        "up": weights.array("up", experts, ffn, dim, precision=precision),
        "down": weights.array("down", experts, dim, ffn, precision=precision),
    }


def expect_moe(
    x: np.ndarray,
    router: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    *,
    experts_per_token: int,
    renormalized: bool = True,
) -> Expected:
    experts = Experts(as_float64(router), as_float64(gate), as_float64(up), as_float64(down))
    unit = precision(x.dtype.name).unit
    y = mixed(
        exactly(x),
        experts,
        exactly(np.zeros(x.shape)),
        experts_per_token=experts_per_token,
        renormalized=renormalized,
        unit=unit,
    )
    hidden = linear(np.abs(as_float64(x)), np.abs(experts.up).max(axis=0))  # [tokens ffn]
    sizes = linear(hidden, np.abs(experts.down).max(axis=0))
    return Expected(y.value, y.error, y.error, sizes)


def biased_arguments(*, precision: Precision, biases: Values, **draws: Any) -> Arguments:
    named = moe_arguments(precision=precision, shares=SHARES[0], **draws)
    del named["renormalized"]
    experts, dim, ffn = draws["experts"], draws["dim"], draws["ffn"]
    shapes = {"router": (experts,), "gate": (experts, ffn), "up": (experts, ffn), "down": (experts, dim)}
    drawn = {
        f"{name}_bias": biases.array(f"{name}_bias", *shape, precision=precision) for name, shape in shapes.items()
    }
    return named | drawn


def expect_biased(
    x: np.ndarray,
    router: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    *biases: np.ndarray,
    experts_per_token: int,
) -> Expected:
    added = Biases(*(as_float64(bias) for bias in biases))
    experts = Experts(as_float64(router), as_float64(gate), as_float64(up), as_float64(down), added)
    unit, zeros = precision(x.dtype.name).unit, exactly(np.zeros(x.shape))
    y = mixed(exactly(x), experts, zeros, experts_per_token=experts_per_token, unit=unit, joined=clamped_gated)
    # Each output of an expert is a sum of a bias and of terms that clamping limits to 7 * 8.
    sizes = 56 * np.abs(experts.down).max(axis=0).sum(axis=-1) + np.abs(added.down).max(axis=0)
    return Expected(y.value, y.error, y.error, np.broadcast_to(sizes, x.shape))


def _renamed_biased(trial: Trial) -> Claim:
    """Reverse the order of the experts and their biases: the result must not change, as in `_renamed`."""
    names = [name for name in trial.arguments if name not in ("x", "experts_per_token")]
    flipped = {name: np.ascontiguousarray(trial.arguments[name][::-1]) for name in names}
    return Claim(trial.again(**flipped)[0], trial.outputs[0], 2 * trial.bounds[0])


def _renamed(trial: Trial) -> Claim:
    """Reverse the order of the experts: the result must not change. Tokens without a clear choice have no bound."""
    flipped = {name: np.ascontiguousarray(trial.arguments[name][::-1]) for name in ("router", "gate", "up", "down")}
    return Claim(trial.again(**flipped)[0], trial.outputs[0], 2 * trial.bounds[0])


SHAPES = {
    "tokens": st.sampled_from([1, 2, 3, 5]),
    "dim": sizes(8, 16, most=33),
    "experts": st.sampled_from([1, 2, 3, 4, 5, 8]),
}
LARGE = {"tokens": beyond(8, 64, 8192), "dim": beyond(64, 1024, 8192), "chosen": (4, 8, 12, 23)}
CLOSER = {"tokens": {"chosen": [1]}, "dim": {"experts": [5]}, "chosen": {"experts": [33]}}
ENDS = {"chosen": "published mixtures choose at most 22 experts for a token"}
BESIDE = {
    "tokens": [3],
    "dim": [24],
    "experts": [9],
    "chosen": [2],
    # Make logits of about 1 for many features, so that the choice is clear.
    "x": ["normal(1)", "normal(2)"],
    "router": ["normal(3) * 2**-5", "normal(4) * 2**-6"],
}
ROUTE = Contract(
    definition=route,
    shapes={**SHAPES, "chosen": st.sampled_from([1, 2, 3])},
    values={"x": values(-4, 2), "router": values(-4, 2), "shares": st.sampled_from(SHARES)},
    arguments=route_arguments,
    expect=expect_route,
    domain="x [tokens dim] and router [experts dim] of one dtype; the choice of experts is judged only if no rounding "
    "could change it",
    bound="hard and alarm: experts exact; weights by running error analysis of logits, softmax and quotient",
    laws=[Law("renormalized weights sum to 1", _weights_sum_to_one)],
    large=Large({**LARGE, "experts": beyond(16, 32, 128, 8192)}, beside=BESIDE, closer=CLOSER, ends=ENDS),
)
MOE = Contract(
    definition=moe,
    shapes={**SHAPES, "ffn": sizes(8, most=17), "chosen": st.sampled_from([1, 2, 3])},
    values={"x": values(-4, 2), "router": values(-4, 2), "weights": values(-4, 2), "shares": st.sampled_from(SHARES)},
    arguments=moe_arguments,
    expect=expect_moe,
    domain="x [tokens dim], router [experts dim], gate and up [experts ffn dim], down [experts dim ffn] of one dtype; "
    "a token is not judged if a rounding could change its choice of experts",
    bound="hard and alarm: running error analysis of router, softmax, three products and SwiGLU per expert, and sum",
    laws=[independent("a token", "x"), Law("the order of experts does not change the result", _renamed)],
    large=Large(
        {**LARGE, "experts": beyond(16, 32, 128, 8192), "ffn": beyond(32, 256, 8192)},
        beside={**BESIDE, "ffn": [5], "weights": ["normal(5) * 2**-4", "normal(6) * 2**-3"]},
        closer=CLOSER,
        ends=ENDS,
    ),
)
BIASED_MOE = Contract(
    definition=biased_moe,
    shapes=MOE.shapes,
    values={"x": values(-4, 2), "router": values(-4, 2), "weights": values(-4, 2), "biases": values(-4, 2)},
    arguments=biased_arguments,
    expect=expect_biased,
    domain=f"{MOE.domain.partition(' of one')[0]}, biases [experts], [experts ffn] twice and [experts dim], of one "
    "dtype; a token is not judged if a rounding could change its choice of experts",
    bound="hard and alarm: running error analysis of router, softmax, three products, clamped SwiGLU per expert, and "
    "the sum",
    laws=[independent("a token", "x"), Law("the order of experts does not change the result", _renamed_biased)],
    large=replace(MOE.large, beside={**MOE.large.beside, "biases": ["normal(7) * 2**-4"]}),
)
