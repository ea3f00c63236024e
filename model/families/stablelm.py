"""StableLM 3B and StableLM 2: LayerNorm, and RoPE for a quarter of the features of each head.

StableLM 2 12B also computes attention and the feed-forward layer of a block in parallel, and normalizes each head of q
and k with its own weights. See https://arxiv.org/abs/2402.17834.
"""

from collections.abc import Mapping
from typing import Any

from llamaspec.model.family import DEFAULTS, GGUF_KEYS, GGUF_NAMES, KEYS, Architecture, Family, RopeKeys
from llamaspec.model.tensors import NAMES
from llamaspec.reference.config import Config

SWITCHES = {"layer_norm": True}
NORMS_OF_HEADS = {"head_q_norm": "blk.{layer}.attn_q_norm", "head_k_norm": "blk.{layer}.attn_k_norm"}
PARALLEL = "use_parallel_residual"


def write_gguf(config: Config) -> dict[str, Any]:
    """Return the GGUF key use_parallel_residual, which llama.cpp's converter also writes.

    No reader needs the key: llama.cpp and this package recognize a parallel block by its missing second norm.
    """
    return {PARALLEL: config.parallel_residual}


def read(_: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the field `head_dim` as transformers does for this family, which ignores the key in config.json."""
    return {"head_dim": values["dim"] // values["heads"]}


FAMILY = Family(
    "stablelm",
    model="StableLmForCausalLM",
    gguf=Architecture(
        "stablelm",
        names={part: name for part, name in GGUF_NAMES.items() if part not in ("q_norm", "k_norm")} | NORMS_OF_HEADS,
        keys=GGUF_KEYS | {"eps": "attention.layer_norm_epsilon"},
        square=True,
        has=("qkv_bias", "rotary_dim", "parallel_residual", "head_qk_norm"),
        switches=SWITCHES | {"tied": False},
        own=(PARALLEL,),
        write=write_gguf,
    ),
    keys=KEYS
    | {
        "eps": ("layer_norm_eps",),
        "qkv_bias": ("use_qkv_bias",),
        "head_qk_norm": ("qk_layernorm",),
        "parallel_residual": (PARALLEL,),
    },
    names=NAMES,
    defaults=DEFAULTS
    | {"context": 4096, "kv_heads": 32, "eps": 1e-5}
    | {"qkv_bias": False, "head_qk_norm": False, "parallel_residual": False},
    switches=SWITCHES,
    rope=RopeKeys(partial=True, fraction=0.25),
    derived=("head_dim",),
    read=read,
    bos=0,
    stop=0,
)
