"""`reference.backward` agrees with JAX's automatic differentiation of each layer in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.reference import llama
from llamaspec.reference.attention import causal_mask
from llamaspec.reference.backward.attention import attention_backward
from llamaspec.reference.backward.embedding import embedding_backward
from llamaspec.reference.backward.linear import linear_backward
from llamaspec.reference.backward.llama import loss_and_gradient
from llamaspec.reference.backward.moe import moe_backward
from llamaspec.reference.backward.qk_norm import qk_norm_backward
from llamaspec.reference.backward.rmsnorm import rmsnorm_backward
from llamaspec.reference.backward.rope import rope_halves_backward
from llamaspec.reference.backward.softmax import softmax_backward
from llamaspec.reference.backward.swiglu import swiglu_backward
from llamaspec.reference.losses import cross_entropy
from llamaspec.reference.moe import route
from llamaspec.reference.rope import frequencies, rope_halves
from llamaspec.reference.softmax import softmax
from tests.support.random_models import CONFIGS, SMALL, random_checkpoint
from tests.support.strategies import seeds, share_of

CLOSE = 1e-12  # relative to the largest entry: a few hundred roundings of float64; a wrong term is of order 1


def assert_is_vjp(function, inputs, dy, slopes):
    """Assert that `slopes` equal the gradients that `jax.vjp` gives in float64 for the output gradient `dy`."""
    with jax.enable_x64(True):
        expected = [np.asarray(a) for a in jax.vjp(function, *map(jnp.asarray, inputs))[1](jnp.asarray(dy))]
    assert len(expected) == len(slopes)
    for slope, exact in zip(slopes, expected, strict=True):
        assert slope.shape == exact.shape and slope.dtype == np.float64
        assert np.abs(slope - exact).max(initial=0) <= CLOSE * max(1, np.abs(exact).max(initial=0))


def normal(seed: int):
    return np.random.default_rng(seed).normal


def jnp_rmsnorm(x, weight, eps=1e-5):
    return weight * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps)


def jnp_swiglu(a, b):
    return jax.nn.silu(a) * b


sizes = st.sampled_from([1, 4])  # each new shape compiles
few = settings(max_examples=share_of(20, part=10))


@few
@given(seed=seeds, tokens=sizes, rows=sizes, cols=sizes)
def test_linear(seed, tokens, rows, cols):
    draw = normal(seed)
    x, w, b, dy = (draw(size=s) for s in ((2, tokens, cols), (rows, cols), rows, (2, tokens, rows)))
    assert_is_vjp(lambda x, w, b: x @ w.T + b, (x, w, b), dy, linear_backward(x, w, dy))


@few
@given(seed=seeds, tokens=sizes, dim=st.sampled_from([1, 2, 9]))
def test_rmsnorm(seed, tokens, dim):
    draw = normal(seed)
    x, g, dy = draw(size=(2, tokens, dim)), draw(size=dim), draw(size=(2, tokens, dim))
    assert_is_vjp(jnp_rmsnorm, (x, g), dy, rmsnorm_backward(x, g, dy, eps=1e-5))


@few
@given(seed=seeds, tokens=sizes, heads=sizes, pairs=sizes, start=st.integers(0, 100))
def test_rope(seed, tokens, heads, pairs, start):
    draw = normal(seed)
    at, turns = start + np.arange(tokens), frequencies(2 * pairs, theta=100.0)
    x, dy = draw(size=(tokens, heads, 2 * pairs)), draw(size=(tokens, heads, 2 * pairs))

    def turned(x):
        a, b = jnp.split(x, 2, axis=-1)
        angles = at[:, None, None] * turns
        return jnp.concatenate(
            [a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1
        )

    assert_is_vjp(turned, (x,), dy, (rope_halves_backward(dy, at, turns),))
    # A rotation preserves inner products: <R x, dy> = <x, R^T dy>.
    forward = np.sum(rope_halves(x, at, turns) * dy)
    assert (
        abs(forward - np.sum(x * rope_halves_backward(dy, at, turns))) <= CLOSE * np.sum(np.abs(x)) * np.abs(dy).max()
    )


@few
@given(seed=seeds, rows=sizes, n=st.integers(1, 9), hidden=st.integers(0, 3))
def test_softmax(seed, rows, n, hidden):
    draw = normal(seed)
    x, dp = 3 * draw(size=(rows, n)), draw(size=(rows, n))
    assert_is_vjp(lambda x: jax.nn.softmax(x, axis=-1), (x,), dp, (softmax_backward(softmax(x), dp),))
    x[:, : min(hidden, n)] = -np.inf
    dx = softmax_backward(softmax(x), dp)
    assert (dx[np.isneginf(x)] == 0).all()
    assert np.abs(dx.sum(axis=-1)).max() <= CLOSE  # adding a constant to all scores changes nothing


@given(seed=seeds, scale=st.sampled_from([1.0, 30.0, 1000.0]))
def test_swiglu(seed, scale):
    draw = normal(seed)
    a, b, dy = scale * draw(size=7), draw(size=7), draw(size=7)
    assert_is_vjp(jnp_swiglu, (a, b), dy, swiglu_backward(a, b, dy))


@given(seed=seeds, tokens=st.integers(1, 12), vocab=st.integers(1, 6))
@example(seed=0, tokens=12, vocab=1)  # the same id twelve times
def test_embedding(seed, tokens, vocab):
    rng = np.random.default_rng(seed)
    ids, dx = rng.integers(0, vocab, (2, tokens)), rng.normal(size=(2, tokens, 3))
    table = rng.normal(size=(vocab, 3))
    assert_is_vjp(lambda table: table[ids], (table,), dx, (embedding_backward(ids, dx, vocab=vocab),))


@pytest.mark.parametrize("id", [-1, 4])
def test_ids_outside_the_vocabulary_have_no_gradient(id):
    with pytest.raises(IndexError, match=r"0\.\.3"):
        embedding_backward(np.array([id]), np.ones((1, 2)), vocab=4)


@few
@given(seed=seeds, heads=sizes, kv_heads=sizes)
def test_qk_norm(seed, heads, kv_heads):
    draw = normal(seed)
    q, k = draw(size=(3, heads, 4)), draw(size=(3, kv_heads, 4))
    gq, gk, dq, dk = draw(size=4), draw(size=4), draw(size=q.shape), draw(size=k.shape)
    slopes = qk_norm_backward(q, k, gq, gk, dq, dk, eps=1e-5)
    assert_is_vjp(jnp_rmsnorm, (q, gq), dq, slopes[::2])
    assert_is_vjp(jnp_rmsnorm, (k, gk), dk, slopes[1::2])


@few
@given(
    seed=seeds,
    queries=sizes,
    before=st.sampled_from([0, 3]),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    window=st.sampled_from([None, 1, 2]),
)
def test_attention(seed, queries, before, kv_heads, group, window):
    draw, keys = normal(seed), before + queries
    q, do = draw(size=(2, queries, kv_heads * group, 4)), draw(size=(2, queries, kv_heads * group, 4))
    k, v = draw(size=(2, keys, kv_heads, 4)), draw(size=(2, keys, kv_heads, 4))
    mask = causal_mask(queries, keys, offset=before, window=window)

    def attend(q, k, v):
        k, v = (jnp.repeat(a, group, axis=2) for a in (k, v))
        p = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k) / 2 + mask, axis=-1)
        return jnp.einsum("bhij,bjhd->bihd", p, v)

    slopes = attention_backward(q, k, v, mask, do)
    assert_is_vjp(attend, (q, k, v), do, slopes)
    unseen = np.isneginf(mask).all(axis=0)
    assert (slopes[1][:, unseen] == 0).all() and (slopes[2][:, unseen] == 0).all()


def test_attention_to_nothing_has_no_gradient():
    q = np.ones((1, 1, 2))
    for slope in attention_backward(q, q, q, np.full((1, 1), -np.inf), q):
        np.testing.assert_array_equal(slope, np.zeros((1, 1, 2)))


def test_heads_that_cannot_share_are_refused():
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        q, k = np.ones((1, 3, 2)), np.ones((1, 2, 2))
        attention_backward(q, k, k, np.zeros((1, 1)), q)


@few
@given(seed=seeds, tokens=sizes, experts=sizes, per_token=st.integers(1, 3), renormalized=st.booleans())
def test_moe(seed, tokens, experts, per_token, renormalized):
    per_token, draw = min(per_token, experts), normal(seed)
    x, router, dy = draw(size=(tokens, 4)), draw(size=(experts, 4)), draw(size=(tokens, 4))
    gate, up, down = draw(size=(experts, 3, 4)), draw(size=(experts, 3, 4)), draw(size=(experts, 4, 3))
    chosen, _ = route(x, router, experts_per_token=per_token)

    def mixed(x, router, gate, up, down):
        p = jax.nn.softmax(x @ router.T, axis=-1)
        weights = jnp.take_along_axis(p, chosen, axis=-1)
        hidden = jnp_swiglu(jnp.einsum("td,efd->tef", x, gate), jnp.einsum("td,efd->tef", x, up))
        outputs = jnp.einsum("tef,edf->ted", hidden, down)
        picked = jnp.take_along_axis(outputs, chosen[..., None], axis=1)
        weights = weights / weights.sum(axis=-1, keepdims=True) if renormalized else weights
        return jnp.einsum("tc,tcd->td", weights, picked)

    slopes = moe_backward(x, router, gate, up, down, dy, experts_per_token=per_token, renormalized=renormalized)
    assert_is_vjp(mixed, (x, router, gate, up, down), dy, slopes)


def arrays_of(params: llama.Params) -> list[np.ndarray]:
    return [a for a in jax.tree.leaves(params) if a is not None]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_of_a_whole_model_is_that_of_its_loss(name):
    config = CONFIGS[name]
    params = load_reference_params(random_checkpoint(config, seed=3, dtype=np.float64))
    rng = np.random.default_rng(3)
    tokens, weights = rng.integers(0, config.vocab, 9), rng.uniform(0, 1, 9)
    loss, gradient = loss_and_gradient(params, tokens, weights, config=config)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    direction = jax.tree.map(lambda a: rng.normal(size=a.shape), params)

    def loss_at(step: float) -> float:
        moved = jax.tree.map(lambda a, d: np.asarray(a, np.float64) + step * d, params, direction)
        logits, _ = llama.forward(moved, tokens, llama.empty_cache(config), config=config)
        return cross_entropy(logits[:-1], tokens[1:], weights[1:])

    assert abs(loss - loss_at(0.0)) <= CLOSE * abs(loss)
    expected = sum(float(np.sum(s * d)) for s, d in zip(arrays_of(gradient), arrays_of(direction), strict=True))
    # The error of a central difference falls with the square of the step; of two combined differences, with its fourth
    # power.
    wide, narrow = ((loss_at(h) - loss_at(-h)) / (2 * h) for h in (2e-4, 1e-4))
    measured = (4 * narrow - wide) / 3
    assert abs(measured - expected) <= max(1e-7 * abs(expected), 4 * abs(narrow - wide))
    assert abs(narrow - wide) <= 1e-2 * abs(expected)  # otherwise the extrapolation above means nothing


def test_the_gradient_at_several_depths_is_the_mean_of_the_smaller_models():
    """The first d layers are a model of their own; elastic depth averages the losses and gradients of these models."""
    config = replace(SMALL, layers=3)
    params = load_reference_params(random_checkpoint(config, seed=3, dtype=np.float64))
    rng = np.random.default_rng(3)
    tokens, weights = rng.integers(0, config.vocab, 9), rng.uniform(0, 1, 9)
    loss, gradient = loss_and_gradient(params, tokens, weights, config=config, depths=(1, 3))
    nothing = jax.tree.map(np.zeros_like, params)
    losses, gradients = [], []
    for depth in (1, 3):
        smaller = params._replace(layers=params.layers[:depth])
        own_loss, own = loss_and_gradient(smaller, tokens, weights, config=replace(config, layers=depth))
        losses.append(own_loss)
        gradients.append(own._replace(layers=[*own.layers, *nothing.layers[depth:]]))
    assert abs(loss - np.mean(losses)) <= CLOSE * loss
    expected = jax.tree.map(lambda *slopes: np.mean(slopes, axis=0), *gradients)
    for slope, mean in zip(arrays_of(gradient), arrays_of(expected), strict=True):
        assert np.abs(slope - mean).max() <= CLOSE * max(1, np.abs(mean).max())
