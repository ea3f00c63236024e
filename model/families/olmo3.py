"""OLMo 3: an OLMo 2 with attention windows in three of four layers (https://arxiv.org/abs/2512.13961).

A rescaling of RoPE applies only to the layers without a window.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llamaspec.model.families import olmo2
from llamaspec.model.family import RopeKeys

THETA = 500_000.0


def one_theta(_: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Set the field `local_theta` (theta in layers with a window) to None if no layer has a window."""
    return {} if values["windows"] else {"local_theta": None}


FAMILY = replace(
    olmo2.FAMILY,
    name="olmo3",
    model="Olmo3ForCausalLM",
    rope=RopeKeys(theta=THETA, local_theta=("rope_theta", THETA)),
    windows="by layer",
    window=4096,
    full_every=4,
    read=one_theta,
)
