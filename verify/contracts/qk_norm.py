"""Normalized queries and keys: RMSNorm of every head, or of all heads of a token as one vector."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.qk_norm import qk_norm, wide_qk_norm
from llamaspec.verify.bounds.precision import Precision
from llamaspec.verify.contract import Arguments, Contract, Expected, Large, beyond, independent
from llamaspec.verify.contracts import rmsnorm
from llamaspec.verify.draws import reach
from llamaspec.verify.draws.draw import Values, sizes, values


def arguments(
    *,
    precision: Precision,
    batch: int,
    seq: int,
    group: int,
    kv_heads: int,
    head_dim: int,
    q: Values,
    k: Values,
    weights: Values,
    eps: float,
) -> Arguments:
    return {
        "q": q.array("q", batch, seq, group * kv_heads, head_dim, precision=precision),
        "k": k.array("k", batch, seq, kv_heads, head_dim, precision=precision),
        "q_weight": weights.array("q_weight", head_dim, precision=precision),
        "k_weight": weights.array("k_weight", head_dim, precision=precision),
        "eps": eps,
    }


def expect(
    q: np.ndarray, k: np.ndarray, q_weight: np.ndarray, k_weight: np.ndarray, *, eps: float
) -> tuple[Expected, ...]:
    return rmsnorm.expect(q, q_weight, eps=eps), rmsnorm.expect(k, k_weight, eps=eps)


def wide_arguments(*, precision: Precision, weights: Values, **draws: Any) -> Arguments:
    named = arguments(precision=precision, weights=weights, **draws)
    widths = {f"{name}_weight": named[name].shape[-2] * named[name].shape[-1] for name in "qk"}
    return named | {name: weights.array(name, width, precision=precision) for name, width in widths.items()}


def expect_wide(
    q: np.ndarray, k: np.ndarray, q_weight: np.ndarray, k_weight: np.ndarray, *, eps: float
) -> tuple[Expected, ...]:
    def expected(x: np.ndarray, weight: np.ndarray) -> Expected:
        wide = rmsnorm.expect(x.reshape(*x.shape[:-2], -1), weight, eps=eps)
        value, hard, alarm, size = (part.reshape(x.shape) for part in wide[:4])
        return Expected(value, hard, alarm, size)

    return expected(q, q_weight), expected(k, k_weight)


SHAPES = {
    "batch": st.sampled_from([1, 2]),
    "seq": st.sampled_from([1, 2, 3]),
    "group": st.sampled_from([1, 2, 3, 7]),
    "kv_heads": st.sampled_from([1, 2, 3]),
    "head_dim": sizes(8, 32, 64, most=128),
}
VALUES = {"q": values(), "k": values(), "weights": values(-4, 4), "eps": st.sampled_from([1e-6, 1e-5, 0.5])}
LARGE = Large(
    {
        "batch": beyond(8, 64, 8192),
        "seq": beyond(16, 128, 1024, 8192),
        "group": beyond(8, 32, 8192),
        "kv_heads": beyond(8, 64, 8192),
        "head_dim": (192, 257, 513),
    },
    beside={"batch": [2], "seq": [3], "group": [2], "kv_heads": [2], "head_dim": [9]},
    closer={"batch": {"seq": [1]}, "seq": {"batch": [1]}},
    ends={"head_dim": reach.WIDTH},
)
CONTRACT = Contract(
    definition=qk_norm,
    shapes=SHAPES,
    values=VALUES,
    arguments=arguments,
    expect=expect,
    domain="q [batch seq heads head_dim], k [batch seq kv_heads head_dim] and two weights [head_dim], eps above 0",
    bound="the bound of rmsnorm",
    laws=[independent("a sequence", "q", "k")],
    large=LARGE,
)
WIDE = Contract(
    definition=wide_qk_norm,
    shapes=SHAPES,
    values=VALUES,
    arguments=wide_arguments,
    expect=expect_wide,
    domain="q [batch seq heads head_dim], k [batch seq kv_heads head_dim], q_weight [heads head_dim] and k_weight "
    "[kv_heads head_dim], each joined to one axis, eps above 0",
    bound="the bound of rmsnorm over all heads of a token",
    laws=[independent("a sequence", "q", "k")],
    large=LARGE,
)
