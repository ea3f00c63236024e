"""Weights of attention, with a scale as an argument and a soft cap of the scores."""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.attention import attention_weights
from llamaspec.verify.bounds.precision import TINY, Precision
from llamaspec.verify.bounds.running_error import Approx, gamma, soft_capped, softmaxed
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
from llamaspec.verify.contracts.attention import HEADS_ENDS, MASKS, mask_named
from llamaspec.verify.draws import reach
from llamaspec.verify.draws.draw import Values, sizes, values

BLOCKS = 8  # most blocks of keys of an online softmax


def arguments(
    *,
    precision: Precision,
    batch: int,
    queries: int,
    keys: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    q: Values,
    k: Values,
    mask: str,
    scale: float | None,
    cap: float | None,
) -> Arguments:
    return {
        "q": q.array("q", batch, queries, kv_heads * group, head_dim, precision=precision),
        "k": k.array("k", batch, keys, kv_heads, head_dim, precision=precision),
        "mask": mask_named(mask, batch, queries, keys),
        "scale": scale,
        "cap": cap,
    }


def expect(q: np.ndarray, k: np.ndarray, mask: np.ndarray, *, scale: float | None, cap: float | None) -> Expected:
    group, head_dim = q.shape[2] // k.shape[2], q.shape[3]
    queries, keys = (as_float64(a).swapaxes(1, 2) for a in (q, np.repeat(k, group, axis=2)))  # [batch heads n head_dim]
    by = head_dim**-0.5 if scale is None else scale
    sizes = by * np.abs(queries) @ np.abs(keys).swapaxes(-1, -2)
    # The scale is rounded, its root and quotient may be, and it multiplies q or the score.
    moved = gamma(head_dim + 3) * sizes + (head_dim + 4) * TINY
    scores = Approx(by * queries @ keys.swapaxes(-1, -2), moved)
    scores = scores if cap is None else soft_capped(scores, cap)
    seen = as_float64(mask)[:, None]
    p, error = softmaxed(scores.value + seen, np.where(np.isneginf(seen), 0, scores.error), blocks=BLOCKS)
    return Expected(p, error, error, p)


def _sums_to_one(trial: Trial) -> Claim:
    p = as_float64(trial.outputs[0])
    seen = np.any(np.isfinite(trial.arguments["mask"]), axis=-1)[:, None]
    bound = trial.bounds[0].sum(axis=-1) + p.shape[-1] * 2.0**-53 * p.sum(axis=-1)  # this sum itself rounds
    return Claim(p.sum(axis=-1), np.broadcast_to(seen * 1.0, p.shape[:-1]), bound)


def _repeated_heads(trial: Trial) -> Claim:
    k = trial.arguments["k"]
    again = trial.again(k=np.repeat(k, trial.arguments["q"].shape[2] // k.shape[2], axis=2))
    return Claim(again[0], trial.outputs[0], 2 * trial.bounds[0])


def _longer_queries(trial: Trial) -> Claim | None:
    """Double the queries and halve the scale: the result must not change, unless queries overflow or underflow."""
    q, scale = trial.arguments["q"], trial.arguments["scale"]
    if scale is None:
        return None
    with np.errstate(over="ignore"):
        doubled = (q * 2).astype(q.dtype)
    if not np.array_equal(as_float64(doubled), 2 * as_float64(q)):
        return None
    return Claim(trial.again(q=doubled, scale=scale / 2)[0], trial.outputs[0], 2 * trial.bounds[0])


CONTRACT = Contract(
    definition=attention_weights,
    shapes={
        "batch": st.sampled_from([1, 2]),
        "queries": st.sampled_from([1, 2, 3, 8, 9]),
        "keys": sizes(8, 16, most=33),
        "kv_heads": st.sampled_from([1, 2, 3]),
        "group": st.sampled_from([1, 2, 3]),
        "head_dim": sizes(8, 16, most=33),
    },
    values={
        "q": values(-4, 4),
        "k": values(-4, 4),
        "mask": st.sampled_from(MASKS),
        "scale": st.sampled_from([None, 0.0625, 0.1, 1.0, 2.5]),
        "cap": st.sampled_from([None, 50.0, 5.0, 0.5]),
    },
    arguments=arguments,
    expect=expect,
    domain="q [batch queries heads head_dim] and k [batch keys kv_heads head_dim] of one dtype, mask [batch queries "
    "keys] float32 of 0 and -inf; scale None or above 0, cap None or above 0; a query that sees nothing gets zeros",
    bound="hard and alarm: running error analysis of the scores, of the cap (which shrinks errors of large scores), "
    "and of the softmax over blocks of keys",
    laws=[
        independent("a sequence", "q", "k", "mask"),
        Law("weights sum to 1, or to 0 for a query that sees no key", _sums_to_one),
        Law("repeating a shared key head for each of its query heads does not change the result", _repeated_heads),
        Law("2 q with half the scale gives the same weights as q", _longer_queries, sets=("scale",)),
    ],
    large=Large(
        {
            "batch": beyond(8, 1024),
            "queries": beyond(16, 64, 8192),
            "keys": beyond(64, 128, 1024, 8192),
            "group": beyond(8, 1024),
            "kv_heads": beyond(8, 1024),
            "head_dim": (65, 128, 513),
        },
        beside={"batch": [2], "queries": [3], "keys": [9], "kv_heads": [2], "group": [2], "head_dim": [24]},
        closer={
            "batch": {"queries": [1], "kv_heads": [1]},
            "group": {"batch": [1]},
            "kv_heads": {"batch": [1], "group": [1]},
        },
        ends={"batch": reach.SEQUENCES, **HEADS_ENDS},
    ),
)
