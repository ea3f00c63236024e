"""Granite 3, dense: a Llama with multipliers for embeddings, attention scores, residuals and logits.

The multipliers come from muP (Yang et al., 2022, https://arxiv.org/abs/2203.03466).
"""

from collections.abc import Mapping
from typing import Any

from llamaspec.model.family import DEFAULTS, GGUF_KEYS, KEYS, Architecture, Family
from llamaspec.reference.config import Config


def _scale(multiplier: float, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_scale": None if multiplier == values["head_dim"] ** -0.5 else multiplier}


def _multiplier(config: Config) -> float:
    return config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale


def read(fields: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the multiplier of attention scores from config.json."""
    return _scale(fields.number("attention_multiplier", 1.0), values)


def read_gguf(metadata: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the multiplier of attention scores from a GGUF file; if it is absent or 0, use 1 / sqrt(head_dim)."""
    return _scale(metadata.decimal("attention.scale", 0.0) or values["head_dim"] ** -0.5, values)


FAMILY = Family(
    "granite",
    model="GraniteForCausalLM",
    gguf=Architecture(
        "granite",
        interleaved=True,
        keys=GGUF_KEYS
        | {"embedding_scale": "embedding_scale", "residual_scale": "residual_scale", "logit_divisor": "logit_scale"},
        own=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
        derived=("attention_scale",),
        read=read_gguf,
        write=lambda config: {"attention.scale": _multiplier(config)},
    ),
    keys=KEYS
    | {
        "embedding_scale": ("embedding_multiplier",),
        "residual_scale": ("residual_multiplier",),
        "logit_divisor": ("logits_scaling",),
        "qkv_bias": ("attention_bias",),
        "o_bias": ("attention_bias",),
        "ffn_bias": ("mlp_bias",),
    },
    defaults=DEFAULTS | {"context": 2048, "kv_heads": None, "qkv_bias": False, "o_bias": False, "ffn_bias": False},
    derived=("attention_scale",),
    read=read,
    write=lambda config: {"attention_multiplier": _multiplier(config)},
    bos=1,
    stop=2,
)
