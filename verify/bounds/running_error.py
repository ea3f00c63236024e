r"""Error bounds for a Llama computed in float32: a proof that travels with the numbers.

Every quantity is a pair of the exact value x, from `reference`, and a bound e on |x^ - x|, where x^
is the number that an implementation computes. Each function below takes such pairs through one
layer: it propagates the incoming errors and adds the layer's own roundings, for sums in any order
(running error analysis: Wilkinson, 1963; Higham, Accuracy and Stability of Numerical Algorithms, ch. 3).

    u = 2^-24                      a correct rounding to float32 is off by at most u |x|
    gamma_n = n u / (1 - n u)      n roundings in a row, or a sum of n products, in any order
    |fl(w . x) - w . x| <= gamma_n |w| . |x|

We assume that elementary functions (exp, 1/sqrt, the sigmoid) have a relative error of at most 4 u, and tanh of at most
7 u; a test checks XLA's tanh for every float32. If an op returns bfloat16, `rounded` adds one more rounding, with a
relative error of at most 2^-8. No constant here is fitted: a result outside its bound is a bug, in the code or in this
proof.
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
# Relative error of tanh, which XLA computes as a quotient of two polynomials. Over all float32 numbers, the error is at
# most 4.90 u with fused multiply-adds, and 6.89 u without them (tests/verify/test_verify_ours.py).
TANH = 7 * U
FIXED = 2.0**-21  # error of a number in fixed point, relative to the largest number of its group
DIGITS_SIZE = 3.02  # sum of the magnitudes of a number's scaled digits, relative to the number
NO_BOUND = 1e30  # allows any value; infinity times a weight of 0 would be NaN


class Approx(NamedTuple):
    """Exact values, and a bound on the error of each computed value."""

    value: Float[np.ndarray, "..."]
    error: Float[np.ndarray, "..."]

    @property
    def size(self) -> np.ndarray:
        """A bound on the magnitude of the computed value."""
        return np.abs(self.value) + self.error

    def map(self, f) -> "Approx":
        """Apply `f`, which only moves elements, to values and errors."""
        return Approx(f(self.value), f(self.error))


def exactly(values: Any) -> Approx:
    """Wrap `values`, an input of the computation, as exact values."""
    exact = np.asarray(values).astype(np.float64)
    return Approx(exact, np.zeros_like(exact))


def gamma(n: int) -> float:
    """Return gamma_n, a bound on the relative error of n roundings in a row.

    >>> round(gamma(1) / U, 6), round(gamma(1000) / U, 1)
    (1.0, 1000.1)
    """
    return n * U / (1 - n * U)


def rounded(x: Approx, unit: float, smallest: float = 0.0) -> Approx:
    """Round once more, to a dtype with relative error `unit`, and absolute error `smallest` for tiny numbers.

    For float32, both are 0, since x is already float32.
    """
    return Approx(x.value, x.error + unit * x.size + smallest)


def added(x: Approx, y: Approx) -> Approx:
    """Add x and y."""
    value = x.value + y.value
    error = x.error + y.error
    return Approx(value, error + U * (np.abs(value) + error))


def projected(x: Approx, weight: np.ndarray, bias: np.ndarray | None = None) -> Approx:
    """Compute W x + b for exact W and b. The sum may add b at any point: XLA's products on a CPU start with b."""
    magnitudes = np.abs(weight)
    terms = weight.shape[1] if bias is None else weight.shape[1] + 1
    sums = linear(x.size, magnitudes, None if bias is None else np.abs(bias))
    error = linear(x.error, magnitudes) + gamma(terms) * sums
    # Hardware may flush each product and its factors to zero.
    error = error + TINY * (np.sum(x.size, axis=-1, keepdims=True) + terms * (np.max(magnitudes, initial=0) + 2))
    return Approx(linear(x.value, weight, bias), error)


def normalized(x: Approx, weight: np.ndarray, *, eps: float) -> Approx:
    """Compute RMSNorm.

    We bound the computed mean square from below and from above, and so bound the result's error.
    """
    n = x.value.shape[-1]
    mean = np.mean(x.value**2, axis=-1, keepdims=True)
    change = np.mean((2 * np.abs(x.value) + x.error) * x.error, axis=-1, keepdims=True) + TINY
    low = np.maximum(mean - change, 0) * (1 - gamma(n + 2)) + eps
    high = (mean + change) * (1 + gamma(n + 2)) + eps
    exact = 1 / np.sqrt(mean + eps)
    # The root halves the roundings of eps to float32 and of its sum. A separate root and quotient round once more.
    slack = ELEMENTARY + 2 * U
    off = np.maximum(1 / np.sqrt(low) * (1 + slack) - exact, exact - 1 / np.sqrt(high) * (1 - slack))
    value = rmsnorm(x.value, weight, eps=eps)
    error = np.abs(weight) * (x.size * (exact + off) * (1 + gamma(2)) - np.abs(x.value) * exact)
    return Approx(value, error + flushed(np.abs(weight), x.size, exact))


def centered(x: Approx) -> Approx:
    """Subtract the mean. A kernel may sum the n terms in any order, and divide by n or multiply by 1/n."""
    mean = np.mean(x.value, axis=-1, keepdims=True)
    terms = gamma(x.value.shape[-1] + 1) * np.mean(x.size, axis=-1, keepdims=True)
    value, error = x.value - mean, x.error + np.mean(x.error, axis=-1, keepdims=True) + terms + 4 * TINY
    return Approx(value, error + U * (np.abs(value) + error))


def layer_normalized(x: Approx, weight: np.ndarray, bias: np.ndarray | None, *, eps: float) -> Approx:
    """Compute LayerNorm: RMSNorm of centered values, plus a bias.

    The error of the mean adds to every feature's error.
    """
    y = normalized(centered(x), weight, eps=eps)
    return y if bias is None else added(y, exactly(bias))


def apply_norm(x: Approx, weight: np.ndarray, bias: np.ndarray | None, *, config: Config) -> Approx:
    """Apply the model's kind of norm."""
    if config.layer_norm:
        return layer_normalized(x, weight, bias, eps=config.eps)
    return normalized(x, weight, eps=config.eps)


def flushed(*sizes: np.ndarray | float) -> np.ndarray:
    """Bound the change of a product if hardware flushes tiny factors, or tiny partial products, to zero.

    `sizes` are the magnitudes of the factors. A flush changes one factor by at most `TINY`, and so the result by `TINY`
    times the other factors.
    """
    return 2 ** len(sizes) * TINY * np.prod(np.broadcast_arrays(*(1 + np.asarray(size) for size in sizes)), axis=0)


def turned(x: Approx, positions: np.ndarray, config: Config) -> Approx:
    """Apply the model's RoPE, with cosines and sines that are rounded to float32.

    Each rotated feature is a sum of two products. With partial RoPE, the last features of a head do not change.
    """
    turns, length = config.rotation()
    unturned = x.map(lambda part: part[..., 2 * len(turns) :])
    x = x.map(lambda part: part[..., : 2 * len(turns)])
    value = length * rope_halves(x.value, positions, turns)
    angles = positions[:, None, None] * turns  # [seq, 1, pairs]
    cos, sin = length * np.abs(np.cos(angles)), length * np.abs(np.sin(angles))

    def spread(part: np.ndarray) -> np.ndarray:
        a, b = np.split(part, 2, axis=-1)
        return np.concatenate([a * cos + b * sin, b * cos + a * sin], axis=-1)

    error = spread(x.error) + gamma(3) * spread(x.size)
    return Approx(*(np.concatenate(parts, axis=-1) for parts in ((value, unturned.value), (error, unturned.error))))


def turn_error(angle: np.ndarray) -> np.ndarray:
    """Bound the error of the cosine or sine of `angle`, if a kernel computes position times frequency in float32.

    The product rounds once. Most implementations then reduce the angle modulo 2 pi, which may round once more.
    """
    return 2 * U * angle + ELEMENTARY


def rotated(x: Approx, positions: np.ndarray, turns: np.ndarray) -> Approx:
    """Apply RoPE by halves, with angles computed in float32 from the frequencies `turns` [pairs]: see `turn_error`."""
    value = rope_halves(x.value, positions, turns)
    angles = positions[..., None, None] * turns  # [*batch, seq, 1, pairs]
    angle, cos, sin = (
        np.concatenate([a, a], axis=-1) for a in (angles, np.abs(np.cos(angles)), np.abs(np.sin(angles)))
    )

    def partner(part: np.ndarray) -> np.ndarray:
        return np.concatenate(np.split(part, 2, axis=-1)[::-1], axis=-1)

    off = turn_error(angle) * (x.size + partner(x.size))
    size = x.size * cos + partner(x.size) * sin
    moved = x.error * cos + partner(x.error) * sin
    return Approx(value, moved + off + gamma(3) * (size + off) + flushed(x.size + partner(x.size), 1.0))


def turned_by(x: Approx, cos: np.ndarray, sin: np.ndarray) -> Approx:
    """Apply RoPE to x [batch heads head_dim] with the given tables `cos` and `sin` [batch pairs].

    Each feature of the result is a sum of two products.
    """
    cos, sin = cos[:, None], sin[:, None]
    a, b = np.split(x.value, 2, axis=-1)
    value = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def spread(part: np.ndarray) -> np.ndarray:
        a, b = np.split(part, 2, axis=-1)
        return np.concatenate([a * abs(cos) + b * abs(sin), b * abs(cos) + a * abs(sin)], axis=-1)

    return Approx(value, spread(x.error) + gamma(2) * spread(x.size) + 2 * TINY)


def in_fixed_point(x: Approx, *, group: int) -> Approx:
    """Convert each group of `group` columns of x [*batch cols] to fixed point; the last group may be shorter.

    The error is at most `FIXED` times the largest magnitude in the group.
    """
    size = np.pad(x.size, [(0, 0)] * (x.size.ndim - 1) + [(0, -x.size.shape[-1] % group)])
    largest = np.max(size.reshape(*size.shape[:-1], -1, group), axis=-1)
    off = FIXED * np.repeat(largest, group, axis=-1)[..., : x.size.shape[-1]]
    return Approx(x.value, x.error + off + TINY)


def fixed_point_product(
    x: Approx, codes: np.ndarray, scales: np.ndarray, *, group: int, roundings: int, rms: float = 1.0
) -> Approx:
    """Multiply codes [rows cols] by x in fixed point, and scale each group of columns by scales [rows groups].

    A kernel splits x into digits. The products of codes and digits are exact, and so are their sums. For each digit,
    the kernel then scales the sums, and rounds `roundings` times. If x is the output of a norm, and the kernel
    multiplies by 1 / RMS only after the product, `rms` is the largest factor 1 / RMS. All numbers must be below 2^127.
    """
    cols = codes.shape[1]
    weights = codes * np.repeat(scales, -(-cols // scales.shape[1]), axis=1)[:, :cols]
    fixed = in_fixed_point(x, group=group)
    off, sizes = fixed.error, x.size + fixed.error
    error = off @ np.abs(weights).T + gamma(roundings) * DIGITS_SIZE * (sizes @ np.abs(weights).T)
    # Hardware may flush a scale to 0, or its product with 2^e, which multiplies digits up to 1 / FIXED. Four-bit codes
    # are multiplied by 16.
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
    """Compute attention of q [queries heads head_dim] to k and v [keys kv_heads head_dim].

    The softmax may divide by its total before or after the sum over values. With `blocks` > 1, a kernel computes an
    online softmax over this number of blocks of keys, and rescales its sums once per block.

    A kernel may round softmax weights to the dtype of the values before it multiplies them on matrix units. This
    rounding has the relative error `unit`, and the absolute error `smallest` for tiny weights. Both are 0 if weights
    stay float32.

    `sinks` [heads] are exact. Each sink is one more score of its head, and may be a separate block.
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
    """Return the exact softmax of scores, and a bound on the error of each probability.

    The computed scores have errors up to `moved`. A kernel subtracts the maximum: d = score - maximum. The subtraction
    rounds once, and computing e^d as 2^(d log2 e) rounds twice more; these errors are relative to d. Let a be the sum
    of all errors of the exponent. Then each weight, and the sum of the weights, changes by a factor of at most e^a. An
    online softmax also multiplies by exp(old maximum - new maximum) once per block. These differences add up to at most
    the largest |d|.
    """
    p = softmax(scores)
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    below = np.where(np.isneginf(scores), 0, np.where(np.isneginf(top), 0, top) - scores)
    a = moved + 3 * U * (below + moved + np.max(moved, axis=-1, keepdims=True))
    if blocks > 1:
        a = a + 3 * U * np.max(below + moved, axis=-1, keepdims=True)
    a = np.minimum(a, 100)  # for larger errors, the 1 in the last line is the smaller bound
    most, least = (np.sum(p * np.exp(sign * a), axis=-1, keepdims=True) for sign in (1, -1))
    most, least = (np.where(total == 0, 1, total) for total in (most, least))  # if every score is -inf
    slack = 2 * blocks * ELEMENTARY + gamma(scores.shape[-1] + 2 * blocks)
    rate = np.maximum(np.exp(a) / least * (1 + slack) / (1 - slack) - 1, 1 - np.exp(-a) / most * (1 - slack))
    # A computed probability exceeds 1 only by its own roundings.
    return p, np.minimum(p * rate + 2 * TINY, 1 + slack) * np.isfinite(scores)


def soft_capped(x: Approx, cap: float) -> Approx:
    """Compute c tanh(x / c) with c = `cap`.

    The function increases with x, so we compute it at both ends of the interval [x - error, x + error] to bound the
    result.
    """
    value = capped(x.value, cap=cap)
    moved = x.error + 2 * U * x.size + TINY  # c as a float32, and the quotient
    carried = np.maximum(capped(x.value + moved, cap=cap) - value, value - capped(x.value - moved, cap=cap))
    return Approx(value, carried + (TANH + 2 * U) * (np.abs(value) + carried) + 2 * TINY * (1 + cap))


def sigmoid(x: Approx) -> Approx:
    """Compute 1 / (1 + e^-x): an exp, a sum and a quotient, as in `gated`. Its derivative is at most 1/4."""
    value = (1 + np.tanh(x.value / 2)) / 2
    moved = x.error / 4
    slack = ELEMENTARY + 2 * U + 2 * U * np.maximum(x.error - x.value, 1)
    return Approx(value, moved + slack * (value + moved) + TINY)


def gated(gate: Approx, up: Approx) -> Approx:
    """Compute SwiGLU. The derivative of silu is at most 1.1.

    The sigmoid is an exp, a sum and a quotient. A kernel that computes the exp as a power of 2 also rounds the
    exponent.
    """
    silu = np.abs(swiglu(gate.value, np.ones_like(gate.value)))
    error = 1.1 * gate.error
    sigmoid = ELEMENTARY + 2 * U + 2 * U * np.maximum(gate.error - gate.value, 1)
    error = error + (sigmoid + U) * (silu + error)
    product = (silu + error) * up.size * (1 + U) - silu * np.abs(up.value)
    return Approx(swiglu(gate.value, up.value), product + flushed(gate.size, up.size))


def gelu_gated(gate: Approx, up: Approx) -> Approx:
    """Compute GeGLU with GELU by tanh."""
    g = gelu_of(gate)
    product = g.size * up.size * (1 + U) - np.abs(g.value * up.value)
    return Approx(g.value * up.value, product + flushed(gate.size, up.size))


def gelu_of(x: Approx) -> Approx:
    """Compute GELU by tanh. Its derivative is at most 1.13.

    GELU is x s with s = (1 + tanh(z)) / 2, and z is a polynomial of x. If tanh(z) is near -1, only the absolute error
    of s is small. This error comes from tanh, from the sum, and from the eight roundings of z. The last part is at most
    0.23 times the relative error of z, since |z| (1 - tanh(z)^2) / 2 is at most 0.23.
    """
    value = gelu(x.value)
    sigmoid = ELEMENTARY + 2 * U + 0.23 * gamma(8)
    error = 1.13 * x.error + (x.size + x.error) * sigmoid + gamma(2) * np.abs(value)
    return Approx(value, error + flushed(x.size))


def squared_relu_of(x: Approx) -> Approx:
    """Compute max(x, 0)^2. Only the square is rounded."""
    positive = Approx(np.maximum(x.value, 0), np.maximum(x.value + x.error, 0) - np.maximum(x.value, 0))
    value, largest = squared_relu(x.value), positive.size**2
    below = np.maximum(np.maximum(x.value - x.error, 0), 0) ** 2
    error = np.maximum(largest - value, value - below) + U * largest
    return Approx(value, error + np.where(positive.size > 0, flushed(positive.size, positive.size), 0))


def clamped_gated(gate: Approx, up: Approx) -> Approx:
    """Compute clamped SwiGLU. Clamping never increases an error, and the derivative of g sigmoid(1.702 g) is below 1.1.

    The sigmoid has the error of `gated`. Its argument 1.702 g adds two roundings: of the slope to float32, and of the
    product.
    """
    g = Approx(np.minimum(gate.value, LIMIT), gate.error)
    plus_one = added(Approx(np.clip(up.value, -LIMIT, LIMIT), up.error), exactly(1.0))
    passed = np.abs(clamped_swiglu(g.value, np.zeros_like(g.value)))
    error = 1.1 * g.error
    sigmoid = ELEMENTARY + 2 * U + 5 * U * np.maximum(SLOPE * (g.error - g.value), 1)
    error = error + (sigmoid + U) * (passed + error)
    product = (passed + error) * plus_one.size * (1 + U) - passed * np.abs(plus_one.value)
    return Approx(clamped_swiglu(gate.value, up.value), product + flushed(g.size, plus_one.size))


# The function of gate and up, or only of up in a layer without a gate, by the name of the activation.
GATED: dict[str, Callable[[Approx, Approx], Approx]] = {
    "silu": gated,
    "gelu_tanh": gelu_gated,
    "clamped_silu": clamped_gated,
}
UNGATED: dict[str, Callable[[Approx], Approx]] = {"gelu_tanh": gelu_of, "relu2": squared_relu_of}


def norm_qkv(
    x: Approx, layer: Layer, positions: np.ndarray, *, config: Config, unit: float
) -> tuple[Approx, Approx, Approx]:
    """Compute q, k and v of an attention layer: its norm, the projections, the norms of q and k (if any), and RoPE.

    In this function and the functions below, `unit` is the relative error of rounding an output to its dtype.
    """
    assert layer.attention_norm is not None
    n = rounded(apply_norm(x, layer.attention_norm, layer.attention_norm_bias, config=config), unit)
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
    """Apply LayerNorm to every head of x [tokens heads head_dim]; each head has its own part of `weight`."""
    assert weight is not None
    head_weights = np.split(weight, x.value.shape[1])
    parts = [
        layer_normalized(x.map(lambda part, i=i: part[:, i]), own, None, eps=eps) for i, own in enumerate(head_weights)
    ]
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
    """Compute attention, with the outputs of the heads concatenated. `weights_unit` is the `unit` of `attended`."""
    h = attended(q, k, v, mask, blocks=blocks, unit=weights_unit, sinks=sinks)
    return rounded(h.map(lambda part: part.reshape(len(part), -1)), unit)


def project_add(h: Approx, layer: Layer, x: Approx, *, unit: float) -> Approx:
    """Compute the output projection and add it to the residual stream."""
    return rounded(added(x, projected(h, *layer.o)), unit)


def norm_gate_up(x: Approx, layer: Layer, *, config: Config, unit: float) -> Approx:
    """Compute the hidden features of a feed-forward layer: its norm, gate and up (or only up), and the activation."""
    assert isinstance(layer.ffn, FeedForward) and layer.ffn_norm is not None
    n = rounded(apply_norm(x, layer.ffn_norm, layer.ffn_norm_bias, config=config), unit)
    up = projected(n, *layer.ffn.up)
    if layer.ffn.gate is None:
        return rounded(UNGATED[config.activation](up), unit)
    return rounded(GATED[config.activation](projected(n, *layer.ffn.gate), up), unit)


def down_add(g: Approx, layer: Layer, x: Approx, *, unit: float) -> Approx:
    """Compute the down projection and add it to the residual stream."""
    assert isinstance(layer.ffn, FeedForward)
    return rounded(added(x, projected(g, *layer.ffn.down)), unit)


def moe_add(x: Approx, layer: Layer, *, config: Config, unit: float) -> Approx:
    """Compute RMSNorm and the chosen experts, and add their outputs to the residual stream.

    A token gets `NO_BOUND` if a rounding could change its choice of experts.
    """
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
    """Add the outputs of the chosen experts for n [tokens dim] to `start` [tokens dim].

    `joined` computes the activation from gate and up; it is an entry of `GATED`.

    A token gets `NO_BOUND` if a rounding could change its choice of experts.
    """
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
            by_gate, by_up, by_down = (None,) * 3 if biases is None else (by_expert[e] for by_expert in biases[1:])
            hidden = rounded(joined(projected(rows, gate[e], by_gate), projected(rows, up[e], by_up)), unit)
            out.value[its], out.error[its] = projected(hidden, down[e], by_down)
        weight = weights.map(lambda part, rank=rank: part[:, rank, None])
        product = weight.size * out.size * (1 + U) - np.abs(weight.value * out.value)
        y = added(y, Approx(weight.value * out.value, product + flushed(weight.size, out.size)))
    # Implementations may also add the other experts times zero. Each such sum rounds once more.
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
    """Choose experts for n [tokens dim], and compute their weights: the probabilities `p` of the chosen experts.

    With `renormalized`, the weights are divided by their sum. `p_error` bounds the error of each probability.
    """
    chosen, weights = route(n, router, experts_per_token=experts_per_token, renormalized=renormalized, bias=bias)
    if not renormalized:
        return chosen, Approx(*(np.take_along_axis(part, chosen, axis=-1) for part in (p, p_error)))
    total, off = (np.take_along_axis(a, chosen, axis=-1).sum(axis=-1, keepdims=True) for a in (p, p_error))
    least = total - off  # bounds the computed sum; useless if it may be 0, but weights are at most 1
    quotient = (np.take_along_axis(p_error, chosen, axis=-1) + weights * off) / np.where(least > 0, least, np.inf)
    moved = np.where(least > 0, np.minimum(quotient, 1), 1.0)
    return chosen, Approx(weights, moved + gamma(experts_per_token + 1) * (weights + moved))


def clear_choice(p: np.ndarray, p_error: np.ndarray, chosen: np.ndarray) -> Bool[np.ndarray, " tokens"]:
    """Return for each token whether its choice of experts is certain: no rounding error can change it.

    This is true if the probability of each chosen expert exceeds the probability of each expert that was not chosen, by
    more than the sum of the two errors.
    """
    lowest_chosen = np.take_along_axis(p - p_error, chosen, axis=-1).min(axis=-1)
    high = p + p_error
    np.put_along_axis(high, chosen, -np.inf, axis=-1)
    return lowest_chosen > high.max(axis=-1)


def norm_logits(x: Approx, params: Params, *, config: Config, unit: float) -> Approx:
    """Compute the last norm and the logits, which stay float32."""
    return projected(rounded(apply_norm(x, params.norm, params.norm_bias, config=config), unit), params.head)
