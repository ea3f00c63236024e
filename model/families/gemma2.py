"""Gemma 2: a Gemma with soft caps of logits, attention windows in every other layer, and more norms.

The norms are before and after attention, and before and after the feed-forward layer. See
https://arxiv.org/abs/2408.00118.
"""

from collections.abc import Mapping
from math import isclose, sqrt
from typing import Any

from llamaspec.model.families.gemma import ACTIVATIONS, DEFAULT_VALUES, SWITCHES
from llamaspec.model.family import GGUF_KEYS, GGUF_NAMES, KEYS, Architecture, Family, windows_but_every
from llamaspec.model.tensors import NAMES
from llamaspec.reference.config import Config

NORMS = {
    "attention_post_norm": "model.layers.{layer}.post_attention_layernorm",
    "ffn_norm": "model.layers.{layer}.pre_feedforward_layernorm",
    "ffn_post_norm": "model.layers.{layer}.post_feedforward_layernorm",
}
GGUF_NORMS = {
    "attention_post_norm": "blk.{layer}.post_attention_norm",
    "ffn_post_norm": "blk.{layer}.post_ffw_norm",
}
CAPS = {"attention_cap": ("attn_logit_softcapping",), "logit_cap": ("final_logit_softcapping",)}
SCALES = ("embedding_scale", "attention_scale")
WINDOW = "attention.sliding_window"


def attention_scale(scalar: float | int, values: Mapping[str, Any]) -> float | None:
    """Return the scale of attention scores, 1 / sqrt(scalar); None if this is the default, 1 / sqrt(head_dim)."""
    return None if scalar == values["head_dim"] else scalar**-0.5


def read(fields: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields `embedding_scale` and `attention_scale` from config.json."""
    scalar = fields.number("query_pre_attn_scalar", 256.0)
    if not scalar > 0:
        raise fields.refused(f"query_pre_attn_scalar is {scalar}, expected a positive number")
    return {"embedding_scale": sqrt(values["dim"]), "attention_scale": attention_scale(scalar, values)}


def write(config: Config) -> dict[str, Any]:
    """Return the key query_pre_attn_scalar for config.json.

    If its value is a whole number, it is written as an integer, as in all releases.
    """
    scalar = config.head_dim if config.attention_scale is None else config.attention_scale**-2
    integer = round(scalar)
    return {"query_pre_attn_scalar": integer if isclose(scalar, integer, rel_tol=1e-12) else scalar}


def read_gguf(metadata: Any, values: Mapping[str, Any], *, largest: int, full_every: int) -> dict[str, Any]:
    """Compute the scales and windows of a Gemma 2 or 3 from a GGUF file as llama.cpp does.

    The largest model has `largest` layers, and divides attention scores by sqrt(dim / heads); the other models divide
    by sqrt(head_dim). Every `full_every`-th layer has no window.
    """
    window = metadata.integer(WINDOW, 4096)
    scalar = float(values["dim"] // values["heads"] if values["layers"] == largest else values["head_dim"])
    fields = {"embedding_scale": sqrt(values["dim"]), "attention_scale": attention_scale(scalar, values)}
    windows = windows_but_every(full_every, window, layers=values["layers"])
    return fields | {"windows": windows if any(windows) else None}


def write_window(config: Config) -> dict[str, Any]:
    """Return the GGUF key for the size of the windows, which is the same in all layers with a window."""
    sizes = [window for window in config.windows or () if window is not None]
    return {WINDOW: sizes[0]} if sizes else {}


LARGEST = 46  # number of layers of Gemma 2 27B, the largest model

FAMILY = Family(
    "gemma2",
    model="Gemma2ForCausalLM",
    gguf=Architecture(
        "gemma2",
        names=GGUF_NAMES | GGUF_NORMS,
        keys=GGUF_KEYS | {"attention_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"},
        switches=SWITCHES | {"post_norms": True},
        own=("attn_logit_softcapping", "final_logit_softcapping", WINDOW),
        derived=(*SCALES, "windows"),
        read=lambda metadata, values: read_gguf(metadata, values, largest=LARGEST, full_every=2),
        write=write_window,
    ),
    keys=KEYS | CAPS | {"qkv_bias": ("attention_bias",), "o_bias": ("attention_bias",)},
    names={**NAMES, **NORMS},
    defaults=DEFAULT_VALUES
    | {"kv_heads": 4, "attention_cap": 50.0, "logit_cap": 30.0, "qkv_bias": False, "o_bias": False},
    switches=SWITCHES | {"post_norms": True},
    understood={"hidden_act": ACTIVATIONS, "hidden_activation": ACTIVATIONS}
    | {"use_bidirectional_attention": (None, False)},
    norm_offset=1.0,
    windows="by layer",
    window=4096,
    full_every=2,
    derived=SCALES,
    read=read,
    write=write,
    bos=2,
    stop=1,
)
