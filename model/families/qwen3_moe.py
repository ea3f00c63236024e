"""Qwen3-MoE: a Qwen3 with experts in every layer (https://arxiv.org/abs/2505.09388)."""

from llamaspec.model.family import DEFAULTS, GGUF_KEYS, KEYS, Architecture, Family
from llamaspec.model.tensors import NAMES

FAMILY = Family(
    "qwen3_moe",
    model="Qwen3MoeForCausalLM",
    gguf=Architecture("qwen3moe", has=("experts", "qk_norm"), keys=GGUF_KEYS | {"ffn": "expert_feed_forward_length"}),
    keys=KEYS
    | {
        "ffn": ("moe_intermediate_size",),
        "experts": ("num_experts", "num_local_experts"),  # the name in releases, and the name in transformers 5
        "experts_per_token": ("num_experts_per_tok",),
        "renormalize_experts": ("norm_topk_prob",),
        "qkv_bias": ("attention_bias",),
        "o_bias": ("attention_bias",),
    },
    names={
        **NAMES,
        "router": "model.layers.{layer}.mlp.gate",
        "expert_gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj",
        "expert_up": "model.layers.{layer}.mlp.experts.{expert}.up_proj",
        "expert_down": "model.layers.{layer}.mlp.experts.{expert}.down_proj",
    },
    defaults=DEFAULTS
    | {
        "context": 32_768,
        "kv_heads": 4,
        "experts": 128,
        "experts_per_token": 8,
        "renormalize_experts": False,
        "qkv_bias": False,
        "o_bias": False,
    },
    switches={"qk_norm": True},
    understood={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},  # all layers have experts
    windows="every layer if on",
    window=4096,
)
