"""The least cost of decoding a token and of reading a prompt: bytes and floating-point operations.

For a mixture of experts the bytes of several tokens are not the least but the expected ones, if each token is as likely
to choose any of the experts (`experts_read`). Tokens that choose the same experts read fewer.

Weights may be arrays, or only their shapes (`model.weights.loading.abstract_params`).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from llamaspec.model.cache import position_bytes
from llamaspec.model.insight.describe import cached_numbers, matrix_weights
from llamaspec.model.weights.params import Experts, FeedForward, Params
from llamaspec.reference.config import Config


class Cost(NamedTuple):
    """Bytes that are read, and floating-point operations."""

    bytes: float
    flops: float

    @property
    def intensity(self) -> float:
        """Operations for each byte. Work below a machine's own ratio waits for its memory."""
        return self.flops / self.bytes

    def seconds(self, *, bandwidth: float, rate: float, cache: int = 0) -> float:
        """Give the least seconds, at `bandwidth` bytes and `rate` operations a second.

        Bytes that fit in a cache of `cache` bytes may be there since the last time, and then nothing waits for memory.
        A larger array that is read from end to end each time has left the cache before it is needed again.

        >>> [Cost(bytes=20.0, flops=100.0).seconds(bandwidth=10.0, rate=100.0, cache=cache) for cache in (0, 32)]
        [2.0, 1.0]
        """
        reading = 0.0 if self.bytes <= cache else self.bytes / bandwidth
        return max(reading, self.flops / rate)


def decode_cost(
    params: Params, config: Config, *, position: int | float, batch: int, cache_dtype: np.dtype | None = None
) -> Cost:
    """Give the cost of one step of `batch` sequences, each with `position` tokens before it.

    Every weight is read once, and takes two operations for each token that it is multiplied by. An embedding that is
    not the head, too, is read a row for each token; experts are read as `experts_read` expects. Keys and values that a
    layer sees are read once, and each takes two operations for each query head. The cache has the embedding's dtype,
    unless `cache_dtype` is given.
    """
    weights = _layer_bytes(params, config, tokens=batch) + _bytes((params.norm, params.head))
    row = 0 if config.tied else _bytes(params.embedding) / config.vocab
    seen = positions_seen(config, position)
    cached = position_bytes(config, dtype=cache_dtype or params.embedding.dtype) * seen
    attention = 2 * cached_numbers(config) * seen * config.heads / config.kv_heads
    flops = 2 * matrix_weights(config, head=True) + attention
    return Cost(bytes=weights + batch * (row + cached), flops=batch * flops)


def decode_bytes(params: Params, config: Config, *, position: int | float, batch: int) -> dict[str, float]:
    """Split the bytes of `decode_cost` by part of the model, as `model.insight.profile` names the parts.

    Norms and rows of the embedding do not count.
    """
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
    read["moe_add product"] += _expert_bytes(params, config, tokens=batch)
    cached = position_bytes(config, dtype=params.embedding.dtype) * positions_seen(config, position)
    return {part: count for part, count in {**read, "attend": float(batch * cached)}.items() if count}


def prefill_cost(params: Params, config: Config, *, tokens: int, batch: int = 1) -> Cost:
    """Give the cost of reading `batch` prompts of `tokens` tokens into empty caches, without the head.

    Every weight of a layer is read once; experts are read as `experts_read` expects.
    """
    pairs = sum(_pairs(tokens, config.window(layer)) for layer in range(config.layers))
    attention = 4 * config.heads * config.head_dim * pairs
    flops = batch * (2 * tokens * matrix_weights(config, head=False) + attention)
    return Cost(bytes=_layer_bytes(params, config, tokens=batch * tokens), flops=flops)


def positions_seen(config: Config, position: int | float) -> float:
    """Count the positions that a query sees with `position` others before it, on average over the layers.

    >>> gemma = Config(4, 2, 2, 1, 2, 8, vocab=10, context=8, eps=1e-5, theta=1e4, windows=(4, None))
    >>> positions_seen(gemma, 1), positions_seen(gemma, 7)
    (2.0, 6.0)
    """
    spans = [min(position + 1, config.window(layer) or position + 1) for layer in range(config.layers)]
    return sum(spans) / max(len(spans), 1)


def _pairs(tokens: int, window: int | None) -> float:
    """Count the pairs of a query and a key that it sees, in a text from its beginning."""
    first = tokens if window is None else min(tokens, window)  # queries that see all before them
    return first * (first + 1) / 2 + (tokens - first) * first


def experts_read(config: Config, *, tokens: int) -> float:
    """Compute the expected number of experts that `tokens` tokens choose in a layer, if all are equally likely.

    At most that is tokens x experts_per_token, or all. If all tokens choose the same, it is experts_per_token.

    >>> mixtral = Config(4, 1, 2, 1, 2, 8, vocab=10, context=8, eps=1e-5, theta=1e4, experts=8, experts_per_token=2)
    >>> [experts_read(mixtral, tokens=tokens) for tokens in (1, 2, 3)]
    [2.0, 3.5, 4.625]
    """
    passed_over = 1 - config.experts_per_token / config.experts  # by a token
    return config.experts * (1 - passed_over**tokens)


def _layer_bytes(params: Params, config: Config, *, tokens: int) -> float:
    """Count the bytes of all layers that `tokens` tokens read together."""
    without_experts = _bytes(params.layers) - _bytes(_experts(params))
    return without_experts + _expert_bytes(params, config, tokens=tokens)


def _expert_bytes(params: Params, config: Config, *, tokens: int) -> float:
    experts = _bytes(_experts(params))
    return experts * experts_read(config, tokens=tokens) / config.experts if experts else 0.0


def _experts(params: Params) -> list[Sequence[FeedForward]]:
    return [layer.ffn.experts for layer in params.layers if isinstance(layer.ffn, Experts)]


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
