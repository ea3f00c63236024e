"""What decoding a token and reading a prompt cost at least: bytes and floating-point operations.

Weights may be arrays, or only their shapes (`model.params.abstract_params`).
"""

import math
from typing import NamedTuple

import jax

from model.describe import cached_numbers, matrix_weights
from model.params import Experts, Params
from reference.config import Config


class Cost(NamedTuple):
    bytes: float
    flops: float

    @property
    def intensity(self) -> float:
        """Operations for each byte: what is below a machine's own ratio waits for its memory."""
        return self.flops / self.bytes


def decode_cost(params: Params, config: Config, *, position: float, batch: int) -> Cost:
    """One step of `batch` sequences, each with `position` tokens before it.

    Every weight is read once, of an embedding that is not the head as well only a row for each token; each weight of a
    matrix is two operations a token. Keys and values are read once, and each is two operations a query head.
    """
    weights = _layer_bytes(params, config) + _bytes((params.norm, params.head))
    width = params.embedding.dtype.itemsize
    row = 0 if config.tied else config.dim * width
    cached = cached_numbers(config) * (position + 1)
    flops = 2 * matrix_weights(config, head=True) + 2 * cached * config.heads / config.kv_heads
    return Cost(bytes=weights + batch * (row + cached * width), flops=batch * flops)


def prefill_cost(params: Params, config: Config, *, tokens: int, batch: int = 1) -> Cost:
    """`batch` prompts of so many tokens into empty caches, up to where decoding begins: the head has no part in it."""
    pairs = tokens * (tokens + 1) / 2  # of a query and a key that it sees
    attention = 4 * config.layers * config.heads * config.head_dim * pairs
    flops = batch * (2 * tokens * matrix_weights(config, head=False) + attention)
    return Cost(bytes=_layer_bytes(params, config), flops=flops)


def _layer_bytes(params: Params, config: Config) -> float:
    """Of all layers; of experts, as many as a token chooses."""
    experts = sum(_bytes(layer.ffn.experts) for layer in params.layers if isinstance(layer.ffn, Experts))
    left_out = 1 - config.experts_per_token / config.experts if config.experts else 0
    return _bytes(params.layers) - experts * left_out


def _bytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
