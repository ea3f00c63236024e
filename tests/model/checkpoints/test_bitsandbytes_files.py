"""NF4 and FP4 matrices in Hugging Face folders are read and written in bitsandbytes' layout."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamaspec.model.checkpoints.checkpoint import CheckpointError, Form
from llamaspec.model.checkpoints.codes import exact_parts, quantized
from llamaspec.model.checkpoints.huggingface.bitsandbytes import (
    CODEBOOKS,
    BitsAndBytes,
    format_bitsandbytes,
    read_bitsandbytes,
)
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.loading import load_params
from llamaspec.reference.quantizers import double_quantization, nf4
from llamaspec.reference.quantizers.nf4 import NF4
from tests.goldens.quantizers.make_bitsandbytes_files import SHAPE, WEIGHTS
from tests.model.checkpoints.stored_goldens import arrays_of
from tests.model.checkpoints.test_quantized_checkpoints import CONFIG as NARROW
from tests.support import families
from tests.support.families import is_matrix
from tests.support.goldens import read_golden
from tests.support.random_models import CONFIGS, random_checkpoint
from tests.support.refusals import mentions, refusal

GOLDENS = read_golden("quantizers/bitsandbytes_files")["cases"]
CONFIG = {**NARROW, "intermediate_size": 128}
UP = "model.layers.1.mlp.up_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"
ROWS, COLS = SHAPE


@pytest.mark.parametrize("case", GOLDENS)
def test_what_bitsandbytes_stores_is_read_as_it_reads(case):
    """We decode the same float32 weights as bitsandbytes does: a scale times a level, rounded once."""
    rule, arrays = (
        read_bitsandbytes(Fields(GOLDENS[case]["config"], "config.json")),
        arrays_of(GOLDENS[case]["tensors"]),
    )
    assert isinstance(rule, BitsAndBytes)
    stored = rule.stored(ROWS, COLS)
    assert {name: array.shape for name, array in arrays.items() if name != rule.state} == {
        name: part.shape for name, part in stored.items() if name != rule.state
    }
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        name: part.dtypes[0] for name, part in stored.items()
    }
    rule.check(arrays, ROWS, COLS)
    parts = [rule.part(arrays, start, start + 8, COLS) for start in range(0, ROWS, 8)]
    weights = np.concatenate([CODEBOOKS[rule.form].dequantize(part) for part in parts]).astype("<f4") + np.float32(
        0
    )  # -0 is 0 there
    assert hashlib.sha256(weights.tobytes()).hexdigest() == GOLDENS[case]["read"]


@pytest.mark.parametrize("kind", CODEBOOKS)
def test_what_is_written_is_what_bitsandbytes_stores(kind):
    rule, arrays = BitsAndBytes(kind), arrays_of(GOLDENS[f"{kind}, once"]["tensors"])
    codes = CODEBOOKS[kind].quantize(WEIGHTS(ROWS, COLS), group=64)
    actual = rule.pack(codes) | rule.constants(ROWS, COLS)
    assert actual.keys() == arrays.keys()
    for name, array in actual.items():
        if kind == "fp4" and name == "weight":  # bitsandbytes writes some zeros as -0
            expected, array = (CODEBOOKS[kind].levels[nf4.unpack(packed)] for packed in (arrays[name], array))
            np.testing.assert_array_equal(array, expected)
            continue
        np.testing.assert_array_equal(array, arrays[name])
        assert array.dtype == arrays[name].dtype
    expected = GOLDENS[f"{kind}, once"]["config"]
    for key, value in format_bitsandbytes(kind, plain=[]).items():
        assert key == "llm_int8_skip_modules" or expected[key] == value


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_written_is_read_again(tied, tmp_path):
    config = replace(CONFIGS["2 to 1, wide, tied"], layers=1, tied=tied)
    first = quantized(random_checkpoint(config, seed=3), "nf4")
    write_huggingface(first, tmp_path / "hf")
    second = open_checkpoint(tmp_path / "hf")
    for name, tensor in first.tensors.items():
        again = second.tensors[name]
        assert bool(tensor.codes) == bool(again.codes) == is_matrix(name)
        if tensor.codes and again.codes:
            assert (again.codes.form, again.codes.group) == ("nf4", 64)
            for expected, actual in zip(tensor.codes.parts(), again.codes.parts(), strict=True):
                np.testing.assert_array_equal(expected.codes, actual.codes)
                np.testing.assert_array_equal(expected.scales, actual.scales)
        np.testing.assert_array_equal(tensor.read(), again.read())
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    assert settings["llm_int8_skip_modules"] == (["lm_head"] if tied else [])
    params = load_params(second, dtype=np.dtype(np.float32), positions=1)
    assert isinstance(params.layers[0].qkv.weight, QuantizedMatrix)
    assert isinstance(params.head, QuantizedMatrix) != tied
    write_huggingface(second, tmp_path / "again")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "again")]
    assert files[0] == files[1]


def write(
    folder: Path, kind: Form = "nf4", *, double: bool = False, **changes: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Write a checkpoint with matrices in NF4 or FP4; return the exact weights by name.

    `changes` replace stored tensors of the matrix `UP`; None removes a tensor.
    """
    tensors, exact = {}, {}
    rule, codebook = BitsAndBytes(kind), CODEBOOKS[kind]
    for name, w in families.random_tensors(CONFIG).items():
        if not is_matrix(name):
            tensors[name] = w
            continue
        q = codebook.quantize(w, group=64)
        stored = rule.pack(q) | rule.constants(*w.shape)
        if double:
            scales = double_quantization.quantize(q.scales.reshape(-1))
            state = json.loads(stored[rule.state].tobytes()) | {"nested_blocksize": 256, "nested_dtype": "float32"}
            stored |= {
                rule.state: state_of(**state, nested_offset=float(scales.offset)),
                "weight.absmax": scales.codes,
                "weight.nested_absmax": scales.tops,
                "weight.nested_quant_map": double_quantization.dynamic_levels(),
            }
            q = q._replace(scales=double_quantization.dequantize(scales).astype(np.float32).reshape(q.scales.shape))
        exact[name] = codebook.dequantize(q)
        module = name.removesuffix(".weight")
        for part, array in {**stored, **(changes if module == UP else {})}.items():
            if array is not None:
                tensors[f"{module}.{part}"] = array
    settings = {**format_bitsandbytes(kind, plain=[]), "bnb_4bit_use_double_quant": double}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": settings}))
    families.write_safetensors(folder / "model.safetensors", tensors)
    return exact


def state_of(**values: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(values).encode(), np.uint8)


@pytest.fixture(autouse=True)
def codes_of_bytes(monkeypatch):
    monkeypatch.setattr(families, "CODES", {**families.CODES, "uint8": "U8"})


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", CODEBOOKS)
def test_a_checkpoint_of_theirs_stays_in_codes(kind, double, tmp_path):
    exact = write(tmp_path, kind, double=double)
    checkpoint = open_checkpoint(tmp_path)
    for name, weights in exact.items():
        tensor = checkpoint.tensors[name]
        assert tensor.codes
        read = np.concatenate(list(exact_parts(tensor)))
        # Ours and bitsandbytes add the offset of double-quantized scales in float32; the reference adds it in float64.
        bound = 4 * 2.0**-24 * np.max(np.abs(weights)) if double else 0.0
        np.testing.assert_allclose(read, weights, rtol=0, atol=bound)
    params = load_params(checkpoint, dtype=np.dtype(np.float32), positions=1)
    weight = params.layers[1].qkv.weight
    assert isinstance(weight, QuantizedMatrix) and weight.form == kind
    write_huggingface(checkpoint, tmp_path / "ours")
    again = open_checkpoint(tmp_path / "ours")
    for name in exact:
        np.testing.assert_array_equal(again.tensors[name].read(), checkpoint.tensors[name].read())


SOUND = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [128, 64]}
NESTED = {**SOUND, "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
SCALES = np.full(128, np.nan, np.float32)


@pytest.mark.parametrize(
    ("double", "part", "value", "what"),
    [
        (False, "weight.absmax", None, f"lacks {UP}.weight.absmax"),
        (
            False,
            "weight.absmax",
            np.ones(64, np.float32),
            "up_proj.weight.absmax float32 [64] expected float32 [128] config.json",
        ),
        (False, "weight.absmax", SCALES, "nan finite number"),
        (False, "weight.quant_map", NF4.levels[::-1].copy(), "quant_map not levels NF4"),
        (
            False,
            STATE,
            state_of(**{**SOUND, "quant_type": "fp4"}),
            'quant_type "fp4" quant_state "nf4"',
        ),
        (False, STATE, state_of(**{**SOUND, "blocksize": 128}), "blocksize 128 quant_state 64"),
        (False, STATE, state_of(**{**SOUND, "shape": [64, 128]}), "shape in quant_state not match [128 64]"),
        (False, STATE, np.frombuffer(b"{", np.uint8), "quant_state: is not JSON"),
        (False, STATE, np.zeros(5000, np.uint8), "quant_state 5000 bytes 4096"),
        (False, STATE, np.zeros((2, 2), np.uint8), f"{STATE} uint8 [2, 2] config.json"),
        (True, STATE, state_of(**SOUND), "nested_blocksize null quant_state 256"),
        (True, STATE, state_of(**{**NESTED, "nested_offset": "0.5"}), 'nested_offset "0.5" quant_state'),
        (True, STATE, state_of(**{**NESTED, "nested_offset": 1e39}), "nested_offset 1e+39 quant_state"),
        (True, STATE, state_of(**{**NESTED, "nested_offset": float("nan")}), "nested_offset NaN quant_state"),
        (True, "weight.nested_absmax", np.full(1, np.inf, np.float32), "-inf finite number"),
    ],
)
def test_invalid_quantized_tensors_are_refused(double, part, value, what, tmp_path):
    write(tmp_path, double=double, **{part: value})
    assert mentions(refusal(tmp_path), what)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"bnb_4bit_quant_type": "int4"}, 'bitsandbytes "int4" "uint8" "nf4" "fp4"'),
        ({"bnb_4bit_quant_type": ["nf4"]}, "bitsandbytes list not supported"),
        ({"bnb_4bit_quant_type": "fp4"}, "q_proj.weight.quant_state.bitsandbytes__fp4"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, 'bitsandbytes "nf4" "bfloat16"'),
        ({"load_in_4bit": False, "_load_in_4bit": False}, "load_in_4bit load_in_8bit"),
        ({"bnb_4bit_use_double_quant": True}, "weight.absmax float32 [64] config.json uint8 [64]"),
    ],
)
def test_an_unsupported_quantization_config_is_refused(changes, what, tmp_path):
    write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert mentions(refusal(tmp_path, named=str(tmp_path)), what)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path):
    narrow = replace(CONFIGS["2 to 1, wide, tied"], ffn=96)
    with pytest.raises(CheckpointError, match=r"\b96\b.*bitsandbytes.*\b64\b"):
        write_huggingface(quantized(random_checkpoint(narrow, seed=0), "nf4"), tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match=r"\b96\b.*\b64\b"):
        BitsAndBytes().check({}, 64, 96)
