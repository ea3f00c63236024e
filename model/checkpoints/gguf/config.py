"""Read a GGUF file's keys into a `Config`, with the meaning that llama.cpp gives them.

We read the architectures of `model.families`. Files of Mistral and Mixtral state the architecture "llama". If a key
changes the computation in a way that we do not support, we refuse the file, and the error names the key.
"""

from collections.abc import Container
from dataclasses import MISSING, fields, replace
from typing import Any

import numpy as np

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.checks import check_model
from llamaspec.model.checkpoints.gguf.control_tokens import ENDS, ending_names
from llamaspec.model.checkpoints.gguf.file import Metadata, short
from llamaspec.model.checkpoints.gguf.rope import from_factors
from llamaspec.model.checkpoints.recognize import IMATRIX
from llamaspec.model.family import Architecture, architectures
from llamaspec.reference.config import Config
from llamaspec.reference.rope import LinearScaling, LongRopeScaling, Scaling, YarnScaling, yarn_magnitude

# Keys that change the computation, and the values with which they do not change it.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_gating_func": (0, 1),  # 1: softmax
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}

TOKENS = "tokenizer.ggml.tokens"
BOS = "tokenizer.ggml.bos_token_id"
EOS = "tokenizer.ggml.eos_token_id"
STOPS = (EOS, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def architecture_of(metadata: Metadata) -> Architecture:
    """Return the architecture that a file names. Raises `CheckpointError` if we do not know the architecture."""
    if metadata.values.get("general.type") == "imatrix":
        raise metadata.refused(IMATRIX)
    name, known = metadata.string("general.architecture"), architectures()
    if name not in known:
        raise metadata.refused(f"architecture {short(name)} is not supported (only {', '.join(known)})")
    return known[name]


def read_config(
    metadata: Metadata,
    architecture: Architecture,
    tensors: Container[str],
    *,
    vocab: int,
    factors: np.ndarray | None,
    long_factors: tuple[np.ndarray, np.ndarray] | None = None,
) -> Config:
    """Read the hyperparameters of a GGUF file. Raises `CheckpointError` if a key is missing or unsupported.

    `tensors` has the names of the file's tensors, `vocab` is the number of tokens, and `factors` are the contents of
    the tensor rope_freqs.weight. `long_factors` are LongRoPE's factors for short sequences and for long sequences.
    """

    def key(name: str) -> str:
        return f"{architecture.name}.{name}"

    for name, neutral in NEUTRAL.items():
        if name in architecture.own:
            continue
        value = metadata.values.get(key(name), neutral[0])
        if isinstance(value, list | np.ndarray) or value not in neutral:
            raise metadata.refused(f"{key(name)} is {short(value)}, which is not supported")
    if (stated := metadata.integer(key("vocab_size"), vocab)) != vocab:
        raise metadata.refused(f"{key('vocab_size')} is {stated}, but token_embd.weight has {vocab} rows")

    heads = metadata.integer(key(architecture.keys["heads"]))
    optional = {field.name: field.default for field in fields(Config) if field.default is not MISSING}
    defaults = {"kv_heads": heads, **optional}
    config_values: dict[str, Any] = {}
    for name, its_key in architecture.keys.items():
        if name == "head_dim":
            config_values[name] = _head_dim(metadata, architecture, config_values["dim"], heads)
        elif Config.__annotations__[name] in (float, float | None):
            absent = optional.get(name, 10_000.0 if name == "theta" else None)
            stated = key(its_key) in metadata or name == "eps"
            config_values[name] = shortest(metadata.number(key(its_key))) if stated else absent
        else:
            config_values[name] = metadata.integer(key(its_key), defaults.get(name))
    if not config_values["experts"]:
        config_values["experts_per_token"] = 0

    def holds(part: str, kind: str = "weight") -> bool:
        name = architecture.names.get(part)
        return name is not None and f"{name.format(layer=0)}.{kind}" in tensors

    config_values |= architecture.switches
    config_values |= {
        "vocab": vocab,
        "tied": not holds("head"),
        "qkv_bias": holds("q", "bias"),
        "o_bias": holds("o", "bias"),
    }
    config_values |= {"ffn_bias": holds("up", "bias"), "qk_norm": holds("q_norm"), "head_qk_norm": holds("head_q_norm")}
    parallel = "parallel_residual" in architecture.has
    config_values["parallel_residual"] = parallel and not holds("ffn_norm")  # as in llama.cpp
    turned = metadata.integer(key("rope.dimension_count"), config_values["head_dim"])
    config_values["rotary_dim"] = None if turned == config_values["head_dim"] else turned
    config = Config(**config_values)
    check_model(metadata.path, config, bos=None, stops=frozenset())
    config = replace(config, **architecture.read(Keys(metadata, architecture.name), vars(config)))
    check_model(metadata.path, config, bos=None, stops=frozenset())
    config = replace(config, scaling=_scaling(metadata, architecture, config, factors, long_factors))
    check_model(metadata.path, config, bos=None, stops=frozenset())
    return config


def read_tokens(metadata: Metadata, *, vocab: int) -> tuple[int | None, frozenset[int]]:
    """Read the id of the token that begins a text (or None), and the ids of the tokens that end generation.

    As in llama.cpp, generation also ends at tokens with certain names (see `control_tokens`), even if no key states
    their ids. Raises `CheckpointError` for an id that is not in the vocabulary.
    """
    ids = {key: metadata.integer(key) for key in (BOS, *STOPS) if key in metadata}
    for key, id in ids.items():
        if not 0 <= id < vocab:
            raise metadata.refused(f"{key} is {short(id)}, outside the vocabulary of {vocab} tokens")
    tokens = metadata.strings(TOKENS) if TOKENS in metadata else []
    named = {name: id for id, name in enumerate(tokens[:vocab]) if name in ENDS}
    ends = {named[name] for name in ending_names(named) if name in named}
    return ids.get(BOS), frozenset(ids[key] for key in STOPS if key in ids) | ends


def shortest(number: float) -> float:
    """Return the shortest decimal number that rounds to the float32 `number`: most likely the number its author wrote.

    >>> shortest(9.999999747378752e-06), shortest(500000.0)
    (1e-05, 500000.0)
    """
    with np.errstate(over="ignore"):
        return float(str(np.float32(number)))


class Keys:
    """Reads keys by their names without the architecture's prefix, for `model.families`.

    For example, in a file of the architecture "granite", the name "attention.scale" means the key
    "granite.attention.scale".
    """

    def __init__(self, metadata: Metadata, name: str):
        self._metadata, self._name = metadata, name

    def integer(self, key: str, default: int) -> int:
        return self._metadata.integer(f"{self._name}.{key}", default)

    def decimal(self, key: str, default: float) -> float:
        return shortest(self._metadata.number(f"{self._name}.{key}", default))


def _head_dim(metadata: Metadata, architecture: Architecture, dim: int, heads: int) -> int:
    key, dim_key = (f"{architecture.name}.{architecture.keys[name]}" for name in ("head_dim", "dim"))
    if key not in metadata and (heads < 1 or dim % heads):
        raise metadata.refused(f"{dim_key} is {short(dim)}, which is not a multiple of the {short(heads)} heads")
    head_dim = metadata.integer(key) if key in metadata else dim // heads
    partial = "rotary_dim" in architecture.has
    for suffix in ("attention.value_length",) if partial else ("attention.value_length", "rope.dimension_count"):
        other_key = f"{architecture.name}.{suffix}"
        if (size := metadata.integer(other_key, head_dim)) != head_dim:
            raise metadata.refused(f"{other_key} is {short(size)}, expected the width of a head, {short(head_dim)}")
    return head_dim


def _scaling(
    metadata: Metadata,
    architecture: Architecture,
    config: Config,
    factors: np.ndarray | None,
    long_factors: tuple[np.ndarray, np.ndarray] | None,
) -> Scaling | None:
    key = f"{architecture.name}.rope.scaling"
    name = metadata.string(f"{key}.type", "linear")  # as in llama.cpp
    old = f"{architecture.name}.rope.scale_linear"
    factor = shortest(metadata.number(f"{key}.factor", metadata.number(old, 1.0)))
    original = metadata.integer(f"{key}.original_context_length", 0)
    if long_factors is not None:
        return _long_rope(metadata, architecture, config, long_factors, original or config.context)
    if name == "yarn" and factors is None:
        length, whole_yarn = yarn_magnitude(factor), architecture.whole_yarn
        return YarnScaling(factor, original or config.context, length, truncate=whole_yarn) if factor != 1 else None
    if name not in ("none", "linear"):
        raise metadata.refused(f"{key}.type {short(name)} is not supported (only none, linear and yarn)")
    linear = LinearScaling(factor) if name == "linear" else None
    if factors is None:
        return linear if linear and linear.factor != 1 else None
    if linear and linear.factor != 1:
        raise refused(metadata.path, f"rescales RoPE twice: by {key}.factor and by the tensor rope_freqs.weight")
    return from_factors(
        factors,
        head_dim=config.head_dim,
        theta=config.theta,
        path=metadata.path,
        original_context=original if original > 0 else None,
    )


def _long_rope(
    metadata: Metadata,
    architecture: Architecture,
    config: Config,
    factors: tuple[np.ndarray, np.ndarray],
    original: int,
) -> LongRopeScaling:
    if not architecture.long_rope:
        what = f"has the tensors of LongRoPE's factors, but the architecture {architecture.name} does not use LongRoPE"
        raise metadata.refused(what)
    if any(array.shape != (config.rotary_features // 2,) or not np.all(array > 0) for array in factors):
        what = f"expected {config.rotary_features // 2} positive numbers in each of its tensors"
        raise metadata.refused(f"{what} rope_factors_short.weight and rope_factors_long.weight")
    few, many = (tuple(shortest(factor) for factor in array.tolist()) for array in factors)
    stated = f"{architecture.name}.rope.scaling.attn_factor"
    magnitude = shortest(metadata.number(stated, 1.0))
    return LongRopeScaling(few, many, original, magnitude, is_long=config.context > original)
