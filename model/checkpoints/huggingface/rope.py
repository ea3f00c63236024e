"""Reads and writes the keys of RoPE in config.json: theta, the number of rotated features, and the rescaling.

As in transformers, `rope_scaling` (which version 4 writes) has priority over `rope_parameters` (which version 5
writes). If RoPE differs between layers with a window and layers without one, version 5 writes one object for each kind
of layer.
"""

import math
from typing import Any

from llamaspec.model.checkpoints.checks import LARGEST
from llamaspec.model.checkpoints.huggingface.fields import Fields
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.model.family import RopeKeys
from llamaspec.reference.config import Config
from llamaspec.reference.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Scaling,
    YarnScaling,
    yarn_magnitude,
)

SCALINGS = {"default", "dynamic", "linear", "llama3", "longrope", "yarn"}
FULL, LOCAL = "full_attention", "sliding_attention"  # keys of `rope_parameters` for the two kinds of layer


def read_rope(fields: Fields, keys: RopeKeys, *, context: int, head_dim: int) -> dict[str, Any]:
    """Read the `Config` fields about RoPE, by name. Raises `CheckpointError` if a key is missing or not supported."""
    key = "rope_scaling" if fields.object("rope_scaling") else "rope_parameters"
    rope = Fields(fields.object(key), fields.path)
    config_values: dict[str, Any] = {}
    if keys.local_theta is not None:
        local_key, default = keys.local_theta
        local = Fields(rope.object(LOCAL), fields.path)
        if (kind := local.values.get("rope_type", "default")) != "default":
            raise fields.refused(f"{key}.{LOCAL}.rope_type is {short(kind)}, which is not supported (only default)")
        stated = local if "rope_theta" in local.values else fields
        config_values["local_theta"] = stated.number("rope_theta" if stated is local else local_key, default)
        rope = Fields(rope.object(FULL), fields.path) if FULL in rope.values else rope
    elif any(isinstance(value, dict) for value in rope.values.values()):
        raise fields.refused(
            f"{key} has separate settings for kinds of layers, which is not supported for this family of models"
        )
    stated = rope if "rope_theta" in rope.values else fields
    config_values["theta"] = stated.number("rope_theta", keys.theta)
    config_values |= _rotary_dim(fields, rope, keys, head_dim)
    scaling = _scaling(fields, rope, keys, key, context)
    stretched = scaling.factor * scaling.original_context if isinstance(scaling, YarnScaling) else 0.0
    if context < stretched <= LARGEST:  # Users add YaRN as model cards say, without changing max_position_embeddings.
        config_values["context"] = int(stretched)
    return config_values | {"scaling": scaling}


def _rotary_dim(fields: Fields, rope: Fields, keys: RopeKeys, head_dim: int) -> dict[str, Any]:
    stated = rope if rope.values.get("partial_rotary_factor") is not None else fields
    is_stated = stated.values.get("partial_rotary_factor") is not None
    fraction = stated.number("partial_rotary_factor") if is_stated else keys.fraction
    if fraction == 1:
        return {}
    turned = int(head_dim * fraction) if 0 < fraction < 1 and 0 < head_dim <= LARGEST else 0
    if not keys.partial or not turned or turned % 2:
        raise fields.refused(f"partial_rotary_factor is {short(fraction)}, which is not supported for this model")
    return {"rotary_dim": turned}


def _scaling(fields: Fields, rope: Fields, keys: RopeKeys, key: str, context: int) -> Scaling | None:
    name = rope.values.get("rope_type", rope.values.get("type", "default"))
    name = keys.aliases.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in SCALINGS:
        raise fields.refused(f"rope_type is {short(name)}, which is not supported (only {', '.join(sorted(SCALINGS))})")
    if name == "default":
        for factor, value in rope.values.items():  # transformers would ignore this factor
            if "factor" in factor and factor != "partial_rotary_factor" and value not in (None, 1):
                raise fields.refused(f"{key}.{factor} is {short(value)}, but {key} lacks a rope_type that uses it")
        return None
    if name == "linear":
        return LinearScaling(rope.number("factor"))
    if name == "dynamic":
        return DynamicScaling(rope.number("factor"))
    if name == "llama3":
        return Llama3Scaling(
            factor=rope.number("factor"),
            low_frequency=rope.number("low_freq_factor"),
            high_frequency=rope.number("high_freq_factor"),
            original_context=rope.integral("original_max_position_embeddings"),
        )
    original = _original_context(fields, rope, keys, context)
    if not 2 <= original <= LARGEST or context > LARGEST:
        what = f"original_max_position_embeddings is {short(original)}, outside 2 to {LARGEST}"
        raise fields.refused(what)
    if name == "yarn":
        return _yarn(rope, original, context)
    factor = rope.number("factor") if rope.values.get("factor") is not None else context / original
    if rope.values.get("attention_factor") is not None:
        magnitude = rope.number("attention_factor")
    else:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short_factors, long_factors = rope.numbers("short_factor"), rope.numbers("long_factor")
    return LongRopeScaling(short_factors, long_factors, original, magnitude, is_long=context > original)


def _original_context(fields: Fields, rope: Fields, keys: RopeKeys, context: int) -> int:
    outside = fields.values.get("original_max_position_embeddings") is not None
    if outside or (keys.original_context and "original_max_position_embeddings" not in rope.values):
        return fields.integral("original_max_position_embeddings", keys.original_context)
    return rope.integral("original_max_position_embeddings", context)


def _yarn(rope: Fields, original: int, context: int) -> YarnScaling:
    factor = rope.number("factor") if rope.values.get("factor") is not None else context / original
    if rope.values.get("attention_factor") is not None:
        magnitude = rope.number("attention_factor")
    elif rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        some, all_ = (1 + rope.number(key) * (yarn_magnitude(factor) - 1) for key in ("mscale", "mscale_all_dim"))
        magnitude = some / all_ if all_ else math.nan  # `check_model` refuses NaN
    else:
        magnitude = yarn_magnitude(factor)
    fast, slow = (
        rope.number(key) if rope.values.get(key) else usual for key, usual in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    return YarnScaling(factor, original, magnitude, fast, slow, rope.boolean("truncate", True))


def format_rope(config: Config, keys: RopeKeys) -> dict[str, Any]:
    """Format RoPE's keys for config.json, so that transformers 4, transformers 5 and `read_rope` agree on them."""
    scaling = _format_scaling(config.scaling)
    full = config.rotary_dim is None and keys.fraction == 1
    fraction = {} if full else {"partial_rotary_factor": config.rotary_features / config.head_dim}
    # transformers 4 reads `rope_theta` and `rope_scaling`, transformers 5 reads `rope_parameters`.
    written: dict[str, Any] = {"rope_theta": config.theta, "rope_scaling": scaling, **fraction}
    if isinstance(config.scaling, LongRopeScaling):
        written["original_max_position_embeddings"] = config.scaling.original_context
    most = {"rope_theta": config.theta, **fraction, **(scaling or {"rope_type": "default"})}
    if keys.local_theta is None:
        return written | {"rope_parameters": most}
    local = {"rope_theta": config.local_theta, "rope_type": "default"}
    # If `rope_scaling` is present, transformers 5 ignores the objects for the kinds of layer, so we do not write it.
    return {
        "rope_theta": config.theta,
        keys.local_theta[0]: config.local_theta,
        "rope_parameters": {FULL: most, LOCAL: local},
    }


def _format_scaling(scaling: Scaling | None) -> dict[str, Any] | None:
    match scaling:
        case None:
            return None
        case LinearScaling(factor):
            return {"rope_type": "linear", "type": "linear", "factor": factor}  # transformers before 4.43 read `type`
        case DynamicScaling(factor):
            return {"rope_type": "dynamic", "type": "dynamic", "factor": factor}
        case Llama3Scaling(factor, low, high, original):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
        case YarnScaling(factor, original, magnitude, fast, slow, truncate):
            return {
                "rope_type": "yarn",
                "type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "attention_factor": magnitude,
                "beta_fast": fast,
                "beta_slow": slow,
                "truncate": truncate,
            }
        case LongRopeScaling(short_factors, long_factors, original, magnitude):
            return {
                "rope_type": "longrope",
                "type": "longrope",
                "short_factor": list(short_factors),
                "long_factor": list(long_factors),
                "original_max_position_embeddings": original,
                "attention_factor": magnitude,
            }
