"""Wrong, impossible or unsupported values in config.json are refused in one line that names the key."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import families
from tests.support.refusals import load, mentions, refusal

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
    ({"hidden_size": "64"}, 'hidden_size "64" integer'),
    ({"hidden_size": None}, "hidden_size null integer"),
    ({"hidden_size": True}, "hidden_size true integer"),
    ({"hidden_size": 48.0}, "hidden_size 48.0 integer"),
    ({"hidden_size": [48]}, "hidden_size list integer"),
    ({"hidden_size": 0}, "config.json: dim 0"),
    ({"hidden_size": -48}, "dim -48"),
    ({"hidden_size": BIG}, "dim 1000000000000000000"),
    ({"hidden_size": 47}, "hidden_size 47 multiple 4 heads"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000"),
    ({"num_hidden_layers": 10_000}, "too few 10000 layers"),
    ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
    ({"num_hidden_layers": 3}, "lacks tensor model.layers.2"),
    ({"num_attention_heads": 0}, "multiple 0 heads"),
    ({"num_attention_heads": -4}, "multiple -4 heads"),
    ({"num_attention_heads": 3}, "number of heads 3 multiple 2 kv heads"),
    ({"num_attention_heads": BIG}, "multiple 1000000000000000000 heads"),
    ({"num_key_value_heads": 0}, "kv_heads 0"),
    ({"num_key_value_heads": 3}, "number of heads 4 multiple 3 kv heads"),
    ({"num_key_value_heads": "2"}, 'num_key_value_heads "2" integer'),
    ({"head_dim": 11}, "head_dim 11 RoPE pairs"),
    ({"head_dim": 0}, "head_dim 0"),
    ({"head_dim": 14}, "self_attn.q_proj.weight shape [48 48] config.json [56 48]"),
    ({"intermediate_size": 0}, "ffn 0"),
    ({"intermediate_size": 113}, "mlp.gate_proj.weight has shape [112 48] [113 48]"),
    ({"vocab_size": 0}, "vocab 0"),
    ({"vocab_size": 49}, "model.embed_tokens.weight shape [48 48] config.json [49 48]"),
    ({"max_position_embeddings": BIG}, "context 1000000000000000000"),
    ({"max_position_embeddings": 0}, "config.json: context 0"),
    ({"max_position_embeddings": None}, "max_position_embeddings null"),
    ({"rms_norm_eps": 0}, "eps 0.0 positive number"),
    ({"rms_norm_eps": -1e-5}, "eps -1e-05"),
    ({"rms_norm_eps": "1e-5"}, 'rms_norm_eps "1e-5" number'),
    ({"rms_norm_eps": float("nan")}, "eps nan"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps too large"),
    ({"rope_theta": float("nan")}, "theta nan"),
    ({"rope_theta": float("inf")}, "theta inf"),
    ({"rope_theta": 0}, "theta 0.0"),
    ({"rope_theta": "big"}, 'rope_theta "big"'),
    (rope(rope_type="ntk"), 'rope_type "ntk" not supported'),
    (rope(rope_type="yarn", original_max_position_embeddings=0), "original_max_position_embeddings 0 2"),
    (rope(rope_type="yarn", factor=-1), "YaRN -1.0 positive number"),
    (rope(rope_type="yarn", attention_factor=float("nan")), "YaRN nan positive number"),
    (rope(rope_type="yarn", mscale=1, mscale_all_dim=float("inf")), "YaRN 0.0 positive number"),
    (rope(rope_type="dynamic", factor="2"), 'factor "2" number'),
    (rope(rope_type="longrope"), "short_factor null list numbers"),
    (rope(rope_type="longrope", short_factor=[1], long_factor=[2]), "LongRoPE 1 factors 6"),
    (rope(rope_type="longrope", short_factor=[0] * 6, long_factor=[2] * 6), "LongRoPE factor positive number"),
    ({"model_type": "phi3", "partial_rotary_factor": float("nan")}, "partial_rotary_factor NaN not supported"),
    ({"model_type": "phi3", "partial_rotary_factor": 0.3}, "partial_rotary_factor 0.3 not supported"),
    ({"model_type": "gemma", "hidden_size": -1, "hidden_act": "gelu", "head_dim": 2}, "dim -1"),
    ({"model_type": "gemma2", "query_pre_attn_scalar": 0, "hidden_act": "gelu"}, "query_pre_attn_scalar 0.0"),
    ({"is_causal": False}, "is_causal false not supported only true"),
    ({"model_type": "gemma2", "hidden_act": "silu"}, 'hidden_act "silu" not supported only gelu_pytorch_tanh'),
    ({"model_type": "gemma3", "text_config": 3}, "text_config 3 object"),
    ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers list 2 0 1"),
    ({"model_type": "granite", "logits_scaling": 0}, "logit_divisor 0.0"),
    ({"model_type": "olmo3", "sliding_window_pattern": 0}, "sliding_window_pattern 0"),
    (rope(rope_type=7), "rope_type 7 not supported"),
    (rope(rope_type=["llama3"]), "rope_type list not supported"),
    (rope(factor=0), "factor 0.0"),
    (rope(factor=None), "config.json: factor null"),
    (rope(low_freq_factor=4.0), "low_freq_factor high_freq_factor got 4.0"),
    (rope(original_max_position_embeddings=0), "original context 0"),
    (rope(full_attention={"rope_type": "default"}), "rope_scaling separate settings kinds layers not supported"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks key low_freq_factor"),
    ({"rope_scaling": {"type": "linear"}}, "lacks the key factor"),
    ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor -1.0"),
    ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor 4.0 lacks rope_type"),
    ({"rope_scaling": {"rope_type": "default", "factor": 4}}, "rope_scaling.factor 4 lacks rope_type"),
    (
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 7, "long_factor": [2]}},
        "rope_parameters.long_factor list lacks rope_type",
    ),
    ({"rope_scaling": [1]}, "rope_scaling list object"),
    ({"rope_scaling": None, "rope_parameters": "default"}, 'rope_parameters "default"'),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 not supported"),
    (rope(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 not supported"),
    ({"model_type": "gpt2"}, 'model_type "gpt2" not supported'),
    ({"model_type": None}, "model_type null not supported"),
    ({"model_type": ["llama"]}, "model_type list not supported"),
    ({"model_type": "x" * 10**6}, 'model_type "xxxx'),
    ({"hidden_act": "gelu"}, 'hidden_act "gelu" not supported'),
    ({"quantization_config": {"quant_method": "aqlm"}}, 'quant_method "aqlm" not supported'),
    ({"tie_word_embeddings": "false"}, 'tie_word_embeddings "false" true'),
    ({"tie_word_embeddings": None}, "tie_word_embeddings null"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings lm_head.weight differs"),
    ({"attention_bias": True}, "lacks tensor model.layers.0.self_attn.q_proj.bias"),
    ({"attention_bias": 1}, "attention_bias 1 true false"),
    ({"bos_token_id": 48}, "bos_token_id 48 vocabulary 48"),
    ({"eos_token_id": [47, -1]}, "eos_token_id -1 outside"),
    ({"eos_token_id": "</s>"}, 'eos_token_id "</s>" integer list'),
    ({"eos_token_id": [True]}, "eos_token_id is a list expected"),
    ({"bos_token_id": 10**30}, f"bos_token_id {10**30}"),
    ({"bos_token_id": [1, 2]}, "bos_token_id is a list expected"),
    ({"model_type": "mistral", "sliding_window": 0}, "attention window 0"),
    ({"model_type": "mistral", "sliding_window": "all"}, 'sliding_window "all" integer'),
    ({"model_type": "qwen2"}, "lacks tensor model.layers.0.self_attn.q_proj.bias"),
    ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types list 2 names"),
    ({"model_type": "qwen2", "layer_types": "full"}, "layer_types list 2 names"),
    ({"model_type": "qwen2", "layer_types": ["full_attention", "chunked"]}, 'layer_types "chunked"'),
    (
        {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2},
        "layer_types sliding_attention sliding_window not set",
    ),
    ({"model_type": "mixtral"}, "too few 2 layers 8 experts|lacks tensor block_sparse_moe"),
    ({"model_type": "mixtral", "num_local_experts": 10**9}, "experts 1000000000 outside"),
    ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts 0"),
    ({"model_type": "mixtral", "num_experts_per_tok": 9}, "9 experts per token 8"),
    (qwen3_moe(num_experts=0), "num_experts 0"),
    (qwen3_moe(decoder_sparse_step=2), "decoder_sparse_step 2 not supported only 1"),
    (qwen3_moe(mlp_only_layers=[0]), "mlp_only_layers list not supported only []"),
    (qwen3_moe(norm_topk_prob="yes"), 'norm_topk_prob "yes" true false'),
    ({"model_type": "qwen3_moe"}, "lacks key moe_intermediate_size"),
    (qwen3_moe(num_experts=1, num_experts_per_tok=1), "lacks tensor model.layers.0.self_attn.q_norm.weight"),
]


@pytest.mark.parametrize(("changes", "what"), CONFIGS, ids=[what[:40] for _, what in CONFIGS])
def test_config(folder, changes, what):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    message = refusal(folder, named=str(folder))
    assert mentions(message, what), message


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"])
def test_config_without(folder, key):
    (folder / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != key}))
    assert f"config.json: lacks the key {key}" in refusal(folder, named=str(folder))
