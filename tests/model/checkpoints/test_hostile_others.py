"""Invalid safetensors and llama2c files, in addition to `test_bad_checkpoints` and `test_bad_huggingface`.

Some unusual files are valid, such as files with tensors in any order or with empty vectors. We read them as other
readers do.
"""

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.model.checkpoints import test_bad_checkpoints, test_bad_huggingface
from tests.model.checkpoints.test_bad_huggingface import NORM, header_of, write_raw
from tests.support import families, llama2c_files
from tests.support.llama2c_files import Sizes
from tests.support.refusals import load, mentions, refusal

CONFIG = families.FAMILIES["llama-3.1"]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    families.write_checkpoint(tmp_path, CONFIG)
    return tmp_path


def rewrite(folder: Path, **tensors: np.ndarray) -> None:
    families.write_safetensors(folder / "model.safetensors", {**families.random_tensors(CONFIG), **tensors})


HEADERS = {
    "a space before it": (b" {}", "the header is not a JSON object"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "the header is not a JSON object"),
    "a NUL after it": (b"{}\0", "is not JSON:"),
    "two objects": (b"{}{}", "is not JSON:"),
    "a comment": (b"{/* */}", "is not JSON:"),
    "a key that is no text": (b"{1: {}}", "is not JSON:"),
    "NaN as a shape": (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', "shape list nonnegative"),
    "infinity as an offset": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,Infinity]}}',
        "data_offsets list two nonnegative",
    ),
    "a number as a text": (b'{"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}}', "shape list nonnegative"),
    "an exponent": (b'{"a":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}}', "shape list nonnegative"),
    "a name of half a character": (
        b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        "has 1 tensors too few",
    ),
    "a name of 100 KB": (b'{"%s":7}' % (b"n" * 100_000), "exactly keys dtype shape data_offsets"),
    "no name": (b'{"":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "too few"),
    "metadata that is null": (b'{"__metadata__":null}', "__metadata__ header not object"),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{}}', "__metadata__ appears twice"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_safetensors_headers(folder, kind):
    text, what = HEADERS[kind]
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    assert mentions(refusal(folder, named=str(folder)), what)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.bool_, ml_dtypes.float8_e4m3fn])
def test_safetensors_weights_that_are_no_plain_floats(folder, dtype, monkeypatch):
    """Integer, boolean or float8 weights are refused if config.json has no quantization_config that defines them."""
    codes = {"int8": "I8", "uint8": "U8", "int64": "I64", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3"}
    monkeypatch.setattr(families, "CODES", {**families.CODES, **codes})
    rewrite(folder, **{UP: np.zeros((112, 48), dtype)})
    refusal(folder, named=str(folder))


SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "a scalar": ((),), "a row as a matrix": ((1, 48), (48, 1)), "three axes": ((48, 1, 1),), "nothing": ((0, 48),),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHAPES)
def test_safetensors_vectors_of_other_shapes(folder, kind):
    for shape in SHAPES[kind]:
        rewrite(folder, **{NORM: np.ones(shape, np.float32)})
        assert f"{NORM} has shape {list(shape)}" in refusal(folder, named=str(folder))


def test_safetensors_of_more_axes_than_arrays_have(folder):
    rewrite(folder, **{NORM: np.ones((1,) * 9, np.float32)})
    assert "shape is not a list of at most 8" in refusal(folder, named=str(folder))


def test_tensors_may_lie_in_any_order(folder):
    tensors = families.random_tensors(CONFIG)
    families.write_safetensors(folder / "model.safetensors", dict(reversed(tensors.items())))
    for name, tensor in load(folder).tensors.items():
        np.testing.assert_array_equal(tensor.read(), tensors[name])
    header, data = header_of(folder / "model.safetensors")
    write_raw(folder / "model.safetensors", dict(sorted(header.items())), data)
    load(folder)


def spoiled(version: int, at: int, value: Any, *, form: str = "<i", **kwargs: Any) -> bytes:
    raw = bytearray(llama2c_files.file_bytes(version, **kwargs))
    struct.pack_into(form, raw, at if at >= 0 else len(raw) + at, value)
    return bytes(raw)


V1, V2 = 8, 8  # offsets of the sizes in versions 1 and 2
LLAMA2C: dict[str, tuple[bytes, str]] = {
    "a head that is not there": (spoiled(0, 20, -20), "truncated"),
    "a head that is not said": (spoiled(0, 20, 20, tied=False), "too long"),
    "a head that is not there, version 1": (spoiled(1, 36, 0, form="<B"), "truncated"),
    "a head that is not said, version 1": (spoiled(1, 36, 1, form="<B", tied=False), "too long"),
    "a flag of 255": (spoiled(1, 36, 255, form="<B"), "classifier 255"),
    "a negative vocabulary, version 1": (spoiled(1, V1 + 20, -20), "vocab -20"),
    "a negative vocabulary, version 2": (spoiled(2, V2 + 20, -20), "vocab -20"),
    "a context that overflows": (spoiled(0, 24, 2**31 - 1), "truncated"),
    "layers that overflow": (spoiled(0, 8, 2**30), "1073741824 layers"),
    "more heads than features": (spoiled(0, 12, 32), "dim 16 32 heads"),
    "more kv heads than heads": (spoiled(0, 16, 8), "heads 4 8"),
    "no kv heads": (spoiled(2, V2 + 16, 0), "kv_heads 0"),
    "a big-endian magic number": (b"ak42" + llama2c_files.file_bytes(1)[4:], "not a checkpoint|text"),
    "a version of the other order": (spoiled(1, 4, 1 << 24), "version 16777216"),
    "version -1": (spoiled(1, 4, -1), "version -1"),
    "version 1 as 2": (spoiled(1, 4, 2), "group size 0"),
    "version 2 as 1": (spoiled(2, 4, 1), "truncated"),
    "groups of half the size": (spoiled(2, 37, 4), "truncated"),
    "groups of twice the size": (spoiled(2, 37, 16), "too long"),
    "a NaN in a scale": (spoiled(2, -4, np.nan, form="<f"), "up_proj.weight[23 8] nan"),
    "a scale that overflows": (spoiled(2, -4, 3e38, form="<f"), "up_proj.weight[23 8] inf"),
    "an infinity in a norm": (spoiled(2, 256, np.inf, form="<f"), "input_layernorm.weight[0] inf"),
    "a NaN in the embedding": (spoiled(0, 28, np.nan, form="<f"), "embed_tokens.weight[0 0] nan"),
    "a header alone": (llama2c_files.file_bytes(0)[:28], "truncated"),
    "a header alone, version 2": (llama2c_files.file_bytes(2)[:256], "truncated"),
    "KuiperLLama's with a head that is not there": (spoiled(3, 20, -20), "truncated|too long"),
    "KuiperLLama's with a head that is not said": (spoiled(3, 20, 20, tied=False), "truncated|too long"),
    "KuiperLLama's, one byte longer": (llama2c_files.file_bytes(3) + b"\0", "truncated|too long"),
    "KuiperLLama's with an infinity": (spoiled(3, -4, np.inf, form="<f"), "model.norm.weight[15] inf"),
    "KuiperLLama's with biases, as Qwen's are": (
        llama2c_files.file_bytes(3) + bytes(4 * 3 * (16 + 8 + 8)), "truncated|too long",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LLAMA2C)
def test_llama2c(tmp_path, kind):
    raw, what = LLAMA2C[kind]
    (tmp_path / "model.bin").write_bytes(raw)
    message = refusal(tmp_path / "model.bin")
    assert mentions(message, what), message


def test_scales_of_zero_are_weights_of_zero(tmp_path):
    """A scale of 0 decodes to weights of 0.

    export.py writes such scales for groups of zeros, with codes made from NaN.
    """
    raw = bytearray(llama2c_files.file_bytes(2))
    raw[-4:] = bytes(4)
    (tmp_path / "model.bin").write_bytes(raw)
    weights = load(tmp_path / "model.bin").tensors["model.layers.2.mlp.up_proj.weight"].read()
    assert not weights[-1, -8:].any()


def test_the_corpora_are_large_enough():
    """The tests use at least 60 invalid safetensors files and 45 invalid llama2c files, not counting random changes."""
    safetensors = (HEADERS, SHAPES, test_bad_huggingface.ENTRIES, test_bad_huggingface.JSONS)
    assert sum(map(len, safetensors)) >= 60
    assert len(LLAMA2C) + sum(map(len, test_bad_checkpoints.LLAMA2C_CUTS.values())) >= 45
    assert Sizes().dim == 16  # the offsets above rely on this


def test_a_config_of_another_model(folder):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_key_value_heads": 3}))
    refusal(folder, named=str(folder))


def test_code_that_comes_with_a_model_is_not_run(folder):
    """We do not run code that the key auto_map names; transformers runs such code if the user trusts it."""
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": names, "trust_remote_code": True}))
    (folder / "own.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    before = sorted(folder.iterdir())
    load(folder)
    assert sorted(folder.iterdir()) == before
