import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.config import Config
from llamaspec.reference.fused import linear_add, norm_gate_up, norm_linear, norm_qkv
from llamaspec.reference.llama import FeedForward, Layer, LayerCache, Linear, attend, feed_forward
from llamaspec.reference.rope import frequencies
from tests.support.strategies import noises

CONFIG = Config(
    dim=6, layers=1, heads=4, kv_heads=2, head_dim=4, ffn=5, vocab=1, context=9, eps=1e-5, theta=100.0
)  # fmt: skip


def draw_layer(noise) -> Layer:
    width, kv_width = CONFIG.heads * CONFIG.head_dim, CONFIG.kv_heads * CONFIG.head_dim
    noise.blank = False

    def matrix(rows: int, cols: int) -> Linear:
        return Linear(noise(rows, cols), noise(rows))

    return Layer(
        attention_norm=noise(CONFIG.dim),
        q=matrix(width, CONFIG.dim),
        k=matrix(kv_width, CONFIG.dim),
        v=matrix(kv_width, CONFIG.dim),
        o=matrix(CONFIG.dim, width),
        q_norm=None,
        k_norm=None,
        ffn_norm=noise(CONFIG.dim),
        ffn=FeedForward(matrix(CONFIG.ffn, CONFIG.dim), matrix(CONFIG.ffn, CONFIG.dim), matrix(CONFIG.dim, CONFIG.ffn)),
    )


def stacked(*parts: Linear) -> tuple[np.ndarray, np.ndarray]:
    weights, biases = zip(*parts, strict=True)
    return np.concatenate(weights), np.concatenate([bias for bias in biases if bias is not None])


@given(noise=noises)
def test_a_feed_forward_layer_in_two_ops(noise):
    layer = draw_layer(noise)
    assert isinstance(layer.ffn, FeedForward) and layer.ffn.gate is not None and layer.ffn_norm is not None
    x = noise(3, CONFIG.dim)
    hidden = norm_gate_up(x, layer.ffn_norm, *stacked(layer.ffn.gate, layer.ffn.up), eps=CONFIG.eps)
    y = linear_add(hidden, *layer.ffn.down, residual=x)
    exact = feed_forward(x, layer, config=CONFIG)
    np.testing.assert_allclose(y, exact, rtol=1e-12, atol=1e-12 * np.max(np.abs(exact), initial=0))


@given(noise=noises, past=st.integers(0, 4))
def test_a_token_of_each_sequence_is_appended_as_in_the_model(noise, past):
    layer, batch, capacity = draw_layer(noise), 2, 7
    assert layer.attention_norm is not None
    cached = noise(2, batch, capacity, CONFIG.kv_heads, CONFIG.head_dim)
    x = noise(batch, CONFIG.dim)
    positions = np.array([past, past + 2])
    q, k, v = norm_qkv(
        x, layer.attention_norm, *stacked(layer.q, layer.k, layer.v), cached[0], cached[1], positions,
        frequencies(CONFIG.head_dim, theta=CONFIG.theta), eps=CONFIG.eps,
    )  # fmt: skip
    for row, position in enumerate(positions.tolist()):
        before = LayerCache(cached[0, row, :position], cached[1, row, :position])
        _, cache = attend(x[row : row + 1], layer, before, window=None, config=CONFIG)
        np.testing.assert_allclose(k[row, : position + 1], cache.k, rtol=1e-12)
        np.testing.assert_allclose(v[row, : position + 1], cache.v, rtol=1e-12)
        np.testing.assert_array_equal(k[row, position + 1 :], cached[0, row, position + 1 :])
        np.testing.assert_array_equal(v[row, position + 1 :], cached[1, row, position + 1 :])
    assert q.shape == (batch, CONFIG.heads, CONFIG.head_dim)


@pytest.mark.parametrize("position", [0, 3])
def test_a_query_is_turned_and_keeps_its_length(position):
    random = np.random.default_rng(0)
    x, norm, weight = random.normal(size=(1, 6)), random.normal(size=6), random.normal(size=(12, 6))
    cache = np.zeros((1, 4, 1, 4))
    turns = frequencies(4, theta=100.0)
    plain = norm_linear(x, norm, weight[:4], None, eps=1e-5).reshape(1, 1, 4)
    q, _, _ = norm_qkv(x, norm, weight, None, cache, cache, np.array([position]), turns, eps=1e-5)
    np.testing.assert_allclose(np.sum(q**2), np.sum(plain**2))
    assert np.allclose(q, plain) == (position == 0)
