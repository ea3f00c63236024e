"""Qwen3: a Llama that normalizes every head of q and k (https://arxiv.org/abs/2505.09388)."""

from llamaspec.model.family import DEFAULTS, KEYS, Architecture, Family

FAMILY = Family(
    "qwen3",
    model="Qwen3ForCausalLM",
    gguf=Architecture("qwen3", has=("qk_norm",)),
    keys=KEYS | {"qkv_bias": ("attention_bias",), "o_bias": ("attention_bias",)},
    defaults=DEFAULTS | {"context": 32_768, "kv_heads": 32, "head_dim": 128, "qkv_bias": False, "o_bias": False},
    switches={"qk_norm": True},
    windows="by layer if on",
    window=4096,
)
