"""Backward of attention: five products and a softmax. We carry the errors from step to step.

A kernel may compute the row sums D = sum_j p_j dp_j from the probabilities or, like FlashAttention, as <o, do>. Between
two products it may round probabilities, their gradients and o to the dtype of the inputs, for its matrix units.
"""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.backward.attention import attention_backward
from llamaspec.verify.bounds.precision import TINY, Precision, U, precision
from llamaspec.verify.bounds.running_error import gamma, softmaxed
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
    v: Values,
    do: Values,
    mask: str,
) -> Arguments:
    asking, cached = (batch, queries, kv_heads * group, head_dim), (batch, keys, kv_heads, head_dim)
    return {
        "q": q.array("q", *asking, precision=precision),
        "k": k.array("k", *cached, precision=precision),
        "v": v.array("v", *cached, precision=precision),
        "mask": mask_named(mask, batch, queries, keys),
        "do": do.array("do", *asking, precision=precision),
    }


def expect(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, do: np.ndarray
) -> tuple[Expected, Expected, Expected]:
    values = attention_backward(q, k, v, mask, do)
    dtype = precision(v.dtype.name)
    rows = [
        _bounds(*(as_float64(a) for a in row), unit=dtype.unit, smallest=dtype.smallest)
        for row in zip(q, k, v, mask, do, strict=True)
    ]
    dq, dk, dv = (_expected(value, [row[i] for row in rows]) for i, value in enumerate(values))
    return dq, dk, dv


def _expected(value: np.ndarray, rows: list[tuple[np.ndarray, np.ndarray]]) -> Expected:
    error, size = (np.stack([row[part] for row in rows]) for part in (0, 1))
    return Expected(value, error, error, size)


def _bounds(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, do: np.ndarray, *, unit: float, smallest: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Compute the error and the sum of magnitudes of dq, dk and dv for one sequence."""
    (queries, heads, head_dim), (keys, kv_heads, _) = q.shape, k.shape
    group, root = heads // kv_heads, np.sqrt(head_dim)
    q, do = (a.swapaxes(0, 1) for a in (q, do))  # [heads queries head_dim]
    k, v = (np.repeat(a.swapaxes(0, 1), group, axis=0) for a in (k, v))
    size_q, size_k, size_v, size_do = (np.abs(a) for a in (q, k, v, do))
    scores = q @ k.swapaxes(1, 2) / root + mask
    moved = gamma(head_dim + 3) * (size_q @ size_k.swapaxes(1, 2)) / root
    p, p_error = softmaxed(scores, np.where(np.isneginf(scores), 0, moved), blocks=BLOCKS)

    dp_size = size_do @ size_v.swapaxes(1, 2)  # [heads queries keys]
    row_size = np.sum(p * dp_size, axis=-1, keepdims=True)  # sum of magnitudes of D
    dp_error = gamma(head_dim) * dp_size
    row_error = np.sum(p_error * dp_size, axis=-1, keepdims=True)
    row_error = row_error + (gamma(keys + head_dim + 3) + 2 * unit) * (row_size + row_error) + smallest * head_dim
    total = dp_size + row_size
    ds_error = (p + p_error) * (dp_error + row_error + 4 * U * total) + p_error * total
    ds_error = (ds_error + unit * (p * total + ds_error)) / root + smallest + TINY
    ds_error = ds_error * np.isfinite(scores)  # a hidden key has a gradient of exactly 0
    ds_size = p * total / root
    p_error = p_error + (unit * (p + p_error) + smallest) * np.isfinite(scores)

    def shared(a: np.ndarray) -> np.ndarray:
        """Add up the heads that share a key head: [heads keys head_dim] to [keys kv_heads head_dim]."""
        return a.reshape(kv_heads, group, keys, head_dim).sum(axis=1).swapaxes(0, 1)

    transposed, terms = ds_size.swapaxes(1, 2), queries * group
    dq = ds_error @ size_k + gamma(keys + 2) * ((ds_size + ds_error) @ size_k), ds_size @ size_k
    dk_sum = transposed + ds_error.swapaxes(1, 2)
    dk = shared(ds_error.swapaxes(1, 2) @ size_q + gamma(terms + 2) * (dk_sum @ size_q)), shared(transposed @ size_q)
    dv_sum = (p + p_error).swapaxes(1, 2) @ size_do
    dv_error = p_error.swapaxes(1, 2) @ size_do + gamma(terms + 1) * dv_sum + terms * TINY * (1 + np.max(size_do))
    dv = shared(dv_error), shared(p.swapaxes(1, 2) @ size_do)
    # Flushing subnormal numbers to zero.
    tiny = TINY * terms * keys * (1 + np.max(size_q)) * (1 + np.max(size_k)) * (1 + np.max(dp_size))
    return [(dq[0].swapaxes(0, 1) + tiny, dq[1].swapaxes(0, 1)), (dk[0] + tiny, dk[1]), dv]


def _unseen(trial: Trial) -> Claim | None:
    """Check that keys that no query sees have a gradient of 0."""
    unseen = np.all(np.isneginf(trial.arguments["mask"]), axis=1)[..., None, None]
    if not unseen.any():
        return None
    dk = np.where(unseen, as_float64(trial.outputs[1]), 0)
    return Claim(dk, np.zeros(dk.shape), 0.0)


def _sign(trial: Trial) -> Claim:
    return Claim(trial.again(do=-trial.arguments["do"])[0], -trial.outputs[0], 0.0)


CONTRACT = Contract(
    definition=attention_backward,
    shapes={
        "batch": st.sampled_from([1, 2]),
        "queries": st.sampled_from([1, 2, 3, 8, 9]),
        "keys": sizes(8, 16, 32, most=65),
        "kv_heads": st.sampled_from([1, 2, 3]),
        "group": st.sampled_from([1, 2, 3, 7]),
        "head_dim": st.sampled_from([1, 2, 3, 8, 16, 64]),
    },
    values={
        "q": values(-4, 2),
        "k": values(-4, 2),
        "v": values(-6, 6),
        "do": values(-6, 6),
        "mask": st.sampled_from(MASKS),
    },
    arguments=arguments,
    expect=expect,
    domain="q and do [batch queries heads head_dim], k and v [batch keys kv_heads head_dim] of one dtype, "
    "mask [batch queries keys] float32 of 0 and -inf; dq, dk and dv",
    bound="hard and alarm: errors of the scores, of softmax, of dp = do v^T and of D = sum p dp, carried through "
    "ds = p (dp - D) and the three products; p, ds and o may be rounded to the inputs' dtype in between",
    laws=[
        independent("a sequence (dq)", "q", "k", "v", "mask", "do"),
        Law("negating do negates dq, dk and dv, bit for bit", _sign),
        Law("a key that no query sees has a gradient of 0", _unseen),
    ],
    large=Large(
        {
            "batch": beyond(8, 1024),
            "queries": beyond(64, 128, 8192),
            "keys": beyond(128, 512, 8192),
            "kv_heads": beyond(8, 1024),
            "group": beyond(8, 1024),
            "head_dim": (128, 513),
        },
        beside={
            "batch": [1],
            "queries": [3],
            "keys": [5],
            "kv_heads": [1],
            "group": [2],
            "head_dim": [8],
            "mask": ["causal"],
        },
        closer={"kv_heads": {"group": [1]}, "group": {"kv_heads": [2]}},
        ends={"batch": reach.SEQUENCES, **HEADS_ENDS},
    ),
)
