"""Layouts of autoawq, auto-round, optimum-quanto and compressed-tensors, read as these libraries read them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llamaspec.model.checkpoints.checkpoint import Codes
from llamaspec.model.checkpoints.codes import exact_weights
from llamaspec.model.checkpoints.huggingface.quantized import read_rule
from llamaspec.model.checkpoints.huggingface.rule import Rule
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.loading import load_params
from tests.model.checkpoints.stored_goldens import arrays_of
from tests.model.checkpoints.test_quantized_checkpoints import CONFIG, LAYOUTS, _gptq, exact, write_stored
from tests.support.goldens import read_golden
from tests.support.refusals import mentions, refusal

GOLDENS = read_golden("quantizers/packed_files")
ROWS, COLS = GOLDENS["shape"]
CASES = GOLDENS["cases"]
EXTRAS = {"input_scale", "output_scale"}  # of activations


def rule_of(config: dict[str, Any]) -> Rule:
    rule = read_rule({"quantization_config": config}, Path("config.json"))
    assert rule
    return rule


@pytest.mark.parametrize("case", CASES)
def test_matrices_are_read_as_their_library_reads_them(case):
    rule, arrays = rule_of(CASES[case]["config"]), arrays_of(CASES[case]["tensors"])
    arrays = {name: array for name, array in arrays.items() if name not in EXTRAS}
    stored = rule.stored(ROWS, COLS)
    assert arrays.keys() == {name for name, part in stored.items() if not part.optional or name in arrays}
    for name, array in arrays.items():
        assert array.shape == stored[name].shape and array.dtype.name in stored[name].dtypes
    rule.check(arrays, ROWS, COLS)
    codes = Codes(rule.form, rule.group_of(COLS), rule.zeros, bytes=0, parts=lambda: iter(()))
    weights = exact_weights(codes, rule.part(arrays, 0, ROWS, COLS))
    assert hashlib.sha256(weights.astype("<f4").tobytes()).hexdigest() == CASES[case]["read"]


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int", "sym": False}


def test_auto_round_has_other_settings_for_single_modules(tmp_path):
    """auto-round files may have other settings for single modules, given by name or by a regular expression.

    A module with 16 bits is not quantized.
    """
    modules = {
        r".*\.(?:gate|down)_proj.*": {"bits": 8},
        "model.layers.1.self_attn.o_proj": {"bits": 16},
        "model.layers.0.self_attn.v_proj": {"bits": 8, "group_size": 32},
    }
    settings = {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq", "extra_config": modules}

    def store(name: str, w: np.ndarray) -> Any:
        if name == "model.layers.1.self_attn.o_proj.weight":
            return {"weight": w}, w
        wide = "gate_proj" in name or "down_proj" in name or name == "model.layers.0.self_attn.v_proj.weight"
        return LAYOUTS["gptq 8" if wide else "gptq 4"][1](w)

    meant = write_stored(tmp_path, settings, store)
    checkpoint = open_checkpoint(tmp_path)
    for name, weights in meant.items():
        np.testing.assert_array_equal(exact(checkpoint.tensors[name]), weights)
    assert checkpoint.tensors["model.layers.1.self_attn.o_proj.weight"].codes is None


@pytest.mark.parametrize(
    ("packing", "layout"), [("auto_round:auto_awq", "awq"), ("auto_round", "gptq 4, v2"), (None, "gptq 4")]
)
def test_the_packing_format_of_auto_round_names_the_layout(packing, layout, tmp_path):
    def store(_: str, w: np.ndarray) -> Any:
        return _gptq(w, bits=4, version=2) if layout == "gptq 4, v2" else LAYOUTS[layout][1](w)

    settings = AUTO_ROUND if packing is None else {**AUTO_ROUND, "packing_format": packing}
    for name, weights in write_stored(tmp_path, settings, store).items():
        tensor = open_checkpoint(tmp_path).tensors[name]
        np.testing.assert_array_equal(exact(tensor), weights)


@pytest.mark.parametrize(
    ("kind", "changes", "layout"),
    [("nv_fp4_with_static_gs", {"group_size": 16}, "nvfp4"), ("mx_fp", {"group_size": 32}, "mxfp4")],
)
def test_auto_round_stores_floats_of_four_bits_as_compressed_tensors(kind, changes, layout, tmp_path):
    settings = {**AUTO_ROUND, "packing_format": "auto_round:llm_compressor", "data_type": kind, **changes}
    for name, weights in write_stored(tmp_path, settings, lambda _, w: LAYOUTS[layout][1](w)).items():
        np.testing.assert_array_equal(exact(open_checkpoint(tmp_path).tensors[name]), weights)


def quanto(name: str, w: np.ndarray) -> Any:
    """Store up_proj in optimum-quanto's qint4, and other matrices in its qint8."""
    if "up_proj" not in name:
        scales = (np.abs(w).max(axis=1, keepdims=True) / 127).astype(ml_dtypes.bfloat16)
        codes = np.rint(w / scales.astype(np.float32)).clip(-127, 127).astype(np.int8)
        extras = {part: np.ones((), np.float32) for part in EXTRAS}
        return {"weight._data": codes, "weight._scale": scales, **extras}, codes * scales.astype(np.float64)
    scales = (np.ptp(w, axis=1, keepdims=True) / 15).astype(np.float32)
    shifts = -w.min(axis=1, keepdims=True).astype(np.float32)
    codes = np.rint((w + shifts) / scales).clip(0, 15).astype(np.uint8)
    first, second = np.split(codes, 2)
    stored = {"weight._data._data": first | second << 4, "weight._scale": scales, "weight._shift": shifts}
    return stored, codes * scales.astype(np.float64) - shifts


def test_quanto_names_the_type_of_each_module(tmp_path):
    meant = write_stored(tmp_path, {}, quanto)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    modules = {name.removesuffix(".weight"): "qint4" if "up_proj" in name else "qint8" for name in meant}
    qmap = {name: {"weights": kind, "activations": "none"} for name, kind in modules.items()}
    (tmp_path / "quanto_qmap.json").write_text(json.dumps(qmap | {"lm_head": {"weights": "none"}}))
    checkpoint = open_checkpoint(tmp_path)
    for name, weights in meant.items():
        np.testing.assert_array_equal(exact(checkpoint.tensors[name]), weights)
    params = load_params(checkpoint, dtype=np.dtype(np.float32), positions=1)
    assert isinstance(params.layers[1].qkv.weight, QuantizedMatrix)


@pytest.mark.parametrize(
    ("qmap", "what"),
    [
        ({"model.layers.0.mlp.up_proj": {"weights": "qint3"}}, "up_proj qint3 qint8 optimum-quanto"),
        ({"lm_head": {"weights": "none"}}, "no module has quantized weights"),
        ({"lm_head": 7}, "lm_head 7 object"),
        ({"lm_head": {"weights": "qint8"}, "re:(": {"weights": "qint4"}}, 'target "re:("'),
        ({"weights": "int8"}, 'quanto "int8" optimum-quanto'),
    ],
)
def test_a_map_of_quanto_that_is_not_read_is_refused(qmap, what, tmp_path):
    write_stored(tmp_path, {}, quanto)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "quanto_qmap.json").write_text(json.dumps(qmap))
    assert mentions(refusal(tmp_path, named=str(tmp_path)), what)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"packing_format": "auto_round:fp8_static"},
            '"int" 4 packing_format "auto_round:fp8_static" auto_gptq',
        ),
        ({"data_type": ["int"]}, "auto-round list not supported"),
        ({"bits": 5}, "GPTQ 5 bits not supported"),
        ({"extra_config": {"(a+)+": {"bits": 8}}}, 'target "re:(a+)+"'),
        ({"extra_config": {"lm_head": 8}}, "lm_head 8 object"),
    ],
)
def test_settings_of_auto_round_that_are_not_read_are_refused(changes, what, tmp_path):
    write_stored(tmp_path, {**AUTO_ROUND, **changes}, lambda _, w: LAYOUTS["gptq 4"][1](w))
    assert mentions(refusal(tmp_path, named=str(tmp_path)), what)


def test_gemv_needs_whole_groups(tmp_path):
    settings = {"quant_method": "awq", "bits": 4, "group_size": 48, "version": "gemv_fast", "zero_point": True}

    def store(_: str, w: np.ndarray) -> Any:
        rows, cols = w.shape
        grid = np.ones((16, rows), np.float16)
        return {"qweight": np.zeros((rows // 4, cols), np.int16), "scales": grid, "qzeros": grid}, w

    write_stored(tmp_path, settings, store)
    assert mentions(refusal(tmp_path), "rows 64 multiple group size 48")
