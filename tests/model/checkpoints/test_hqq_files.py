"""hqq's layout in Hugging Face folders is read as hqq reads it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.hqq import read_hqq
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.loading import load_params
from tests.model.checkpoints.stored_goldens import arrays_of
from tests.model.checkpoints.test_quantized_checkpoints import CONFIG
from tests.support import families
from tests.support.families import is_matrix
from tests.support.goldens import read_golden
from tests.support.refusals import mentions, refusal

GOLDENS = read_golden("quantizers/hqq_files")
ROWS, COLS = GOLDENS["shape"]
CASES = GOLDENS["cases"]


@pytest.mark.parametrize("case", CASES)
def test_what_hqq_stores_is_read_as_it_reads(case):
    """We decode hqq's weights as (code - zero) * scale, with one rounding.

    Storing zero * scale as a minimum adds no rounding, because this product is exact for half-precision numbers.
    """
    rule, arrays = read_hqq(Fields(CASES[case]["config"], "config.json")), arrays_of(CASES[case]["tensors"])
    stored = rule.stored(ROWS, COLS)
    assert arrays.keys() == stored.keys()
    for name, array in arrays.items():
        assert stored[name].any_length or (array.shape or (1,)) == stored[name].shape
        assert array.dtype.name in stored[name].dtypes
    rule.check(arrays, ROWS, COLS)
    weights = []
    for start in range(0, ROWS, 8):
        part: Any = rule.part(arrays, start, start + 8, COLS)
        copies = COLS // part.scales.shape[1]
        scales, minima = (np.repeat(a.astype(np.float64), copies, axis=1) for a in (part.scales, part.minima))
        weights.append((part.codes * scales + minima).astype("<f4"))
    assert hashlib.sha256(np.concatenate(weights).tobytes()).hexdigest() == CASES[case]["read"]


def packed(w: np.ndarray, *, axis: int, group: int = 32) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Quantize a matrix to 4 bits in hqq's layout, rounding to nearest; return its tensors and the exact weights."""
    groups = w.reshape(group, -1) if axis == 0 else w.reshape(-1, group)
    low, high = (f(groups, axis=axis, keepdims=True).astype(np.float64) for f in (np.min, np.max))
    scale = ((high - low) / 15).astype(np.float16)
    zero = (-low / scale).astype(np.float16)
    codes = np.clip(np.rint(groups / scale + zero), 0, 15).astype(np.uint8)
    half = len(codes) // 2
    stored = {"W_q": codes[:half] << 4 | codes[half:], "scale": scale, "zero": zero, "shape": np.array(w.shape)}
    stored |= {"nbits": np.array(4, np.int32), "axis": np.array(axis, np.int32), "quant_zero": np.array(0, np.uint8)}
    return stored, ((codes - zero.astype(np.float64)) * scale).reshape(w.shape)


def write(folder: Path, changes: dict[str, Any], *, axis: int = 1, tag: str | None = None) -> dict[str, np.ndarray]:
    """Write a checkpoint and return its quantized weights by name; `changes` replace stored tensors of one module.

    With `tag`, only matrices with `tag` in their names are quantized.
    """
    tensors, exact = {}, {}
    for name, w in families.random_tensors(CONFIG).items():
        if not is_matrix(name) or name == "lm_head.weight" or (tag and tag not in name):
            tensors[name] = w
            continue
        stored, exact[name] = packed(w, axis=axis)
        for part, array in {**stored, **(changes if "layers.1.mlp.up_proj" in name else {})}.items():
            if array is not None:
                tensors[f"{name.removesuffix('.weight')}.{part}"] = array
    options = {"weight_quant_params": {"nbits": 4, "group_size": 32, "axis": axis}, "scale_quant_params": None}
    settings = {"quant_method": "hqq", "quant_config": {tag: options} if tag else options, "skip_modules": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": settings}))
    families.write_safetensors(folder / "model.safetensors", tensors)
    return exact


@pytest.mark.parametrize(("axis", "tag"), [(1, None), (1, "mlp.down_proj"), (0, None)])
def test_a_checkpoint_runs_from_its_codes(axis, tag, tmp_path):
    """A model with scales along axis 1 runs from hqq's codes.

    With axis 0, the columns of a row have different scales, so the matrices are decoded to float32.
    """
    exact = write(tmp_path, {}, axis=axis, tag=tag)
    checkpoint = open_checkpoint(tmp_path)
    assert {name for name, tensor in checkpoint.tensors.items() if tensor.codes} == exact.keys()
    for name, weights in exact.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].read(), weights.astype(np.float32))
    ffn: Any = load_params(checkpoint, dtype=np.dtype(np.float32), positions=1).layers[1].ffn
    assert isinstance(ffn.down.weight, QuantizedMatrix) == (axis == 1)
    write_huggingface(checkpoint, tmp_path / "plain")
    again = open_checkpoint(tmp_path / "plain")
    for name in exact:
        assert not again.tensors[name].codes
        np.testing.assert_array_equal(again.tensors[name].read(), checkpoint.tensors[name].read())


NAN = np.full((192, 1), np.nan, np.float16)


@pytest.mark.parametrize(
    ("part", "value", "what"),
    [
        ("scale", None, "tensor model.layers.1.mlp.up_proj.scale"),
        ("scale", np.ones((192, 2), np.float16), "up_proj.scale float16 [192 2] config.json"),
        ("scale", NAN, "up_proj.weight[0 0] nan finite number"),
        ("zero", NAN, "up_proj.weight[0 0] nan finite number"),
        ("W_q", np.zeros((96, 31), np.uint8), "up_proj.W_q uint8 [96 31] config.json uint8 [96 32]"),
        ("shape", np.array([64, 96]), "up_proj shape [64 96]"),
        ("nbits", np.array(2, np.int32), "up_proj nbits 2 4"),
        ("axis", np.array(0, np.int32), "up_proj axis 0 1"),
        ("quant_zero", np.array(1, np.uint8), "up_proj quant_zero 1 0"),
    ],
)
def test_invalid_quantized_tensors_are_refused(part, value, what, tmp_path):
    write(tmp_path, {part: value})
    assert mentions(refusal(tmp_path), what)


@pytest.mark.parametrize(
    ("weights", "change", "what"),
    [
        ({"nbits": 7}, {}, "hqq 7 bits axis 1 1 1.58 2 3 4 5 6 8 axis"),
        ({"nbits": 1.5}, {}, "hqq 1.5 bits not supported"),
        ({"nbits": True}, {}, "hqq true bits not supported"),
        ({"nbits": 1.58}, {}, "up_proj nbits 4 1.58|config.json uint8"),
        ({"nbits": [4]}, {}, "hqq list bits not supported"),
        ({"axis": 2}, {}, "hqq axis 2 not supported"),
        ({"axis": "1"}, {}, 'axis "1" integer'),
        ({"group_size": 0}, {}, "group_size 0 least 1"),
        ({"group_size": 48}, {}, "rows 64 weights group size 48|config.json uint8"),
        ({"group_size": 10**30}, {}, f"W_q [64 32] expected {10**30} config.json"),
        ({"view_as_float": True}, {}, "view_as_float not supported"),
        ({}, {"zero_quant_params": {"nbits": 8}}, "axis 1 zero_quant_params not supported"),
        ({}, {"weight_quant_params": None}, "hqq null bits not supported"),
        ({}, {"weight_quant_params": 7}, "weight_quant_params 7 object"),
    ],
)
def test_an_unsupported_quantization_config_is_refused(weights, change, what, tmp_path):
    write(tmp_path, {})
    config = json.loads((tmp_path / "config.json").read_text())
    settings = config["quantization_config"]["quant_config"]
    settings["weight_quant_params"] |= weights
    settings |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(tmp_path, named=str(tmp_path))
    assert mentions(message, what), message
