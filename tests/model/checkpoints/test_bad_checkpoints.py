"""Damaged files, and files that are not checkpoints: opening one gives a one-line error and has no side effects."""

import io
import json
import os
import pickle
import struct
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.checkpoints import CheckpointError
from tests.support import families, llama2c_files
from tests.support.gguf_files import STRING, U32, File, Tensor
from tests.support.llama2c_files import Sizes
from tests.support.refusals import check_message, load, mentions, refusal

HTML = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>401</body></html>\n"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef\nsize 4400717852\n"


def zipped() -> bytes:
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({"model": 1}))
        return file.getvalue()


def imatrix() -> bytes:
    """Return an importance matrix in GGUF, as llama-imatrix writes it: sums of squared inputs, and their counts."""
    sums = {
        "blk.0.attn_k.weight.in_sum2": Tensor((1, 8), bytes(32)),
        "blk.0.attn_k.weight.counts": Tensor((1, 1), bytes(4)),
    }
    return File({"general.type": (STRING, "imatrix"), "imatrix.chunk_count": (U32, 1)}, {**sums}).bytes()


STRANGERS = {
    "empty": (b"", "is empty"),
    "one byte": (b"\1", "too few"),
    "seven bytes": (b"\1" * 7, "too few"),
    "html": (HTML, "HTML page, not weights"),
    "html after blanks": (b"\n\n  <html>" + b" " * 99, "HTML page, not weights"),
    "html after a byte order mark": (b"\xef\xbb\xbf" + HTML, "HTML page, not weights"),
    "git lfs": (LFS, "git lfs pull"),
    "imatrix": (struct.pack("<ii", 2, 19) + b"blk.0.attn_k.weight" + bytes(40), "importance matrix (imatrix)"),
    "imatrix in gguf": (imatrix(), "importance matrix (imatrix)"),
    "onnx": (b"\x08\x0b\x12\x09llamaspec:" + bytes(90), "is an ONNX model"),
    "zip": (zipped(), "zip archive"),
    "pickle 2": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "Python pickle save_pretrained() safetensors"),
    "pickle 4": (pickle.dumps({"a": list(range(999))}, protocol=4), "pickle"),
    "gguf": (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "lacks key general.architecture"),
    "json": (b'{"model_type": "llama"}', "is a JSON file, not weights"),
    "text": (b"hello, world\n" * 9, "is a text file, not weights"),
    "zeros": (bytes(4096), "dim 0"),
    "ones": (b"\xff" * 4096, "dim -1"),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_files_of_other_formats_are_refused(tmp_path, kind):
    content, what = STRANGERS[kind]
    (tmp_path / "model.bin").write_bytes(content)
    assert mentions(refusal(tmp_path / "model.bin"), what)


@pytest.mark.parametrize("kind", STRANGERS)
def test_other_files_named_safetensors_are_refused(tmp_path, kind):
    families.write_checkpoint(tmp_path, families.FAMILIES["llama-3"])
    (tmp_path / "model.safetensors").write_bytes(STRANGERS[kind][0])
    refusal(tmp_path, named=str(tmp_path / "model.safetensors"))


def test_what_is_not_a_file(tmp_path):
    assert "No such file" in refusal(tmp_path / "missing")
    assert "no config.json" in refusal(tmp_path)
    assert "zero byte" in refusal("a\0b", named="a\\x00b")
    assert "File name too long" in refusal("a" * 900)
    assert r"\ud800: the name is not valid Unicode, so no" in refusal("\ud800", named="\\ud800")
    assert "Not a directory" in refusal("/dev/null/model.bin")
    assert "not a regular file" in refusal("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    assert "symbolic link" in refusal(tmp_path / "loop")
    (tmp_path / "line\nfeed").write_bytes(b"")
    refusal(tmp_path / "line\nfeed", named=f"{tmp_path}/line\\nfeed")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(tmp_path):
    path = llama2c_files.write(tmp_path / "model.bin")
    path.chmod(0)
    assert "Permission denied" in refusal(path)


def test_an_error_while_reading_is_one_line(tmp_path, monkeypatch):
    path = llama2c_files.write(tmp_path / "model.bin")
    monkeypatch.setattr("mmap.mmap", lambda *_, **__: (_ for _ in ()).throw(OSError(5, os.strerror(5))))
    with pytest.raises(CheckpointError) as caught:
        load(path)
    check_message(str(caught.value), str(path))
    assert "Input/output error" in str(caught.value)


@pytest.mark.parametrize("missing", ["the directory's config.json", "the weights"])
def test_an_incomplete_folder_is_refused(tmp_path, missing):
    families.write_checkpoint(tmp_path, families.FAMILIES["llama-3"])
    if missing == "the weights":
        (tmp_path / "model.safetensors").unlink()
        assert "has neither model.safetensors nor" in refusal(tmp_path)
        (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
        assert "save_pretrained()" in refusal(tmp_path)
        (tmp_path / "model.safetensors").mkdir()
        assert "is a directory" in refusal(tmp_path)
    else:
        (tmp_path / "config.json").unlink()
        assert "no config.json" in refusal(tmp_path)
        assert "no config.json" in refusal(tmp_path / "model.safetensors")


LLAMA2C_CUTS = {0: [1, 7, 27, 28, 29, -1], 1: [4, 8, 36, 37, 255, 256, -1], 2: [40, 41, 255, 256, 257, -1]}


@pytest.mark.parametrize(("version", "cut"), [(v, cut) for v, cuts in LLAMA2C_CUTS.items() for cut in cuts])
def test_llama2c_cut_short(tmp_path, version, cut):
    raw = llama2c_files.file_bytes(version)
    (tmp_path / "model.bin").write_bytes(raw[:cut])
    message = refusal(tmp_path / "model.bin")
    assert "truncated" in message or "too few" in message


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("more", [1, 4, 64])
def test_llama2c_too_long(tmp_path, version, more):
    (tmp_path / "model.bin").write_bytes(llama2c_files.file_bytes(version) + bytes(more))
    assert "too long" in refusal(tmp_path / "model.bin")


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("value", [0, -1, -(2**31), 2**31 - 1, 2**24, 3, 10**9])
@pytest.mark.parametrize("name", ["dim", "ffn", "layers", "heads", "kv_heads", "vocab", "context"])
def test_llama2c_absurd_sizes(tmp_path, version, name, value):
    raw = llama2c_files.file_bytes(version)
    sizes = Sizes(**{name: value})
    if sizes == Sizes() or (name == "context" and value > 0 and version > 0):
        return  # without RoPE tables, any context is valid
    header = llama2c_files.header(sizes, version=version, tied=True, group=8)
    (tmp_path / "model.bin").write_bytes(header + raw[len(header) :])
    refusal(tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("sizes", "what"), [(Sizes(heads=4, kv_heads=3), "heads 4 3"), (Sizes(dim=12), "head_dim 3 even RoPE pairs")]
)
def test_llama2c_heads_that_do_not_fit(tmp_path, sizes, what):
    assert mentions(refusal(llama2c_files.write(tmp_path / "model.bin", sizes=sizes, group=4)), what)


@pytest.mark.parametrize("group", [0, -8, 7, 2**31 - 1, -(2**31)])
def test_llama2c_groups_that_do_not_fit(tmp_path, group):
    raw = llama2c_files.file_bytes(2)
    header = llama2c_files.header(Sizes(), version=2, tied=True, group=group)
    (tmp_path / "model.bin").write_bytes(header + raw[256:])
    assert f"group size is {group}" in refusal(tmp_path / "model.bin")


@pytest.mark.parametrize(("at", "value", "what"), [(4, 3, "version 3"), (4, 0, "version 0"), (36, 2, "classifier 2")])
def test_llama2c_headers_from_elsewhere(tmp_path, at, value, what):
    raw = bytearray(llama2c_files.file_bytes(1))
    raw[at] = value
    (tmp_path / "model.bin").write_bytes(raw)
    assert mentions(refusal(tmp_path / "model.bin"), what)


def test_a_sparse_file_of_many_layers_is_refused_soon(tmp_path):
    sizes = Sizes(dim=2, ffn=1, layers=2**24, heads=1, kv_heads=1, vocab=3, context=1)
    per_layer = 4 * (2 + 2 + 4 * 4 + 3 * 2)
    with open(tmp_path / "model.bin", "wb") as file:
        file.write(llama2c_files.header(sizes, version=0, tied=True))
        file.truncate(28 + 4 * (6 + 2 + 2) + per_layer * sizes.layers)
    assert "16777216 layers" in refusal(tmp_path / "model.bin")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("version", [0, 1])
def test_llama2c_weights_that_are_not_finite(tmp_path, version, value):
    raw = bytearray(llama2c_files.file_bytes(version, tied=False))
    raw[-4:] = np.float32(value).tobytes()
    (tmp_path / "model.bin").write_bytes(raw)
    assert "lm_head.weight[19, 15] is" in refusal(tmp_path / "model.bin")


def test_llama2c_scales_that_are_not_finite(tmp_path):
    raw = bytearray(llama2c_files.file_bytes(2))
    raw[-4:] = np.float32(np.inf).tobytes()
    (tmp_path / "model.bin").write_bytes(raw)
    assert "model.layers.2.mlp.up_proj.weight[23, 8] is" in refusal(tmp_path / "model.bin")


@pytest.mark.parametrize("dtype", families.DTYPES)
def test_safetensors_weights_that_are_not_finite(tmp_path, dtype):
    config = families.FAMILIES["mixtral"]
    families.write_checkpoint(tmp_path, config)
    tensors = families.random_tensors(config, dtype=dtype)
    tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"][5, 7] = np.nan
    families.write_safetensors(tmp_path / "model.safetensors", tensors)
    assert "experts.3.w2.weight[5, 7] is nan" in refusal(tmp_path)


# After any changed byte or cut, a file gives an error in one line, or a checkpoint that is readable to its end.


@cache
def healthy(kind: str) -> dict[str, bytes]:
    """Return the files of a small, valid checkpoint: file names and bytes."""
    if kind.startswith("llama2c"):
        return {"model.bin": llama2c_files.file_bytes(int(kind[-1]), tied=False)}
    with tempfile.TemporaryDirectory() as folder:
        families.write_checkpoint(Path(folder), families.FAMILIES["llama-3.1"], shards=3)
        (Path(folder) / "generation_config.json").write_text('{"bos_token_id": 44, "eos_token_id": [45, 46]}')
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def headers(kind: str, name: str) -> int:
    """Return how many bytes of a file come before its weights."""
    raw = healthy(kind)[name]
    if name.endswith(".safetensors"):
        return 8 + int.from_bytes(raw[:8], "little")
    return (
        llama2c_files.header(Sizes(), version=int(kind[-1]), tied=False).__len__() if name == "model.bin" else len(raw)
    )


def load_or_refuse(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, raw in files.items():
            (Path(folder) / name).write_bytes(raw)
        path = Path(folder) / "model.bin" if "model.bin" in files else Path(folder)
        try:
            load(path)
        except CheckpointError as error:
            assert str(error).isprintable()
            assert str(error).startswith(folder)


KINDS = ["llama2c-v0", "llama2c-v1", "llama2c-v2", "safetensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_files_load(kind, tmp_path):
    for name, raw in healthy(kind).items():
        (tmp_path / name).write_bytes(raw)
    load(tmp_path / "model.bin" if kind != "safetensors" else tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_a_flipped_byte_in_a_header(kind, data):
    files = dict(healthy(kind))
    name = data.draw(st.sampled_from(list(files)))
    raw = bytearray(files[name])
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, headers(kind, name) - 1))] ^= data.draw(st.integers(1, 255))
    load_or_refuse({**files, name: bytes(raw)})


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_a_file_cut_anywhere(kind, data):
    files = dict(healthy(kind))
    name = data.draw(st.sampled_from(list(files)))
    length = data.draw(st.integers(0, len(files[name]) - 1))
    load_or_refuse({**files, name: files[name][:length]})


ROPE = tuple(families.FAMILIES["llama-3.1"]["rope_scaling"])
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@given(
    key=st.sampled_from([*families.FAMILIES["llama-3.1"], *ROPE]), value=st.recursive(VALUES, st.lists, max_leaves=4)
)
def test_any_value_for_any_key_of_config_json(key, value):
    files = healthy("safetensors")
    config = json.loads(files["config.json"])
    (config["rope_scaling"] if key in ROPE else config)[key] = value
    load_or_refuse({**files, "config.json": json.dumps(config).encode()})
