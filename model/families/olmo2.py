"""OLMo 2: norms after attention and after the feed-forward layer instead of before, and norms of q and k.

A norm of q or k normalizes all heads together. See https://arxiv.org/abs/2501.00656.
"""

from llamaspec.model.families.gemma2 import GGUF_NORMS, NORMS, WINDOW, write_window
from llamaspec.model.family import DEFAULTS, GGUF_NAMES, KEYS, Architecture, Family, windows_but_every
from llamaspec.model.tensors import NAMES

SWITCHES = {"pre_norms": False, "post_norms": True, "qk_norm": True, "wide_qk_norm": True}


def read_windows(metadata, values):
    """Read the attention windows of an OLMo 3 from a GGUF file: every fourth layer has no window."""
    window = metadata.integer(WINDOW, 0)
    windows = windows_but_every(4, window, layers=values["layers"])
    # llama.cpp rescales RoPE only in the layers without a window.
    return {"windows": windows, "local_theta": values["theta"]} if window and any(windows) else {}


ARCHITECTURE = Architecture(
    "olmo2",
    names=GGUF_NAMES | GGUF_NORMS,
    switches=SWITCHES,
    own=(WINDOW,),
    derived=("windows", "local_theta"),
    read=read_windows,
    write=write_window,
)
FAMILY = Family(
    "olmo2",
    model="Olmo2ForCausalLM",
    gguf=ARCHITECTURE,
    keys=KEYS | {"qkv_bias": ("attention_bias",), "o_bias": ("attention_bias",)},
    names={**NAMES, **NORMS},
    defaults=DEFAULTS | {"context": 2048, "kv_heads": None, "eps": 1e-5, "qkv_bias": False, "o_bias": False},
    switches=SWITCHES,
    stop=50279,
)
