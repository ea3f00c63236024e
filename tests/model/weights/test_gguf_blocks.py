"""GGUF blocks that the device unpacks give the same bits as blocks that the host unpacks and then uploads."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from llamaspec.model.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from llamaspec.model.checkpoints.checkpoint import Tensor
from llamaspec.model.checkpoints.gguf.blocks import FLOAT16_AT
from llamaspec.model.device import HOPPER, Device
from llamaspec.model.parallel.reading import share_of
from llamaspec.model.weights import gguf_blocks
from llamaspec.model.weights.forms.integers import Int8
from llamaspec.model.weights.forms.table import CLASS_OF_FORM
from llamaspec.model.weights.gguf_blocks import LAYOUTS, matrix_of_blocks
from llamaspec.model.weights.gpu_codes import Stacked, arranged
from llamaspec.model.weights.loading import check_weights, load_params
from llamaspec.model.weights.words import Words
from llamaspec.reference.quantizers import ggml
from tests.model.checkpoints.gguf.test_gguf_codes import FLOATS, file_in, mixed, random_blocks
from tests.support import families, gguf_files

FLOAT32 = np.dtype(np.float32)
WITH_KERNELS, WITHOUT_KERNELS = Device("gpu", "NVIDIA H200", HOPPER), Device("gpu", "NVIDIA A100", "8.0")
HEAD, DOWN = "lm_head.weight", "model.layers.0.mlp.down_proj.weight"
LOAD = partial(load_params, dtype=FLOAT32, positions=1)


def changed(checkpoint: Checkpoint, **fields: Any) -> Checkpoint:
    """Return a copy of `checkpoint` with changed `fields` in the `Codes` of all tensors that a device can unpack."""

    def tensor(old: Tensor) -> Tensor:
        return old._replace(codes=old.codes._replace(**fields)) if old.codes and old.codes.blocks else old

    return replace(checkpoint, tensors={name: tensor(old) for name, old in checkpoint.tensors.items()})


def for_device(checkpoint: Checkpoint) -> Checkpoint:
    """Return a copy of `checkpoint` that fails if the host unpacks a matrix that the device can unpack."""

    def parts() -> Any:
        raise AssertionError("the host unpacks blocks")

    return changed(checkpoint, parts=parts)


def for_host(checkpoint: Checkpoint) -> Checkpoint:
    return changed(checkpoint, blocks=None)


def assert_equal(actual: Any, expected: Any) -> None:
    """Assert that two trees have the same structure, dtypes, shapes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for leaf, expected_leaf in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (leaf.dtype, leaf.shape) == (expected_leaf.dtype, expected_leaf.shape)
        assert np.asarray(leaf).tobytes() == np.asarray(expected_leaf).tobytes()


@pytest.mark.sampled(3)  # 12 cases, 20 s
@pytest.mark.parametrize("type", LAYOUTS)
def test_the_device_unpacks_the_same_bits_as_the_host(tmp_path, type):
    """The device and the host unpack the same bits, in the layouts for GPUs with and without kernels.

    The blocks have all codes and extreme scales, and their rows are reordered for RoPE.
    """
    checkpoint = open_checkpoint(file_in(lambda name: type, vocab_size=40).write(tmp_path / "x.gguf"))
    codes = checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"].codes
    assert codes and codes.blocks
    packed = np.concatenate(list(codes.blocks.rows()))
    parts = [CLASS_OF_FORM[codes.form].stored(part, codes) for part in codes.parts()]
    expected = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
    assert_equal(matrix_of_blocks(packed, type=type, for_kernels=False), expected)
    words = arranged(jax.device_put(expected))
    assert isinstance(words, Words | Int8)
    assert_equal(matrix_of_blocks(packed, type=type, for_kernels=True), words)


@pytest.mark.parametrize(("type", "rows", "slab"), [("Q6_K", 12, 4), ("Q4_K", 10, 5)])
def test_a_large_matrix_is_unpacked_in_slabs(monkeypatch, type, rows, slab):
    """A loop unpacks a large matrix in slabs of `slab` rows. The result equals that of unpacking each slab separately.

    `slab` is the largest divisor of the number of rows that is at most 5 (the limit in this test).
    """
    monkeypatch.setattr(gguf_blocks, "AT_ONCE", 5 * 256)
    packed = np.frombuffer(random_blocks(type, (rows, 256), seed=1), np.uint8).reshape(rows, -1)
    unpack = partial(matrix_of_blocks, type=type, for_kernels=True)
    assert "while" in jax.jit(unpack).lower(packed).as_text()
    pieces = [unpack(packed[start : start + slab]) for start in range(0, rows, slab)]
    assert_equal(unpack(packed), jax.tree.map(lambda *arrays: np.concatenate(arrays), *pieces))


@pytest.mark.parametrize("device", [WITH_KERNELS, WITHOUT_KERNELS], ids=["kernels", "plain"])
def test_all_matrices_of_a_model(tmp_path, device):
    checkpoint = open_checkpoint(file_in(lambda name: "Q4_0", vocab_size=40).write(tmp_path / "x.gguf"))
    assert_equal(LOAD(for_device(checkpoint), device=device), LOAD(for_host(checkpoint), device=device))


@pytest.mark.parametrize("readers", [1, 3])
def test_a_file_of_several_types(tmp_path, readers):
    """A stacked matrix of several types loads, although a separate program unpacks the rows of each type.

    In Q4_K_M, v may have a different type than q and k.
    """
    checkpoint = open_checkpoint(file_in(mixed, tie_word_embeddings=readers == 3).write(tmp_path / "x.gguf"))
    shares: list[float] = []
    options: dict[str, Any] = {"device": WITH_KERNELS, "readers": readers, "checked": False}
    params = LOAD(for_device(checkpoint), progress=lambda stage, share: shares.append(share), **options)
    assert isinstance(params.layers[0].qkv.weight, Stacked)
    assert params.tied == (readers == 3)
    assert_equal(params, LOAD(for_host(checkpoint), **options))
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)


def test_the_experts_of_a_layer(tmp_path):
    """The device unpacks the matrices of all experts of a layer, which are one tensor in the file."""
    config = {**families.FAMILIES["mixtral"], "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    file = gguf_files.file_of(config, families.random_tensors(config, seed=0))
    for name, tensor in file.tensors.items():
        if "_exps" in str(name):
            blocks = random_blocks("Q4_K", tensor.shape, seed=len(name))
            file.tensors[name] = gguf_files.Tensor(tensor.shape, blocks, gguf_files.CODES["Q4_K"])
    checkpoint = open_checkpoint(file.write(tmp_path / "x.gguf"))
    assert sum(bool(tensor.codes and tensor.codes.blocks) for tensor in checkpoint.tensors.values()) >= 6
    assert_equal(LOAD(for_device(checkpoint), device=WITH_KERNELS), LOAD(for_host(checkpoint), device=WITH_KERNELS))


def test_two_types_with_one_form_are_left_to_the_host(tmp_path):
    """The host unpacks two matrices that are stacked in one form of codes, if their blocks have different types.

    Here the matrix gate has the type Q4_1, and the matrix up has Q4_K.
    """
    types = {"gate_proj": "Q4_1", "up_proj": "Q4_K"}
    checkpoint = open_checkpoint(
        file_in(lambda name: types.get(name.split(".")[-2], "Q8_0")).write(tmp_path / "x.gguf")
    )
    assert_equal(LOAD(checkpoint, device=WITH_KERNELS), LOAD(for_host(checkpoint), device=WITH_KERNELS))
    with pytest.raises(AssertionError, match="the host unpacks blocks"):
        LOAD(for_device(checkpoint), device=WITH_KERNELS)


@pytest.mark.parametrize("vocab", [40, 41])
def test_the_share_of_each_device(tmp_path, vocab):
    """Each of two devices gets its rows or columns as blocks, and unpacks them.

    The host unpacks a share that ends within a block, and a share that needs rows of padding.
    """
    file = file_in(mixed, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=2, vocab_size=vocab)
    checkpoint = open_checkpoint(file.write(tmp_path / "x.gguf"))
    for device in range(2):
        share = share_of(checkpoint, device=device, devices=2)
        blocks = {name: bool(tensor.codes.blocks) for name, tensor in share.tensors.items() if tensor.codes}
        o = "model.layers.0.self_attn.o_proj.weight"  # 128 of 256 columns: half a block
        assert blocks == {name: name != o and (name != HEAD or vocab == 40 or device == 0) for name in blocks}
        assert_equal(LOAD(share, device=WITH_KERNELS), LOAD(for_host(share), device=WITH_KERNELS))
        halves = share.tensors[DOWN].codes, checkpoint.tensors[DOWN].codes
        assert halves[0] and halves[1] and halves[0].bytes * 2 == halves[1].bytes


@pytest.mark.parametrize("type", LAYOUTS)
def test_scales_that_are_not_finite_are_named_as_before(tmp_path, type):
    """A scale that is not finite is refused with the same error, whether the device or the host unpacks the blocks."""
    for at, value in [(at, value) for at in FLOATS[type] for value in (np.inf, -np.inf, np.nan)] or [(0, 0xFF)]:
        file = file_in(lambda name: type)
        data = (
            np.frombuffer(file.tensors["token_embd.weight"].data, np.uint8).reshape(-1, ggml.TYPES[type].bytes).copy()
        )
        if type == "MXFP4":
            data[3, at] = value
        else:
            data[3, at : at + 2] = np.array([value], "<f2").view(np.uint8)
        file.tensors["token_embd.weight"].data = data.tobytes()
        checkpoint = open_checkpoint(file.write(tmp_path / f"{at}.gguf"))
        messages = set()
        for check in (
            check_weights,  # of the blocks
            lambda checkpoint: check_weights(for_host(checkpoint)),
            partial(LOAD, device=WITH_KERNELS, checked=False),
        ):
            with pytest.raises(CheckpointError, match=r"embed_tokens.weight.*( is -?(inf|nan)|NaN)") as error:
                check(checkpoint)
            messages.add(str(error.value))
        assert len(messages) == 1


def test_every_layout_has_the_offsets_of_its_float16_numbers():
    assert {type: list(at) for type, at in FLOAT16_AT.items()} == {type: FLOATS[type] for type in LAYOUTS}
