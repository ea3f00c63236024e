"""Logits of a prompt and of the tokens after it: results of kernels and of XLA are within the same proven error bound.

The weights have few nonzeros per row (`random_checkpoint`); otherwise the bound would be larger than the logits.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamaspec.model.cache import Cache, LayerCache, empty_cache
from llamaspec.model.forward import forward
from llamaspec.model.ops.gpu import pallas_ops
from llamaspec.model.ops.table import Ops
from llamaspec.model.ops.xla import XLA
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.weights.loading import load_params
from llamaspec.pallas_kernels.parts.compat import interpreter
from llamaspec.reference.config import Config
from tests.kernels.kernel_ops import KERNEL_OPS
from tests.model.test_model_against_reference import UNITS, composed_bound
from tests.support.random_models import random_checkpoint
from tests.support.strategies import assert_within

CAPACITY = 136
PROMPT = np.array([70, 1])  # tokens of each sequence: more than a tile of keys, and one
STEPS = 2
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16)}
# These are the narrowest vectors that kernels take. A second layer in bfloat16 would make the bound useless.
CONFIGS = {
    "float32": Config(
        dim=128, layers=2, heads=2, kv_heads=1, head_dim=64, ffn=128, vocab=64, context=128, eps=1e-5, theta=1e4
    ),
    "bfloat16": Config(
        dim=256, layers=1, heads=4, kv_heads=2, head_dim=64, ffn=256, vocab=64, context=128, eps=1e-5, theta=1e4
    ),
}


class Story:
    """A model and two prompts, with methods to compute logits, decode greedily, and check logits against exact ones."""

    def __init__(self, dtype: str) -> None:
        self.dtype, self.config = dtype, CONFIGS[dtype]
        checkpoint = random_checkpoint(self.config, seed=3, dtype=DTYPES[dtype], few=4)
        self.params = load_params(checkpoint, dtype=DTYPES[dtype], positions=CAPACITY)
        self.exact = load_reference_params(checkpoint)
        self.prompt = np.random.default_rng(0).integers(0, self.config.vocab, (2, PROMPT.max())).astype(np.int32)

    def chunk(self, ops: Ops) -> tuple[np.ndarray, Cache]:
        """Prefill both prompts; return the logits and the KV cache."""
        empty = empty_cache(self.config, batch=2, capacity=CAPACITY, dtype=DTYPES[self.dtype])
        program = jax.jit(partial(forward, config=self.config, ops=ops))
        logits, filled = program(self.params, self.prompt, empty, lengths=jnp.asarray(PROMPT, jnp.int32))
        return np.asarray(logits), filled

    def decode(
        self, ops: Ops, logits: np.ndarray, kv_cache: Cache, *, steps: int = STEPS
    ) -> tuple[np.ndarray, np.ndarray]:
        """Decode greedily after a chunk; return the tokens [2, steps + 1] and the logits [2, steps, vocab].

        The first token comes from the chunk's logits.
        """
        program = jax.jit(partial(forward, config=self.config, ops=ops))
        drawn, after = [logits[np.arange(2), PROMPT - 1].argmax(axis=-1)], []
        for _ in range(steps):
            logits, kv_cache = program(self.params, drawn[-1][:, None].astype(np.int32), kv_cache)
            after.append(np.asarray(logits)[:, 0])
            drawn.append(after[-1].argmax(axis=-1))
        return np.stack(drawn, axis=1), np.stack(after, axis=1)

    def check(self, chunk: np.ndarray, tokens: np.ndarray, after: np.ndarray) -> None:
        """Check that the logits of both sequences are within the error bound of the exact logits."""
        for row, length in enumerate(PROMPT):
            fed = np.concatenate([self.prompt[row, :length], tokens[row, : after.shape[1]]])
            expected = composed_bound(self.exact, fed, self.config, unit=UNITS[self.dtype], blocks=len(fed) // 8 + 3)
            assert np.median(expected.error) < 0.05 * np.abs(expected.value).max()  # a small bound
            assert_within(np.concatenate([chunk[row, :length], after[row]]), expected.value, expected.error)


@cache
def plain(dtype: str) -> tuple[Story, np.ndarray, Cache]:
    """Build the test story in `dtype`. Also return the logits and the KV cache that XLA computes for its prompts."""
    story = Story(dtype)
    return story, *story.chunk(XLA)


@pytest.mark.slow  # 9 and 19 s
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_chunk_and_greedy_steps_after_it(dtype):
    """For a prompt chunk and two greedy steps, XLA and kernels give equal tokens, and logits within the bound."""
    story, chunk, kv_cache = plain(dtype)
    tokens, after = story.decode(XLA, chunk, kv_cache)
    story.check(chunk, tokens, after)
    assert len(np.unique(tokens)) > 2
    with interpreter():
        if dtype == "bfloat16":
            ops, _ = pallas_ops(story.config, story.params, batch=2, capacity=CAPACITY)
            chunk, kv_cache = story.chunk(ops)
        drawn, after = story.decode(KERNEL_OPS, chunk, kv_cache)
    np.testing.assert_array_equal(drawn, tokens)
    story.check(chunk, tokens, after)


def newest_key_missing(q, cache, positions, **options):
    return XLA.attend(q, cache, positions._replace(at=positions.at - 1), **options)


def values_for_keys(q, cache, positions, **options):
    return XLA.attend(q, LayerCache(cache.v, cache.k), positions, **options)


def turned_too_far(x, layer, cache, positions, **options):
    far = positions._replace(cos=jnp.roll(positions.cos, 1, axis=-1), sin=jnp.roll(positions.sin, 1, axis=-1))
    return XLA.norm_qkv(x, layer, cache, far, **options)


def row_before(x, layer, cache, positions, **options):
    return XLA.norm_qkv(x, layer, cache, positions._replace(at=positions.at - 1), **options)


def without_residual(h, layer, x):
    return XLA.project_add(h, layer, 0 * x)


@pytest.mark.sampled(1)  # 1 to 2 s each
@pytest.mark.parametrize(
    ("dtype", "op", "mutant"),
    [
        ("float32", "attend", newest_key_missing),
        ("float32", "norm_qkv", turned_too_far),
        ("float32", "norm_qkv", row_before),
        ("bfloat16", "attend", newest_key_missing),
        ("bfloat16", "attend", values_for_keys),
        ("bfloat16", "project_add", without_residual),
    ],
)
def test_the_bound_tells_a_wrong_step(dtype: str, op: str, mutant: Callable[..., Any]):
    story, chunk, kv_cache = plain(dtype)
    tokens, after = story.decode(XLA._replace(**{op: mutant}), chunk, kv_cache, steps=1)
    with pytest.raises(AssertionError, match="too far"):
        story.check(chunk, tokens, after)
