"""A GGUF file's keys, read into a `Config` with the meaning that llama.cpp gives them.

Three architectures are read: "llama" (Llama, TinyLlama, SmolLM2, Mistral, Mixtral, llama2.c's), "qwen2" and "qwen3".
What would change a number and is not implemented is refused by name.
"""

from collections.abc import Container
from dataclasses import replace
from typing import Any

import numpy as np

from model.checkpoints.checkpoint import refused
from model.checkpoints.checks import check_model
from model.checkpoints.gguf.file import Metadata, short
from model.checkpoints.gguf.rope import from_factors
from reference.config import Config
from reference.rope import LinearScaling, Scaling

ARCHITECTURES = ("llama", "qwen2", "qwen3")
SPLITS = "split.count"

# Keys of an architecture that change the computation, and the values with which they do not.
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

BOS = "tokenizer.ggml.bos_token_id"
STOPS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def architecture_of(metadata: Metadata) -> str:
    """Raises `CheckpointError` for one that is not read, and for a part of a file that was split."""
    if (count := metadata.integer(SPLITS, 1)) > 1:
        raise metadata.refused(f"is one of {count} parts: merge them first, with llama-gguf-split --merge")
    name = metadata.string("general.architecture")
    if name not in ARCHITECTURES:
        raise metadata.refused(f"architecture {short(name)} is not supported (only {', '.join(ARCHITECTURES)})")
    return name


def read_config(
    metadata: Metadata, architecture: str, tensors: Container[str], *, vocab: int, factors: np.ndarray | None
) -> Config:
    """The hyperparameters of a file that holds `tensors`; `factors` are its rope_freqs. Raises `CheckpointError`."""

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    for name, neutral in NEUTRAL.items():
        value = metadata.values.get(key(name), neutral[0])
        if isinstance(value, list | np.ndarray) or value not in neutral:
            raise metadata.refused(f"{key(name)} is {short(value)}, which is not supported")
    if (stated := metadata.integer(key("vocab_size"), vocab)) != vocab:
        raise metadata.refused(f"{key('vocab_size')} is {stated}, but token_embd.weight has {vocab} rows")

    dim, heads = metadata.integer(key("embedding_length")), metadata.integer(key("attention.head_count"))
    head_dim = _head_dim(metadata, architecture, dim, heads)
    theta = shortest(metadata.number(key("rope.freq_base"), 10_000.0))
    experts = metadata.integer(key("expert_count"), 0)
    config = Config(
        dim=dim,
        layers=metadata.integer(key("block_count")),
        heads=heads,
        kv_heads=metadata.integer(key("attention.head_count_kv"), heads),
        head_dim=head_dim,
        ffn=metadata.integer(key("feed_forward_length")),
        vocab=vocab,
        context=metadata.integer(key("context_length")),
        eps=shortest(metadata.number(key("attention.layer_norm_rms_epsilon"))),
        theta=theta,
        experts=experts,
        experts_per_token=metadata.integer(key("expert_used_count"), 0) if experts else 0,
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        ffn_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )
    check_model(metadata.path, config, bos=None, stops=frozenset())
    config = replace(config, scaling=_scaling(metadata, architecture, config, factors))
    check_model(metadata.path, config, bos=None, stops=frozenset())
    return config


def read_tokens(metadata: Metadata, *, vocab: int) -> tuple[int | None, frozenset[int]]:
    """The id that begins a text, where the file says, and those that end one. Raises `CheckpointError`."""
    ids = {key: metadata.integer(key) for key in (BOS, *STOPS) if key in metadata}
    for key, id in ids.items():
        if not 0 <= id < vocab:
            raise metadata.refused(f"{key} is {short(id)}, outside a vocabulary of {vocab}")
    return ids.get(BOS), frozenset(ids[key] for key in STOPS if key in ids)


def shortest(number: float) -> float:
    """The decimal that somebody wrote before it became float32: the shortest of those that do.

    >>> shortest(9.999999747378752e-06), shortest(500000.0)
    (1e-05, 500000.0)
    """
    with np.errstate(over="ignore"):
        return float(str(np.float32(number)))


def _head_dim(metadata: Metadata, architecture: str, dim: int, heads: int) -> int:
    key = f"{architecture}.attention.key_length"
    if key not in metadata and (heads < 1 or dim % heads):
        raise metadata.refused(f"{architecture}.embedding_length is {short(dim)}, no multiple of {short(heads)} heads")
    head_dim = metadata.integer(key) if key in metadata else dim // heads
    for other in ("attention.value_length", "rope.dimension_count"):
        if (size := metadata.integer(f"{architecture}.{other}", head_dim)) != head_dim:
            raise metadata.refused(f"{architecture}.{other} is {short(size)}, but heads are {short(head_dim)} wide")
    return head_dim


def _scaling(metadata: Metadata, architecture: str, config: Config, factors: np.ndarray | None) -> Scaling | None:
    key = f"{architecture}.rope.scaling"
    name = metadata.string(f"{key}.type", "linear")  # llama.cpp's default, too
    old = f"{architecture}.rope.scale_linear"
    factor = shortest(metadata.number(f"{key}.factor", metadata.number(old, 1.0)))
    if name not in ("none", "linear"):
        raise metadata.refused(f"{key}.type {short(name)} is not supported (only none and linear)")
    linear = LinearScaling(factor) if name == "linear" else None
    if factors is None:
        return linear if linear and linear.factor != 1 else None
    if linear and linear.factor != 1:
        raise refused(metadata.path, "rescales RoPE twice: by a linear factor and by rope_freqs.weight")
    original = metadata.integer(f"{key}.original_context_length", 0)
    return from_factors(
        factors,
        head_dim=config.head_dim,
        theta=config.theta,
        path=metadata.path,
        original_context=original if original > 0 else None,
    )
