"""torchao's layouts in Hugging Face folders are read as torchao reads them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.checkpoints.checkpoint import Codes
from llamaspec.model.checkpoints.codes import exact_weights
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.torchao import CODES, PAIRS, SCALE, ZERO, TiledInt4, read_torchao
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.checkpoints.recognize import weights_file
from llamaspec.model.checkpoints.safetensors_header import read_header
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.loading import load_params
from llamaspec.reference.quantizers import torchao_int4
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.model.checkpoints.stored_goldens import arrays_of
from tests.model.checkpoints.test_quantized_checkpoints import CONFIG
from tests.support import families
from tests.support.families import is_matrix
from tests.support.goldens import read_golden
from tests.support.refusals import mentions, refusal
from tests.support.strategies import seeds

GOLDENS = read_golden("quantizers/torchao_files")
ROWS, COLS = GOLDENS["shape"]
CASES = GOLDENS["cases"]


@pytest.mark.parametrize("case", CASES)
def test_what_torchao_stores_is_read_as_it_reads(case):
    rule, arrays = read_torchao(Fields(CASES[case]["config"], "config.json")), arrays_of(CASES[case]["tensors"])
    stored = rule.stored(ROWS, COLS)
    assert arrays.keys() == stored.keys()
    for name, array in arrays.items():
        assert array.shape == stored[name].shape and array.dtype.name in stored[name].dtypes
    rule.check(arrays, ROWS, COLS)
    codes = Codes(rule.form, rule.group_of(COLS), rule.zeros, bytes=0, parts=lambda: iter(()))
    weights = np.concatenate([exact_weights(codes, rule.part(arrays, start, start + 4, COLS)) for start in (0, 4)])
    if "read" in CASES[case]:
        assert hashlib.sha256(weights.astype("<f4").tobytes()).hexdigest() == CASES[case]["read"]
        return
    original = np.array(CASES[case]["original"], np.float32)
    q = torchao_int4.quantize(original, group=32)
    scales, zeros = (a.astype(ml_dtypes.bfloat16).astype(np.float32) for a in (q.scales, q.zeros))
    q = q._replace(scales=scales, zeros=zeros)
    np.testing.assert_array_equal(q.scales, arrays[SCALE].T)
    np.testing.assert_array_equal(q.zeros, arrays[ZERO].T)
    # zero - 8 scale is rounded to float32, with a relative error of 2^-24.
    np.testing.assert_allclose(
        weights, torchao_int4.dequantize(q), rtol=0, atol=2.0**-24 * 9 * np.max(np.abs(original))
    )
    check_bound(original, q, t=2.0**-8)


def check_bound(w: np.ndarray, q: torchao_int4.TorchaoInt4, *, t: float) -> None:
    """Check that each decoded weight is within half a step of `w`, plus roundoff.

    `t` is the unit roundoff of the dtype of the scales and zero points.
    """
    scale, zero = (np.repeat(np.abs(a.astype(np.float64)), 32, axis=1) for a in (q.scales, q.zeros))
    bound = scale * (0.5 + 8 * t) + t * zero + 2.0**-24 * (100 * scale + 2 * zero)
    assert np.all(np.abs(w - torchao_int4.dequantize(q)) <= bound)


@given(weights=st.builds(Weights, kind=st.sampled_from(KINDS), seed=seeds, exponent=st.integers(-20, 60)))
def test_weights_are_within_half_a_step(weights):
    w = weights(2, 64)
    check_bound(w, torchao_int4.quantize(w, group=32), t=0.0)


def write(folder: Path, changes: dict[str, Any], kind: str = "Int4WeightOnlyConfig") -> dict[str, np.ndarray]:
    """Write a checkpoint with quantized matrices, and return each matrix's exact weights by name.

    For Int4WeightOnlyConfig, these are two arrays: code * scale, and the zero point to add. `changes` replace stored
    tensors of one module; None removes a tensor.
    """
    tensors, exact = {}, {}
    for name, w in families.random_tensors(CONFIG).items():
        if not is_matrix(name) or name == "lm_head.weight":
            tensors[name] = w
            continue
        rng, (rows, cols) = np.random.default_rng(len(exact)), w.shape
        if kind == "Int4WeightOnlyConfig":
            codes = rng.integers(0, 256, (rows, cols // 2)).astype(np.uint8)
            grid = (cols // 32, rows)
            stored = {CODES: codes.view(np.int8)}
            stored |= {part: rng.normal(size=grid).astype(ml_dtypes.bfloat16) for part in (SCALE, ZERO)}
            halves = np.stack([codes & 15, codes >> 4], axis=-1).reshape(rows, cols).astype(np.int16)
            scale, zero = (np.repeat(stored[part].T.astype(np.float64), 32, axis=1) for part in (SCALE, ZERO))
            exact[name] = (np.where(halves > 7, halves - 16, halves) * scale, zero)
        else:
            codes = rng.integers(-128, 128, w.shape).astype(np.int8)
            scale = rng.random((rows, 1)).astype(np.float32)
            stored = {CODES: codes, SCALE: scale, ZERO: np.zeros((rows, 1), np.int8)}
            exact[name] = codes * scale.astype(np.float64), np.float64(0)
        for part, array in {**stored, **(changes if "layers.1.mlp.up_proj" in name else {})}.items():
            if array is not None:
                tensors[f"{name.removesuffix('.weight')}.{part}"] = array
    settings: dict[str, Any] = {"_type": kind, "_version": 2}
    settings["_data"] = (
        {"group_size": 32} if "Int4" in kind else {"granularity": {"_type": "PerRow", "_data": {"dim": -1}}}
    )
    config = {**CONFIG, "quantization_config": {"quant_method": "torchao", "quant_type": {"default": settings}}}
    (folder / "config.json").write_text(json.dumps(config))
    families.write_safetensors(folder / "model.safetensors", tensors)
    return exact


@pytest.mark.parametrize("kind", ["Int4WeightOnlyConfig", "Int8WeightOnlyConfig"])
def test_a_checkpoint_runs_from_its_codes(kind, tmp_path):
    exact = write(tmp_path, {}, kind)
    checkpoint = open_checkpoint(tmp_path)
    for name, (product, zero) in exact.items():
        tensor = checkpoint.tensors[name]
        assert tensor.codes
        # The minimum, zero - 8 scale, is rounded to float32, and so is the weight.
        bound = 2.0**-24 * (2 * np.abs(product) + 2 * np.abs(zero) + 16 * np.abs(product).max())
        assert np.all(np.abs(tensor.read() - (product + zero)) <= bound)
    params = load_params(checkpoint, dtype=np.dtype(np.float32), positions=1)
    assert isinstance(params.layers[1].qkv.weight, QuantizedMatrix)


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    file = weights_file(folder / "model.safetensors")
    return {name: file.array(*entry).copy() for name, entry in read_header(file).items()}


def tiled(codes: np.ndarray) -> np.ndarray:
    """Pack codes thread by thread, as PyTorch's matrix_to_m16n8k16_Bint4_layout does with 8 inner tiles."""
    rows, cols = codes.shape
    words = np.zeros((rows // 8, cols // 128, 32, 4), np.uint32)
    for tile, outer, thread, word in np.ndindex(words.shape):
        first = 128 * outer + 32 * word + 2 * (thread % 4)
        columns = [first + offset for offset in (0, 1, 8, 9, 16, 17, 24, 25)]
        values = [int(codes[8 * tile + thread // 4, column]) for column in columns]
        order = (7, 5, 3, 1, 6, 4, 2, 0)  # from the highest bits on
        words[tile, outer, thread, word] = sum(values[i] << 4 * (7 - place) for place, i in enumerate(order))
    return words.view(np.int32)


@pytest.mark.parametrize("shape", [(16, 1024), (12, 200)])
def test_codes_in_tiles_are_read_as_the_kernel_packs_them(shape):
    rows, cols = shape
    random, rule = np.random.RandomState(3), TiledInt4(32)
    stored = rule.stored(rows, cols)
    padded = (stored[PAIRS].shape[1], 32 * stored[PAIRS].shape[0])
    codes = random.randint(0, 16, padded).astype(np.uint8)
    pairs = random.standard_normal(stored[PAIRS].shape).astype(ml_dtypes.bfloat16)
    arrays = {CODES: tiled(codes), PAIRS: pairs}
    assert {name: array.shape for name, array in arrays.items()} == {name: part.shape for name, part in stored.items()}
    scale, zero = (np.repeat(pairs[:, :rows, place].T.astype(np.float64), 32, axis=1)[:, :cols] for place in (0, 1))
    meant = (codes[:rows, :cols].astype(np.float64) - 8) * scale + zero
    grid = Codes(rule.form, 32, rule.zeros, bytes=0, parts=lambda: iter(()))
    read = np.concatenate([exact_weights(grid, rule.part(arrays, *span, cols)) for span in ((0, 8), (8, rows))])
    # zero - 8 scale is rounded to float32, with a relative error of 2^-24.
    assert np.all(np.abs(read - meant) <= 2.0**-24 * (8 * np.abs(scale) + np.abs(zero)))


@pytest.mark.parametrize(
    ("packing", "layout"),
    [("tile_packed_to_4d", TiledInt4), ({"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"}, TiledInt4)],
)
def test_a_packing_format_may_be_a_string(packing, layout):
    settings = {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {"int4_packing_format": packing}}
    assert isinstance(read_torchao(Fields({"quant_type": {"default": settings}}, "config.json")), layout)


@pytest.mark.parametrize(
    ("kind", "key"), [("FqnToConfig", "fqn_to_config"), ("ModuleFqnToConfig", "module_fqn_to_config")]
)
def test_modules_have_types_of_their_own(kind, key, tmp_path):
    """The configuration may name a type for single modules and for the embedding; null means not quantized."""
    exact = write(tmp_path, {})
    w = families.random_tensors(CONFIG)["model.embed_tokens.weight"]
    scale = (np.abs(w).max(axis=1, keepdims=True) / 127).astype(np.float32)
    codes = np.rint(w / scale).astype(np.int8)
    stem = "model.embed_tokens"
    zeros = np.zeros_like(scale, np.int8)
    embedding = {f"{stem}.{CODES}": codes, f"{stem}.{SCALE}": scale, f"{stem}.{ZERO}": zeros}
    tensors = {name: tensor for name, tensor in read_tensors(tmp_path).items() if name != f"{stem}.weight"}
    families.write_safetensors(tmp_path / "model.safetensors", tensors | embedding)
    config = json.loads((tmp_path / "config.json").read_text())
    int4 = config["quantization_config"]["quant_type"]["default"]
    rows = {"_type": "PerAxis", "_version": 1, "_data": {"axis": 0}}
    int8 = {"_type": "IntxWeightOnlyConfig", "_version": 2, "_data": {"granularity": rows}}
    modules = {"_default": int8, r"re:model\.layers\..*_proj": int4, f"{stem}.weight": int8, "lm_head": None}
    config["quantization_config"]["quant_type"] = {"default": {"_type": kind, "_version": 1, "_data": {key: modules}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.tensors[f"{stem}.weight"].read(), codes * scale)
    assert checkpoint.tensors[f"{stem}.weight"].codes
    coded = [checkpoint.tensors[name].codes for name in exact]
    assert {codes.form for codes in coded if codes} == {"int4_min"} and all(coded)
    assert checkpoint.tensors["lm_head.weight"].codes is None


@pytest.mark.parametrize(
    ("kind", "part", "value", "what"),
    [
        ("Int4WeightOnlyConfig", SCALE, None, "tensor model.layers.1.mlp.up_proj._weight_scale"),
        ("Int4WeightOnlyConfig", CODES, np.zeros((96, 31), np.int8), "_weight_qdata int8 [96 31] config.json"),
        ("Int4WeightOnlyConfig", ZERO, np.full((2, 96), np.nan, np.float16), "up_proj.weight[0 0] nan finite number"),
        ("Int4WeightOnlyConfig", "_weight_act_pre_scale", np.ones(64, np.float32), "act_pre_scale' unexpected"),
        ("Int8WeightOnlyConfig", ZERO, np.ones((96, 1), np.int8), "_weight_zero_point 0 config.json"),
        ("Int8WeightOnlyConfig", SCALE, np.ones((96, 2), np.float32), "_weight_scale float32 [96 2] config"),
    ],
)
def test_invalid_quantized_tensors_are_refused(kind, part, value, what, tmp_path):
    write(tmp_path, {part: value}, kind)
    assert mentions(refusal(tmp_path), what)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ("int4_weight_only", 'quant_type "int4_weight_only" saved pickle Int8Weight'),
        ({"default": 7}, "default 7 object"),
        ({"default": {"_type": ["x"]}}, "torchao's list"),
        ({"default": {"_type": "FqnToConfig"}}, "FqnToConfig without"),
        ({"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 0}}}, "group_size 0"),
        (
            {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"int4_packing_format": {"_data": "PRESHUFFLED"}}}},
            'packing format "PRESHUFFLED"',
        ),
        (
            {"default": {"_type": "Int8WeightOnlyConfig", "_data": {"granularity": {"_type": "PerBlock"}}}},
            'Int8WeightOnlyConfig granularity "PerBlock"',
        ),
        ({"default": {"_type": "Int8WeightOnlyConfig", "_data": {"granularity": 7}}}, "granularity null"),
        (
            {"default": {"_type": "Float8WeightOnlyConfig", "_data": {"weight_dtype": {"_data": "float8_e5m2"}}}},
            'Float8WeightOnlyConfig "float8_e5m2"',
        ),
    ],
)
def test_an_unsupported_quantization_config_is_refused(settings, what, tmp_path):
    write(tmp_path, {})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["quant_type"] = settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert mentions(refusal(tmp_path, named=str(tmp_path)), what)
