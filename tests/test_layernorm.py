"""LayerNorm, and what comes with it: what llama.cpp lacks, and what pages that know only Llamas refuse."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.checkpoints.checkpoint import CheckpointError
from model.checkpoints.checks import check_model
from model.family import families
from reference.layernorm import layernorm
from reference.qk_norm import head_qk_norm
from reference.rmsnorm import rmsnorm
from tests.random_models import SMALL
from tests.strategies import noises

WIDE = replace(SMALL, head_dim=SMALL.dim // SMALL.heads, layer_norm=True, tied=False, ffn_bias=False, scaling=None)


@given(noise=noises, shift=st.integers(-100, 100))
def test_layernorm_is_rmsnorm_of_what_is_centred_wherever_it_was(noise, shift):
    x, weight, bias = noise(3, 16), noise(16), noise(16)
    centred = x - np.mean(x.astype(np.float64), axis=-1, keepdims=True)
    due = rmsnorm(centred, weight, eps=0.5) + bias
    moved = layernorm(x.astype(np.float64) + shift, weight, bias, eps=0.5)
    # float64 rounds x + shift, and the mean of what was moved, by 2^-53 of their size, times 1 / sqrt(eps).
    size = np.max(np.abs(x)) + abs(shift)
    limit = 64 * 2.0**-53 * (np.abs(weight) * (size + 1) * np.sqrt(2) + np.abs(due) + np.abs(bias))
    assert (np.abs(moved - due) <= limit).all()


def test_heads_have_weights_of_their_own():
    x, weight = np.random.default_rng(0).normal(size=(2, 3, 4)), np.arange(12.0)
    q, k = head_qk_norm(x, x[:, :1], weight, weight[:4], eps=1e-5)
    for head in range(3):
        own = layernorm(x[:, head], weight[4 * head : 4 * head + 4], None, eps=1e-5)
        np.testing.assert_array_equal(q[:, head], own)
    np.testing.assert_array_equal(k, q[:, :1])


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({}, None),
        ({"parallel_residual": True, "head_qk_norm": True, "rotary_dim": 2}, None),
        ({"tied": True}, "head that is the embedding"),
        ({"head_dim": WIDE.head_dim + 2}, f"{WIDE.heads} heads of {WIDE.head_dim + 2} for {WIDE.dim} features"),
        ({"layer_norm": False}, "model without LayerNorm"),
        ({"gated": False, "activation": "gelu_tanh"}, "activation gelu_tanh"),
    ],
)
def test_what_llama_cpp_lacks_is_named(changes, lacking):
    assert families()["stablelm"].gguf.lacks(replace(WIDE, **changes)) == lacking


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gated": False}, "without a gate, of silu"),
        ({"activation": "relu2"}, "with a gate, of relu2"),
        ({"layer_norm": False, "head_qk_norm": True}, "norms of heads by RMSNorm"),
        ({"qk_norm": True}, "LayerNorm and norms of another family"),
        ({"post_norms": True}, "that are LayerNorms"),
        ({"parallel_residual": True, "pre_norms": False}, "norms of another family"),
        ({"experts": 2, "experts_per_token": 1}, "experts with the norms"),
    ],
)
def test_switches_that_have_no_meaning_together_are_refused(changes, words):
    with pytest.raises(CheckpointError, match=words):
        check_model("m", replace(WIDE, **changes), bos=None, stops=frozenset())
