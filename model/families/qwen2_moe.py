"""Qwen1.5-MoE and Qwen2-MoE: a Qwen2 with experts, and with a shared expert that processes every token.

See https://arxiv.org/abs/2407.10671.
"""

from llamaspec.model.families.qwen3_moe import FAMILY as QWEN3
from llamaspec.model.family import DEFAULTS, GGUF_KEYS, GGUF_NAMES, KEYS, Architecture, Family

FAMILY = Family(
    "qwen2_moe",
    model="Qwen2MoeForCausalLM",
    gguf=Architecture(
        "qwen2moe",
        names=GGUF_NAMES
        | {
            "shared_score": "blk.{layer}.ffn_gate_inp_shexp",
            "shared_gate": "blk.{layer}.ffn_gate_shexp",
            "shared_up": "blk.{layer}.ffn_up_shexp",
            "shared_down": "blk.{layer}.ffn_down_shexp",
        },
        keys=GGUF_KEYS | {"ffn": "expert_feed_forward_length", "shared_ffn": "expert_shared_feed_forward_length"},
        has=("experts", "qkv_bias", "shared_ffn"),
        switches={"renormalize_experts": False},
    ),
    keys=KEYS
    | {
        "ffn": ("moe_intermediate_size",),
        "experts": ("num_experts", "num_local_experts"),
        "experts_per_token": ("num_experts_per_tok",),
        "renormalize_experts": ("norm_topk_prob",),
        "shared_ffn": ("shared_expert_intermediate_size",),
        "qkv_bias": ("qkv_bias",),
    },
    names={
        **QWEN3.names,
        "shared_score": "model.layers.{layer}.mlp.shared_expert_gate",
        "shared_gate": "model.layers.{layer}.mlp.shared_expert.gate_proj",
        "shared_up": "model.layers.{layer}.mlp.shared_expert.up_proj",
        "shared_down": "model.layers.{layer}.mlp.shared_expert.down_proj",
    },
    defaults=DEFAULTS
    | {
        "context": 32_768,
        "kv_heads": 16,
        "experts": 60,
        "experts_per_token": 4,
        "renormalize_experts": False,
        "shared_ffn": 5632,
        "qkv_bias": True,
    },
    understood={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None), "use_sliding_window": (False,)},
)
