"""Written checkpoints are readable by us and by other libraries; a file appears complete or not at all."""

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.checkpoints import Checkpoint, CheckpointError, Tensor, open_checkpoint
from llamaspec.model.checkpoints.gguf.file import read_header
from llamaspec.model.checkpoints.gguf.write import write_gguf
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.llama2c.write import write_llama2c
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.onnx.write import write_onnx
from llamaspec.model.checkpoints.pooling import stated_pooling
from llamaspec.model.convert import convert
from llamaspec.reference.byte_bpe import LLAMA3
from llamaspec.reference.rope import LinearScaling, frequencies
from tests.model.tokenizers.test_gguf_tokenizers import trained_merges
from tests.support import families, llama2c_files
from tests.support.llama2c_files import Sizes
from tests.support.refusals import mentions

MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense"}
WRITERS = pytest.mark.parametrize("write", [write_huggingface, write_llama2c, write_gguf, write_onnx])


def contents(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {name: tensor.read().tobytes() for name, tensor in checkpoint.tensors.items()}


def llama2c_checkpoint(directory: Path, **kwargs) -> Checkpoint:
    directory.mkdir(exist_ok=True)
    return open_checkpoint(llama2c_files.write(directory / "source.bin", **kwargs))


@pytest.mark.sampled(15)  # 45 cases, 3 s
@pytest.mark.parametrize("dtype", families.DTYPES)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_hugging_face_goes_there_and_back(tmp_path, family, dtype):
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    families.write_checkpoint(source, families.FAMILIES[family], dtype=dtype, shards=2)
    first = open_checkpoint(source)
    write_huggingface(first, copy)
    second = open_checkpoint(copy)
    assert contents(second) == contents(first)
    assert {name: tensor.dtype for name, tensor in second.tensors.items()} == dict.fromkeys(
        first.tensors, np.dtype(families.DTYPES[dtype])
    )
    assert (second.config, second.bos, second.stops) == (first.config, first.bos, first.stops)
    assert sorted(path.name for path in copy.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_what_belongs_to_a_model_comes_along(tmp_path):
    checkpoint = llama2c_checkpoint(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.bin").write_bytes(b"pieces")
    (tmp_path / "source" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "source" / "1_Pooling").mkdir()
    (tmp_path / "source" / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in MODULES.items()]
    (tmp_path / "source" / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "source" / "2_Dense").mkdir()
    (tmp_path / "source" / "2_Dense" / "model.safetensors").write_bytes(b"matrix")
    (tmp_path / "source" / "notes.txt").write_text("mine")
    write_huggingface(checkpoint, tmp_path / "copy")
    assert (tmp_path / "copy" / "tokenizer.bin").read_bytes() == b"pieces"
    assert (tmp_path / "copy" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (tmp_path / "copy" / "1_Pooling" / "config.json").read_text() == '{"pooling_mode": "mean"}'
    assert (tmp_path / "copy" / "2_Dense" / "model.safetensors").read_bytes() == b"matrix"
    assert not (tmp_path / "copy" / "notes.txt").exists()


@pytest.mark.parametrize(
    ("pooling", "number"), [("mean", 1), ("cls", 2), ("lasttoken", 3), ("max", None), (None, None)]
)
def test_pooling_is_converted_in_both_directions(tmp_path, pooling, number):
    """A model keeps its kind of pooling if it is converted to GGUF, which stores it as a number, and back to a folder.

    If a format cannot store this kind of pooling, a note says so.
    """
    source = tmp_path / "source"
    source.mkdir()
    tokenizer = trained_merges(LLAMA3)
    (source / "tokenizer.json").write_text(tokenizer)
    vocab = len(json.loads(tokenizer)["model"]["vocab"])
    families.write_checkpoint(source, {**families.FAMILIES["llama-3.1"], "vocab_size": vocab})
    if pooling:
        (source / "1_Pooling").mkdir()
        (source / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    notes = convert(open_checkpoint(source), tmp_path / "x.gguf", to="gguf")
    metadata = read_header(MappedFile(tmp_path / "x.gguf")).metadata
    assert (metadata.integer("llama.pooling_type") if "llama.pooling_type" in metadata else None) == number
    assert any("pooling for embeddings, max, is left out" in note for note in notes) == (pooling == "max")
    convert(open_checkpoint(tmp_path / "x.gguf"), tmp_path / "back", to="safetensors")
    assert (tmp_path / "back" / "modules.json").exists() == (number is not None)
    assert stated_pooling(tmp_path / "back") == (stated_pooling(source) if number else None)


@given(
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    pairs=st.integers(1, 3),
    layers=st.integers(1, 3),
    tied=st.booleans(),
)
def test_llama2c_goes_to_hugging_face_and_back(tmp_path_factory, kv_heads, shared, pairs, layers, tied):
    folder = tmp_path_factory.mktemp("back")
    heads = kv_heads * shared
    sizes = Sizes(dim=2 * pairs * heads, ffn=5, layers=layers, heads=heads, kv_heads=kv_heads, vocab=6, context=7)
    source = llama2c_checkpoint(folder, sizes=sizes, tied=tied)
    write_llama2c(source, folder / "ours.bin")
    write_huggingface(open_checkpoint(folder / "ours.bin"), folder / "hf")
    write_llama2c(open_checkpoint(folder / "hf"), folder / "again.bin")
    assert (folder / "again.bin").read_bytes() == (folder / "ours.bin").read_bytes()
    assert contents(open_checkpoint(folder / "hf")) == contents(source)
    # The independent writer agrees on every byte except the RoPE tables, which it fills with 99.
    original, copy = ((folder / name).read_bytes() for name in ("source.bin", "ours.bin"))
    classifier = 0 if tied else 4 * sizes.vocab * sizes.dim
    end = len(copy) - classifier
    begin = end - 4 * sizes.context * 2 * pairs
    assert copy[:begin] + copy[end:] == original[:begin] + original[end:]


@pytest.mark.parametrize("family", ["llama-2", "tinyllama"])
def test_hugging_face_goes_to_llama2c_and_back(tmp_path, family):
    families.write_checkpoint(tmp_path, families.FAMILIES[family])
    first = open_checkpoint(tmp_path)
    write_llama2c(first, tmp_path / "model.bin")
    write_huggingface(open_checkpoint(tmp_path / "model.bin"), tmp_path / "hf")
    assert contents(open_checkpoint(tmp_path / "hf")) == contents(first)


def test_llama2c_holds_bfloat16_exactly(tmp_path):
    families.write_checkpoint(tmp_path, families.FAMILIES["llama-2"], dtype="bfloat16")
    first = open_checkpoint(tmp_path)
    write_llama2c(first, tmp_path / "model.bin")
    second = open_checkpoint(tmp_path / "model.bin")
    for name, tensor in second.tensors.items():
        np.testing.assert_array_equal(tensor.read(), first.tensors[name].read().astype(np.float32))


def test_a_quantized_file_is_written_as_it_is_read(tmp_path):
    source = llama2c_checkpoint(tmp_path, version=2)
    write_huggingface(source, tmp_path / "hf")
    assert contents(open_checkpoint(tmp_path / "hf")) == contents(source)


def test_the_safetensors_library_reads_what_is_written(tmp_path):
    source = llama2c_checkpoint(tmp_path)
    write_huggingface(source, tmp_path / "hf")
    arrays = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    assert {name: array.tobytes() for name, array in arrays.items()} == contents(source)
    with safetensors.safe_open(tmp_path / "hf" / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_every_tensor_is_aligned(tmp_path):
    families.write_checkpoint(tmp_path, families.FAMILIES["llama-bias"], dtype="bfloat16")
    source = open_checkpoint(tmp_path)
    norm = source.tensors["model.norm.weight"]
    wide = Tensor(norm.shape, np.dtype(np.float32), lambda: norm.read().astype(np.float32))
    write_huggingface(replace(source, tensors={**source.tensors, "model.norm.weight": wide}), tmp_path / "hf")
    raw = (tmp_path / "hf" / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    assert header["model.norm.weight"]["data_offsets"][0] == 0
    assert start % 8 == 0
    offsets = sorted(entry["data_offsets"] for entry in header.values() if "dtype" in entry)
    assert all(end == begin for (_, end), (begin, _) in pairwise(offsets))


def test_rope_tables_are_those_of_export(tmp_path):
    sizes = Sizes(dim=32, heads=2, kv_heads=2, context=5000)
    write_llama2c(llama2c_checkpoint(tmp_path, sizes=sizes), tmp_path / "model.bin")
    cos, sin = np.fromfile(tmp_path / "model.bin", "<f4")[-5000 * 16 :].reshape(2, 5000, 8)
    angles = np.arange(5000)[:, None] * frequencies(16, theta=1e4)
    # The frequency and the angle are rounded to float32: at most three roundings of 5000 radians.
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=4 * 5000 * 2.0**-24)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=4 * 5000 * 2.0**-24)
    assert (cos[0] == 1).all()
    assert (sin[0] == 0).all()


def test_rope_tables_are_those_of_stories260k(tmp_path, data):
    path = data / "stories260K" / "stories260K.bin"
    write_llama2c(open_checkpoint(path), tmp_path / "model.bin")
    actual, expected = np.fromfile(tmp_path / "model.bin", "<f4"), np.fromfile(path, "<f4")
    tables = 512 * 8
    np.testing.assert_array_equal(actual[:-tables].view(np.uint32), expected[:-tables].view(np.uint32))
    np.testing.assert_allclose(
        actual[-tables:], expected[-tables:], rtol=0, atol=2.0**-24
    )  # torch's cosine is off by an ulp


def test_progress_adds_up(tmp_path):
    source = llama2c_checkpoint(tmp_path)
    steps: list[tuple[str, int]] = []
    write_llama2c(source, tmp_path / "model.bin", progress=lambda name, size: steps.append((name, size)))
    assert sum(size for _, size in steps) == (tmp_path / "model.bin").stat().st_size - 28
    steps.clear()
    write_huggingface(source, tmp_path / "hf", progress=lambda name, size: steps.append((name, size)))
    assert dict(steps) == {name: tensor.bytes for name, tensor in source.tensors.items()}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@contextmanager
def refused_in_one_line(folder: Path, *, words: str) -> Iterator[None]:
    """Check that the block raises a one-line CheckpointError that mentions `words`, and writes no file to `folder`."""
    before = names(folder)
    with pytest.raises(CheckpointError) as caught:
        yield
    message = str(caught.value).replace(f"{folder}/", "")  # the name of the test's folder could contain the words
    assert "\n" not in message and mentions(message, words), message
    assert names(folder) == before


@WRITERS
@pytest.mark.parametrize("kind", ["file", "directory", "dangling link"])
def test_what_exists_is_not_overwritten(tmp_path, write, kind):
    source = llama2c_checkpoint(tmp_path)
    place = tmp_path / "place"
    {"file": place.touch, "directory": place.mkdir, "dangling link": lambda: place.symlink_to("nothing")}[kind]()
    with refused_in_one_line(tmp_path, words="place: exists"):
        write(source, place)


@WRITERS
def test_what_appears_meanwhile_is_not_overwritten(tmp_path, write):
    source = llama2c_checkpoint(tmp_path)
    place = tmp_path / "place"
    place_made_at_once = lambda name, size: place.write_text("mine")  # noqa: E731
    with pytest.raises(CheckpointError, match=r"/place: .*exists"):
        write(source, place, progress=place_made_at_once)
    assert place.read_text() == "mine"
    assert names(tmp_path) == {"source.bin", "place"}


@WRITERS
def test_an_interrupt_leaves_nothing(tmp_path, write):
    source = llama2c_checkpoint(tmp_path)

    def interrupt(name: str, size: int) -> None:
        assert {name for name in names(tmp_path) if not name.endswith(".partial")} == {"source.bin"}
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        write(source, tmp_path / "place", progress=interrupt)
    assert names(tmp_path) == {"source.bin"}


@WRITERS
def test_a_full_disk_is_one_line(tmp_path, write):
    source = llama2c_checkpoint(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # EFBIG follows the same path as ENOSPC
    try:
        with refused_in_one_line(tmp_path, words="place: File too large|place.data: File too large"):
            write(source, tmp_path / "place")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@WRITERS
def test_a_missing_folder_is_one_line(tmp_path, write):
    source = llama2c_checkpoint(tmp_path)
    with refused_in_one_line(tmp_path, words="nowhere/place: No such file"):
        write(source, tmp_path / "nowhere" / "place")


@WRITERS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_not_written(tmp_path, write, bad):
    source = llama2c_checkpoint(tmp_path)
    array = source.tensors["model.layers.2.mlp.up_proj.weight"].read().copy()
    array[1, 2] = bad
    broken = Tensor(array.shape, array.dtype, lambda: array)
    source = replace(source, tensors={**source.tensors, "model.layers.2.mlp.up_proj.weight": broken})
    with refused_in_one_line(tmp_path, words=f"source.bin: model.layers.2.mlp.up_proj.weight[1, 2] {bad}"):
        write(source, tmp_path / "place")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"theta": 5e5}, "theta 500000 10000"),
        ({"eps": 1e-6}, "eps 1e-06 1e-05"),
        ({"scaling": LinearScaling(2.0)}, "rescaling RoPE"),
        ({"windows": (4, None, 4)}, "sliding windows"),
        ({"experts": 2, "experts_per_token": 1}, "experts"),
        ({"qkv_bias": True}, "biases"),
        ({"o_bias": True}, "biases"),
        ({"ffn_bias": True}, "biases"),
        ({"qk_norm": True}, "norms of q and k"),
        ({"head_dim": 6}, "heads 6"),
    ],
)
def test_llama2c_refuses_what_it_cannot_hold(tmp_path, changes, words):
    source = llama2c_checkpoint(tmp_path)
    source = replace(source, config=replace(source.config, **changes))
    with refused_in_one_line(tmp_path, words=f"source.bin: llama2.c {words}"):
        write_llama2c(source, tmp_path / "model.bin")


@pytest.mark.parametrize(("tokens", "words"), [({"bos": 3}, "begin 3 1"), ({"stops": frozenset({2, 3})}, "end 3 1 2")])
def test_llama2c_refuses_other_tokens(tmp_path, tokens, words):
    source = replace(llama2c_checkpoint(tmp_path), **tokens)
    with refused_in_one_line(tmp_path, words=f"source.bin: llama2.c {words}"):
        write_llama2c(source, tmp_path / "model.bin")
