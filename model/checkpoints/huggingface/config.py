"""Reads Hugging Face's config.json into a `Config`, with the same meaning as in transformers.

We read the families of `model.families`. SmolLM2, TinyLlama and other models state the family "llama". If transformers
4 and 5 spell a key differently, we read both spellings. If a key changes the computation in a way that we do not
support, we refuse the file, and the error names the key.
"""

import builtins
import json
from dataclasses import MISSING, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.checks import MOST_LAYERS, check_model
from llamaspec.model.checkpoints.huggingface.fields import Fields
from llamaspec.model.checkpoints.huggingface.rope import read_rope
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.model.family import Family, families
from llamaspec.reference.config import Config


def read_config(values: dict[str, Any], path: str | Path, family: Family | None = None) -> Config:
    """Read the hyperparameters from `values`, a parsed config.json; `path` is the file's path, for error messages.

    If `family` is None, we use the family that config.json names. A caller passes a family if `values` comes from
    another kind of file, such as Mistral's params.json. Raises `CheckpointError` if a key is missing or unsupported.
    """
    family = checked(family, Fields(values, path)) if family else family_of(Fields(values, path))
    fields = fields_within(values, path, family)
    config_values = dict(family.switches)
    for name, keys in family.keys.items():
        config_values[name] = _value(fields, name, keys, family)
    if "experts" in family.keys and not config_values["experts"]:
        raise refused(path, f"{family.keys['experts'][0]} is 0, expected at least 1")
    if not 1 <= config_values["layers"] <= MOST_LAYERS:  # checked before we make a window for each layer
        raise refused(
            path, f"{family.keys['layers'][0]} is {short(config_values['layers'])}, outside 1 to {MOST_LAYERS}"
        )
    if config_values["kv_heads"] is None:
        config_values["kv_heads"] = config_values["heads"]
    if config_values["head_dim"] is None:
        if config_values["heads"] < 1 or config_values["dim"] % config_values["heads"]:
            dim, heads = short(config_values["dim"]), short(config_values["heads"])
            what = f"{family.keys['dim'][0]} is {dim}, which is not a multiple of the {heads} heads"
            raise refused(path, what)
        config_values["head_dim"] = config_values["dim"] // config_values["heads"]
    config_values["windows"] = _windows(fields, family, config_values["layers"])
    config_values |= read_rope(
        fields, family.rope, context=config_values["context"], head_dim=config_values["head_dim"]
    )
    config = Config(**config_values)
    check_model(str(path), config, bos=None, stops=frozenset())
    config = replace(config, **family.read(fields, vars(config)))
    check_model(str(path), config, bos=None, stops=frozenset())
    return config


def read_tokens(
    values: dict[str, Any],
    path: str | Path,
    generation: dict[str, Any],
    generation_path: str | Path,
    *,
    vocab: int,
    family: Family | None = None,
) -> tuple[int | None, frozenset[int]]:
    """Read the id of the token that begins a text (or None), and the ids of the tokens that end generation.

    generation_config.json (`generation`) has priority over config.json (`values`). A null in generation_config.json
    counts as absent. Raises `CheckpointError` if an id is not in the vocabulary of `vocab` tokens.
    """
    family = family or family_of(Fields(values, path))
    own = fields_within(values, path, family).values
    stated = Fields({"bos_token_id": family.bos, "eos_token_id": family.stop} | own | values, path)
    preferred = Fields(generation, generation_path)
    chosen = []
    for key in ("bos_token_id", "eos_token_id"):
        fields = preferred if generation.get(key) is not None else stated
        ids = fields.ids(key) or frozenset()
        outside = sorted(id for id in ids if not 0 <= id < vocab)
        if key == "eos_token_id" and (ids == {-1} or all(id >= vocab for id in outside)):
            ids = ids.difference(outside)  # The model never generates such an id, and transformers loads such a model.
        elif outside:
            raise refused(fields.path, f"{key} is {short(outside[0])}, outside the vocabulary of {vocab} tokens")
        if key == "bos_token_id" and len(ids) > 1:
            raise refused(fields.path, f"{key} is a list, expected an integer")
        chosen.append(ids)
    begins, stops = chosen
    return next(iter(begins), None), stops


def family_of(fields: Fields) -> Family:
    """Return the family that a config.json names. Raises `CheckpointError` if the family or a key is not supported."""
    name, known = fields.values.get("model_type"), families()
    if not isinstance(name, str) or name not in known:
        raise refused(fields.path, f"model_type {short(name)} is not supported (only {', '.join(known)})")
    return checked(known[name], fields)


def checked(family: Family, fields: Fields) -> Family:
    """Return `family` unchanged. Raises `CheckpointError` if this family does not support the value of a key."""
    own = fields_within(fields.values, fields.path, family).values
    for key, understood in {"hidden_act": ("silu",), "is_causal": (True, None), **family.understood}.items():
        value = own.get(key, understood[0])
        if value not in understood:
            only = understood[0] if isinstance(understood[0], str) else json.dumps(understood[0])
            raise refused(fields.path, f"{key} is {short(value)}, which is not supported (only {only})")
    return family


def fields_within(values: dict[str, Any], path: str | Path, family: Family) -> Fields:
    """Return the keys that describe the text model.

    They are in the object of config.json that `family` names, or else at the top level.
    """
    return Fields(Fields(values, path).object(family.within) if family.within else values, path)


def _value(fields: Fields, name: str, keys: tuple[str, ...], family: Family) -> Any:
    """Read the `Config` field `name` from the first of `keys` that config.json has.

    If config.json has none of them, use the default.
    """
    key = next((key for key in keys if key in fields.values), keys[0])
    default = family.defaults.get(name, _plain_default(name))
    if name in ("kv_heads", "head_dim"):
        return fields.integer_or_none(key, default)
    match Config.__annotations__[name]:
        case builtins.bool:
            return fields.boolean(key, bool(default))
        case builtins.float:
            return fields.number(key, default)
        case optional if optional == (builtins.float | None):
            return None if fields.values.get(key, default) is None else fields.number(key, default)
        case _:
            return fields.integer(key, default)


def _plain_default(name: str) -> Any:
    """Return the default of the `Config` field `name`; None if the field has no default."""
    default = next(field.default for field in fields_of(Config) if field.name == name)
    return None if default is MISSING else default


def _windows(fields: Fields, family: Family, layers: int) -> tuple[int | None, ...] | None:
    """Read the attention window of each layer, with None for a layer without a window.

    Returns None instead of a tuple if no layer has a window.
    """
    if family.windows == "none":
        return None
    used = family.windows in ("every layer", "by layer") or fields.boolean("use_sliding_window")
    window = fields.integer_or_none("sliding_window", family.window) if used else None
    if not family.windows.startswith("by layer"):
        return None if window is None else (window,) * layers
    types = fields.values.get("layer_types")
    if types is None and family.windows == "by layer":
        step = fields.integer("sliding_window_pattern", family.full_every)
        if step < 1:
            raise refused(fields.path, f"sliding_window_pattern is {step}, expected at least 1")
        types = ["full_attention" if (i + 1) % step == 0 else "sliding_attention" for i in range(layers)]
        types = ["full_attention"] * layers if window is None else types
    elif types is None:
        first = fields.integer("max_window_layers", 28)
        types = ["sliding_attention" if window is not None and i >= first else "full_attention" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise refused(fields.path, f"layer_types is not a list of {layers} names, one for each layer")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            what = f"layer_types contains {short(name)}, expected full_attention or sliding_attention"
            raise refused(fields.path, what)
    if "sliding_attention" not in types:
        return None
    if window is None:
        raise refused(fields.path, "layer_types contains sliding_attention, but sliding_window is not set")
    return tuple(window if name == "sliding_attention" else None for name in types)
