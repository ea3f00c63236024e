"""Whole heads and channels removed from a model: what is left computes as if the others were zero."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaspec.model.checkpoints.checkpoint import Checkpoint, CheckpointError, Tensor
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.checkpoints.smaller import without_weakest
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.reference import llama
from tests.support.random_models import SMALL, random_checkpoint
from tests.support.strategies import seeds, share_of

TOKENS = np.array([1, 5, 2, 5, 7])
CLOSE = 1e-12  # relative to the largest logit: a few hundred roundings of float64


def logits(checkpoint: Checkpoint) -> np.ndarray:
    config = checkpoint.config
    return llama.forward(load_reference_params(checkpoint), TOKENS, llama.empty_cache(config), config=config)[0]


def remaining_columns(checkpoint: Checkpoint, smaller: Checkpoint, name: str) -> np.ndarray:
    """Find the columns of a matrix that the smaller model has; its columns keep their order."""
    columns, remaining = checkpoint.tensors[name].read(), smaller.tensors[name].read()
    indices = [int(np.flatnonzero((columns == column[:, None]).all(axis=0))[0]) for column in remaining.T]
    assert indices == sorted(set(indices))
    return np.array(indices)


def with_zeros(checkpoint: Checkpoint, smaller: Checkpoint) -> Checkpoint:
    """Return `checkpoint` with zeros in the columns of o and down that the smaller model does not have."""
    tensors = dict(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        if not name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
            continue
        w = np.zeros(tensor.shape)
        columns = remaining_columns(checkpoint, smaller, name)
        w[:, columns] = tensor.read()[:, columns]
        tensors[name] = Tensor(w.shape, w.dtype, lambda w=w: w)
    return replace(checkpoint, tensors=tensors)


@settings(max_examples=share_of(20, part=4))
@given(
    seed=seeds,
    kv_heads=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 3]),
    heads=st.sampled_from([0.2, 0.5, 1.0]),
    ffn=st.sampled_from([0.1, 0.6, 1.0]),
    experts=st.sampled_from([0, 2]),
    biases=st.booleans(),
)
def test_the_smaller_model_is_the_original_with_zeros(seed, kv_heads, group, heads, ffn, experts, biases):
    config = replace(
        SMALL,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        experts=experts,
        experts_per_token=min(experts, 1),
        qkv_bias=biases,
        qk_norm=not biases,
    )
    checkpoint = random_checkpoint(config, seed=seed % 100, dtype=np.float64)
    smaller = without_weakest(checkpoint, heads=heads, ffn=ffn)
    small = smaller.config
    assert small.kv_heads == max(1, round(heads * kv_heads)) and small.heads == small.kv_heads * group
    assert small.ffn == max(1, round(ffn * config.ffn)) and small.head_dim == config.head_dim
    expected = logits(with_zeros(checkpoint, smaller))
    assert np.abs(logits(smaller) - expected).max() <= CLOSE * max(1, np.abs(expected).max())


def test_the_strongest_parts_stay():
    """A group of heads and a channel that are far larger than the others are those that stay."""
    config = replace(SMALL, heads=6, kv_heads=3, head_dim=4)
    checkpoint = random_checkpoint(config, seed=0)
    q, down = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
    enlarged = {name: checkpoint.tensors[name].read().copy() for name in (q, down)}
    enlarged[q][1 * 8 : 2 * 8] *= 100
    enlarged[down][:, 5] *= 100
    tensors = {name: Tensor(w.shape, w.dtype, lambda w=w: w) for name, w in enlarged.items()}
    smaller = without_weakest(replace(checkpoint, tensors={**checkpoint.tensors, **tensors}), heads=0.33, ffn=1e-9)
    assert (smaller.config.heads, smaller.config.kv_heads, smaller.config.ffn) == (2, 1, 1)
    assert np.array_equal(smaller.tensors[q].read(), enlarged[q][8:16])
    assert np.array_equal(smaller.tensors[down].read(), enlarged[down][:, 5:6])
    assert smaller.tensors["model.norm.weight"] is checkpoint.tensors["model.norm.weight"]


def test_a_smaller_model_survives_its_file(tmp_path: Path):
    """config.json has the numbers of heads and the width of a head, so the model in the file is the same."""
    smaller = without_weakest(random_checkpoint(replace(SMALL, heads=4, kv_heads=2), seed=0), heads=0.5, ffn=0.5)
    write_huggingface(smaller, tmp_path / "small")
    read = open_checkpoint(tmp_path / "small")
    assert read.config == smaller.config
    assert np.array_equal(logits(read), logits(smaller))


@pytest.mark.parametrize("switch", ["wide_qk_norm", "sinks"])
def test_heads_with_something_in_common_stay(switch):
    checkpoint = random_checkpoint(SMALL, seed=0)
    joined = replace(checkpoint, config=replace(SMALL, qk_norm=True, **{switch: True}))
    with pytest.raises(CheckpointError, match="so no head can be removed"):
        without_weakest(joined, heads=0.5)
