"""The plain Llama page computes the same bits as `reference.llama`, for models without switches."""

from dataclasses import replace

import numpy as np
import pytest

from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.reference import llama, plain_llama
from tests.support.random_models import CONFIGS, SMALL, random_checkpoint

NAMES = ("7 to 1, rescaled", "2 to 1, wide, tied")
PLAIN = [SMALL, replace(SMALL, layers=0), *(CONFIGS[name] for name in NAMES)]


def block(layer: llama.Layer) -> plain_llama.Block:
    """Take a layer's weights. The model must have no switches."""
    ffn = layer.ffn
    assert isinstance(ffn, llama.FeedForward) and ffn.gate and layer.attention_norm is not None
    assert layer.ffn_norm is not None
    q, k, v, o = (matrix.weight for matrix in (layer.q, layer.k, layer.v, layer.o))
    norms = layer.attention_norm, layer.ffn_norm
    return plain_llama.Block(norms[0], q, k, v, o, norms[1], ffn.gate.weight, ffn.up.weight, ffn.down.weight)


@pytest.mark.parametrize("config", PLAIN, ids=["1 to 1", "no layers", *NAMES])
def test_both_pages_give_the_same_bits(config):
    params = load_reference_params(random_checkpoint(config, seed=3))
    weights = plain_llama.Weights(params.embedding, list(map(block, params.layers)), params.norm, params.head)
    tokens = np.random.default_rng(3).integers(config.vocab, size=9)
    expected, _ = llama.forward(params, tokens, llama.empty_cache(config), config=config)
    frequencies = config.rotation().frequencies
    actual = plain_llama.forward(weights, tokens, head_dim=config.head_dim, frequencies=frequencies, eps=config.eps)
    assert actual.shape == (9, config.vocab) and np.array_equal(actual, expected)


def test_llama_3_8b_has_the_weights_that_the_page_counts():
    dim, ffn, layer_count, vocab = 4096, 14336, 32, 128256
    a_layer = 2 * dim**2 + 2 * dim * 1024 + 3 * dim * ffn
    assert round(a_layer / 1e6) == 218
    assert round((layer_count * (a_layer + 2 * dim) + 2 * vocab * dim + dim) / 1e9, 2) == 8.03
