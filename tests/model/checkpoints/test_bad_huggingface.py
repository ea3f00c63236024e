"""Hugging Face folders with a wrong index or header are refused in one line that names the file."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import families
from tests.support.refusals import load, mentions, refusal

CONFIG = families.FAMILIES["llama-3.1"]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Write a valid checkpoint in a temporary folder."""
    families.write_checkpoint(tmp_path, CONFIG)
    load(tmp_path)
    return tmp_path


JSONS = {
    "empty": (b"", "is empty"),
    "blank": (b"  ", "is not JSON:"),
    "html": (b"<html></html>", "is not JSON:"),
    "a list": (b"[1, 2]", "is not a JSON object"),
    "a number": (b"7", "is not a JSON object"),
    "cut": (b'{"a": ', "is not JSON:"),
    "a trailing word": (b"{} x", "is not JSON: Extra data"),
    "latin-1": (b'{"a": "\xe9"}', "is not JSON: byte 7 not valid UTF-8"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), "is not JSON: byte 0 not valid UTF-8"),
    "deep lists": (b'{"a": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", "nested too deeply"),
    "deep objects": (b'{"a":' * 40_000 + b"1" + b"}" * 40_000, "nested too deeply"),
    "a number of 10000 digits": (b'{"a": ' + b"9" * 10_000 + b"}", "is not usable JSON 10000 digits"),
    "too large": (b'{"a": "' + b" " * (5 << 20) + b'"}', "bytes JSON"),
    "many small objects": (b'{"a": [' + b"{}," * (1 << 20) + b"{}]}", "50000 objects"),
    "many objects": (b'{"a": [' + b"{}," * 20_000 + b"{}]}", "model_type|weight_map|described"),
    "many lists": (b'{"a": [' + b"[]," * 1_390_000 + b"[]]}", "model_type|weight_map"),
    "many keys": (b"{" + b",".join(b'"%d":1' % i for i in range(380_000)) + b"}", "model_type|weight_map"),
    "many strings": (b'{"a": [' + b",".join(b'"%d"' % i for i in range(400_000)) + b"]}", "model_type|weight_map"),
}

HARMLESS = ("many objects", "many lists", "many keys", "many strings")


@pytest.mark.parametrize("kind", JSONS)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_files(folder, kind, name):
    content, what = JSONS[kind]
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    if name == "generation_config.json" and kind in HARMLESS:
        return  # the reader uses nothing in it
    message = refusal(folder, named=str(folder / name))
    assert mentions(message, what), message


@pytest.mark.parametrize("kind", [kind for kind in JSONS if kind not in ("empty", "html")])
def test_json_in_a_safetensors_header(folder, kind):
    text = JSONS[kind][0]
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    refusal(folder, named=str(folder / "model.safetensors"))


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_raw(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


NORM = "model.norm.weight"  # 48 numbers, the last tensor but one in its file
ENTRIES = [
    ({"dtype": "F64"}, "384 bytes shape data_offsets span 192"),
    ({"dtype": "F8_E5M2"}, 'dtype "F8_E5M2" not supported'),
    ({"dtype": "I32"}, "int32 config.json quantization_config"),
    ({"dtype": "f32"}, 'dtype "f32" not supported'),
    ({"dtype": None}, "dtype null not supported"),
    ({"dtype": ["F32"]}, "dtype list not supported"),
    ({"dtype": "BF16"}, "96 bytes shape data_offsets span 192"),
    ({"shape": [47]}, "188 bytes shape data_offsets span 192"),
    ({"shape": [0]}, "0 bytes shape data_offsets span 192"),
    ({"shape": [6, 8]}, "shape [6 8] config.json [48]"),
    ({"shape": [-48]}, "shape list nonnegative"),
    ({"shape": [48.0]}, "shape list nonnegative"),
    ({"shape": [True]}, "shape list nonnegative"),
    ({"shape": "48"}, "shape list nonnegative"),
    ({"shape": [2**62, 2**62, 0]}, "0 bytes shape data_offsets span 192"),
    ({"shape": [2**62] * 8}, f"{2**498} bytes shape data_offsets span 192"),
    ({"shape": [2**62] * 10**5}, "shape list at most 8 nonnegative"),
    ({"shape": [10**4000]}, "shape list nonnegative"),
    ({"data_offsets": [0, 192]}, "overlaps"),
    ({"data_offsets": [192, 0]}, "192 bytes data_offsets span -192"),
    ({"data_offsets": [-192, 0]}, "data_offsets list two nonnegative"),
    ({"data_offsets": [0]}, "data_offsets list two nonnegative"),
    ({"data_offsets": None}, "data_offsets list two nonnegative"),
    ({"data_offsets": [2**62, 2**62 + 192]}, "leaves gap"),
    ({"data_offsets": [10**400, 10**400 + 192]}, "data_offsets list two nonnegative"),
    ({"more": 1}, "exactly keys dtype shape data_offsets"),
]


@pytest.mark.parametrize(("changes", "what"), ENTRIES, ids=[f"{i} {what[:30]}" for i, (_, what) in enumerate(ENTRIES)])
def test_safetensors_entries(folder, changes, what):
    header, data = header_of(folder / "model.safetensors")
    header[NORM] |= changes
    write_raw(folder / "model.safetensors", header, data)
    assert mentions(refusal(folder, named=str(folder)), what)


@pytest.mark.parametrize("entry", [None, 7, "F32", [], {}, {"dtype": "F32", "shape": [48]}])
def test_safetensors_entries_that_are_none(folder, entry):
    header, data = header_of(folder / "model.safetensors")
    header[NORM] = entry
    write_raw(folder / "model.safetensors", header, data)
    assert "tensor 'model.norm.weight': expected exactly" in refusal(folder, named=str(folder / "model.safetensors"))


def test_safetensors_shifted_by_a_hole_or_an_overlap(folder):
    header, data = header_of(folder / "model.safetensors")
    for shift, what in ((4, "leaves a gap"), (-4, "overlaps"), (1, "leaves a gap")):
        shifted = {**header, "lm_head.weight": dict(header["lm_head.weight"])}
        shifted["lm_head.weight"]["data_offsets"] = [at + shift for at in header["lm_head.weight"]["data_offsets"]]
        write_raw(folder / "model.safetensors", shifted, data + bytes(max(shift, 0)))
        assert what in refusal(folder, named=str(folder / "model.safetensors"))


def test_safetensors_cut_or_longer(folder):
    raw = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for length in (1, 7, 8, 9, 99, start - 1, start, start + 1, len(raw) - 1):
        (folder / "model.safetensors").write_bytes(raw[:length])
        message = refusal(folder, named=str(folder / "model.safetensors"))
        assert "truncated" in message or length < 9, message
    (folder / "model.safetensors").write_bytes(raw + b"\0")
    assert "1 unexpected bytes after the last tensor" in refusal(folder, named=str(folder))


@pytest.mark.parametrize("length", [0, 1, 10**8, 2**32, 2**63, 2**64 - 1])
def test_safetensors_header_lengths(folder, length):
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + raw[8:])
    refusal(folder, named=str(folder / "model.safetensors"))
    refusal(folder / "model.safetensors")


def test_safetensors_metadata_is_an_object(folder):
    header, data = header_of(folder / "model.safetensors")
    write_raw(folder / "model.safetensors", {**header, "__metadata__": 7}, data)
    assert "__metadata__ in the header is not a JSON object" in refusal(folder, named=str(folder))


def rewrite(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    families.write_safetensors(folder / "model.safetensors", tensors)


def test_tensors_missing_extra_or_misshapen(folder):
    good = families.random_tensors(CONFIG)
    up = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, {name: array for name, array in good.items() if name != up})
    assert f"lacks the tensor {up}" in refusal(folder)
    rewrite(folder, {**good, "model.layers.0.self_attn.q_norm.weight": np.ones(12, np.float32)})
    assert "q_norm.weight' is unexpected" in refusal(folder)
    for part in ("bias", "weight_scale", "a.b"):
        rewrite(folder, {**good, f"lm_head.{part}": np.ones(1, np.float32)})
        assert f"lm_head.{part}' is unexpected" in refusal(folder)
    rewrite(folder, {**good, up: np.ascontiguousarray(good[up].T)})
    assert re.search(rf"{re.escape(up)} .*\[48, 112\].*\[112, 48\].*config\.json", refusal(folder))
    rewrite(folder, {**good, up: good[up][:-1]})
    assert f"{up} has shape [111, 48]" in refusal(folder)
    rewrite(folder, {name.replace("model.", "net."): array for name, array in good.items()})
    assert "lacks the tensor model.embed_tokens.weight" in refusal(folder)
    rewrite(folder, {})
    assert "0 tensors" in refusal(folder)


@pytest.fixture
def sharded(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    families.write_checkpoint(folder, CONFIG, shards=3)
    load(folder)
    return folder


def change_index(folder: Path, **changes: Any) -> str:
    """Map tensors to other shards in the index, and return the path of the index."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    path.write_text(json.dumps(index))
    return str(path)


SHARD = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize(
    "name",
    [
        "../{}",
        "/{}",
        "./{}",
        "..",
        ".",
        "",
        "a/{}",
        "{}/",
        "\0",
        7,
        None,
        ["{}"],
        "\ud800",
        "/dev/zero",
        "a" * 999,
        "nothing",
    ],
)
def test_shards_that_are_no_file_of_the_directory(sharded, name):
    (sharded.parent / SHARD).write_bytes((sharded / SHARD).read_bytes())
    (sharded / "a").mkdir()
    index = change_index(sharded, **{NORM: name.format(SHARD) if isinstance(name, str) else name})
    message = refusal(sharded, named=index)
    if name is None:
        assert f"names null as the shard of tensor '{NORM}'" in message
    elif name == "nothing":
        assert 'shard "nothing"' in message


def test_shards_that_link_out_of_the_directory(sharded):
    outside = sharded.parent / "outside.safetensors"
    (sharded / SHARD).rename(outside)
    (sharded / SHARD).symlink_to(outside)
    assert "a link out of this directory" in refusal(sharded, named=str(sharded))
    (sharded / SHARD).unlink()
    (sharded / SHARD).symlink_to(SHARD)
    refusal(sharded, named=str(sharded))
    (sharded / SHARD).unlink()
    (sharded / SHARD).symlink_to("inside.safetensors")
    assert "missing" in refusal(sharded, named=str(sharded))
    outside.rename(sharded / "inside.safetensors")
    load(sharded)


def test_shards_that_are_missing_or_disagree_with_the_index(sharded):
    good = (sharded / SHARD).read_bytes()
    (sharded / SHARD).unlink()
    assert f'"{SHARD}", which is missing' in refusal(sharded, named=str(sharded))
    (sharded / SHARD).write_bytes((sharded / SHARD.replace("2", "1", 1)).read_bytes())
    assert f"in the shard {SHARD}, but" in refusal(sharded, named=str(sharded))
    (sharded / SHARD).write_bytes(good)
    index = change_index(sharded, **{"more": SHARD})
    assert "tensor 'more' is not in" in refusal(sharded, named=index)


@pytest.mark.parametrize("where", [1, 3])
def test_a_tensor_in_two_shards(sharded, where):
    name = {1: NORM, 3: "model.embed_tokens.weight"}[where]
    index = sharded / "model.safetensors.index.json"
    right = json.loads(index.read_text())["weight_map"][name]
    shard = f"model-0000{where}-of-00003.safetensors"
    assert shard != right
    tensors = families.random_tensors(CONFIG)
    names = [*header_of(sharded / shard)[0]][1:]  # without the metadata
    families.write_safetensors(sharded / shard, {key: tensors[key] for key in [*names, name]})
    assert refusal(sharded, named=str(index)).endswith(
        f"""tensor '{name}' is in the shard {shard}, but the index names "{right}" for it"""
    )


def test_a_tensor_that_the_index_does_not_know(sharded):
    index = sharded / "model.safetensors.index.json"
    text = json.loads(index.read_text())
    del text["weight_map"][NORM]
    index.write_text(json.dumps(text))
    assert f"tensor '{NORM}' is in the shard" in refusal(sharded, named=str(index))


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", 7])
def test_an_index_without_a_map(sharded, weight_map):
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "lacks the key weight_map" in refusal(sharded, named=str(index))
