"""Writes a `Config` as a config.json that transformers 4, transformers 5 and this package read in the same way."""

from typing import Any

from llamaspec.model.checkpoints.checkpoint import Checkpoint, refused
from llamaspec.model.checkpoints.huggingface.rope import format_rope
from llamaspec.model.family import Family, nearest_family
from llamaspec.reference.config import Config


def format_config(checkpoint: Checkpoint, *, dtype: str) -> dict[str, Any]:
    """Format the contents of config.json; `dtype` is the value of torch_dtype.

    Raises `CheckpointError` if no family of Hugging Face's transformers can express the model.
    """
    config = checkpoint.config
    family = nearest_family(config)
    if differing := family.differences(config):
        what = f"no Hugging Face family fits this model; the nearest, {family.name}, differs in {', '.join(differing)}"
        raise refused(checkpoint.path, what)
    return _format(config, family) | {"torch_dtype": dtype} | format_tokens(checkpoint)


def format_tokens(checkpoint: Checkpoint) -> dict[str, Any]:
    """Format the keys bos_token_id and eos_token_id; null if the model has no such token.

    We do not leave a key out, since readers would then use the family's default.
    """
    stops: list[int] = sorted(checkpoint.stops)
    return {"bos_token_id": checkpoint.bos, "eos_token_id": stops[0] if len(stops) == 1 else stops or None}


def _format(config: Config, family: Family) -> dict[str, Any]:
    return {
        "architectures": [family.model],
        "model_type": family.name,
        "hidden_act": "silu",
        **{key: values[0] for key, values in family.understood.items()},
        **family.write_fields(config),
        **format_rope(config, family.rope),
        "use_cache": True,
        **_format_windows(config, family),
        **family.write(config),
    }


def _format_windows(config: Config, family: Family) -> dict[str, Any]:
    windows = config.windows or (None,) * config.layers
    sizes = [window for window in windows if window is not None]
    window = {"sliding_window": sizes[0] if sizes else None}
    match family.windows:
        case "none":
            return {}
        case "every layer":
            return window
        case "every layer if on":
            return window | {"use_sliding_window": bool(sizes)}
    types = ["full_attention" if size is None else "sliding_attention" for size in windows]
    if family.windows == "by layer":
        return window | {"layer_types": types}
    return window | {
        "use_sliding_window": bool(sizes),
        "max_window_layers": types.index("sliding_attention") if sizes else config.layers,  # for older versions
        "layer_types": types,
    }
