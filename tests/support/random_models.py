"""Random models in memory, with shapes that expose mistakes."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from llamaspec.model.checkpoints.adapter import Adapter, adaptable
from llamaspec.model.checkpoints.checkpoint import Checkpoint, LowRank, Tensor
from llamaspec.model.tensors import tensor_shapes
from llamaspec.reference.config import Config
from llamaspec.reference.rope import LinearScaling, Llama3Scaling

SMALL = Config(
    dim=24, layers=2, heads=4, kv_heads=4, head_dim=6, ffn=40, vocab=50, context=64, eps=1e-5, theta=10_000.0
)
CONFIGS = {
    "1 to 1, biases, scaled, tied": replace(
        SMALL, qkv_bias=True, o_bias=True, ffn_bias=True, scaling=LinearScaling(factor=4.0), tied=True
    ),
    "3 to 1, q/k norms, window": replace(SMALL, heads=3, kv_heads=1, head_dim=10, qk_norm=True, windows=(3, None)),
    "7 to 1, rescaled": replace(
        SMALL,
        heads=14,
        kv_heads=2,
        head_dim=4,
        theta=500_000.0,
        scaling=Llama3Scaling(factor=8.0, low_frequency=1.0, high_frequency=4.0, original_context=16),
    ),
    # This model is as wide as the blocks of the CPU's product; narrower matrices never fill a block.
    "2 to 1, wide, tied": replace(SMALL, dim=128, kv_heads=2, head_dim=32, ffn=320, tied=True),
    "experts": replace(SMALL, kv_heads=2, experts=4, experts_per_token=2),
}


def random_checkpoint(
    config: Config, *, seed: int, dtype: np.dtype | type = np.float32, few: int | None = None
) -> Checkpoint:
    """Draw weights at random. Activations stay near 1, norm weights differ from 1, and logits reach several units.

    With `few`, each row has only `few` nonzero weights, with magnitudes that sum to about 1. Products then do not
    amplify errors, so an error bound for the whole model stays small enough to be useful.
    """
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if "norm" in name:
            return rng.uniform(0.5, 1.5, shape).astype(dtype)
        if name.endswith(".bias"):
            return rng.normal(0, 0.5, shape).astype(dtype)
        if few and "embed" not in name:
            chosen = np.argsort(rng.random(shape), axis=1) < few
            return np.where(chosen, rng.normal(0, 1 / few, shape), 0).astype(dtype)
        size = 1.0 if "embed" in name else 1 / np.sqrt(shape[1])
        return rng.normal(0, size, shape).astype(dtype)

    arrays = {name: draw(name, shape) for name, shape in tensor_shapes(config).items()}
    tensors = {name: Tensor(a.shape, a.dtype, lambda a=a: a) for name, a in arrays.items()}
    return Checkpoint("random", "memory", config, tensors, bos=None, stops=frozenset())


def random_adapter(
    config: Config, *, seed: int = 0, rank: int = 3, parts: Iterable[str] = ("q", "v", "down"), **fields: Any
) -> Adapter:
    """Draw an adapter for the matrices `parts`. Its changes are about as large as `random_checkpoint`'s weights."""
    draw = np.random.default_rng(seed).normal
    pairs = {
        name: LowRank(
            draw(0, 1 / np.sqrt(weight.shape[1]), (rank, weight.shape[1])).astype(np.float32),
            draw(0, 1 / rank, (weight.shape[0], rank)).astype(np.float32),
        )
        for name, weight in adaptable(config, parts).items()
    }
    return Adapter(rank, 6.0, pairs, **fields)
