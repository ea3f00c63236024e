"""EXAONE 4: a Llama with norms after attention and after the feed-forward layer instead of before.

If some layers have an attention window, only these layers use RoPE. See https://arxiv.org/abs/2507.11407.
"""

from collections.abc import Mapping
from typing import Any

from llamaspec.model.families.gemma2 import GGUF_NORMS, NORMS, WINDOW, write_window
from llamaspec.model.family import DEFAULTS, GGUF_NAMES, Architecture, Family, windows_but_every
from llamaspec.model.tensors import NAMES

LARGEST = 64  # number of layers of EXAONE 4.0 32B, the largest model
SWITCHES = {"pre_norms": False, "post_norms": True, "qk_norm": True}


def rotary_layers(_: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the field `rotary_layers`: the layers with a window use RoPE, or all layers if none has a window."""
    windows = values["windows"]
    turned = tuple(window is not None for window in windows or ())
    return {"rotary_layers": turned if windows and not all(turned) else None}


def read_gguf(metadata: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the fields `windows` and `rotary_layers` from a GGUF file as llama.cpp does.

    Only the largest model has windows. In this model, every fourth layer has no window.
    """
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
