"""Mixtral: a Mistral with experts (https://arxiv.org/abs/2401.04088)."""

from llamaspec.model.families.llama import ARCHITECTURE
from llamaspec.model.family import DEFAULTS, KEYS, Family, RopeKeys

FAMILY = Family(
    "mixtral",
    model="MixtralForCausalLM",
    gguf=ARCHITECTURE,
    keys=KEYS | {"experts": ("num_local_experts",), "experts_per_token": ("num_experts_per_tok",)},
    defaults=DEFAULTS | {"context": 131_072, "kv_heads": 8, "eps": 1e-5, "experts": 8, "experts_per_token": 2},
    rope=RopeKeys(theta=1e6),
    windows="every layer",
    bos=1,
    stop=2,
)
