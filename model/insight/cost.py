"""The least cost of decoding a token and of prefilling a prompt: bytes and floating-point operations.

For a mixture of experts and several tokens, the bytes are not the minimum. We count the expected number for tokens that
choose every expert with the same probability (`experts_read`). If tokens choose the same experts, fewer bytes are read.

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
    """The bytes that a computation reads, and its floating-point operations."""

    bytes: float
    flops: float

    @property
    def intensity(self) -> float:
        """Operations per byte. On a machine that can do more operations per byte, the computation waits for memory."""
        return self.flops / self.bytes

    def seconds(self, *, bandwidth: float, rate: float, cache: int = 0) -> float:
        """Return the least seconds for this cost, at `bandwidth` bytes per second and `rate` operations per second.

        If all bytes fit in a cache of `cache` bytes, an earlier read may have left them there, so we count no time for
        reading. A larger array that is read from end to end each time has left the cache before the next read.

        >>> [Cost(bytes=20.0, flops=100.0).seconds(bandwidth=10.0, rate=100.0, cache=cache) for cache in (0, 32)]
        [2.0, 1.0]
        """
        reading = 0.0 if self.bytes <= cache else self.bytes / bandwidth
        return max(reading, self.flops / rate)


def decode_cost(
    params: Params, config: Config, *, position: int | float, batch: int, cache_dtype: np.dtype | None = None
) -> Cost:
    """Return the cost of one decoding step of `batch` sequences, each with `position` earlier tokens.

    Every weight is read once, and takes two operations per token. If the embedding is not also the head, one row of the
    embedding is read per token. For experts we count the expected number that is read (`experts_read`).

    Every number in the keys and values that a layer attends to is read once, and takes two operations for each query
    head that uses it. The cache has the embedding's dtype, unless `cache_dtype` is given.
    """
    weights = _layer_bytes(params, config, tokens=batch) + _bytes((params.norm, params.head))
    row = 0 if config.tied else _bytes(params.embedding) / config.vocab
    seen = positions_seen(config, position)
    cached = position_bytes(config, dtype=cache_dtype or params.embedding.dtype) * seen
    attention = 2 * cached_numbers(config) * seen * config.heads / config.kv_heads
    flops = 2 * matrix_weights(config, head=True) + attention
    return Cost(bytes=weights + batch * (row + cached), flops=batch * flops)


def decode_bytes(params: Params, config: Config, *, position: int | float, batch: int) -> dict[str, float]:
    """Split the bytes of `decode_cost` by part of the model, with the part names of `model.insight.profile`.

    Norms and rows of the embedding are left out.
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
    """Return the cost of prefilling `batch` prompts of `tokens` tokens into empty caches, without the head.

    Every weight of a layer is read once. For experts we count the expected number that is read (`experts_read`).
    """
    pairs = sum(_pairs(tokens, config.window(layer)) for layer in range(config.layers))
    attention = 4 * config.heads * config.head_dim * pairs
    flops = batch * (2 * tokens * matrix_weights(config, head=False) + attention)
    return Cost(bytes=_layer_bytes(params, config, tokens=batch * tokens), flops=flops)


def positions_seen(config: Config, position: int | float) -> float:
    """Count the positions that a query with `position` earlier positions attends to, on average over the layers.

    >>> gemma = Config(4, 2, 2, 1, 2, 8, vocab=10, context=8, eps=1e-5, theta=1e4, windows=(4, None))
    >>> positions_seen(gemma, 1), positions_seen(gemma, 7)
    (2.0, 6.0)
    """
    spans = [min(position + 1, config.window(layer) or position + 1) for layer in range(config.layers)]
    return sum(spans) / max(len(spans), 1)


def _pairs(tokens: int, window: int | None) -> float:
    """Count the pairs of a query and a key that the query attends to, in a sequence of `tokens` tokens.

    A query attends to its last `window` positions, or to all if `window` is None.
    """
    first = tokens if window is None else min(tokens, window)  # number of queries that attend to all tokens before them
    return first * (first + 1) / 2 + (tokens - first) * first


def experts_read(config: Config, *, tokens: int) -> float:
    """Compute the expected number of experts that `tokens` tokens choose in a layer, if all experts are equally likely.

    The actual number is at least experts_per_token (all tokens choose the same experts), and at most the smaller of
    tokens x experts_per_token and all experts.

    >>> mixtral = Config(4, 1, 2, 1, 2, 8, vocab=10, context=8, eps=1e-5, theta=1e4, experts=8, experts_per_token=2)
    >>> [experts_read(mixtral, tokens=tokens) for tokens in (1, 2, 3)]
    [2.0, 3.5, 4.625]
    """
    passed_over = 1 - config.experts_per_token / config.experts  # probability that a token skips a given expert
    return config.experts * (1 - passed_over**tokens)


def _layer_bytes(params: Params, config: Config, *, tokens: int) -> float:
    """Count the bytes of all layers' weights that a step for `tokens` tokens reads."""
    without_experts = _bytes(params.layers) - _bytes(_experts(params))
    return without_experts + _expert_bytes(params, config, tokens=tokens)


def _expert_bytes(params: Params, config: Config, *, tokens: int) -> float:
    experts = _bytes(_experts(params))
    return experts * experts_read(config, tokens=tokens) / config.experts if experts else 0.0


def _experts(params: Params) -> list[Sequence[FeedForward]]:
    return [layer.ffn.experts for layer in params.layers if isinstance(layer.ffn, Experts)]


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
