"""Qwen2 and 2.5: a Llama with biases of q, k and v (https://arxiv.org/abs/2407.10671)."""

from llamaspec.model.family import DEFAULTS, Architecture, Family

FAMILY = Family(
    "qwen2",
    model="Qwen2ForCausalLM",
    gguf=Architecture("qwen2", has=("qkv_bias",)),
    defaults=DEFAULTS | {"context": 32_768, "kv_heads": 32},
    switches={"qkv_bias": True},
    windows="by layer if on",
    window=4096,
)
