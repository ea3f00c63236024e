"""Backward of RMSNorm, and of the norms of queries and keys.

An entry of dx is A - B with A = r g dy and B = x r^3 mean(g dy x), where g is the weight and r is 1 / sqrt(mean(x^2) +
eps). The difference may cancel, so the bound is relative to |A| + |B|, not to |A - B|.
"""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.backward.qk_norm import qk_norm_backward
from llamaspec.reference.backward.rmsnorm import rmsnorm_backward
from llamaspec.verify.bounds.precision import TINY, Precision, U
from llamaspec.verify.bounds.running_error import ELEMENTARY, flushed, gamma
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
from llamaspec.verify.draws import reach
from llamaspec.verify.draws.draw import Values, sizes, values


def arguments(
    *, precision: Precision, rows: int, dim: int, x: Values, weight: Values, dy: Values, eps: float
) -> Arguments:
    return {
        "x": x.array("x", rows, dim, precision=precision),
        "weight": weight.array("weight", dim, precision=precision),
        "dy": dy.array("dy", rows, dim, precision=precision),
        "eps": eps,
    }


def expect(x: np.ndarray, weight: np.ndarray, dy: np.ndarray, *, eps: float) -> tuple[Expected, ...]:
    dx, dweight = rmsnorm_backward(x, weight, dy, eps=eps)
    n = x.shape[-1]
    x, dn, dy = np.abs(as_float64(x)), np.abs(as_float64(dy) * as_float64(weight)), np.abs(as_float64(dy))
    mean = np.mean(x**2, axis=-1, keepdims=True)
    r = 1 / np.sqrt(mean + eps)
    # Hardware may flush a square to zero, and eps and its sum with the mean are rounded.
    root = 1 / np.sqrt(1 - gamma(n + 4) - TINY / eps) * (1 + ELEMENTARY + U) - 1
    through, along = r * dn, x * r**3 * np.mean(dn * x, axis=-1, keepdims=True)
    dx_error = through * ((1 + root) * (1 + gamma(4)) - 1) + along * ((1 + root) ** 3 * (1 + gamma(n + 10)) - 1)
    dx_error = dx_error + flushed(dn, x, r, r, r)
    terms = dy * x * r
    rows = int(np.prod(terms.shape[:-1]))
    size = terms.reshape(rows, n).sum(axis=0)
    dweight_error = size * ((1 + root) * (1 + gamma(rows + 3)) - 1)
    dweight_error = dweight_error + flushed(dy, x, r).reshape(rows, n).sum(axis=0)
    return Expected(dx, dx_error, dx_error, through + along), Expected(dweight, dweight_error, dweight_error, size)


def qk_arguments(
    *,
    precision: Precision,
    seq: int,
    group: int,
    kv_heads: int,
    head_dim: int,
    q: Values,
    k: Values,
    weights: Values,
    slopes: Values,
    eps: float,
) -> Arguments:
    heads = {"q": (seq, group * kv_heads, head_dim), "k": (seq, kv_heads, head_dim)}
    return {
        "q": q.array("q", *heads["q"], precision=precision),
        "k": k.array("k", *heads["k"], precision=precision),
        "q_weight": weights.array("q_weight", head_dim, precision=precision),
        "k_weight": weights.array("k_weight", head_dim, precision=precision),
        "dq": slopes.array("dq", *heads["q"], precision=precision),
        "dk": slopes.array("dk", *heads["k"], precision=precision),
        "eps": eps,
    }


def expect_qk(
    q: np.ndarray,
    k: np.ndarray,
    q_weight: np.ndarray,
    k_weight: np.ndarray,
    dq: np.ndarray,
    dk: np.ndarray,
    *,
    eps: float,
) -> tuple[Expected, ...]:
    (by_q, by_q_weight), (by_k, by_k_weight) = (
        expect(*part, eps=eps) for part in ((q, q_weight, dq), (k, k_weight, dk))
    )
    return by_q, by_k, by_q_weight, by_k_weight


def _orthogonal(trial: Trial) -> Claim | None:
    """Check that the dot product of a row x and its gradient dx is eps r^3 sum(dn x).

    dn is dy times the weight, and r is 1 / sqrt(mean(x^2) + eps). The dot product is nearly 0 for a small eps.
    """
    x, dn = as_float64(trial.arguments["x"]), as_float64(trial.arguments["dy"]) * as_float64(trial.arguments["weight"])
    eps, dx = trial.arguments["eps"], as_float64(trial.outputs[0])
    if not np.isfinite(dx).all():  # beyond float16's largest number
        return None
    r = 1 / np.sqrt(np.mean(x**2, axis=-1) + eps)
    product = eps * r**3 * np.sum(dn * x, axis=-1)
    tolerance = np.sum(np.abs(x) * trial.bounds[0], axis=-1) + 1e-12 * np.sum(np.abs(r[:, None] * dn * x), axis=-1)
    return Claim(np.sum(dx * x, axis=-1), product, tolerance)


def _sign(trial: Trial) -> Claim:
    return Claim(trial.again(dy=-trial.arguments["dy"])[0], -trial.outputs[0], 0.0)


BOUND = (
    "hard and alarm: with A = |r g dy| and B = |x| r^3 mean|g dy x|, (n/2 + 11) u A + (5 n/2 + 31) u B for dx; "
    "(n/2 + rows + 10) u sum|dy x r| for the weight"
)
VALUES = {"x": values(-8, 8), "weight": values(-4, 4), "dy": values(-8, 8), "eps": st.sampled_from([1e-5, 1e-6, 0.5])}

CONTRACT = Contract(
    definition=rmsnorm_backward,
    shapes={"rows": st.sampled_from([1, 2, 3, 5, 9]), "dim": sizes(8, 16, 32, 64, 128, 256, most=513)},
    values=VALUES,
    arguments=arguments,
    expect=expect,
    domain="x and dy [rows dim] and weight [dim] of one dtype, eps above 0; gives dx [rows dim] and dweight [dim]",
    bound=BOUND,
    laws=[
        independent("a row (dx)", "x", "dy"),
        Law("negating dy negates both gradients, bit for bit", _sign),
        Law("dx is orthogonal to x, up to a term with eps", _orthogonal),
    ],
    large=Large({"rows": beyond(128, 1024, 8192), "dim": beyond(1024, 8192)}, beside={"rows": [2], "dim": [5]}),
)
QK_NORM = Contract(
    definition=qk_norm_backward,
    shapes={
        "seq": st.sampled_from([1, 2, 3]),
        "group": st.sampled_from([1, 2, 3]),
        "kv_heads": st.sampled_from([1, 2, 3]),
        "head_dim": sizes(8, 32, most=65),
    },
    values={
        "q": values(-8, 8),
        "k": values(-8, 8),
        "weights": values(-4, 4),
        "slopes": values(-8, 8),
        "eps": st.sampled_from([1e-6, 1e-5, 0.5]),
    },
    arguments=qk_arguments,
    expect=expect_qk,
    domain="q and dq [seq heads head_dim], k and dk [seq kv_heads head_dim], two weights [head_dim], eps above 0",
    bound="the bound of rmsnorm_backward, with the heads of all tokens as rows",
    large=Large(
        {
            "seq": beyond(64, 1024, 8192),
            "group": beyond(8, 1024, 8192),
            "kv_heads": beyond(8, 1024, 8192),
            "head_dim": (128, 513),
        },
        beside={"seq": [2], "group": [2], "kv_heads": [2], "head_dim": [9]},
        ends={"head_dim": reach.WIDTH},
    ),
)
