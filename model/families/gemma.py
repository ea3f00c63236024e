"""Gemma: a Llama with GeGLU and scaled embeddings; files store the weights of norms minus 1.

See https://arxiv.org/abs/2403.08295.
"""

from collections.abc import Mapping
from math import sqrt
from typing import Any

from llamaspec.model.family import DEFAULTS, GGUF_KEYS, KEYS, Architecture, Family

DEFAULT_VALUES = DEFAULTS | {"context": 8192, "kv_heads": None, "head_dim": 256, "tied": True}
SWITCHES = {"activation": "gelu_tanh"}
# Old releases write "gelu" for the tanh approximation of GELU, for which transformers then had no separate name.
ACTIVATIONS = ("gelu_pytorch_tanh", "gelu")


def embedding_scale(_: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the field `embedding_scale`: the model multiplies embeddings by sqrt(dim)."""
    return {"embedding_scale": sqrt(values["dim"])}


FAMILY = Family(
    "gemma",
    model="GemmaForCausalLM",
    gguf=Architecture("gemma", keys=GGUF_KEYS, switches=SWITCHES, derived=("embedding_scale",), read=embedding_scale),
    keys=KEYS | {"qkv_bias": ("attention_bias",), "o_bias": ("attention_bias",)},
    defaults=DEFAULT_VALUES | {"qkv_bias": False, "o_bias": False},
    switches=SWITCHES,
    understood={"hidden_act": ACTIVATIONS, "hidden_activation": (*ACTIVATIONS, None)}
    | {"use_bidirectional_attention": (None, False)},
    norm_offset=1.0,
    derived=("embedding_scale",),
    read=embedding_scale,
    bos=2,
    stop=1,
)
