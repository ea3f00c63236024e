"""`reference` agrees with the node tests of ONNX, which compute independently of us in float32 and narrower dtypes.

An adapter per operator calls `reference` with the inputs of a case. For each output, it returns the reference's value
and a bound on ONNX's distance from it. The bound has one u for each rounding of ONNX, where u is the roundoff of the
case's dtype. Dot products of float16 and bfloat16 are accumulated in float32, as NumPy does. If nothing is rounded, the
bound is 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from llamaspec.reference.add import add
from llamaspec.reference.attention import attention, causal_mask
from llamaspec.reference.embedding import embedding
from llamaspec.reference.linear import linear
from llamaspec.reference.moe import route
from llamaspec.reference.rmsnorm import rmsnorm
from llamaspec.reference.rope import rope_halves, rope_interleaved
from llamaspec.reference.sampling import temper
from llamaspec.reference.softmax import softmax, softmax_online
from llamaspec.reference.swiglu import swiglu
from tests.reference.onnx_cases import Case, node_cases
from tests.support.strategies import assert_within, attention_bound, roundoff


class OnnxExpected(NamedTuple):
    """An expected output: the reference's value, and a bound on ONNX's distance from it."""

    value: np.ndarray
    bound: np.ndarray | float


Outputs = list[OnnxExpected | None]  # None: an output that the reference does not have


def needed(case: Case, index: int) -> np.ndarray:
    array = case.input(index)
    assert array is not None
    return array


def rms_normalization(case: Case) -> Outputs:
    """Flatten the axes from `axis` on: ONNX normalizes over all of these axes, the reference over the last axis."""
    x, weight = needed(case, 0), needed(case, 1)
    axis = case.attributes.get("axis", -1) % x.ndim
    flat = x.reshape(*x.shape[:axis], -1)
    y = rmsnorm(flat, weight.reshape(-1), eps=case.attributes.get("epsilon", 1e-5)).reshape(x.shape)
    # All terms of the sum of squares are positive, so its n roundings are halved by the root. Further roundings: x^2,
    # the mean, eps (and its own), the root, its reciprocal, and two products.
    return [OnnxExpected(y, np.abs(y) * (flat.shape[-1] / 2 + 7) * roundoff(x.dtype))]


def rotary_embedding(case: Case) -> Outputs:
    """Rotate with the reference's RoPE, and multiply by hypot(cos, sin).

    ONNX's cases have random cos and sin, which belong to no angle: cos^2 + sin^2 is not 1.
    """
    x, cos, sin, positions = needed(case, 0), needed(case, 1), needed(case, 2), case.input(3)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]  # [batch, seq, pairs]
    cos, sin = cos.astype(np.float64), sin.astype(np.float64)
    heads_first = x.ndim == 4
    by_token = x.swapaxes(1, 2) if heads_first else x.reshape(*x.shape[:2], case.attributes["num_heads"], -1)
    turned = case.attributes.get("rotary_embedding_dim", 0) or by_token.shape[-1]
    interleaved = case.attributes.get("interleaved", 0)
    rope = rope_interleaved if interleaved else rope_halves

    y, size = by_token.astype(np.float64), np.abs(by_token).astype(np.float64)
    for token in np.ndindex(*by_token.shape[:2]):
        angles, stretch = np.arctan2(sin[token], cos[token]), np.hypot(sin[token], cos[token])
        stretch = np.repeat(stretch, 2) if interleaved else np.tile(stretch, 2)
        rotated = rope(by_token[token][None, :, :turned], np.array([1]), angles)  # at position 1, angle = frequency
        y[token][:, :turned] = rotated[0] * stretch
        size[token][:, :turned] = stretch * np.max(size[token][:, :turned], axis=-1, keepdims=True)
    # Two products and a difference; the products are at most `size`, the difference at most twice `size`.
    bound = 4 * size * roundoff(x.dtype)
    y, bound = (a.swapaxes(1, 2) if heads_first else a.reshape(x.shape) for a in (y, bound))
    return [OnnxExpected(y, bound)]


def onnx_attention(case: Case) -> Outputs:
    q, k, v = (needed(case, i) for i in range(3))
    mask, past_k, past_v, lengths = (case.input(i) for i in range(3, 7))
    get = case.attributes.get
    flat = q.ndim == 3
    if flat:  # [batch, seq, heads * head_dim]
        heads, kv_heads = case.attributes["q_num_heads"], case.attributes["kv_num_heads"]
        q, k, v = (a.reshape(*a.shape[:2], n, -1) for a, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
    else:  # [batch, heads, seq, head_dim]
        q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
    past = 0
    if past_k is not None and past_v is not None:
        past = past_k.shape[2]
        k, v = (np.concatenate([p.swapaxes(1, 2), a], axis=1) for p, a in ((past_k, k), (past_v, v)))
    batch, queries, _, head_dim = q.shape
    keys = k.shape[1]

    # [batch, heads or 1, queries, keys]
    total = np.zeros((batch, 1, queries, keys)) if mask is None else additive(mask, batch, queries, keys)
    offsets = np.full(batch, past) if lengths is None else lengths - queries  # bottom right
    if get("is_causal") or case.name in CAUSAL_GRAPHS:
        left_window = get("left_window_size", -1)
        window = None if left_window < 0 else left_window + 1  # ONNX's window does not count the token itself
        seen = [causal_mask(queries, keys, offset=int(offset), window=window) for offset in offsets]
        total = total + np.stack(seen)[:, None]
    if lengths is not None:
        total = total + np.where(np.arange(keys) < lengths[:, None], 0, -np.inf)[:, None, None, :]

    scale = get("scale", 1 / np.sqrt(head_dim))
    scaled = q.astype(np.float64) * scale * np.sqrt(head_dim)  # the reference divides by the root of head_dim
    y = attend(scaled, k, v, total)
    sums = np.promote_types(q.dtype, np.float32)
    bound = attention_bound(q, k, v, total, scale=scale, dtype=q.dtype, sums=sums)
    y = y.reshape(batch, queries, -1) if flat else y.swapaxes(1, 2)
    present = [
        OnnxExpected(a.swapaxes(1, 2).astype(np.float64), 0.0) for a in (k, v)
    ]  # the reference is not involved: this checks our adapter
    outputs: Outputs = [OnnxExpected(y, bound), *present, None]
    if get("qk_matmul_output_mode") == 3:  # the probabilities: the attention output if values are unit vectors
        units = np.broadcast_to(np.eye(keys)[:, None], (*k.shape[:3], keys))
        bound = attention_bound(q, k, units, total, scale=scale, dtype=q.dtype, sums=sums)
        outputs[3] = OnnxExpected(attend(scaled, k, units, total).swapaxes(1, 2), bound)
    return outputs


# ONNX runs these masks as graphs. This mask lets a query see the keys up to its own position.
CAUSAL_GRAPHS = ["test_flexattention_causal_mask"]


def additive(mask: np.ndarray, batch: int, queries: int, keys: int) -> np.ndarray:
    """Convert a boolean mask to 0 and -inf, and hide the keys after the mask's end.

    The first axis of a 3-D mask is the heads.
    """
    if mask.dtype == bool:
        mask = np.where(mask, 0, -np.inf)
    mask = mask.astype(np.float64)
    short = keys - mask.shape[-1]
    mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, short)], constant_values=-np.inf)
    heads = mask.shape[-3] if mask.ndim >= 3 else 1
    return np.broadcast_to(mask, (batch, heads, queries, keys))


def attend(q, k, v, mask) -> np.ndarray:
    """Call `attention` with one mask for all heads or one per head; values may be wider or narrower than keys."""
    head_dim, width = k.shape[-1], v.shape[-1]
    v = np.pad(v.astype(np.float64), [(0, 0)] * 3 + [(0, -width % head_dim)])
    columns = np.split(v, v.shape[-1] // head_dim, axis=-1)  # each output feature depends only on its own value column

    def per_head(v: np.ndarray) -> np.ndarray:
        if mask.shape[1] == 1:
            return attention(q, k, v, mask[:, 0])
        return np.stack([attention(q, k, v, mask[:, h])[..., h, :] for h in range(q.shape[-2])], axis=-2)

    return np.concatenate([per_head(v) for v in columns], axis=-1)[..., :width]


def onnx_softmax(case: Case) -> Outputs:
    x = needed(case, 0)
    axis = case.attributes.get("axis", -1)
    rows = np.moveaxis(x, axis, -1)
    # The rounding of x - max, an exponent, becomes a relative error; then exp (2 u), a sum of n terms and a quotient.
    # The sum is an average of such terms.
    spread = np.max(rows, axis=-1, keepdims=True) - np.min(rows, axis=-1, keepdims=True)
    p = softmax(rows)
    online = softmax_online(rows, block=2)
    assert_within(online, p, p * (2 * spread + 4 * rows.shape[-1] + 8) * roundoff(np.float64))
    bound = p * (2 * spread + rows.shape[-1] + 6) * roundoff(x.dtype)
    return [OnnxExpected(np.moveaxis(p, -1, axis), np.moveaxis(bound, -1, axis))]


def onnx_swiglu(case: Case) -> Outputs:
    """Compute a sigmoid(alpha a) b as silu(alpha a) b / alpha. For Swish, b is 1."""
    a, alpha = needed(case, 0), case.attributes.get("alpha", 1.0)
    b = needed(case, 1) if case.op == "SwiGLU" else np.ones_like(a)
    y = swiglu(a.astype(np.float64) * alpha, b) / alpha
    # The rounding of alpha a, an exponent, becomes a relative error; then exp (2 u), the sum, the quotient, its cast,
    # and two products with their casts.
    return [OnnxExpected(y, np.abs(y) * (np.abs(alpha * a.astype(np.float64)) + 8) * roundoff(a.dtype))]


def matmul(case: Case) -> Outputs:
    a, b = needed(case, 0), needed(case, 1)

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if b.ndim == 1:
            return linear(a, b[None])[..., 0]
        if b.ndim == 2:
            return linear(a, b.T)
        if a.ndim == 1:
            return product(a[None], b)[..., 0, :]
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = (np.broadcast_to(m, batch + m.shape[-2:]) for m in (a, b))
        return np.stack([product(*matrices) for matrices in zip(a, b, strict=True)])

    return [OnnxExpected(product(a, b), a.shape[-1] * roundoff(a.dtype) * product(np.abs(a), np.abs(b)))]


def gemm(case: Case) -> Outputs:
    """Compute alpha A B + beta C; either matrix may be transposed."""
    a, b, c = needed(case, 0), needed(case, 1), case.input(2)
    get = case.attributes.get
    x = (a.T if get("transA") else a).astype(np.float64) * get("alpha", 1.0)
    weight = b if get("transB") else b.T
    bias = None if c is None else c.astype(np.float64) * get("beta", 1.0)
    matrix = bias is not None and bias.ndim == 2 and len(bias) > 1
    if bias is not None and not matrix:
        bias = np.broadcast_to(bias.reshape(-1), len(weight))

    def affine(x, weight, bias):
        return add(linear(x, weight), bias) if matrix else linear(x, weight, bias)

    magnitudes = affine(np.abs(x), np.abs(weight), None if bias is None else np.abs(bias))
    # A dot product, the roundings of alpha and beta, their products, and the sum.
    return [OnnxExpected(affine(x, weight, bias), (x.shape[-1] + 5) * roundoff(a.dtype) * magnitudes)]


def gather(case: Case) -> Outputs:
    """Look up rows of a table: move the gathered axis to the front, and flatten the other axes."""
    data, indices = needed(case, 0), needed(case, 1)
    axis = case.attributes.get("axis", 0)
    first = np.moveaxis(data, axis, 0)
    rows = embedding(indices, first.reshape(len(first), -1)).reshape(*indices.shape, *first.shape[1:])
    places = range(axis, axis + indices.ndim)
    return [OnnxExpected(np.moveaxis(rows, range(indices.ndim), places), 0.0)]


def argmax(case: Case) -> Outputs:
    """Choose the largest number, and on ties the lowest index. To get the highest index, reverse the axis."""
    data = needed(case, 0)
    get = case.attributes.get
    axis, last, keep = get("axis", 0), get("select_last_index", 0), get("keepdims", 1)

    def greedy(logits: np.ndarray) -> int:
        [token] = np.flatnonzero(temper(logits[::-1] if last else logits, temperature=0.0))
        return len(logits) - 1 - int(token) if last else int(token)

    result = np.apply_along_axis(greedy, axis, data)
    return [OnnxExpected(np.expand_dims(result, axis) if keep else result, 0.0)]


def top_k(case: Case) -> Outputs:
    """Choose the k largest numbers by the reference's `route`, with an identity matrix as the router's weights.

    To choose the k smallest numbers, negate x.
    """
    x, k = needed(case, 0), int(needed(case, 1)[0])
    axis = case.attributes.get("axis", -1)
    rows = np.moveaxis(x, axis, -1).astype(np.float64)
    logits = rows if case.attributes.get("largest", 1) else -rows
    experts = rows.shape[-1]
    chosen, _ = route(logits.reshape(-1, experts), np.eye(experts), experts_per_token=k)
    chosen = chosen.reshape(*rows.shape[:-1], k)
    values = np.take_along_axis(rows, chosen, axis=-1)
    return [OnnxExpected(np.moveaxis(a, -1, axis), 0.0) for a in (values, chosen)]


def onnx_add(case: Case) -> Outputs:
    x, y = needed(case, 0), needed(case, 1)
    total = add(x.astype(np.float64), np.broadcast_to(y, x.shape).astype(np.float64))
    rounds = np.issubdtype(x.dtype, np.floating)
    return [OnnxExpected(total, np.abs(total) * roundoff(x.dtype) if rounds else 0.0)]


class Operator(NamedTuple):
    adapter: Callable[[Case], Outputs]
    cases: int  # number of cases that run
    arrays: int  # number of outputs that are compared


OPERATORS = {
    "Add": Operator(onnx_add, 8, 8),
    "ArgMax": Operator(argmax, 16, 16),
    "Attention": Operator(onnx_attention, 81, 126),
    "FlexAttention": Operator(onnx_attention, 7, 7),
    "Gather": Operator(gather, 3, 3),
    "Gemm": Operator(gemm, 11, 11),
    "MatMul": Operator(matmul, 7, 7),
    "RMSNormalization": Operator(rms_normalization, 19, 19),
    "RotaryEmbedding": Operator(rotary_embedding, 8, 8),
    "Softmax": Operator(onnx_softmax, 7, 7),
    "SwiGLU": Operator(onnx_swiglu, 3, 3),
    "Swish": Operator(onnx_swiglu, 1, 1),
    "TopK": Operator(top_k, 7, 14),
}

SOFTCAP = "no Llama caps its scores"
GRAPH = "changes scores or probabilities by a graph that ONNX is to run"
LEFT_OUT = {
    "test_attention_3d_diff_heads_sizes_softcap": SOFTCAP,
    "test_attention_3d_gqa_softcap": SOFTCAP,
    "test_attention_3d_softcap": SOFTCAP,
    "test_attention_3d_with_past_and_present_qk_matmul_softcap": SOFTCAP,
    "test_attention_4d_diff_heads_sizes_softcap": SOFTCAP,
    "test_attention_4d_gqa_softcap": SOFTCAP,
    "test_attention_4d_softcap": SOFTCAP,
    "test_attention_4d_softcap_neginf_mask": SOFTCAP,
    "test_attention_4d_softcap_neginf_mask_poison": SOFTCAP,
    "test_attention_4d_with_qk_matmul_softcap": SOFTCAP,
    "test_attention_local_window_gqa_rank4_mask": SOFTCAP,
    "test_attention_bidirectional_window": "no Llama looks ahead",
    "test_flexattention_prob_mod": GRAPH,
    "test_flexattention_relative_positional": GRAPH,
    "test_flexattention_score_mod": GRAPH,
    "test_flexattention_soft_cap": GRAPH,
    "test_gather_negative_indices": "the reference refuses negative ids, see test_embedding",
}

# Cases with qk_matmul_output in mode 0 or 2: scores before the softmax, which the reference does not return.
SCORES_LEFT_OUT = 10


def cases_to_run(op: str) -> list[Case]:
    return [case for case in node_cases(op) if case.name not in LEFT_OUT]


@pytest.mark.parametrize("op", OPERATORS)
def test_reference_agrees_with_onnx(op):
    cases = cases_to_run(op)
    arrays = 0
    for case in cases:
        for output, expected in zip(case.outputs, OPERATORS[op].adapter(case), strict=False):
            if output is not None and expected is not None:
                try:
                    assert_within(output, expected.value, expected.bound)
                except AssertionError as error:
                    raise AssertionError(f"{case.name}: {error}") from error
                arrays += 1
    assert (len(cases), arrays) == (OPERATORS[op].cases, OPERATORS[op].arrays)


def test_no_case_is_dropped_silently():
    cases = [case for op in OPERATORS for case in node_cases(op)]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert set(LEFT_OUT) <= set(names)
    assert sum(operator.cases for operator in OPERATORS.values()) + len(LEFT_OUT) == len(names)

    scores = [case for case in cases if len(case.outputs) == 4 and case.attributes.get("qk_matmul_output_mode", 0) != 3]
    assert len([case for case in scores if case.name not in LEFT_OUT]) == SCORES_LEFT_OUT
    compared = sum(operator.arrays for operator in OPERATORS.values())
    outputs = sum(output is not None for case in cases if case.name not in LEFT_OUT for output in case.outputs)
    assert compared + SCORES_LEFT_OUT == outputs
