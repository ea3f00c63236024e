"""Normalized queries and keys: RMSNorm of every head."""

import numpy as np
from hypothesis import strategies as st

from reference.qk_norm import qk_norm
from verify.contract import Arguments, Contract, Expected, Large, beyond
from verify.contracts import rmsnorm
from verify.draw import Values, sizes, values
from verify.laws import alone
from verify.precision import Precision


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


CONTRACT = Contract(
    definition=qk_norm,
    shapes={
        "batch": st.sampled_from([1, 2]),
        "seq": st.sampled_from([1, 2, 3]),
        "group": st.sampled_from([1, 2, 3, 7]),
        "kv_heads": st.sampled_from([1, 2, 3]),
        "head_dim": sizes(8, 32, 64, most=128),
    },
    values={"q": values(), "k": values(), "weights": values(-4, 4), "eps": st.sampled_from([1e-6, 1e-5, 0.5])},
    arguments=arguments,
    expect=expect,
    domain="q [batch seq heads head_dim], k [batch seq kv_heads head_dim] and two weights [head_dim], eps above 0",
    bound="that of rmsnorm",
    laws=[alone("a sequence", "q", "k")],
    large=Large(
        {
            "batch": beyond(8, 64),
            "seq": beyond(16, 128, 1024),
            "group": beyond(8, 32),
            "kv_heads": beyond(8, 64),
            "head_dim": (192, 256, 257),
        },
        beside={"batch": [2], "seq": [3], "group": [2], "kv_heads": [2], "head_dim": [24]},
    ),
)
