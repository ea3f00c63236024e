"""Hugging Face's config.json, read into a `Config` with the meaning that transformers gives it.

Five families are read; SmolLM2, TinyLlama and others call themselves "llama". Where transformers 4 and 5 spell a
thing differently, both spellings are read. What would change a number and is not implemented is refused by name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from model.checkpoints.checkpoint import refused
from model.checkpoints.checks import MOST_LAYERS, check_model
from model.checkpoints.strict_json import short
from reference.config import Config
from reference.rope import LinearScaling, Llama3Scaling, Scaling


class Family(NamedTuple):
    """What the name of a family implies: transformers' defaults for absent keys, and which keys it looks at."""

    context: int
    kv_heads: int | None  # None: as many as heads
    head_dim: int | None = None  # None: dim / heads
    eps: float = 1e-6
    theta: float = 10_000.0
    bos: int | None = 1
    stop: int | None = 2
    qkv_bias: bool = False  # whatever the file says
    attention_bias: bool = False  # the key counts, for q, k, v and o alike
    mlp_bias: bool = False  # the key counts
    qk_norm: bool = False
    layer_types: bool = False  # windows are chosen layer by layer, and use_sliding_window turns them on
    window: int | None = None
    moe: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(2048, kv_heads=None, attention_bias=True, mlp_bias=True),
    "mistral": Family(131_072, kv_heads=8, window=4096),
    "mixtral": Family(131_072, kv_heads=8, eps=1e-5, theta=1e6, moe=True),
    "qwen2": Family(32_768, kv_heads=32, bos=None, stop=None, qkv_bias=True, layer_types=True, window=4096),
    "qwen3": Family(
        32_768,
        kv_heads=32,
        head_dim=128,
        bos=None,
        stop=None,
        attention_bias=True,
        qk_norm=True,
        layer_types=True,
        window=4096,
    ),
}

SCALINGS = {"default", "linear", "llama3"}


class Fields:
    """A JSON object whose values are fetched by key and type; a `CheckpointError` names the key of a wrong one."""

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
        """Token ids given as one integer or a list; None where there is none."""
        value: Any = self.values.get(key)
        ids = value if isinstance(value, list) else [value]
        self._typed(key, value, "an integer or a list of them", value is None or all(type(id) is int for id in ids))
        return None if value is None else frozenset(ids)

    def object(self, key: str) -> dict[str, Any]:
        """An object, empty where it is absent or null."""
        value = self.values.get(key)
        return self._typed(key, value, "an object", value is None or isinstance(value, dict)) or {}

    def _typed(self, key: str, value: Any, kind: str, valid: bool) -> Any:
        if not valid:
            raise refused(self.path, f"{key} is {short(value)}, not {kind}")
        return value


def read_config(values: dict[str, Any], path: str | Path) -> Config:
    """The hyperparameters that config.json, parsed, describes; `path` is for errors. Raises `CheckpointError`."""
    fields = Fields(values, path)
    family = _family(fields)
    dim, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers = fields.integer("num_hidden_layers")
    if not 1 <= layers <= MOST_LAYERS:  # before a window is made for each
        raise refused(path, f"num_hidden_layers is {short(layers)}, outside 1 to {MOST_LAYERS}")
    kv_heads = fields.integer_or_none("num_key_value_heads", family.kv_heads)
    attention_bias = family.attention_bias and fields.boolean("attention_bias")
    theta, scaling = _rope(fields, family)
    config = Config(
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=_head_dim(fields, family, dim, heads),
        ffn=fields.integer("intermediate_size"),
        vocab=fields.integer("vocab_size"),
        context=fields.integer("max_position_embeddings", family.context),
        eps=fields.number("rms_norm_eps", family.eps),
        theta=theta,
        scaling=scaling,
        windows=_windows(fields, family, layers),
        experts=fields.integer("num_local_experts", 8) if family.moe else 0,
        experts_per_token=fields.integer("num_experts_per_tok", 2) if family.moe else 0,
        tied=fields.boolean("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        ffn_bias=family.mlp_bias and fields.boolean("mlp_bias"),
        qk_norm=family.qk_norm,
    )
    if family.moe and not config.experts:
        raise refused(path, "num_local_experts is 0")
    check_model(str(path), config, bos=None, stops=frozenset())
    return config


def read_tokens(
    values: dict[str, Any], path: str | Path, generation: dict[str, Any], generation_path: str | Path, *, vocab: int
) -> tuple[int | None, frozenset[int]]:
    """The id that begins a text and those that end one: generation_config.json's, else config.json's.

    Raises `CheckpointError` where an id is none of the `vocab`. A null in generation_config.json says nothing.
    """
    family = FAMILIES[values["model_type"]]
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


def _family(fields: Fields) -> Family:
    name = fields.values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise refused(fields.path, f"model_type {short(name)} is not supported (only {', '.join(FAMILIES)})")
    activation = fields.values.get("hidden_act", "silu")
    if activation != "silu":
        raise refused(fields.path, f"hidden_act {short(activation)} is not supported (only silu)")
    return FAMILIES[name]


def _head_dim(fields: Fields, family: Family, dim: int, heads: int) -> int:
    head_dim = fields.integer_or_none("head_dim", family.head_dim)
    if head_dim is not None:
        return head_dim
    if heads < 1 or dim % heads:
        raise refused(fields.path, f"hidden_size {short(dim)} is no multiple of {short(heads)} heads")
    return dim // heads


def _rope(fields: Fields, family: Family) -> tuple[float, Scaling | None]:
    """Theta and the rescaling. As in transformers, `rope_scaling` (4) wins over `rope_parameters` (5)."""
    key = "rope_scaling" if fields.object("rope_scaling") else "rope_parameters"
    rope = Fields(fields.object(key), fields.path)
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise refused(fields.path, f"{key} that differ from layer to layer are not supported")
    theta = rope.number("rope_theta") if "rope_theta" in rope.values else fields.number("rope_theta", family.theta)
    for part in (fields, rope):
        fraction = part.values.get("partial_rotary_factor")
        if fraction is not None and fraction != 1:
            raise refused(fields.path, f"partial_rotary_factor {short(fraction)} is not supported (only 1)")

    name = rope.values.get("rope_type", rope.values.get("type", "default"))
    if not isinstance(name, str) or name not in SCALINGS:
        raise refused(fields.path, f"rope_type {short(name)} is not supported (only {', '.join(sorted(SCALINGS))})")
    if name == "default":
        for factor, value in rope.values.items():  # transformers would ignore it
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
    """Per layer, how many last positions it sees; None where every layer sees all."""
    if not family.layer_types:
        reads_key = family.window is not None or family.moe
        window = fields.integer_or_none("sliding_window", family.window) if reads_key else None
        return None if window is None else (window,) * layers

    used = fields.boolean("use_sliding_window")
    window = fields.integer_or_none("sliding_window", family.window) if used else None
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
