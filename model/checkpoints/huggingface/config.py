"""Read Hugging Face's config.json into a `Config`, with the meaning that transformers gives it.

The families of `model.families` are read; SmolLM2, TinyLlama and others call themselves "llama". Where transformers 4
and 5 spell a thing differently, both spellings are read. A key that would change a number and is not implemented is
refused by name.
"""

import builtins
import json
from pathlib import Path
from typing import Any

from model.checkpoints.checkpoint import refused
from model.checkpoints.checks import MOST_LAYERS, check_model
from model.checkpoints.strict_json import short
from model.family import Family, families
from reference.config import Config
from reference.rope import LinearScaling, Llama3Scaling, Scaling

SCALINGS = {"default", "linear", "llama3"}


class Fields:
    """A JSON object whose values are fetched by key and type; a `CheckpointError` names the key of a wrong value."""

    def __init__(self, values: dict[str, Any], path: str | Path):
        self.values, self.path = values, path

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if value is None and key not in self.values:
            raise refused(self.path, f"lacks {key}")
        return self._typed(key, value, "an integer", type(value) is int)

    def integer_or_none(self, key: str, default: int | None = None) -> int | None:
        value = self.values.get(key, default)
        return self._typed(key, value, "an integer", value is None or type(value) is int)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if value is None and key not in self.values:
            raise refused(self.path, f"lacks {key}")
        number = self._typed(key, value, "a number", type(value) in (int, float))
        try:
            return float(number)
        except OverflowError as error:
            raise refused(self.path, f"{key} is {short(value)}, too large") from error

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key, default)
        return self._typed(key, value, "true or false", type(value) is bool)

    def ids(self, key: str) -> frozenset[int] | None:
        """Token ids, given as one integer or a list; None if absent."""
        value: Any = self.values.get(key)
        ids = value if isinstance(value, list) else [value]
        self._typed(key, value, "an integer or a list of them", value is None or all(type(id) is int for id in ids))
        return None if value is None else frozenset(ids)

    def object(self, key: str) -> dict[str, Any]:
        """An object; empty if absent or null."""
        value = self.values.get(key)
        return self._typed(key, value, "an object", value is None or isinstance(value, dict)) or {}

    def _typed(self, key: str, value: Any, kind: str, valid: bool) -> Any:
        if not valid:
            raise refused(self.path, f"{key} is {short(value)}, not {kind}")
        return value


def read_config(values: dict[str, Any], path: str | Path) -> Config:
    """Read the hyperparameters in a parsed config.json; `path` is for errors. Raises `CheckpointError`."""
    fields = Fields(values, path)
    family = family_of(fields)
    theta, scaling = _rope(fields, family)
    given = dict(family.switches) | {"theta": theta, "scaling": scaling}
    for name, keys in family.keys.items():
        given[name] = _value(fields, name, keys, family)
    if "experts" in family.keys and not given["experts"]:
        raise refused(path, f"{family.keys['experts'][0]} is 0")
    if not 1 <= given["layers"] <= MOST_LAYERS:  # checked before a window is made for each layer
        raise refused(path, f"num_hidden_layers is {short(given['layers'])}, outside 1 to {MOST_LAYERS}")
    if given["kv_heads"] is None:
        given["kv_heads"] = given["heads"]
    if given["head_dim"] is None:
        if given["heads"] < 1 or given["dim"] % given["heads"]:
            what = f"hidden_size {short(given['dim'])} is no multiple of {short(given['heads'])} heads"
            raise refused(path, what)
        given["head_dim"] = given["dim"] // given["heads"]
    config = Config(**given, windows=_windows(fields, family, given["layers"]))
    check_model(str(path), config, bos=None, stops=frozenset())
    return config


def read_tokens(
    values: dict[str, Any], path: str | Path, generation: dict[str, Any], generation_path: str | Path, *, vocab: int
) -> tuple[int | None, frozenset[int]]:
    """Read the id that begins a text and those that end one: from generation_config.json, else from config.json.

    Raises `CheckpointError` for an id outside `vocab`. A null in generation_config.json counts as absent.
    """
    family = family_of(Fields(values, path))
    stated = Fields({"bos_token_id": family.bos, "eos_token_id": family.stop} | values, path)
    preferred = Fields(generation, generation_path)
    chosen = []
    for key in ("bos_token_id", "eos_token_id"):
        fields = preferred if generation.get(key) is not None else stated
        ids = fields.ids(key) or frozenset()
        if outside := sorted(id for id in ids if not 0 <= id < vocab):
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
    family = known[name]
    for key, understood in {"hidden_act": ("silu",), **family.understood}.items():
        value = fields.values.get(key, understood[0])
        if value not in understood:
            only = understood[0] if isinstance(understood[0], str) else json.dumps(understood[0])
            raise refused(fields.path, f"{key} {short(value)} is not supported (only {only})")
    return family


def _value(fields: Fields, name: str, keys: tuple[str, ...], family: Family) -> Any:
    """Read a field of `Config` from the first of `keys` that is present, else take the family's default."""
    key = next((key for key in keys if key in fields.values), keys[0])
    default = family.defaults.get(name)
    if name in ("kv_heads", "head_dim"):
        return fields.integer_or_none(key, default)
    match Config.__annotations__[name]:
        case builtins.bool:
            return fields.boolean(key, default)
        case builtins.float:
            return fields.number(key, default)
        case _:
            return fields.integer(key, default)


def _rope(fields: Fields, family: Family) -> tuple[float, Scaling | None]:
    """Read theta and the rescaling. As in transformers, `rope_scaling` (4) wins over `rope_parameters` (5)."""
    key = "rope_scaling" if fields.object("rope_scaling") else "rope_parameters"
    rope = Fields(fields.object(key), fields.path)
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise refused(fields.path, f"{key} that differ from layer to layer are not supported")
    stated = rope if "rope_theta" in rope.values else fields
    theta = stated.number("rope_theta", family.defaults["theta"])
    for part in (fields, rope):
        fraction = part.values.get("partial_rotary_factor")
        if fraction is not None and fraction != 1:
            raise refused(fields.path, f"partial_rotary_factor {short(fraction)} is not supported (only 1)")

    name = rope.values.get("rope_type", rope.values.get("type", "default"))
    if not isinstance(name, str) or name not in SCALINGS:
        raise refused(fields.path, f"rope_type {short(name)} is not supported (only {', '.join(sorted(SCALINGS))})")
    if name == "default":
        for factor, value in rope.values.items():  # transformers ignores it
            if "factor" in factor and factor != "partial_rotary_factor" and value not in (None, 1):
                raise refused(fields.path, f"{key} has {factor} {short(value)}, but no rope_type that uses it")
        return theta, None
    if name == "linear":
        return theta, LinearScaling(rope.number("factor"))
    return theta, Llama3Scaling(
        factor=rope.number("factor"),
        low_frequency=rope.number("low_freq_factor"),
        high_frequency=rope.number("high_freq_factor"),
        original_context=rope.integer("original_max_position_embeddings"),
    )


def _windows(fields: Fields, family: Family, layers: int) -> tuple[int | None, ...] | None:
    """Read how many last positions each layer sees; None if every layer sees all."""
    if family.windows == "none":
        return None
    used = family.windows == "every layer" or fields.boolean("use_sliding_window")
    window = fields.integer_or_none("sliding_window", family.window) if used else None
    if family.windows != "by layer if on":
        return None if window is None else (window,) * layers
    types = fields.values.get("layer_types")
    if types is None:
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
