"""The whole JAX model, compared with transformers and with mathematical laws."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaspec.model.cache import Cache, empty_cache
from llamaspec.model.checkpoints.checkpoint import Checkpoint, Tensor
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.forward import forward
from llamaspec.model.ops.cpu import CPU
from llamaspec.model.ops.xla import XLA
from llamaspec.model.weights.loading import load_params
from tests.support.families import FAMILIES, write_checkpoint
from tests.support.goldens import read_golden
from tests.support.random_models import CONFIGS, random_checkpoint
from tests.support.strategies import seeds, share_of

GOLDENS = read_golden("logits")["families"]
FLOAT32 = np.dtype(np.float32)
CAPACITY, LONGEST = 32, 12

# Two float32 computations of a model may differ by this share of the largest logit. transformers differs from float64
# by a tenth of it (tests/goldens); the mildest mistake that the goldens were tested with makes a difference 35 times as
# large.
AGREE = 1e-5

FORWARD = jax.jit(forward, static_argnames=("config", "ops"))


def run(checkpoint: Checkpoint, tokens: np.ndarray, *, ops=CPU, cache: Cache | None = None, lengths=None):
    """Compute the logits of `tokens` [batch, seq] after `cache`, and the updated cache."""
    config = checkpoint.config
    if cache is None:
        cache = empty_cache(config, batch=len(tokens), capacity=CAPACITY, dtype=FLOAT32)
    params = load_params(checkpoint, dtype=FLOAT32, positions=CAPACITY)
    lengths = np.full(len(tokens), tokens.shape[1]) if lengths is None else lengths
    logits, cache = FORWARD(
        params, tokens.astype(np.int32), cache, lengths=np.array(lengths, np.int32), config=config, ops=ops
    )
    return np.asarray(logits), cache


def assert_agree(a: np.ndarray, b: np.ndarray):
    np.testing.assert_allclose(a, b, rtol=0, atol=AGREE * np.abs(b).max())


@pytest.mark.sampled(14)  # 30 cases, 16 s
@pytest.mark.parametrize("ops", [CPU, XLA], ids=["cpu", "xla"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_are_those_of_transformers(family, ops, tmp_path):
    write_checkpoint(tmp_path, FAMILIES[family])
    golden = GOLDENS[family]
    logits, _ = run(open_checkpoint(tmp_path), np.array([golden["tokens"]]), ops=ops)
    expected = np.array(golden["logits"], np.float32)
    assert np.abs(expected).max() >= 5
    assert_agree(logits[0, golden["positions"]], expected)


configs = st.sampled_from(sorted(CONFIGS))
few = settings(max_examples=share_of(20, part=10))  # each example compiles


@few
@given(name=configs, seed=seeds, data=st.data())
def test_any_split_into_chunks_gives_the_logits_of_one_pass(name, seed, data):
    checkpoint = random_checkpoint(CONFIGS[name], seed=seed)
    tokens = np.random.default_rng(seed).integers(0, CONFIGS[name].vocab, LONGEST)
    full, _ = run(checkpoint, tokens[None])

    # Chunks are padded to one of two lengths, 5 for prefill and 1 for decoding, with tokens that must not matter.
    cache, rows, start = None, [], 0
    while start < LONGEST:
        count = data.draw(st.integers(1, min(5, LONGEST - start)), "tokens of the next chunk")
        chunk = np.full(1 if count == 1 else 5, data.draw(st.integers(0, CONFIGS[name].vocab - 1), "padding"))
        chunk[:count] = tokens[start : start + count]
        logits, cache = run(checkpoint, chunk[None], cache=cache, lengths=[count])
        rows.append(logits[0, :count])
        start += count
    assert cache is not None and int(cache.lengths[0]) == LONGEST
    assert_agree(np.concatenate(rows), full[0])


@few
@given(name=configs, seed=seeds, lengths=st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_a_row_of_a_batch_is_the_row_alone(name, seed, lengths):
    checkpoint = random_checkpoint(CONFIGS[name], seed=seed)
    tokens = np.random.default_rng(seed).integers(0, CONFIGS[name].vocab, (3, 5))
    first, cache = run(checkpoint, tokens, lengths=lengths)
    second, _ = run(checkpoint, tokens[:, :1], cache=cache)
    for row, length in enumerate(lengths):
        single, cache = run(checkpoint, tokens[row : row + 1], lengths=[length])
        after, _ = run(checkpoint, tokens[row : row + 1, :1], cache=cache)
        assert_agree(first[row, :length], single[0, :length])
        assert_agree(second[row], after[0])


@given(name=configs, seed=seeds, at=st.integers(1, LONGEST - 1))
def test_later_tokens_change_nothing_before_them(name, seed, at):
    checkpoint = random_checkpoint(CONFIGS[name], seed=seed)
    tokens = np.random.default_rng(seed).integers(0, CONFIGS[name].vocab, LONGEST)
    changed = np.concatenate([tokens[:at], (tokens[at:] + 1) % CONFIGS[name].vocab])
    a, _ = run(checkpoint, tokens[None])
    b, _ = run(checkpoint, changed[None])
    np.testing.assert_array_equal(a[0, :at], b[0, :at])
    assert np.abs(a[0, at:] - b[0, at:]).max() > 1e-3


@few
@given(
    name=st.sampled_from([name for name in sorted(CONFIGS) if CONFIGS[name].heads > CONFIGS[name].kv_heads]), seed=seeds
)
def test_shared_heads_are_repeated_heads(name, seed):
    config = CONFIGS[name]
    checkpoint = random_checkpoint(config, seed=seed)
    group = config.heads // config.kv_heads

    def repeat(name: str, tensor: Tensor) -> Tensor:
        if ".k_proj." not in name and ".v_proj." not in name:
            return tensor
        heads = tensor.read().reshape(config.kv_heads, config.head_dim, *tensor.shape[1:])
        repeated = np.repeat(heads, group, axis=0).reshape(-1, *tensor.shape[1:])
        return Tensor(repeated.shape, tensor.dtype, lambda: repeated)

    every_head_its_own = replace(
        checkpoint,
        config=replace(config, kv_heads=config.heads),
        tensors={name: repeat(name, tensor) for name, tensor in checkpoint.tensors.items()},
    )
    tokens = np.random.default_rng(seed).integers(0, config.vocab, (1, LONGEST))
    assert_agree(run(checkpoint, tokens)[0], run(every_head_its_own, tokens)[0])


@given(seed=seeds, capacity=st.sampled_from([CAPACITY, 200]))
def test_unused_cache_rows_do_not_matter(seed, capacity):
    """Numbers that a longer sequence left in the cache do not change the logits.

    With 200 rows, attention chooses how many rows of the cache it reads; every choice includes leftover numbers.
    """
    checkpoint = random_checkpoint(CONFIGS["experts"], seed=seed)
    config = checkpoint.config
    tokens = np.random.default_rng(seed).integers(0, config.vocab, (1, LONGEST))
    clean = empty_cache(config, batch=1, capacity=capacity, dtype=FLOAT32)
    dirty = jax.tree.map(lambda a: a if a.ndim == 1 else jax.device_put(np.full(a.shape, 1e4, np.float32)), clean)
    expected, _ = run(checkpoint, tokens, cache=clean)
    np.testing.assert_array_equal(run(checkpoint, tokens, cache=dirty)[0], expected)
