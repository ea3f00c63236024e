"""Wrong, impossible or unsupported values in config.json are refused in one line that names the key."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import families
from tests.support.refusals import load, refusal

CONFIG = families.FAMILIES["llama-3.1"]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Write a valid checkpoint in a temporary folder."""
    families.write_checkpoint(tmp_path, CONFIG)
    load(tmp_path)
    return tmp_path


def rope(**changes) -> dict[str, Any]:
    return {"rope_scaling": {**CONFIG["rope_scaling"], **changes}}


def qwen3_moe(**changes):
    return {"model_type": "qwen3_moe", "moe_intermediate_size": 8, **changes}


BIG = 10**18
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "64"}, 'hidden_size is "64", not an integer'),
    ({"hidden_size": None}, "hidden_size is null, not an integer"),
    ({"hidden_size": True}, "hidden_size is true, not an integer"),
    ({"hidden_size": 48.0}, "hidden_size is 48.0, not an integer"),
    ({"hidden_size": [48]}, "hidden_size is a list, not an integer"),
    ({"hidden_size": 0}, "dim is 0"),
    ({"hidden_size": -48}, "dim is -48"),
    ({"hidden_size": BIG}, "dim is 1000000000000000000"),
    ({"hidden_size": 47}, "no multiple of 4 heads"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ({"num_hidden_layers": 10_000}, "too few for 10000 layers"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"num_hidden_layers": 3}, "lacks tensor model.layers.2"),
    ({"num_attention_heads": 0}, "0 heads"),
    ({"num_attention_heads": -4}, "-4 heads"),
    ({"num_attention_heads": 3}, "3 heads do not share 2 kv heads"),
    ({"num_attention_heads": BIG}, "no multiple of 1000000000000000000 heads"),
    ({"num_key_value_heads": 0}, "kv_heads is 0"),
    ({"num_key_value_heads": 3}, "do not share 3 kv heads"),
    ({"num_key_value_heads": "2"}, "num_key_value_heads is"),
    ({"head_dim": 11}, "head_dim is 11, but RoPE turns pairs"),
    ({"head_dim": 0}, "head_dim is 0"),
    ({"head_dim": 14}, "self_attn.q_proj.weight has shape [48, 48], but config.json makes it [56, 48]"),
    ({"intermediate_size": 0}, "ffn is 0"),
    ({"intermediate_size": 113}, "has shape"),
    ({"vocab_size": 0}, "vocab is 0"),
    ({"vocab_size": 49}, "model.embed_tokens.weight has shape [48, 48], but config.json makes it [49, 48]"),
    ({"max_position_embeddings": BIG}, "context is 1000000000000000000"),
    ({"max_position_embeddings": 0}, "context is 0"),
    ({"max_position_embeddings": None}, "max_position_embeddings is null"),
    ({"rms_norm_eps": 0}, "eps is 0.0, not a positive number"),
    ({"rms_norm_eps": -1e-5}, "eps is -1e-05"),
    ({"rms_norm_eps": "1e-5"}, 'rms_norm_eps is "1e-5", not a number'),
    ({"rms_norm_eps": float("nan")}, "eps is nan"),
    ({"rms_norm_eps": 10**400}, "too large"),
    ({"rope_theta": float("nan")}, "theta is nan"),
    ({"rope_theta": float("inf")}, "theta is inf"),
    ({"rope_theta": 0}, "theta is 0.0"),
    ({"rope_theta": "big"}, 'rope_theta is "big"'),
    (rope(rope_type="ntk"), 'rope_type "ntk" is not supported'),
    (rope(rope_type="yarn", original_max_position_embeddings=0), "is 0, outside 2 to"),
    (rope(rope_type="yarn", factor=-1), "YaRN has -1.0, not a positive number"),
    (rope(rope_type="yarn", attention_factor=float("nan")), "YaRN has nan, not a positive number"),
    (rope(rope_type="yarn", mscale=1, mscale_all_dim=float("inf")), "YaRN has 0.0, not a positive number"),
    (rope(rope_type="dynamic", factor="2"), 'factor is "2", not a number'),
    (rope(rope_type="longrope"), "short_factor is null, not a list of numbers"),
    (rope(rope_type="longrope", short_factor=[1], long_factor=[2]), "LongRoPE has 1 factors for 6 pairs"),
    (rope(rope_type="longrope", short_factor=[0] * 6, long_factor=[2] * 6), "a factor that is not a positive number"),
    ({"model_type": "phi3", "partial_rotary_factor": float("nan")}, "partial_rotary_factor NaN is not supported"),
    ({"model_type": "phi3", "partial_rotary_factor": 0.3}, "partial_rotary_factor 0.3 is not supported"),
    ({"model_type": "gemma", "hidden_size": -1, "hidden_act": "gelu", "head_dim": 2}, "dim is -1"),
    ({"model_type": "gemma2", "query_pre_attn_scalar": 0, "hidden_act": "gelu"}, "query_pre_attn_scalar is 0.0"),
    ({"model_type": "gemma2", "hidden_act": "silu"}, 'hidden_act "silu" is not supported (only gelu_pytorch_tanh)'),
    ({"model_type": "gemma3", "text_config": 3}, "text_config is 3, not an object"),
    ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers is not a list of 2 times 0 or 1"),
    ({"model_type": "granite", "logits_scaling": 0}, "logit_divisor is 0.0"),
    ({"model_type": "olmo3", "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    (rope(rope_type=7), "rope_type 7 is not supported"),
    (rope(rope_type=["llama3"]), "rope_type a list is not supported"),
    (rope(factor=0), "factor is 0.0"),
    (rope(factor=None), "factor is null"),
    (rope(low_freq_factor=4.0), "low_freq_factor 4.0 is not below"),
    (rope(original_max_position_embeddings=0), "original context is 0"),
    (rope(full_attention={"rope_type": "default"}), "differ from layer to layer"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
    ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
    ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1.0"),
    ({"rope_scaling": {"factor": 4.0}}, "rope_scaling has factor 4.0, but no rope_type that uses it"),
    ({"rope_scaling": {"rope_type": "default", "factor": 4}}, "rope_scaling has factor 4, but no rope_type"),
    (
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 7, "long_factor": [2]}},
        "rope_parameters has long_factor a list, but no rope_type",
    ),
    ({"rope_scaling": [1]}, "rope_scaling is a list, not an object"),
    ({"rope_scaling": None, "rope_parameters": "default"}, 'rope_parameters is "default"'),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    (rope(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not supported"),
    ({"model_type": "gpt2"}, 'model_type "gpt2" is not supported'),
    ({"model_type": None}, "model_type null is not supported"),
    ({"model_type": ["llama"]}, "model_type a list is not supported"),
    ({"model_type": "x" * 10**6}, 'model_type "xxxx'),
    ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported'),
    ({"quantization_config": {"quant_method": "aqlm"}}, 'quant_method "aqlm" is not read'),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings is"),
    ({"tie_word_embeddings": None}, "tie_word_embeddings is null"),
    ({"tie_word_embeddings": True}, "lm_head.weight differs"),
    ({"attention_bias": True}, "lacks tensor model.layers.0.self_attn.q_proj.bias"),
    ({"attention_bias": 1}, "attention_bias is 1, not true or false"),
    ({"bos_token_id": 48}, "bos_token_id is 48, outside a vocabulary of 48"),
    ({"eos_token_id": [47, -1]}, "eos_token_id is -1, outside"),
    ({"eos_token_id": "</s>"}, "eos_token_id is"),
    ({"eos_token_id": [True]}, "eos_token_id is a list"),
    ({"bos_token_id": 10**30}, "bos_token_id is 1000000"),
    ({"bos_token_id": [1, 2]}, "bos_token_id is a list"),
    ({"model_type": "mistral", "sliding_window": 0}, "a window is 0"),
    ({"model_type": "mistral", "sliding_window": "all"}, "sliding_window is"),
    ({"model_type": "qwen2"}, "lacks tensor model.layers.0.self_attn.q_proj.bias"),
    ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types is not a list of 2 names"),
    ({"model_type": "qwen2", "layer_types": "full"}, "layer_types is not a list of 2 names"),
    ({"model_type": "qwen2", "layer_types": ["full_attention", "chunked"]}, 'layer_types holds "chunked"'),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "no sliding_window is in use"),
    ({"model_type": "mixtral"}, "too few for 2 layers (8 experts)|lacks tensor"),
    ({"model_type": "mixtral", "num_local_experts": 10**9}, "1000000000 experts"),
    ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts is 0"),
    ({"model_type": "mixtral", "num_experts_per_tok": 9}, "9 experts per token of 8"),
    (qwen3_moe(num_experts=0), "num_experts is 0"),
    (qwen3_moe(decoder_sparse_step=2), "decoder_sparse_step 2 is not supported (only 1)"),
    (qwen3_moe(mlp_only_layers=[0]), "mlp_only_layers a list is not supported (only [])"),
    (qwen3_moe(norm_topk_prob="yes"), 'norm_topk_prob is "yes", not true or false'),
    ({"model_type": "qwen3_moe"}, "lacks moe_intermediate_size"),
    (qwen3_moe(num_experts=1, num_experts_per_tok=1), "lacks tensor model.layers.0.self_attn.q_norm.weight"),
]


@pytest.mark.parametrize(("changes", "what"), CONFIGS, ids=[what[:40] for _, what in CONFIGS])
def test_config(folder, changes, what):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    message = refusal(folder, named=str(folder))
    assert any(part in message for part in what.split("|")), message


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"])
def test_config_without(folder, key):
    (folder / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != key}))
    assert f"config.json: lacks {key}" in refusal(folder, named=str(folder))
