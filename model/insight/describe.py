"""Describes the tensors of a checkpoint and the cost of a token, from the checkpoint's header."""

from dataclasses import asdict
from math import prod
from typing import Any

from llamaspec.model.checkpoints.checkpoint import Checkpoint, Tensor
from llamaspec.model.tensors import EMBEDDING, Role, Weight, weights
from llamaspec.reference.config import Config


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return everything that `llamaspec inspect` shows, as values for JSON.

    Decoding a token reads every weight once, but only one row of the embedding and only the chosen experts. Each weight
    of a matrix takes two FLOPs. Attention is not included. If the cache has the dtype of the embedding, each earlier
    position adds `cache_bytes_per_token` to the bytes that are read.
    """
    config, tensors = checkpoint.config, checkpoint.tensors
    read = {weight.name: tensors[weight.name].bytes * _share_read(weight, config) for weight in weights(config)}
    return {
        "format": checkpoint.format,
        "config": asdict(config),
        "tensors": [
            {"name": name, "shape": list(tensor.shape), "dtype": _dtype(tensor), "bytes": tensor.bytes}
            for name, tensor in tensors.items()
        ],
        "parameters": sum(prod(tensor.shape) for tensor in tensors.values()),
        "bytes": sum(tensor.bytes for tensor in tensors.values()),
        "flops_per_token": 2 * matrix_weights(config, head=True),
        "bytes_per_token": round(sum(read.values())),
        "cache_bytes_per_token": cached_numbers(config) * tensors[EMBEDDING].dtype.itemsize,
    }


def matrix_weights(config: Config, *, head: bool) -> int:
    """Count the weights of the matrices that multiply a token's activations, with only the chosen experts.

    >>> matrix_weights(Config(4, 1, 2, 1, 2, 8, vocab=10, context=8, eps=1e-5, theta=1e4), head=True)
    184
    >>> ungated = Config(4, 1, 2, 1, 2, 8, vocab=10, context=8, eps=1e-5, theta=1e4, gated=False, activation="relu2")
    >>> matrix_weights(ungated, head=True)
    152
    """
    attention = config.dim * (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    chosen = config.experts_per_token if config.experts else 1
    shared = (3 * config.shared_ffn + 1) * config.dim if config.shared_ffn else 0
    ffn = (2 + config.gated) * config.dim * config.ffn * chosen + config.dim * config.experts + shared
    return config.layers * (attention + ffn) + head * config.vocab * config.dim


def cached_numbers(config: Config) -> int:
    """Count the numbers in the keys and values of one position, in all layers.

    >>> cached_numbers(Config(4, 3, 2, 1, 2, 8, vocab=10, context=8, eps=1e-5, theta=1e4))
    12
    """
    return 2 * config.layers * config.kv_heads * config.head_dim


def _dtype(tensor: Tensor) -> str:
    return tensor.codes.form if tensor.codes else tensor.dtype.name


def _share_read(weight: Weight, config: Config) -> float:
    if weight.role is Role.EMBEDDING and not config.tied:
        return 1 / config.vocab
    return config.experts_per_token / config.experts if weight.role is Role.EXPERT else 1.0


def format_bytes(count: int) -> str:
    """Format a number of bytes with a unit.

    >>> format_bytes(256), format_bytes(65_536), format_bytes(16_777_216), format_bytes(1_050_673_152)
    ('256 B', '65.5 kB', '16.8 MB', '1.1 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
