"""What decoding a token and reading a prompt cost at least: bytes and floating-point operations.

Weights may be arrays, or only their shapes (`model.params.abstract_params`).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from model.cache import position_bytes
from model.describe import cached_numbers, matrix_weights
from model.params import Experts, FeedForward, Params
from reference.config import Config


class Cost(NamedTuple):
    bytes: float
    flops: float

    @property
    def intensity(self) -> float:
        """Operations for each byte: what is below a machine's own ratio waits for its memory."""
        return self.flops / self.bytes

    def seconds(self, *, bandwidth: float, rate: float) -> float:
        """What it takes at least: bytes to read a second, operations a second.

        >>> Cost(bytes=20.0, flops=100.0).seconds(bandwidth=10.0, rate=100.0)
        2.0
        """
        return max(self.bytes / bandwidth, self.flops / rate)


def decode_cost(
    params: Params, config: Config, *, position: int | float, batch: int, cache_dtype: np.dtype | None = None
) -> Cost:
    """One step of `batch` sequences, each with `position` tokens before it.

    Every weight is read once, of an embedding that is not the head as well only a row for each token; each weight of a
    matrix is two operations a token. Keys and values are read once, and each is two operations a query head. The cache
    is of the embedding's dtype, unless `cache_dtype` says otherwise.
    """
    weights = _layer_bytes(params, config) + _bytes((params.norm, params.head))
    row = 0 if config.tied else config.dim * params.embedding.dtype.itemsize
    cached = position_bytes(config, dtype=cache_dtype or params.embedding.dtype) * (position + 1)
    attention = 2 * cached_numbers(config) * (position + 1) * config.heads / config.kv_heads
    flops = 2 * matrix_weights(config, head=True) + attention
    return Cost(bytes=weights + batch * (row + cached), flops=batch * flops)


def decode_bytes(params: Params, config: Config, *, position: int | float, batch: int) -> dict[str, float]:
    """What a step reads by part of the model, as `model.profile` names the parts: all but norms and embedding rows."""
    layers = params.layers
    products = {
        "norm_qkv": [layer.qkv for layer in layers],
        "project_add": [layer.o for layer in layers],
        "norm_gate_up": [layer.ffn.gate_up for layer in layers if isinstance(layer.ffn, FeedForward)],
        "down_add": [layer.ffn.down for layer in layers if isinstance(layer.ffn, FeedForward)],
        "moe_add": [layer.ffn.router for layer in layers if isinstance(layer.ffn, Experts)],
        "norm_logits": params.head,
    }
    read = {f"{op} product": float(_bytes(tree)) for op, tree in products.items()}
    read["moe_add product"] += _bytes(_experts(params)) * _share_chosen(config)
    cached = position_bytes(config, dtype=params.embedding.dtype) * (position + 1)
    return {part: count for part, count in {**read, "attend": float(batch * cached)}.items() if count}


def prefill_cost(params: Params, config: Config, *, tokens: int, batch: int = 1) -> Cost:
    """`batch` prompts of so many tokens into empty caches, up to where decoding begins: the head has no part in it."""
    pairs = tokens * (tokens + 1) / 2  # of a query and a key that it sees
    attention = 4 * config.layers * config.heads * config.head_dim * pairs
    flops = batch * (2 * tokens * matrix_weights(config, head=False) + attention)
    return Cost(bytes=_layer_bytes(params, config), flops=flops)


def _layer_bytes(params: Params, config: Config) -> float:
    """Of all layers; of experts, as many as a token chooses."""
    return _bytes(params.layers) - _bytes(_experts(params)) * (1 - _share_chosen(config))


def _experts(params: Params) -> list[Sequence[FeedForward]]:
    return [layer.ffn.experts for layer in params.layers if isinstance(layer.ffn, Experts)]


def _share_chosen(config: Config) -> float:
    return config.experts_per_token / config.experts if config.experts else 1.0


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
