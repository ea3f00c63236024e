"""gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, and attention windows in every other layer.

See https://arxiv.org/abs/2508.10925. The release stores the experts' matrices in MXFP4, in one tensor for all experts
of a layer.
"""

from collections.abc import Mapping
from typing import Any

from llamaspec.model.families.gemma2 import WINDOW, write_window
from llamaspec.model.family import (
    DEFAULTS,
    GGUF_KEYS,
    GGUF_NAMES,
    KEYS,
    Architecture,
    Family,
    RopeKeys,
    windows_but_every,
)
from llamaspec.model.tensors import NAMES
from llamaspec.reference.rope import YarnScaling, yarn_magnitude

EXPERTS = "model.layers.{layer}.mlp.experts"
SWITCHES = {"sinks": True, "expert_bias": True, "activation": "clamped_silu"}


def read(fields: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers' default rescaling of RoPE if config.json has no key for a rescaling."""
    if fields.values.get("rope_scaling") or fields.values.get("rope_parameters"):
        return {}
    return {"scaling": YarnScaling(32.0, 4096, yarn_magnitude(32.0), truncate=False)}


def read_gguf(metadata: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the windows from a GGUF file: every other layer has a window, beginning with the first layer."""
    windows = windows_but_every(2, metadata.integer(WINDOW, 128), layers=values["layers"])
    return {"windows": windows if any(windows) else None}


FAMILY = Family(
    "gpt_oss",
    model="GptOssForCausalLM",
    gguf=Architecture(
        "gpt-oss",
        names=GGUF_NAMES | {"ffn_norm": "blk.{layer}.post_attention_norm", "sinks": "blk.{layer}.attn_sinks.weight"},
        keys=GGUF_KEYS | {"ffn": "expert_feed_forward_length"},
        has=("experts", "qkv_bias", "o_bias"),
        switches=SWITCHES,
        own=(WINDOW,),
        whole_yarn=False,
        derived=("windows",),
        read=read_gguf,
        write=write_window,
    ),
    keys=KEYS
    | {
        "experts": ("num_local_experts", "num_experts"),
        "experts_per_token": ("num_experts_per_tok", "experts_per_token"),
        "qkv_bias": ("attention_bias",),
        "o_bias": ("attention_bias",),
    },
    names={
        **NAMES,
        "router": "model.layers.{layer}.mlp.router",
        "expert_gate": f"{EXPERTS}.{{expert}}.gate_proj",
        "expert_up": f"{EXPERTS}.{{expert}}.up_proj",
        "expert_down": f"{EXPERTS}.{{expert}}.down_proj",
    },
    stacked_experts=EXPERTS,
    defaults=DEFAULTS
    | {
        "context": 131_072,
        "kv_heads": 8,
        "head_dim": 64,
        "eps": 1e-5,
        "experts": 128,
        "experts_per_token": 4,
        "qkv_bias": True,
        "o_bias": True,
    },
    switches=SWITCHES,
    understood={"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
    windows="by layer",
    window=128,
    full_every=2,
    rope=RopeKeys(theta=150_000.0),
    read=read,
)
