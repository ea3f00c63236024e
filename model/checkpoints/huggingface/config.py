"""Read Hugging Face's config.json into a `Config`, with the meaning that transformers gives it.

We read the families of `model.families`; SmolLM2, TinyLlama and others name theirs "llama". If transformers 4 and 5
spell a key differently, we read both spellings. If a key would change the computation and is not implemented, the file
is refused, and the error names the key.
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
    """Read the hyperparameters in a parsed config.json; `path` is for errors. Raises `CheckpointError`.

    If `family` is None, the file names the family. Callers pass a family if its keys differ from config.json's, as in
    Mistral's own layout.
    """
    family = checked(family, Fields(values, path)) if family else family_of(Fields(values, path))
    fields = fields_within(values, path, family)
    config_values = dict(family.switches)
    for name, keys in family.keys.items():
        config_values[name] = _value(fields, name, keys, family)
    if "experts" in family.keys and not config_values["experts"]:
        raise refused(path, f"{family.keys['experts'][0]} is 0")
    if not 1 <= config_values["layers"] <= MOST_LAYERS:  # checked before a window is made for each layer
        raise refused(
            path, f"{family.keys['layers'][0]} is {short(config_values['layers'])}, outside 1 to {MOST_LAYERS}"
        )
    if config_values["kv_heads"] is None:
        config_values["kv_heads"] = config_values["heads"]
    if config_values["head_dim"] is None:
        if config_values["heads"] < 1 or config_values["dim"] % config_values["heads"]:
            dim, heads = short(config_values["dim"]), short(config_values["heads"])
            what = f"{family.keys['dim'][0]} {dim} is no multiple of {heads} heads"
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
    """Read the id that begins a text and the ids that end one, from generation_config.json, else from config.json.

    Raises `CheckpointError` for an id outside `vocab`. A null in generation_config.json counts as absent.
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
            ids = ids.difference(outside)  # The model never writes such an id, and transformers loads such a model.
        elif outside:
            raise refused(fields.path, f"{key} is {short(outside[0])}, outside a vocabulary of {vocab}")
        if key == "bos_token_id" and len(ids) > 1:
            raise refused(fields.path, f"{key} is a list, not an integer")
        chosen.append(ids)
    begins, stops = chosen
    return next(iter(begins), None), stops


def family_of(fields: Fields) -> Family:
    """Return the family that config.json names. Raises `CheckpointError` for an unknown family or unsupported key."""
    name, known = fields.values.get("model_type"), families()
    if not isinstance(name, str) or name not in known:
        raise refused(fields.path, f"model_type {short(name)} is not supported (only {', '.join(known)})")
    return checked(known[name], fields)


def checked(family: Family, fields: Fields) -> Family:
    """Return `family` if it supports all keys. Raises `CheckpointError` for a key that would change the computation."""
    own = fields_within(fields.values, fields.path, family).values
    for key, understood in {"hidden_act": ("silu",), **family.understood}.items():
        value = own.get(key, understood[0])
        if value not in understood:
            only = understood[0] if isinstance(understood[0], str) else json.dumps(understood[0])
            raise refused(fields.path, f"{key} {short(value)} is not supported (only {only})")
    return family


def fields_within(values: dict[str, Any], path: str | Path, family: Family) -> Fields:
    """Return the keys of a text model: all of config.json, or the object in it that `family` names."""
    return Fields(Fields(values, path).object(family.within) if family.within else values, path)


def _value(fields: Fields, name: str, keys: tuple[str, ...], family: Family) -> Any:
    """Read a field of `Config` from the first of `keys` that is present, else take the family's default."""
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
    """Return the default of a field of `Config`; None where it has none."""
    default = next(field.default for field in fields_of(Config) if field.name == name)
    return None if default is MISSING else default


def _windows(fields: Fields, family: Family, layers: int) -> tuple[int | None, ...] | None:
    """Read how many last positions each layer sees: None for a layer that sees all, or if every layer does."""
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
            raise refused(fields.path, f"sliding_window_pattern is {step}")
        types = ["full_attention" if (i + 1) % step == 0 else "sliding_attention" for i in range(layers)]
        types = ["full_attention"] * layers if window is None else types
    elif types is None:
        first = fields.integer("max_window_layers", 28)
        types = ["sliding_attention" if window is not None and i >= first else "full_attention" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise refused(fields.path, f"layer_types is not a list of {layers} names")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise refused(fields.path, f"layer_types holds {short(name)}, not full_attention or sliding_attention")
    if "sliding_attention" not in types:
        return None
    if window is None:
        raise refused(fields.path, "layer_types holds sliding_attention, but no sliding_window is in use")
    return tuple(window if name == "sliding_attention" else None for name in types)
