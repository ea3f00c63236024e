"""EXAONE 4: norms after each half of a block, and RoPE only in layers with a window, if some layers have one.

See https://arxiv.org/abs/2507.11407.
"""

from collections.abc import Mapping
from typing import Any

from llamaspec.model.families.gemma2 import GGUF_NORMS, NORMS, WINDOW, write_window
from llamaspec.model.family import DEFAULTS, GGUF_NAMES, Architecture, Family, windows_but_every
from llamaspec.model.tensors import NAMES

LARGEST = 64  # layers of EXAONE 4.0 32B
SWITCHES = {"pre_norms": False, "post_norms": True, "qk_norm": True}


def rotary_layers(_: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Use RoPE in the layers with a window, or in all layers if no layer has a window."""
    windows = values["windows"]
    turned = tuple(window is not None for window in windows or ())
    return {"rotary_layers": turned if windows and not all(turned) else None}


def read_gguf(metadata: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the window: every fourth layer has no window, and llama.cpp uses windows only in the largest model."""
    window = metadata.integer(WINDOW, 4096) if values["layers"] == LARGEST else 0
    windows = windows_but_every(4, window, layers=values["layers"]) if window else None
    return {"windows": windows} | rotary_layers(None, {"windows": windows})


FAMILY = Family(
    "exaone4",
    model="Exaone4ForCausalLM",
    gguf=Architecture(
        "exaone4",
        names=GGUF_NAMES | GGUF_NORMS,
        switches=SWITCHES,
        own=(WINDOW,),
        derived=("windows", "rotary_layers"),
        read=read_gguf,
        write=write_window,
        llama3_scaling=True,
    ),
    names={**NAMES, **NORMS},
    defaults=DEFAULTS | {"context": 2048, "kv_heads": 32, "eps": 1e-5},
    switches=SWITCHES,
    windows="by layer",
    window=4096,
    full_every=4,
    derived=("rotary_layers",),
    read=rotary_layers,
    bos=0,
    stop=2,
)
