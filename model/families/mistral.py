"""Mistral: a Llama with sliding-window attention in every layer (https://arxiv.org/abs/2310.06825)."""

from llamaspec.model.families.llama import ARCHITECTURE
from llamaspec.model.family import DEFAULTS, Family

FAMILY = Family(
    "mistral",
    model="MistralForCausalLM",
    gguf=ARCHITECTURE,
    defaults=DEFAULTS | {"context": 131_072, "kv_heads": 8},
    windows="every layer",
    window=4096,
    bos=1,
    stop=2,
)
