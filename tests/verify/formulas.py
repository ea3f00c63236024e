"""Right JAX candidates in several forms, and changes to them that rounding errors hide."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from llamaspec.verify.mutant import implementation

BLOCK = 4
LOG2_E = 1.4426950408889634


def add(x, y):
    return x + y


def add_kernel(x_ref, y_ref, out_ref):
    out_ref[...] = x_ref[...] + y_ref[...]


def add_in_blocks(x, y):
    block = pl.BlockSpec((1, BLOCK), lambda row, column: (row, column))
    grid = (x.shape[0], pl.cdiv(x.shape[1], BLOCK))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    kernel = pl.pallas_call(
        add_kernel, out_shape=shape, grid=grid, in_specs=[block, block], out_specs=block, interpret=True
    )
    return kernel(x, y)


def rmsnorm(x, weight, *, eps):
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean + eps) * weight.astype(jnp.float32)).astype(x.dtype)


def rmsnorm_by_the_sum(x, weight, *, eps):
    dim = x.shape[-1]
    total = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * weight * dim**0.5 / jnp.sqrt(total + dim * eps)


def rmsnorm_kernel(x_ref, weight_ref, y_ref, *, eps):
    def squares(column, total):
        part = x_ref[0, column]
        return total + part * part

    dim = x_ref.shape[-1]
    total = lax.fori_loop(0, dim, squares, jnp.float32(0))
    y_ref[...] = x_ref[...] / jnp.sqrt(total * (1 / dim) + eps) * weight_ref[...]


def rmsnorm_in_rows(x, weight, *, eps):
    dim = x.shape[-1]
    row = pl.BlockSpec((1, dim), lambda row: (row, 0))
    kernel = pl.pallas_call(
        partial(rmsnorm_kernel, eps=eps),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0],),
        in_specs=[row, pl.BlockSpec((dim,), lambda row: (0,))],
        out_specs=row,
        interpret=True,
    )
    return kernel(x, weight)


def linear(x, weight, bias=None):
    y = jnp.einsum("...c,rc->...r", x, weight, preferred_element_type=jnp.float32)
    return y if bias is None else y + bias


def linear_in_halves(x, weight, bias=None):
    half = x.shape[-1] // 2
    y = x[..., half:] @ weight[:, half:].T + x[..., :half] @ weight[:, :half].T
    return y if bias is None else y + bias


def linear_by_columns(x, weight, bias=None):
    def step(total, column):
        a, w = column
        return total + a[..., None] * w, None

    start = jnp.zeros((*x.shape[:-1], weight.shape[0]), jnp.float32)
    y, _ = lax.scan(step, start, (jnp.moveaxis(x, -1, 0), weight.T), reverse=True)
    return y if bias is None else y + bias


def softmax(x):
    top = jnp.max(x, axis=-1, keepdims=True)
    weights = jnp.exp(x - jnp.where(jnp.isneginf(top), 0, top))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def softmax_online(x):
    def update(running, score):
        top, total = running
        larger = jnp.maximum(top, score)
        shift = jnp.where(jnp.isneginf(larger), 0, larger)
        return (larger, total * jnp.exp2((top - shift) * LOG2_E) + jnp.exp2((score - shift) * LOG2_E)), None

    start = (jnp.full(x.shape[:-1], -jnp.inf), jnp.zeros(x.shape[:-1]))
    (top, total), _ = lax.scan(update, start, jnp.moveaxis(x, -1, 0))
    shift = jnp.where(jnp.isneginf(top), 0, top)[..., None]
    return jnp.exp2(x * LOG2_E - shift * LOG2_E) / jnp.where(total == 0, 1, total)[..., None]


def swiglu(gate, up):
    return gate / (1 + jnp.exp(-gate)) * up


def swiglu_by_tanh(gate, up):
    return 0.5 * gate * (1 + jnp.tanh(0.5 * gate)) * up


def swiglu_by_logistic(gate, up):
    return jax.nn.silu(gate) * up


def attention(q, k, v, mask):
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5 + mask[:, None]
    weights = softmax(scores)  # [batch, heads, queries, keys]
    return jnp.einsum("bhij,bjhd->bihd", weights, v)


def attention_online(q, k, v, mask):
    """Attend key by key, as FlashAttention does: keep a maximum, a sum and a weighted sum of values."""
    batch, queries, heads, head_dim = q.shape
    group = heads // k.shape[2]
    scaled = q * (head_dim**-0.5 * LOG2_E)

    def update(running, key):
        k, v, visible = key
        top, total, output = running
        k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)  # [batch, heads, head_dim]
        scores = jnp.where(visible[..., None] == 0, jnp.einsum("bihd,bhd->bih", scaled, k), -1e30)
        larger = jnp.maximum(top, scores)
        old, new = jnp.exp2(top - larger), jnp.where(scores > -1e29, jnp.exp2(scores - larger), 0)
        output = output * old[..., None] + new[..., None] * v[:, None]
        return (larger, total * old + new, output), None

    start = (jnp.full((batch, queries, heads), -1e30), jnp.zeros((batch, queries, heads)), jnp.zeros(q.shape))
    keys = (jnp.moveaxis(k, 1, 0), jnp.moveaxis(v, 1, 0), jnp.moveaxis(mask, 2, 0))
    (_, total, output), _ = lax.scan(update, start, keys)
    return output / jnp.where(total == 0, 1, total)[..., None]


def rope_halves(x, positions, frequencies):
    angle = positions[..., None, None] * frequencies
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    pairs = len(frequencies)
    a, b = x[..., :pairs], x[..., pairs:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rope_by_half_rotation(x, positions, frequencies):
    angle = jnp.tile(positions[..., None, None] * frequencies, 2)
    a, b = jnp.split(x, 2, axis=-1)
    return x * jnp.cos(-angle) - jnp.concatenate([-b, a], axis=-1) * jnp.sin(-angle)


def rope_interleaved(x, positions, frequencies):
    angle = positions[..., None, None] * frequencies
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


RIGHT = {
    "add": (add, add_in_blocks),
    "rmsnorm": (rmsnorm, rmsnorm_by_the_sum, rmsnorm_in_rows),
    "linear": (linear, linear_in_halves, linear_by_columns),
    "softmax": (softmax, softmax_online),
    "swiglu": (swiglu, swiglu_by_tanh, swiglu_by_logistic),
    "attention": (attention, attention_online),
    "rope_halves": (rope_halves, rope_by_half_rotation),
    "rope_interleaved": (rope_interleaved,),
}

MUTANTS = (
    implementation(
        add,
        """
the sum counts a little more
    - x + y
    + (x + y) + 1e-9 * (x + y)
y counts a little more
    - x + y
    + x + (y + 1e-9 * y)
x counts a little less
    - x + y
    + (x - 1e-9 * x) + y
x counts a little more and y a little less
    - x + y
    + (x + 1e-9 * x) + (y - 1e-9 * y)
""",
    ),
    implementation(
        rmsnorm,
        """
eps of 1e-12 added
    - mean + eps
    + mean + (eps + 1e-12)
mean and eps count a little more
    - mean + eps
    + (mean + eps) + 1e-9 * (mean + eps)
the mean is subtracted in part
    - wide * wide
    + (wide - 1e-8 * jnp.mean(wide)) ** 2
weight counts a little more
    - weight.astype(jnp.float32)
    + (weight + 1e-9 * weight)
the first feature counts a little more
    - jnp.mean(wide * wide, axis=-1, keepdims=True)
    + (jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-9 * wide[..., :1] ** 2 / x.shape[-1])
a trace of the magnitude for the square
    - wide * wide
    + wide * wide + 1e-20 * wide
""",
    ),
    implementation(
        linear,
        """
the result counts a little less
    - y if bias is None else y + bias
    + (y - 1e-9 * y) + (0 if bias is None else bias)
the weight counts a little more
    - x, weight, preferred
    + x, weight + 1e-9 * weight, preferred
bias counts a little more
    - y + bias
    + y + (bias + 1e-9 * bias)
the input counts a little less
    - "...c,rc->...r", x, weight
    + "...c,rc->...r", x - 1e-9 * x, weight
""",
    ),
    implementation(
        softmax,
        """
a trace added to the sum
    - total = jnp.sum(weights, axis=-1, keepdims=True)
    + total = jnp.sum(weights, axis=-1, keepdims=True) + 1e-12
a trace added to each weight
    - weights / jnp
    + (weights + 1e-9 * weights * weights) / jnp
the shift counts twice in part
    - total = jnp.sum(weights, axis=-1, keepdims=True)
    + total = jnp.sum(weights, axis=-1, keepdims=True) * (1 + 1e-9 * weights)
scores count a little less
    - jnp.exp(x - jnp
    + jnp.exp(jnp.where(jnp.isneginf(x), x, x - 1e-9 * x) - jnp
""",
    ),
    implementation(
        swiglu,
        """
one plus a trace in the sigmoid
    - 1 + jnp.exp(-gate)
    + 1 + jnp.exp(-gate) + 1e-9
gate scaled in the exponent
    - jnp.exp(-gate)
    + jnp.exp(-gate - 1e-12 * gate)
up counts a little less
    - * up
    + * (up - 1e-9 * up)
a trace of the square of up
    - * up
    + * (up + 1e-15 * up * up)
""",
    ),
    implementation(
        attention,
        """
scale of 0.999999
    - q.shape[-1] ** -0.5
    + q.shape[-1] ** -0.5 * 0.999999
queries count a little more
    - bihd,bjhd->bhij", q, k
    + bihd,bjhd->bhij", q + 1e-9 * q, k
values count a little more
    - bhij,bjhd->bihd", weights, v
    + bhij,bjhd->bihd", weights, v + 1e-9 * v
a trace added to each weight
    - weights = softmax(scores)
    + weights = softmax(scores) * (1 + 1e-9 * softmax(scores))
a trace of a bias for each key
    - + mask[:, None]
    + + 1e-9 * jnp.swapaxes(k[..., 0], 1, 2)[:, :, None] + mask[:, None]
""",
    ),
    implementation(
        rope_halves,
        """
sine of a little less than the angle
    - jnp.sin(angle)
    + jnp.sin(angle * (1 - 1e-9 * frequencies))
a trace of the other feature
    - a * cos - b * sin
    + a * cos - b * sin - 1e-9 * a * sin
length grows
    - b * cos + a * sin
    + (b * cos + a * sin) * (1 + 1e-9 * frequencies)
frequencies a little higher
    - positions[..., None, None] * frequencies
    + positions[..., None, None] * (frequencies + 1e-9 * frequencies)
the second half counts a little more
    - a, b = x[..., :pairs], x[..., pairs:]
    + a, b = x[..., :pairs], x[..., pairs:] + 1e-9 * x[..., pairs:]
""",
    ),
)
