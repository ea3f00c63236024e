r"""Error bounds for a Llama computed in float32: a proof that is carried along with the numbers.

Every quantity is a pair of the exact value x, from `reference`, and a bound e on |x^ - x|, where x^
is the number that an implementation holds instead. Each function below takes such pairs through one
layer: it carries the incoming errors along and adds the layer's own roundings, for sums in any order
(running error analysis: Wilkinson, 1963; Higham, Accuracy and Stability of Numerical Algorithms, ch. 3).

    u = 2^-24                      a correct rounding to float32 is off by at most u |x|
    gamma_n = n u / (1 - n u)      n roundings in a row, or a sum of n products, in any order
    |fl(w . x) - w . x| <= gamma_n |w| . |x|

Elementary functions (exp, 1/sqrt, the sigmoid) are taken to be within 4 u, tanh within 7 u: a test goes through every
float32 for XLA's tanh. Results that leave an op in bfloat16 are rounded once more, by at most 2^-8 of themselves:
`rounded`. Nothing here is fitted: a result outside its bound is a bug, in the code or in this proof.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from llamaspec.reference.attention import attention, sink_attention
from llamaspec.reference.capped import capped
from llamaspec.reference.clamped_swiglu import LIMIT, SLOPE, clamped_swiglu
from llamaspec.reference.config import Config
from llamaspec.reference.gelu import gelu
from llamaspec.reference.linear import linear
from llamaspec.reference.llama import Experts, FeedForward, Layer, Params
from llamaspec.reference.moe import route
from llamaspec.reference.rmsnorm import rmsnorm
from llamaspec.reference.rope import rope_halves
from llamaspec.reference.softmax import softmax
from llamaspec.reference.squared_relu import squared_relu
from llamaspec.reference.swiglu import swiglu
from llamaspec.verify.bounds.precision import TINY, U

ELEMENTARY = 4 * U  # relative error of exp, 1/sqrt and the sigmoid
# Relative error of tanh, which XLA computes as a quotient of two polynomials. For every float32, that is 4.90 u off at
# most with fused multiply-adds, and 6.89 u without them (tests/verify/test_verify_ours.py).
TANH = 7 * U
FIXED = 2.0**-21  # the error of a number in fixed point, over the largest number of its group
DIGITS_SIZE = 3.02  # the sum of a number's digits, each without its sign and scaled, over the number
NO_BOUND = 1e30  # allows any value; infinity times a weight of 0 would be NaN


class Approx(NamedTuple):
    """An exact value and a bound on the distance of the computed one, element by element."""

    value: Float[np.ndarray, "..."]
    error: Float[np.ndarray, "..."]

    @property
    def size(self) -> np.ndarray:
        """A bound on the magnitude of the computed value."""
        return np.abs(self.value) + self.error

    def map(self, f) -> "Approx":
        """Move elements around: the same for values and errors."""
        return Approx(f(self.value), f(self.error))


def exactly(values: Any) -> Approx:
    """Take an input of the computation, any array, as exact."""
    exact = np.asarray(values).astype(np.float64)
    return Approx(exact, np.zeros_like(exact))


def gamma(n: int) -> float:
    """The relative error of n roundings.

    >>> round(gamma(1) / U, 6), round(gamma(1000) / U, 1)
    (1.0, 1000.1)
    """
    return n * U / (1 - n * U)


def rounded(x: Approx, unit: float, smallest: float = 0.0) -> Approx:
    """Round once more, to a dtype whose roundings are off by `unit` of a number, or by `smallest` of a tiny one.

    Both are 0 for float32, which x is already.
    """
    return Approx(x.value, x.error + unit * x.size + smallest)


def added(x: Approx, y: Approx) -> Approx:
    """x + y."""
    value = x.value + y.value
    error = x.error + y.error
    return Approx(value, error + U * (np.abs(value) + error))


def projected(x: Approx, weight: np.ndarray, bias: np.ndarray | None = None) -> Approx:
    """Compute W x + b for exact W and b. b is one more term of a sum in any order: XLA's CPU products begin with it."""
    magnitudes = np.abs(weight)
    terms = weight.shape[1] if bias is None else weight.shape[1] + 1
    sums = linear(x.size, magnitudes, None if bias is None else np.abs(bias))
    error = linear(x.error, magnitudes) + gamma(terms) * sums
    # Each product may be flushed to zero, and so may its factors.
    error = error + TINY * (np.sum(x.size, axis=-1, keepdims=True) + terms * (np.max(magnitudes, initial=0) + 2))
    return Approx(linear(x.value, weight, bias), error)


def normalized(x: Approx, weight: np.ndarray, *, eps: float) -> Approx:
    """RMSNorm. Two numbers enclose the computed mean square, and so everything after it."""
    n = x.value.shape[-1]
    mean = np.mean(x.value**2, axis=-1, keepdims=True)
    change = np.mean((2 * np.abs(x.value) + x.error) * x.error, axis=-1, keepdims=True) + TINY
    low = np.maximum(mean - change, 0) * (1 - gamma(n + 2)) + eps
    high = (mean + change) * (1 + gamma(n + 2)) + eps
    exact = 1 / np.sqrt(mean + eps)
    # The root halves the roundings of eps to a float32 and of its sum. One more is for a root and a quotient apart.
    slack = ELEMENTARY + 2 * U
    off = np.maximum(1 / np.sqrt(low) * (1 + slack) - exact, exact - 1 / np.sqrt(high) * (1 - slack))
    value = rmsnorm(x.value, weight, eps=eps)
    error = np.abs(weight) * (x.size * (exact + off) * (1 + gamma(2)) - np.abs(x.value) * exact)
    return Approx(value, error + flushed(np.abs(weight), x.size, exact))


def centered(x: Approx) -> Approx:
    """x less its mean, of n terms in any order and a division by n, or a product with 1/n."""
    mean = np.mean(x.value, axis=-1, keepdims=True)
    terms = gamma(x.value.shape[-1] + 1) * np.mean(x.size, axis=-1, keepdims=True)
    value, error = x.value - mean, x.error + np.mean(x.error, axis=-1, keepdims=True) + terms + 4 * TINY
    return Approx(value, error + U * (np.abs(value) + error))


def layer_normalized(x: Approx, weight: np.ndarray, bias: np.ndarray | None, *, eps: float) -> Approx:
    """LayerNorm: RMSNorm of what is centered, and a sum. The mean's error counts in every feature."""
    y = normalized(centered(x), weight, eps=eps)
    return y if bias is None else added(y, exactly(bias))


def normed(x: Approx, weight: np.ndarray, bias: np.ndarray | None, *, config: Config) -> Approx:
    """The norm that this model has."""
    if config.layer_norm:
        return layer_normalized(x, weight, bias, eps=config.eps)
    return normalized(x, weight, eps=config.eps)


def flushed(*sizes: np.ndarray | float) -> np.ndarray:
    """A bound on the change of a product when inputs, or products of some of them in any order, are flushed to zero.

    Each flush moves a factor by at most `TINY`, and the result by that times the other factors.
    """
    return 2 ** len(sizes) * TINY * np.prod(np.broadcast_arrays(*(1 + np.asarray(size) for size in sizes)), axis=0)


def turned(x: Approx, positions: np.ndarray, config: Config) -> Approx:
    """RoPE with cos and sin rounded to float32: two products and a sum of each pair. Other features stay."""
    turns, length = config.rotation()
    rest = x.map(lambda part: part[..., 2 * len(turns) :])
    x = x.map(lambda part: part[..., : 2 * len(turns)])
    value = length * rope_halves(x.value, positions, turns)
    angles = positions[:, None, None] * turns  # [seq, 1, pairs]
    cos, sin = length * np.abs(np.cos(angles)), length * np.abs(np.sin(angles))

    def spread(part: np.ndarray) -> np.ndarray:
        a, b = np.split(part, 2, axis=-1)
        return np.concatenate([a * cos + b * sin, b * cos + a * sin], axis=-1)

    error = spread(x.error) + gamma(3) * spread(x.size)
    return Approx(*(np.concatenate(parts, axis=-1) for parts in ((value, rest.value), (error, rest.error))))


def turn_error(angle: np.ndarray) -> np.ndarray:
    """The error of the cosine or sine of `angle`, a product of position and frequency in float32.

    The product rounds once. A reduction to less than a turn, which precedes most cosines, may round once more.
    """
    return 2 * U * angle + ELEMENTARY


def rotated(x: Approx, positions: np.ndarray, turns: np.ndarray) -> Approx:
    """RoPE by halves with the frequencies `turns`, of which an implementation computes the angles: see `turn_error`."""
    value = rope_halves(x.value, positions, turns)
    angles = positions[..., None, None] * turns  # [*batch, seq, 1, pairs]
    angle, cos, sin = (
        np.concatenate([a, a], axis=-1) for a in (angles, np.abs(np.cos(angles)), np.abs(np.sin(angles)))
    )

    def partner(part: np.ndarray) -> np.ndarray:
        return np.concatenate(np.split(part, 2, axis=-1)[::-1], axis=-1)

    off = turn_error(angle) * (x.size + partner(x.size))
    both = x.size * cos + partner(x.size) * sin
    moved = x.error * cos + partner(x.error) * sin
    return Approx(value, moved + off + gamma(3) * (both + off) + flushed(x.size + partner(x.size), 1.0))


def turned_by(x: Approx, cos: np.ndarray, sin: np.ndarray) -> Approx:
    """RoPE of x [batch heads head_dim] by a table [batch pairs] that is given: two products and a sum each."""
    cos, sin = cos[:, None], sin[:, None]
    a, b = np.split(x.value, 2, axis=-1)
    value = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def spread(part: np.ndarray) -> np.ndarray:
        a, b = np.split(part, 2, axis=-1)
        return np.concatenate([a * abs(cos) + b * abs(sin), b * abs(cos) + a * abs(sin)], axis=-1)

    return Approx(value, spread(x.error) + gamma(2) * spread(x.size) + 2 * TINY)


def in_fixed_point(x: Approx, *, group: int) -> Approx:
    """x [*batch cols] with each group of columns in fixed point of `FIXED`; the last group may be shorter."""
    size = np.pad(x.size, [(0, 0)] * (x.size.ndim - 1) + [(0, -x.size.shape[-1] % group)])
    largest = np.max(size.reshape(*size.shape[:-1], -1, group), axis=-1)
    off = FIXED * np.repeat(largest, group, axis=-1)[..., : x.size.shape[-1]]
    return Approx(x.value, x.error + off + TINY)


def fixed_point_product(
    x: Approx, codes: np.ndarray, scales: np.ndarray, *, group: int, roundings: int, rms: float = 1.0
) -> Approx:
    """Codes [rows cols] times x in fixed point, each group of columns scaled by scales [rows groups].

    Products and sums of digits are exact. `roundings` of sums that are scaled remain, for each of the digits. Where x
    is a norm whose 1/rms multiplies the sums, that is `rms` at most. Numbers are below 2^127.
    """
    cols = codes.shape[1]
    weights = codes * np.repeat(scales, -(-cols // scales.shape[1]), axis=1)[:, :cols]
    fixed = in_fixed_point(x, group=group)
    off, sizes = fixed.error, x.size + fixed.error
    error = off @ np.abs(weights).T + gamma(roundings) * DIGITS_SIZE * (sizes @ np.abs(weights).T)
    # A scale may be flushed to 0, or its product with the 2^e by which digits up to 1 / FIXED are multiplied. Codes of
    # four bits are multiplied by 16.
    tiny = TINY * (1 + np.max(scales)) * ((x.size + 16 / FIXED) @ (np.abs(codes) + 1).T)
    return Approx(x.value @ weights.T, error + tiny * max(1.0, rms))


def attended(
    q: Approx,
    k: Approx,
    v: Approx,
    mask: np.ndarray,
    *,
    blocks: int = 1,
    unit: float = 0.0,
    smallest: float = 0.0,
    sinks: np.ndarray | None = None,
) -> Approx:
    """Attention of q [queries heads head_dim] to k and v [keys kv_heads head_dim], divided before or after the sum.

    With several `blocks` the softmax is an online one, which rescales its sums once a block. Rounding the weights to
    the dtype of the values, as matrix units take them, is off by `unit` of a weight, or by `smallest` where a weight
    is too small for that; both are 0 for weights that stay float32. Exact `sinks` [heads] are one more score each, and
    may be a block of their own.
    """
    arrays = q.value, k.value, v.value
    value = attention(*arrays, mask) if sinks is None else sink_attention(*arrays, sinks, mask)
    group = q.value.shape[1] // k.value.shape[1]
    q = q.map(lambda part: part.swapaxes(0, 1))  # [heads queries head_dim]
    k, v = (a.map(lambda part: np.repeat(part.swapaxes(0, 1), group, axis=0)) for a in (k, v))
    keys, head_dim = k.value.shape[1:]

    k = k.map(lambda part: part.swapaxes(1, 2))
    scores = q.value @ k.value / np.sqrt(head_dim) + mask
    size = q.size @ k.size / np.sqrt(head_dim)
    moved = size - np.abs(q.value) @ np.abs(k.value) / np.sqrt(head_dim) + gamma(head_dim + 3) * size
    moved = np.where(np.isneginf(scores), 0, moved)
    if sinks is None:
        p, p_error = softmaxed(scores, moved, blocks=blocks)
    else:
        column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        every = np.concatenate([scores, column], axis=-1)
        exact = np.concatenate([moved, np.zeros_like(column)], axis=-1)
        p, p_error = (part[..., :-1] for part in softmaxed(every, exact, blocks=blocks + 1))
    error = (p + p_error) @ v.size * (1 + gamma(keys + 1)) * (1 + unit) - p @ np.abs(v.value)
    error = error + smallest * (np.isfinite(scores) @ v.size)
    error = error + 2 * keys * TINY * (1 + np.max(v.size, axis=1, keepdims=True, initial=0))
    return Approx(value, error.swapaxes(0, 1))


def softmaxed(scores: np.ndarray, moved: np.ndarray, *, blocks: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Softmax of scores that are off by up to `moved`: exact probabilities and their errors.

    Shifting all scores alike changes nothing, so only the rounding of score minus maximum counts,
    and that grows with the distance: once for the difference, twice where e^x is computed as 2^(x log2 e). Every weight
    is then off by a factor e^a, and so is the sum. An online softmax multiplies by exp(old maximum - new) once a block:
    the distances add up to that between the scores at most.
    """
    p = softmax(scores)
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    below = np.where(np.isneginf(scores), 0, np.where(np.isneginf(top), 0, top) - scores)
    a = moved + 3 * U * (below + moved + np.max(moved, axis=-1, keepdims=True))
    if blocks > 1:
        a = a + 3 * U * np.max(below + moved, axis=-1, keepdims=True)
    a = np.minimum(a, 100)  # for scores that are less certain, the last line's 1 is the smaller bound
    most, least = (np.sum(p * np.exp(sign * a), axis=-1, keepdims=True) for sign in (1, -1))
    most, least = (np.where(total == 0, 1, total) for total in (most, least))  # where every score is -inf
    slack = 2 * blocks * ELEMENTARY + gamma(scores.shape[-1] + 2 * blocks)
    rate = np.maximum(np.exp(a) / least * (1 + slack) / (1 - slack) - 1, 1 - np.exp(-a) / most * (1 - slack))
    # No probability is computed to be above 1, but for its own roundings.
    return p, np.minimum(p * rate + 2 * TINY, 1 + slack) * np.isfinite(scores)


def soft_capped(x: Approx, cap: float) -> Approx:
    """c tanh(x / c). It grows with x, so its values at both ends of x's interval enclose what becomes of x's error."""
    value = capped(x.value, cap=cap)
    moved = x.error + 2 * U * x.size + TINY  # c as a float32, and the quotient
    carried = np.maximum(capped(x.value + moved, cap=cap) - value, value - capped(x.value - moved, cap=cap))
    return Approx(value, carried + (TANH + 2 * U) * (np.abs(value) + carried) + 2 * TINY * (1 + cap))


def sigmoid(x: Approx) -> Approx:
    """1 / (1 + e^-x), whose slope is never above 1/4: an exp, a sum and a quotient, as in `gated`."""
    value = (1 + np.tanh(x.value / 2)) / 2
    moved = x.error / 4
    slack = ELEMENTARY + 2 * U + 2 * U * np.maximum(x.error - x.value, 1)
    return Approx(value, moved + slack * (value + moved) + TINY)


def gated(gate: Approx, up: Approx) -> Approx:
    """SwiGLU. The derivative of silu is never above 1.1.

    The sigmoid is an exp, a sum and a quotient, and an exp computed as a power of 2 is off by its argument, too.
    """
    silu = np.abs(swiglu(gate.value, np.ones_like(gate.value)))
    error = 1.1 * gate.error
    sigmoid = ELEMENTARY + 2 * U + 2 * U * np.maximum(gate.error - gate.value, 1)
    error = error + (sigmoid + U) * (silu + error)
    product = (silu + error) * up.size * (1 + U) - silu * np.abs(up.value)
    return Approx(swiglu(gate.value, up.value), product + flushed(gate.size, up.size))


def gelu_gated(gate: Approx, up: Approx) -> Approx:
    """GeGLU with GELU by tanh."""
    g = gelu_of(gate)
    product = g.size * up.size * (1 + U) - np.abs(g.value * up.value)
    return Approx(g.value * up.value, product + flushed(gate.size, up.size))


def gelu_of(x: Approx) -> Approx:
    """GELU by tanh, whose derivative is never above 1.13.

    Its sigmoid (1 + tanh(z)) / 2 has an absolute error where tanh(z) is near -1: of tanh, a sum, and of z, whose
    polynomial takes eight roundings. |z| times the sigmoid's slope in z, (1 - tanh(z)^2) / 2, is never above 0.23.
    """
    value = gelu(x.value)
    sigmoid = ELEMENTARY + 2 * U + 0.23 * gamma(8)
    error = 1.13 * x.error + (x.size + x.error) * sigmoid + gamma(2) * np.abs(value)
    return Approx(value, error + flushed(x.size))


def squared_relu_of(x: Approx) -> Approx:
    """max(x, 0)^2: the maximum rounds nothing, and the square once."""
    positive = Approx(np.maximum(x.value, 0), np.maximum(x.value + x.error, 0) - np.maximum(x.value, 0))
    value, largest = squared_relu(x.value), positive.size**2
    below = np.maximum(np.maximum(x.value - x.error, 0), 0) ** 2
    error = np.maximum(largest - value, value - below) + U * largest
    return Approx(value, error + np.where(positive.size > 0, flushed(positive.size, positive.size), 0))


def clamped_gated(gate: Approx, up: Approx) -> Approx:
    """Clamped SwiGLU. Clamping moves no two numbers apart, and the derivative of g sigmoid(1.702 g) is below 1.1.

    The sigmoid is that of `gated`, whose argument is 1.702 g: the slope as a float32 and the product each round once.
    """
    g = Approx(np.minimum(gate.value, LIMIT), gate.error)
    plus_one = added(Approx(np.clip(up.value, -LIMIT, LIMIT), up.error), exactly(1.0))
    passed = np.abs(clamped_swiglu(g.value, np.zeros_like(g.value)))
    error = 1.1 * g.error
    sigmoid = ELEMENTARY + 2 * U + 5 * U * np.maximum(SLOPE * (g.error - g.value), 1)
    error = error + (sigmoid + U) * (passed + error)
    product = (passed + error) * plus_one.size * (1 + U) - passed * np.abs(plus_one.value)
    return Approx(clamped_swiglu(gate.value, up.value), product + flushed(g.size, plus_one.size))


# The function of gate and up in a feed-forward layer, or of up where there is no gate, by the activation.
GATED: dict[str, Callable[[Approx, Approx], Approx]] = {
    "silu": gated,
    "gelu_tanh": gelu_gated,
    "clamped_silu": clamped_gated,
}
UNGATED: dict[str, Callable[[Approx], Approx]] = {"gelu_tanh": gelu_of, "relu2": squared_relu_of}


def norm_qkv(
    x: Approx, layer: Layer, positions: np.ndarray, *, config: Config, unit: float
) -> tuple[Approx, Approx, Approx]:
    """The norm; q, k and v; their norms; RoPE. Each is rounded by `unit` on the way out, here and below."""
    assert layer.attention_norm is not None
    n = rounded(normed(x, layer.attention_norm, layer.attention_norm_bias, config=config), unit)
    q, k, v = (
        projected(n, *weights).map(lambda part: part.reshape(len(part), -1, config.head_dim))
        for weights in (layer.q, layer.k, layer.v)
    )
    if config.head_qk_norm:
        q, k = (_head_normalized(a, weight, eps=config.eps) for a, weight in ((q, layer.q_norm), (k, layer.k_norm)))
    elif layer.q_norm is not None and layer.k_norm is not None:
        q, k = normalized(q, layer.q_norm, eps=config.eps), normalized(k, layer.k_norm, eps=config.eps)
    q, k = turned(q, positions, config), turned(k, positions, config)
    return rounded(q, unit), rounded(k, unit), rounded(v, unit)


def _head_normalized(x: Approx, weight: np.ndarray | None, *, eps: float) -> Approx:
    """LayerNorm of every head of x [tokens heads head_dim] by its own part of `weight`."""
    assert weight is not None
    each = np.split(weight, x.value.shape[1])
    parts = [layer_normalized(x.map(lambda part, i=i: part[:, i]), own, None, eps=eps) for i, own in enumerate(each)]
    return Approx(*(np.stack([part[i] for part in parts], axis=1) for i in (0, 1)))


def attend(
    q: Approx,
    k: Approx,
    v: Approx,
    mask: np.ndarray,
    *,
    unit: float,
    blocks: int = 1,
    weights_unit: float = 0.0,
    sinks: np.ndarray | None = None,
) -> Approx:
    """Attention, heads side by side. `weights_unit` is the `unit` of `attended`."""
    h = attended(q, k, v, mask, blocks=blocks, unit=weights_unit, sinks=sinks)
    return rounded(h.map(lambda part: part.reshape(len(part), -1)), unit)


def project_add(h: Approx, layer: Layer, x: Approx, *, unit: float) -> Approx:
    """The output projection, added to the residual stream."""
    return rounded(added(x, projected(h, *layer.o)), unit)


def norm_gate_up(x: Approx, layer: Layer, *, config: Config, unit: float) -> Approx:
    """The norm; gate and up, or up alone; the activation."""
    assert isinstance(layer.ffn, FeedForward) and layer.ffn_norm is not None
    n = rounded(normed(x, layer.ffn_norm, layer.ffn_norm_bias, config=config), unit)
    up = projected(n, *layer.ffn.up)
    if layer.ffn.gate is None:
        return rounded(UNGATED[config.activation](up), unit)
    return rounded(GATED[config.activation](projected(n, *layer.ffn.gate), up), unit)


def down_add(g: Approx, layer: Layer, x: Approx, *, unit: float) -> Approx:
    """The down projection, added to the residual stream."""
    assert isinstance(layer.ffn, FeedForward)
    return rounded(added(x, projected(g, *layer.ffn.down)), unit)


def moe_add(x: Approx, layer: Layer, *, config: Config, unit: float) -> Approx:
    """RMSNorm and the chosen experts. A token whose choice of experts hangs on rounding has `NO_BOUND`."""
    assert isinstance(layer.ffn, Experts) and layer.ffn_norm is not None
    n = rounded(normalized(x, layer.ffn_norm, eps=config.eps), unit)
    mixing = {"experts_per_token": config.experts_per_token, "renormalized": config.renormalize_experts}
    return rounded(mixed(n, layer.ffn, x, **mixing, unit=unit, joined=GATED[config.activation]), unit)


def mixed(
    n: Approx,
    experts: Experts,
    start: Approx,
    *,
    experts_per_token: int,
    unit: float,
    renormalized: bool = True,
    joined: Callable[[Approx, Approx], Approx] = gated,
) -> Approx:
    """`start` and what the experts say of each of n [tokens dim]; `NO_BOUND` as in `moe_add`. `joined` is a `GATED`."""
    router, gate, up, down, biases = experts
    bias = None if biases is None else biases.router
    logits = projected(n, router, bias)
    p, p_error = softmaxed(logits.value, logits.error)
    choice = {"experts_per_token": experts_per_token, "renormalized": renormalized, "bias": bias}
    chosen, weights = routed(n.value, router, p, p_error, **choice)

    y = start
    for rank in range(experts_per_token):
        out = Approx(np.zeros_like(start.value), np.zeros_like(start.error))
        for e in np.unique(chosen[:, rank]):
            its = chosen[:, rank] == e
            rows = n.map(lambda part, its=its: part[its])
            by_gate, by_up, by_down = (None,) * 3 if biases is None else (each[e] for each in biases[1:])
            hidden = rounded(joined(projected(rows, gate[e], by_gate), projected(rows, up[e], by_up)), unit)
            out.value[its], out.error[its] = projected(hidden, down[e], by_down)
        weight = weights.map(lambda part, rank=rank: part[:, rank, None])
        product = weight.size * out.size * (1 + U) - np.abs(weight.value * out.value)
        y = added(y, Approx(weight.value * out.value, product + flushed(weight.size, out.size)))
    # Implementations may add the other experts too, times zero. Each such sum rounds once more.
    error = y.error + gamma(len(router)) * y.size
    return Approx(y.value, np.where(clear_choice(p, p_error, chosen)[:, None], error, NO_BOUND))


def routed(
    n: np.ndarray,
    router: np.ndarray,
    p: np.ndarray,
    p_error: np.ndarray,
    *,
    experts_per_token: int,
    renormalized: bool,
    bias: np.ndarray | None = None,
) -> tuple[np.ndarray, Approx]:
    """Choose experts and weigh them by p_e, over the sum of the chosen p where that is asked for.

    Each p is off by up to `p_error`.
    """
    chosen, weights = route(n, router, experts_per_token=experts_per_token, renormalized=renormalized, bias=bias)
    if not renormalized:
        return chosen, Approx(*(np.take_along_axis(part, chosen, axis=-1) for part in (p, p_error)))
    total, off = (np.take_along_axis(a, chosen, axis=-1).sum(axis=-1, keepdims=True) for a in (p, p_error))
    least = total - off  # of the computed sum, which bounds nothing where it may vanish; weights are never above 1
    quotient = (np.take_along_axis(p_error, chosen, axis=-1) + weights * off) / np.where(least > 0, least, np.inf)
    moved = np.where(least > 0, np.minimum(quotient, 1), 1.0)
    return chosen, Approx(weights, moved + gamma(experts_per_token + 1) * (weights + moved))


def clear_choice(p: np.ndarray, p_error: np.ndarray, chosen: np.ndarray) -> Bool[np.ndarray, " tokens"]:
    """Whether the chosen experts are ahead of the others by more than any rounding."""
    lowest_chosen = np.take_along_axis(p - p_error, chosen, axis=-1).min(axis=-1)
    others = p + p_error
    np.put_along_axis(others, chosen, -np.inf, axis=-1)
    return lowest_chosen > others.max(axis=-1)


def norm_logits(x: Approx, params: Params, *, config: Config, unit: float) -> Approx:
    """The last norm and the logits, which stay float32."""
    return projected(rounded(normed(x, params.norm, params.norm_bias, config=config), unit), params.head)
