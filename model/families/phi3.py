"""Phi-3, 3.5, 4 and 4-mini: fused matrices, LongRoPE, and in 4-mini RoPE for a part of each head's features.

See https://arxiv.org/abs/2404.14219.
"""

from collections.abc import Mapping
from typing import Any

from llamaspec.model.family import DEFAULTS, GGUF_NAMES, Architecture, Family, RopeKeys
from llamaspec.model.tensors import NAMES

LAYER = "model.layers.{layer}"


def without_idle_windows(_: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Set the field `windows` to None if all windows are at least as long as the context.

    Some releases have such windows.
    """
    windows = values["windows"]
    return {"windows": None if windows and min(windows) >= values["context"] else windows}


FAMILY = Family(
    "phi3",
    model="Phi3ForCausalLM",
    gguf=Architecture(
        "phi3",
        # llama.cpp reads the key of windows, but does not use windows.
        own=("attention.sliding_window", "rope.scaling.attn_factor"),
        names=GGUF_NAMES,
        fused={
            "blk.{layer}.attn_qkv": ("q", "k", "v"),
            "blk.{layer}.ffn_up": ("gate", "up"),
        },
        has=("rotary_dim",),
        long_rope=True,
    ),
    fused={f"{LAYER}.self_attn.qkv_proj": ("q", "k", "v"), f"{LAYER}.mlp.gate_up_proj": ("gate", "up")},
    names=NAMES,
    defaults=DEFAULTS | {"context": 4096, "kv_heads": None, "eps": 1e-5},
    understood={"attention_bias": (False,)},
    windows="every layer",
    rope=RopeKeys(partial=True, original_context=4096, aliases={"su": "longrope", "yarn": "longrope"}),
    read=without_idle_windows,
    bos=1,
    stop=32000,
)
