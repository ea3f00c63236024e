"""Valid checkpoints: we read every tensor of every format bit for bit."""

from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.checkpoints import CheckpointError, check_finite, open_checkpoint
from llamaspec.model.tensors import tensor_shapes
from tests.support import families, llama2c_files
from tests.support.llama2c_files import Sizes


def assert_holds(checkpoint, expected):
    """Check that `checkpoint` has exactly the tensors `expected`, bit for bit.

    The shapes and dtypes that `checkpoint` states before reading must be right too.
    """
    assert checkpoint.tensors.keys() == expected.keys()
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == tensor_shapes(checkpoint.config)
    for name, tensor in checkpoint.tensors.items():
        array = tensor.read()
        assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype), name
        assert (array.shape, array.dtype) == (expected[name].shape, expected[name].dtype), name
        assert array.tobytes() == expected[name].tobytes(), name
        assert tensor.codes or array.nbytes == tensor.bytes


@pytest.mark.parametrize(("version", "tied"), list(product((0, 1, 2), (True, False))))
def test_llama2c(tmp_path, version, tied):
    sizes = Sizes()
    path = llama2c_files.write(tmp_path / "model.bin", version, sizes=sizes, tied=tied)
    checkpoint = open_checkpoint(path)
    assert checkpoint.format == f"llama2c-v{version}"
    config = checkpoint.config
    assert (config.dim, config.ffn, config.layers, config.heads) == (sizes.dim, sizes.ffn, sizes.layers, sizes.heads)
    assert (config.kv_heads, config.vocab, config.context) == (sizes.kv_heads, sizes.vocab, sizes.context)
    assert (config.head_dim, config.theta, config.eps, config.tied) == (4, 1e4, 1e-5, tied)
    assert (checkpoint.bos, checkpoint.stops) == (1, {1, 2})
    assert_holds(checkpoint, llama2c_files.expected_tensors(version, sizes, tied=tied))


@given(
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    pairs=st.integers(1, 4),
    ffn=st.integers(1, 9),
    tied=st.booleans(),
    version=st.sampled_from([0, 1, 2]),
)
def test_llama2c_of_any_size(tmp_path_factory, layers, kv_heads, shared, pairs, ffn, tied, version):
    heads = kv_heads * shared
    sizes = Sizes(dim=2 * pairs * heads, ffn=ffn, layers=layers, heads=heads, kv_heads=kv_heads, vocab=5, context=3)
    group = 2 * pairs  # divides every row
    path = tmp_path_factory.mktemp("any") / "model.bin"
    llama2c_files.write(path, version, sizes=sizes, tied=tied, group=group)
    expected = llama2c_files.expected_tensors(version, sizes, tied=tied, group=group)
    assert_holds(open_checkpoint(path), expected)


def test_stories260k(data):
    path = data / "stories260K" / "stories260K.bin"
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    assert (config.dim, config.ffn, config.layers, config.heads, config.kv_heads) == (64, 172, 5, 8, 4)
    assert (config.vocab, config.context, config.head_dim, config.tied) == (512, 512, 8, True)
    floats = np.fromfile(path, "<f4", offset=28)
    embedding = checkpoint.tensors["model.embed_tokens.weight"].read()
    np.testing.assert_array_equal(embedding, floats[: 512 * 64].reshape(512, 64))
    # The file ends with the RoPE tables, which begin with four cosines of 0.
    tables = 512 * 4
    np.testing.assert_array_equal(floats[-2 * tables :][:4], 1)
    np.testing.assert_array_equal(
        checkpoint.tensors["model.norm.weight"].read(), floats[-2 * tables - 64 : -2 * tables]
    )


@pytest.mark.parametrize("dtype", families.DTYPES)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_hugging_face(tmp_path, family, dtype):
    shards = 1 + len(family) % 3
    families.write_checkpoint(tmp_path, families.FAMILIES[family], dtype=dtype, shards=shards)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format == "safetensors"
    tensors = families.random_tensors(families.FAMILIES[family], dtype=dtype)
    assert_holds(checkpoint, families.by_our_names(tensors))


def test_a_safetensors_file_is_opened_with_the_config_beside_it(tmp_path):
    config = families.FAMILIES["llama-3"]
    families.write_checkpoint(tmp_path, config)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.of.mine")
    assert_holds(open_checkpoint(tmp_path / "weights.of.mine"), families.random_tensors(config))


def test_a_format_is_told_by_content(tmp_path):
    path = llama2c_files.write(tmp_path / "model.safetensors")
    assert open_checkpoint(path).format == "llama2c-v0"


def test_tensors_are_views_that_cannot_be_written(tmp_path):
    families.write_checkpoint(tmp_path, families.FAMILIES["llama-3"], dtype="bfloat16")
    array = open_checkpoint(tmp_path).tensors["lm_head.weight"].read()
    assert array.base is not None
    assert not array.flags.writeable


def test_unaligned_tensors_are_read(tmp_path):
    # Files from before 2023 have headers without padding.
    config = families.FAMILIES["llama-3"]
    families.write_checkpoint(tmp_path, config)
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + raw[8 : 8 + length] + b" " + raw[8 + length :])
    checkpoint = open_checkpoint(tmp_path)
    assert_holds(checkpoint, families.random_tensors(config))
    assert all(tensor.read().flags.aligned for tensor in checkpoint.tensors.values())


def test_a_tied_model_may_repeat_its_embedding(tmp_path):
    config = families.FAMILIES["qwen2"]
    families.write_checkpoint(tmp_path, config)
    tensors = families.random_tensors(config)
    head = tensors["model.embed_tokens.weight"].copy()
    families.write_safetensors(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": head})
    assert_holds(open_checkpoint(tmp_path), tensors)
    head[-1, -1] += 1
    families.write_safetensors(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": head})
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings.*true"):
        open_checkpoint(tmp_path)


def test_rope_frequencies_in_a_file_are_passed_over(tmp_path):
    config = families.FAMILIES["llama-2"]
    families.write_checkpoint(tmp_path, config)
    tensors = families.random_tensors(config)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    families.write_safetensors(tmp_path / "model.safetensors", {**tensors, **more})
    assert_holds(open_checkpoint(tmp_path), tensors)


def test_a_hub_cache_links_its_shards(tmp_path):
    config = families.FAMILIES["llama-3"]
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    families.write_checkpoint(snapshot, config, shards=2)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    assert_holds(open_checkpoint(snapshot), families.random_tensors(config))


def resident_file_pages() -> int:
    """Return how many bytes of memory-mapped files are in this process's memory."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssFile"))


def test_released_pages_leave_memory(tmp_path):
    sizes = Sizes(dim=256, ffn=8192, layers=1, heads=4, kv_heads=4, vocab=8192)  # 33 MB
    checkpoint = open_checkpoint(llama2c_files.write(tmp_path / "model.bin", sizes=sizes))
    before = resident_file_pages()
    arrays = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
    sums = {name: array.sum() for name, array in arrays.items()}
    assert resident_file_pages() - before > 30e6
    checkpoint.release()
    assert resident_file_pages() - before < 1e6
    assert {name: array.sum() for name, array in arrays.items()} == sums  # a view reads its file again


DTYPES = st.sampled_from([np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)])


@given(
    dtype=DTYPES, rows=st.integers(1, 300), cols=st.integers(1, 1000), where=st.integers(0), bad=st.sampled_from("+-n")
)
def test_a_number_that_is_not_finite_is_found(dtype, rows, cols, where, bad):
    array = np.full((rows, cols), ml_dtypes.finfo(dtype).max, dtype)
    check_finite("w", array)
    row, col = divmod(where % (rows * cols), cols)
    array[row, col] = {"+": np.inf, "-": -np.inf, "n": np.nan}[bad]
    with pytest.raises(CheckpointError, match=rf"^model.bin: w\[{row}, {col}\] is -?(inf|nan), not a finite number$"):
        check_finite("w", array, path="model.bin")
