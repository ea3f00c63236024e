"""Gemma 3, text only: a Gemma 2 with norms of q and k, and attention windows in five of six layers.

RoPE uses a different theta in layers with a window than in the other layers. See https://arxiv.org/abs/2503.19786.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llamaspec.model.families import gemma2
from llamaspec.model.families.gemma2 import GGUF_NORMS, SCALES, SWITCHES, WINDOW, read_gguf, write_window
from llamaspec.model.family import GGUF_KEYS, GGUF_NAMES, Architecture, RopeKeys
from llamaspec.reference.config import Config

LARGEST = 62  # number of layers of Gemma 3 27B, the largest model
LOCAL_THETA = "rope.freq_base_swa"


def read_gguf3(metadata: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the scales and windows as for Gemma 2, and the theta of layers with a window, from a GGUF file."""
    fields = read_gguf(metadata, values, largest=LARGEST, full_every=6)
    return fields | {"local_theta": metadata.decimal(LOCAL_THETA, 10_000.0)}


def write_gguf3(config: Config) -> dict[str, Any]:
    """Return the GGUF keys for the size of the windows, and for the theta of the layers with a window."""
    return write_window(config) | ({} if config.local_theta is None else {LOCAL_THETA: config.local_theta})


ARCHITECTURE = Architecture(
    "gemma3",
    names=GGUF_NAMES | GGUF_NORMS,
    keys=GGUF_KEYS | {"logit_cap": "final_logit_softcapping"},
    switches=SWITCHES | {"post_norms": True},
    has=("qk_norm",),
    own=("final_logit_softcapping", WINDOW),
    derived=(*SCALES, "windows", "local_theta"),
    read=read_gguf3,
    write=write_gguf3,
)
ROPE = RopeKeys(theta=1e6, local_theta=("rope_local_base_freq", 10_000.0))

FAMILY = replace(
    gemma2.FAMILY,
    name="gemma3_text",
    model="Gemma3ForCausalLM",
    gguf=ARCHITECTURE,
    defaults=gemma2.DEFAULT_VALUES | {"context": 131_072, "kv_heads": 4, "qkv_bias": False, "o_bias": False},
    switches={**gemma2.FAMILY.switches, "qk_norm": True},
    understood={**gemma2.FAMILY.understood, "use_bidirectional_attention": (False, None)},
    full_every=6,
    rope=ROPE,
)
