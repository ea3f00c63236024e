"""Llama 1 to 3.2, and other models with the model_type llama, such as TinyLlama and SmolLM2."""

from llamaspec.model.family import DEFAULTS, KEYS, Architecture, Family

# llama.cpp also uses the architecture "llama" for Mistral and Mixtral.
ARCHITECTURE = Architecture(
    "llama", interleaved=True, has=("experts", "qkv_bias", "o_bias", "ffn_bias"), llama3_scaling=True
)

FAMILY = Family(
    "llama",
    model="LlamaForCausalLM",
    gguf=ARCHITECTURE,
    keys=KEYS | {"qkv_bias": ("attention_bias",), "o_bias": ("attention_bias",), "ffn_bias": ("mlp_bias",)},
    defaults=DEFAULTS | {"context": 2048, "kv_heads": None, "qkv_bias": False, "o_bias": False, "ffn_bias": False},
    bos=1,
    stop=2,
)
