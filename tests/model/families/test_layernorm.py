"""LayerNorm and related options: computed values, options that llama.cpp lacks, and options that are refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.checkpoints.checks import check_model
from llamaspec.model.checkpoints.gguf.write import write_gguf
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.family import families
from llamaspec.model.tensors import tensor_shapes
from llamaspec.model.weights.loading import abstract_params
from llamaspec.model.weights.params import weight_bytes
from llamaspec.reference.layernorm import layernorm
from llamaspec.reference.qk_norm import head_qk_norm
from llamaspec.reference.rmsnorm import rmsnorm
from tests.support.random_models import SMALL, random_checkpoint
from tests.support.refusals import mentions
from tests.support.strategies import noises

WIDE = replace(SMALL, head_dim=SMALL.dim // SMALL.heads, layer_norm=True, tied=False, ffn_bias=False, scaling=None)


@given(noise=noises, shift=st.integers(-100, 100))
def test_layernorm_is_rmsnorm_of_what_is_centred_wherever_it_was(noise, shift):
    x, weight, bias = noise(3, 16), noise(16), noise(16)
    centred = x - np.mean(x.astype(np.float64), axis=-1, keepdims=True)
    expected = rmsnorm(centred, weight, eps=0.5) + bias
    moved = layernorm(x.astype(np.float64) + shift, weight, bias, eps=0.5)
    # float64 rounds x + shift, and the mean of that, by 2^-53 of their size, times 1 / sqrt(eps).
    size = np.max(np.abs(x)) + abs(shift)
    limit = 64 * 2.0**-53 * (np.abs(weight) * (size + 1) * np.sqrt(2) + np.abs(expected) + np.abs(bias))
    assert (np.abs(moved - expected) <= limit).all()


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


def test_heads_must_fill_the_features_for_transformers():
    """The class StableLmForCausalLM divides the features by the heads; it would refuse the written file."""
    assert families()["stablelm"].differences(WIDE) == []
    assert families()["stablelm"].differences(replace(WIDE, head_dim=WIDE.head_dim + 2)) == ["head_dim"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gated": False}, "activation silu not supported without a gate"),
        ({"activation": "relu2"}, "activation relu2 not supported with a gate"),
        ({"layer_norm": False, "head_qk_norm": True}, "norms head RMSNorm"),
        ({"qk_norm": True}, "this combination of LayerNorm, q and k norms"),
        ({"post_norms": True}, "LayerNorm after attention"),
        ({"parallel_residual": True, "pre_norms": False}, "combination LayerNorm norms parallel blocks not supported"),
        ({"experts": 2, "experts_per_token": 1}, "experts are not supported with the norms"),
    ],
)
def test_switches_that_have_no_meaning_together_are_refused(changes, words):
    with pytest.raises(CheckpointError, match=r"^m: ") as caught:
        check_model("m", replace(WIDE, **changes), bos=None, stops=frozenset())
    assert mentions(str(caught.value), words)


HEADS = replace(WIDE, parallel_residual=True, head_qk_norm=True, rotary_dim=2)


def test_too_many_heads_are_refused_before_their_norms_are_listed(tmp_path):
    """2^28 heads in config.json are refused before the reader lists one norm tensor per head."""
    write_huggingface(random_checkpoint(HEADS, seed=0), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    values = json.loads(config.read_text())
    many = {"hidden_size": 2**28 * HEADS.head_dim, "num_attention_heads": 2**28, "num_key_value_heads": 2**28}
    config.write_text(json.dumps(values | many))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "model")
    assert mentions(str(caught.value), "2 layers 268435456 heads")


def test_a_gguf_with_the_norms_of_fewer_heads_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(random_checkpoint(HEADS, seed=0), path)
    key = b"stablelm.attention.head_count"
    raw = path.read_bytes()
    at = raw.index(key + b"\x04\x00\x00\x00") + len(key) + 4
    path.write_bytes(raw[:at] + (2 * HEADS.heads).to_bytes(4, "little") + raw[at + 4 :])
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert mentions(str(caught.value), f"{path} blk.0.attn_q_norm.weight {HEADS.heads} {2 * HEADS.heads}")


def test_every_head_has_a_norm_in_the_table_of_weights():
    names = [name for name in tensor_shapes(HEADS) if "layers.0" in name and "norm" in name]
    heads = [f"self_attn.{part}_layernorm.norms.{head}.weight" for part in "qk" for head in range(HEADS.heads)]
    assert names == [f"model.layers.0.{name}" for name in ("input_layernorm.weight", "input_layernorm.bias", *heads)]


def test_the_one_norm_of_a_parallel_block_is_counted_once():
    numbers = sum(int(np.prod(shape)) for shape in tensor_shapes(HEADS).values())
    assert weight_bytes(abstract_params(HEADS, dtype=np.dtype(np.float32), positions=1)) == 4 * numbers
