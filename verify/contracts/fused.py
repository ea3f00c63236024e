"""Fused ops: a product with a matrix, in most ops after a norm, and then a bias, a residual, RoPE or SwiGLU.

The result is rounded once.

We carry errors from step to step (running error analysis), so the bound covers all steps. Between the norm and the
product, a kernel may round numbers to the dtype of x for its matrix units; nowhere else.
"""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.fused import linear_add, norm_gate_up, norm_linear, norm_qkv
from llamaspec.reference.linear import linear
from llamaspec.reference.rope import frequencies as exact_frequencies
from llamaspec.verify.bounds.precision import TINY, Precision, precision
from llamaspec.verify.bounds.running_error import Approx, exactly, gated, normalized, projected, rotated, rounded
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
from llamaspec.verify.contracts.rope import SCALING, THETA
from llamaspec.verify.draws import reach
from llamaspec.verify.draws.draw import Values, sizes, values


def _arrays(precision: Precision, batch: int, rows: int, cols: int, **drawn: Values | None) -> dict[str, Any]:
    """Make the arrays that the fused ops share. A bias that is not drawn is None."""
    shapes = {"x": (batch, cols), "norm": (cols,), "weight": (rows, cols), "bias": (rows,), "residual": (batch, rows)}
    return {name: value and value.array(name, *shapes[name], precision=precision) for name, value in drawn.items()}


def _multiplied(x: np.ndarray, norm: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, eps: float) -> Approx:
    dtype = precision(x.dtype.name)
    n = rounded(normalized(exactly(x), as_float64(norm), eps=eps), dtype.unit, dtype.smallest)
    return projected(n, as_float64(weight), None if bias is None else as_float64(bias))


def _sizes(x: np.ndarray, weight: np.ndarray, *terms: np.ndarray | None) -> np.ndarray:
    """Sum the magnitudes of all terms of W x, and add the magnitudes of `terms`, such as a bias."""
    total = linear(np.abs(as_float64(x)), np.abs(as_float64(weight)))
    return total + sum(np.abs(as_float64(term)) for term in terms if term is not None)


def norm_linear_arguments(
    *,
    precision: Precision,
    batch: int,
    rows: int,
    cols: int,
    x: Values,
    norm: Values,
    weight: Values,
    bias: Values | None,
    eps: float,
) -> Arguments:
    return {**_arrays(precision, batch, rows, cols, x=x, norm=norm, weight=weight, bias=bias), "eps": eps}


def expect_norm_linear(
    x: np.ndarray, norm: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, *, eps: float
) -> Expected:
    y = _multiplied(x, norm, weight, bias, eps)
    n = normalized(exactly(x), as_float64(norm), eps=eps)
    return Expected(y.value, y.error, y.error, _sizes(n.value, weight, bias))


def linear_add_arguments(
    *,
    precision: Precision,
    batch: int,
    rows: int,
    cols: int,
    x: Values,
    weight: Values,
    bias: Values | None,
    residual: Values,
) -> Arguments:
    return _arrays(precision, batch, rows, cols, x=x, weight=weight, bias=bias, residual=residual)


def expect_linear_add(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, residual: np.ndarray) -> Expected:
    """Compute W x + bias + residual and its bounds for sums in any order.

    We treat the residual as one more column of W, multiplied by 1, because a product may start from the residual.
    """
    exact = as_float64(weight)
    parts = []
    for row, residual_row in zip(as_float64(x), as_float64(residual), strict=True):
        wider = np.concatenate([exact, residual_row[:, None]], axis=1)
        with_one = exactly(np.append(row, 1.0))
        parts.append(projected(with_one, wider, None if bias is None else as_float64(bias)))
    error = np.stack([part.error for part in parts])
    return Expected(np.stack([part.value for part in parts]), error, error, _sizes(x, weight, bias, residual))


def norm_gate_up_arguments(*, ffn: int, **drawn: Any) -> Arguments:
    return norm_linear_arguments(rows=2 * ffn, **drawn)


def expect_norm_gate_up(
    x: np.ndarray, norm: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, *, eps: float
) -> Expected:
    gate_up = _multiplied(x, norm, weight, bias, eps)
    gate, up = (gate_up.map(lambda part, half=half: np.split(part, 2, axis=-1)[half]) for half in (0, 1))
    y = gated(gate, up)
    return Expected(y.value, y.error, y.error, np.abs(y.value))


def norm_qkv_arguments(
    *,
    precision: Precision,
    positions: tuple[int, ...],
    spare: int,
    kv_heads: int,
    group: int,
    pairs: int,
    cols: int,
    x: Values,
    norm: Values,
    weight: Values,
    bias: Values | None,
    held: Values,
    theta: float,
    scaling: Any,
    eps: float,
) -> Arguments:
    batch, rows = len(positions), (group + 2) * kv_heads * 2 * pairs
    cached = (batch, max(positions) + 1 + spare, kv_heads, 2 * pairs)
    drawn = _arrays(precision, batch, rows, cols, x=x, norm=norm, weight=weight, bias=bias)
    return {
        **drawn,
        "k_cache": held.array("k_cache", *cached, precision=precision),
        "v_cache": held.array("v_cache", *cached, precision=precision),
        "positions": np.array(positions, np.int32),
        "frequencies": exact_frequencies(2 * pairs, theta=theta, scaling=SCALING[scaling]).astype(np.float32),
        "eps": eps,
    }


def expect_norm_qkv(
    x: np.ndarray,
    norm: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    positions: np.ndarray,
    frequencies: np.ndarray,
    *,
    eps: float,
) -> tuple[Expected, Expected, Expected]:
    batch, _, kv_heads, head_dim = k_cache.shape
    dtype = precision(x.dtype.name)
    y = _multiplied(x, norm, weight, bias, eps).map(lambda part: part.reshape(batch, -1, head_dim))
    heads = y.value.shape[1] - 2 * kv_heads
    turned = rotated(y.map(lambda part: part[:, None]), positions[:, None], as_float64(frequencies))
    turned = turned.map(lambda part: part[:, 0])
    n = normalized(exactly(x), as_float64(norm), eps=eps)
    size = _sizes(n.value, weight, bias).reshape(y.value.shape)

    def appended(cache: np.ndarray, new: Approx, terms: np.ndarray) -> Expected:
        """Round the new row to the dtype of the cache. The other rows must not change."""
        value, magnitudes = as_float64(cache), np.abs(as_float64(cache))
        hard = np.zeros(cache.shape)
        row = np.arange(batch), positions
        new = rounded(new, dtype.unit, dtype.smallest)
        value[row], hard[row], magnitudes[row] = new.value, new.error, terms
        return Expected(value, hard, hard, magnitudes, rounded=False)

    q, error = turned.map(lambda part: part[:, :heads])
    return (
        Expected(q, error, error, size[:, :heads]),
        appended(k_cache, turned.map(lambda part: part[:, heads:-kv_heads]), size[:, heads:-kv_heads]),
        appended(v_cache, y.map(lambda part: part[:, -kv_heads:]), size[:, -kv_heads:]),
    )


def _negated(trial: Trial) -> Claim | None:
    if trial.arguments["bias"] is not None:
        return None
    return Claim(trial.again(x=-trial.arguments["x"])[0], -as_float64(trial.outputs[0]), 2 * trial.bounds[0])


def _residual_alone(trial: Trial) -> Claim | None:
    """Set x to 0: the result must be the residual. Hardware may flush subnormal numbers of the residual to zero."""
    if trial.arguments["bias"] is not None:
        return None
    zeros, residual = np.zeros_like(trial.arguments["x"]), trial.arguments["residual"]
    flushed = np.where(np.abs(as_float64(residual)) < TINY, TINY, 0.0)
    return Claim(trial.again(x=zeros)[0], residual, flushed)


def _gate_of_zeros(trial: Trial) -> Claim | None:
    if trial.arguments["bias"] is not None:
        return None
    weight = trial.arguments["weight"].copy()
    weight[: len(weight) // 2] = 0
    y = trial.again(weight=weight)[0]
    return Claim(y, np.zeros_like(y), 0.0)


def _values_do_not_turn(trial: Trial) -> Claim:
    """Repeat the call with all positions 0: it must store the same values (v) as the first call."""
    positions = trial.arguments["positions"]
    rows = np.arange(len(positions))
    again = trial.again(positions=np.zeros_like(positions))[2]
    return Claim(again[rows, 0], trial.outputs[2][rows, positions], 0.0)


BATCH = st.sampled_from([1, 2, 3, 8])
ROWS = sizes(8, 16, most=33)
COLS = sizes(8, 32, 64, most=129)
DRAWN = {"x": values(-6, 6), "norm": values(-4, 4), "weight": values(-6, 4)}
BIAS = st.none() | values(-6, 4)
EPS = st.sampled_from([1e-5, 1e-6, 0.5])
STEPS = "hard and alarm: running error analysis of the norm, (n/2 + 9) u |n|, rounded to the dtype of x, the product "

NORM_LINEAR = Contract(
    definition=norm_linear,
    shapes={"batch": BATCH, "rows": ROWS, "cols": COLS},
    values={**DRAWN, "bias": BIAS, "eps": EPS},
    arguments=norm_linear_arguments,
    expect=expect_norm_linear,
    domain="x [batch cols], norm [cols], weight [rows cols] and bias [rows] or None, of one dtype, summed in float32",
    bound=STEPS + "and the bias, gamma_(n + 1) |W| |n|",
    laws=[independent("a vector", "x"), Law("-x gives -y, without a bias", _negated)],
    large=Large(
        {"cols": beyond(1024, 2048, 4096, 8192), "rows": beyond(1024, 4096, 8192), "batch": beyond(16, 64, 8192)},
        beside={"batch": [2], "rows": [9], "cols": [17]},
    ),
)
LINEAR_ADD = Contract(
    definition=linear_add,
    shapes={"batch": BATCH, "rows": ROWS, "cols": COLS},
    values={"x": values(-6, 6), "weight": values(-6, 4), "bias": BIAS, "residual": values(-6, 6)},
    arguments=linear_add_arguments,
    expect=expect_linear_add,
    domain="x [batch cols], weight [rows cols], bias [rows] or None and residual [batch rows], of one dtype, summed in "
    "float32 and rounded once",
    bound="hard and alarm: gamma_(n + 2) (|W| |x| + |b| + |r|), n products, bias and residual in any order",
    laws=[
        independent("a vector", "x", "residual"),
        Law("x = 0 gives the residual, bit for bit unless it is subnormal", _residual_alone),
    ],
    large=Large(
        {"cols": beyond(1024, 2048, 4096, 8192), "rows": beyond(1024, 4096, 8192), "batch": beyond(16, 64, 8192)},
        beside={"batch": [2], "rows": [9], "cols": [17]},
    ),
)
NORM_GATE_UP = Contract(
    definition=norm_gate_up,
    shapes={"batch": BATCH, "ffn": ROWS, "cols": COLS},
    values={**DRAWN, "bias": BIAS, "eps": EPS},
    arguments=norm_gate_up_arguments,
    expect=expect_norm_gate_up,
    domain="x [batch cols], norm [cols], weight [2 ffn, cols] with the rows of gate before the rows of up, and bias "
    "[2 ffn] or None, of one dtype, summed in float32",
    bound=STEPS + "and SwiGLU of both",
    laws=[independent("a vector", "x"), Law("gate rows of zeros give 0", _gate_of_zeros)],
    large=Large(
        {"cols": beyond(1024, 2048, 4096, 8192), "ffn": beyond(1024, 4096, 8192), "batch": beyond(16, 64, 8192)},
        beside={"batch": [2], "ffn": [9], "cols": [17]},
    ),
)
NORM_QKV = Contract(
    definition=norm_qkv,
    shapes={
        "positions": st.lists(st.sampled_from([1, 2, 0, 7, 8, 15, 33]), min_size=1, max_size=3).map(tuple),
        "spare": st.sampled_from([0, 1, 7]),
        "kv_heads": st.sampled_from([1, 2, 3]),
        "group": st.sampled_from([1, 2, 3, 7]),
        "pairs": st.sampled_from([1, 2, 4, 8, 32]),
        "cols": sizes(8, 32, most=65),
    },
    values={
        **DRAWN,
        "bias": BIAS,
        "held": values(-4, 4, without=["denormal"]),
        "theta": THETA,
        "scaling": st.sampled_from(list(SCALING)),
        "eps": EPS,
    },
    arguments=norm_qkv_arguments,
    expect=expect_norm_qkv,
    domain="x [batch cols], norm [cols], weight [(heads + 2 kv_heads) head_dim, cols] with the rows of q, k and v, "
    "bias or None, caches [batch capacity kv_heads head_dim], of one dtype; positions [batch] int32, frequencies "
    "[head_dim/2] float32",
    bound=STEPS + "and RoPE as in rope_halves; cache rows at other positions are exact",
    laws=[
        independent("a sequence", "x", "k_cache", "v_cache", "positions"),
        Law("values are the same at every position, bit for bit", _values_do_not_turn, sets=("positions",)),
    ],
    large=Large(
        {
            "cols": beyond(1024, 4096, 8192),
            "positions": [(1023,), (1024, 5), (3,) * 66, (8192,), (2,) * 1041, (133_153,)],
            "kv_heads": beyond(8, 64, 8192),
            "group": beyond(8, 32, 8192),
            "pairs": [64, 65, 257],
            "spare": [8321],
        },
        beside={"positions": [(3, 1)], "spare": [1], "kv_heads": [2], "group": [3], "pairs": [4], "cols": [17]},
        closer={"kv_heads": {"group": [1], "pairs": [1]}, "group": {"pairs": [1]}},
        ends={"pairs": reach.WIDTH, "positions, how many": reach.SEQUENCES},
    ),
)
