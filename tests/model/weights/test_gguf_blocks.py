"""Blocks of GGUF files that the device unpacks: the same bits as those that the host unpacks and uploads."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from llamaspec.model.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from llamaspec.model.checkpoints.checkpoint import Tensor
from llamaspec.model.checkpoints.codes import exact_parts
from llamaspec.model.checkpoints.gguf.blocks import FLOAT16_AT
from llamaspec.model.device import HOPPER, Device
from llamaspec.model.parallel.reading import share_of
from llamaspec.model.weights import loading
from llamaspec.model.weights.gguf_blocks import LAYOUTS, matrix_of_blocks
from llamaspec.model.weights.loading import check_weights, load_params
from llamaspec.reference.quantizers import ggml
from tests.model.checkpoints.gguf.test_gguf_codes import CONFIG, FLOATS, file_in, mixed, random_blocks
from tests.support import families, gguf_files

FLOAT32 = np.dtype(np.float32)
HOPPER_GPU, OLDER_GPU = Device("gpu", "NVIDIA H200", HOPPER), Device("gpu", "NVIDIA A100", "8.0")


def leaves(tree: Any) -> list[tuple[Any, ...]]:
    return [(leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def without_blocks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t._replace(codes=t.codes and t.codes._replace(blocks=None)) for name, t in tensors.items()}


def by_host(checkpoint: Checkpoint) -> Checkpoint:
    """Return a copy of `checkpoint` that the host unpacks."""
    return replace(checkpoint, tensors=without_blocks(checkpoint.tensors))


def assert_equal_to_host(checkpoint: Checkpoint, *, device: Device = HOPPER_GPU, **options: Any) -> Any:
    load = partial(load_params, dtype=FLOAT32, positions=1, device=device, **options)
    params = load(checkpoint)
    expected = load(by_host(checkpoint))
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    assert leaves(params) == leaves(expected)
    return params


@pytest.mark.sampled(4)  # 12 cases
@pytest.mark.parametrize("type", LAYOUTS)
def test_the_device_unpacks_the_bits_of_the_host(tmp_path, type):
    """All matrices of a model are equal, for GPUs with and without kernels: all codes, extreme scales, rows for RoPE."""
    checkpoint = open_checkpoint(file_in(lambda name: type, vocab_size=40).write(tmp_path / "x.gguf"))
    unpacked: list[str] = []
    for device in (HOPPER_GPU, OLDER_GPU):
        assert_equal_to_host(checkpoint, device=device)


def test_every_layout_has_the_offsets_of_its_float16_numbers():
    assert LAYOUTS.keys() == FLOAT16_AT.keys()
    assert {type: list(at) for type, at in FLOAT16_AT.items()} == {type: FLOATS[type] for type in LAYOUTS}
