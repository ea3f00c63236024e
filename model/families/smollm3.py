"""SmolLM3: a Llama without RoPE in every fourth layer (https://arxiv.org/abs/2501.18795)."""

from collections.abc import Mapping
from typing import Any

from llamaspec.model.family import DEFAULTS, KEYS, Architecture, Family
from llamaspec.reference.config import Config

EVERY = 4


def read(fields: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read which layers use RoPE from config.json: no_rope_layers has 1 for a layer with RoPE, 0 for one without."""
    layers = values["layers"]
    named = fields.values.get("no_rope_layers")
    if named is None:
        step = fields.integer("no_rope_layer_interval", EVERY)
        if step < 1:
            raise fields.refused(f"no_rope_layer_interval is {step}, expected at least 1")
        named = [int((i + 1) % step != 0) for i in range(layers)]
    if not isinstance(named, list) or len(named) != layers or any(flag not in (0, 1) for flag in named):
        raise fields.refused(f"no_rope_layers is not a list of {layers} numbers 0 or 1, one for each layer")
    return {"rotary_layers": None if all(named) else tuple(bool(flag) for flag in named)}


def write(config: Config) -> dict[str, Any]:
    """Return the key no_rope_layers for config.json, with 1 for each layer that uses RoPE."""
    return {"no_rope_layers": [int(config.uses_rope(layer)) for layer in range(config.layers)]}


def every_fourth(_: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the field `rotary_layers` as llama.cpp does: every fourth layer has no RoPE."""
    turned = tuple((i + 1) % EVERY != 0 for i in range(values["layers"]))
    return {"rotary_layers": None if all(turned) else turned}


FAMILY = Family(
    "smollm3",
    model="SmolLM3ForCausalLM",
    gguf=Architecture("smollm3", interleaved=True, derived=("rotary_layers",), read=every_fourth),
    keys=KEYS | {"qkv_bias": ("attention_bias",), "o_bias": ("attention_bias",), "ffn_bias": ("mlp_bias",)},
    defaults=DEFAULTS
    | {"context": 32_768, "kv_heads": 4, "tied": True, "qkv_bias": False, "o_bias": False, "ffn_bias": False},
    understood={"use_sliding_window": (False,)},
    derived=("rotary_layers",),
    read=read,
    write=write,
    bos=128_000,
    stop=128_001,
)
