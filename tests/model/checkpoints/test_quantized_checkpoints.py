"""Quantized matrices in Hugging Face folders are read as the layout's library reads them, and written back."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.checkpoints.checkpoint import Checkpoint, CheckpointError, Tensor
from llamaspec.model.checkpoints.codes import exact_parts, quantized
from llamaspec.model.checkpoints.huggingface.awq_gptq import AWQ, GPTQ
from llamaspec.model.checkpoints.huggingface.compressed import PackedIntegers
from llamaspec.model.checkpoints.huggingface.marlin import Marlin
from llamaspec.model.checkpoints.huggingface.rule import pack_words, unpack_words
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.quantize.calibration import calibrated
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.loading import check_weights, load_params
from llamaspec.reference.quantizers import affine, awq, gptq, minifloat, mx, nvfp4, symmetric
from llamaspec.reference.quantizers.affine import Affine
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.reference.quantizers.minifloat import E2M1, E4M3
from tests.goldens.quantizers import make_marlin
from tests.support import families
from tests.support.families import is_matrix
from tests.support.goldens import read_golden
from tests.support.random_models import CONFIGS, random_checkpoint
from tests.support.refusals import mentions, refusal
from tests.support.strategies import seeds

GOLDENS = read_golden("quantizers/methods")
MARLIN = read_golden("quantizers/marlin")
FLOAT32 = np.dtype(np.float32)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 48,
}


@pytest.mark.parametrize("case", GOLDENS["compressed_tensors"]["cases"])
def test_packed_words_equal_compressed_tensors(case):
    rows, cols = GOLDENS["compressed_tensors"]["shape"]
    bits, packed = case["bits"], np.array(case["packed"], np.int32)
    codes = np.array(case["codes"], np.int8)
    rule = PackedIntegers("int4" if bits == 4 else "int8", bits=bits, group=case["group"], zeros=False)
    scales = np.ones((rows, cols // case["group"]), np.float32)
    part = rule.part({"weight_packed": packed, "weight_scale": scales}, 0, rows, cols)
    np.testing.assert_array_equal(part.codes, codes)
    np.testing.assert_array_equal(rule.pack(part)["weight_packed"], packed)


def test_packed_words_equal_autoawq():
    dtypes = {"qweight": np.int32, "qzeros": np.int32, "scales": np.float16}
    words = {name: np.array(GOLDENS["awq"]["words"][name], dtype) for name, dtype in dtypes.items()}
    rows, cols = GOLDENS["awq"]["shape"]
    part = AWQ(GOLDENS["awq"]["group"]).part(words, 0, rows, cols)
    for actual, expected in zip(part, awq.unpack(awq.PackedTensors(**words)), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("case", GOLDENS["gptq_words"]["cases"], ids=lambda case: str(case["bits"]))
def test_packed_words_equal_auto_gptq(case):
    golden, bits = GOLDENS["gptq_words"], case["bits"]
    random = np.random.RandomState(bits)  # as the golden was made
    codes = random.randint(0, 2**bits, (golden["rows"], golden["cols"]))
    zeros = random.randint(1, 2**bits, (golden["rows"], golden["cols"] // golden["group"]))
    arrays = {name: np.array(case[name], np.int32) for name in ("qweight", "qzeros", "scales")}
    part = GPTQ(bits, golden["group"], version=1).part(arrays, 0, golden["rows"], golden["cols"])
    assert isinstance(part, Affine)
    np.testing.assert_array_equal(part.codes, codes)
    np.testing.assert_array_equal(part.zeros, zeros)


@pytest.mark.parametrize("groups", [1, 2])
def test_packed_words_equal_marlin(groups):
    codes, scales = make_marlin.drawn(groups)
    arrays = {name: np.array(MARLIN[str(groups)][name], dtype) for name, dtype in (("B", np.int32), ("s", np.float16))}
    rule = Marlin(make_marlin.COLS // groups)
    assert {name: array.shape for name, array in arrays.items()} == {
        name: part.shape for name, part in rule.stored(*codes.shape).items() if not part.optional
    }
    for start, stop in ((0, 128), (32, 96), (96, 128)):
        part = rule.part(arrays, start, stop, make_marlin.COLS)
        np.testing.assert_array_equal(part.codes, codes[start:stop])
        np.testing.assert_array_equal(part.scales, scales[start:stop])


@given(seed=seeds, bits=st.sampled_from([4, 8]), codes=st.integers(1, 20))
def test_words_hold_every_code(seed, bits, codes):
    drawn = np.random.default_rng(seed).integers(0, 1 << bits, (3, codes)).astype(np.uint8)
    np.testing.assert_array_equal(unpack_words(pack_words(drawn, bits), bits)[:, :codes], drawn)


Layout = tuple[
    dict[str, np.ndarray], np.ndarray
]  # the stored tensors of a module by name, and the weights that they encode


def _awq(w: np.ndarray) -> Layout:
    packed = awq.pack(awq.quantize(w, group=32))
    return packed._asdict(), affine.dequantize(awq.unpack(packed))


def _gptq(w: np.ndarray, *, bits: int, version: int, index: bool = True) -> Layout:
    packed = gptq.pack(affine.quantize(w, bits=bits, block=(1, 32)), bits=bits, version=version)
    exact = affine.dequantize(gptq.unpack(packed, bits=bits, version=version))
    stored = packed._asdict()
    if not index:
        del stored["g_idx"]
    return stored, exact


def _marlin(w: np.ndarray) -> Layout:
    """Quantize to 4 bits in Marlin's order, which a golden file gives for a matrix of 64 rows and 16 columns."""
    q = symmetric.quantize(w, bits=4, block=(1, 32))
    (rows, cols), codes = w.shape, (q.codes + np.int8(8)).astype(np.uint8)
    tiles = codes.reshape(rows // 64, 4, 2, 8, cols // 16, 2, 4, 2).transpose(4, 0, 3, 6, 1, 7, 2, 5)
    scales = (
        q.scales.T.astype(np.float16).reshape(cols // 32, rows // 64, 8, 8).swapaxes(2, 3).reshape(cols // 32, rows)
    )
    stored = {"B": pack_words(tiles.reshape(cols // 16, -1), 4), "s": scales, "workspace": np.zeros(16, np.int32)}
    return stored, q.codes * np.repeat(q.scales.astype(np.float16).astype(np.float64), 32, axis=1)


def _packed(w: np.ndarray, *, bits: int, group: int) -> Layout:
    q = symmetric.quantize(w, bits=bits, block=(1, group or w.shape[1]))
    words = pack_words((q.codes.astype(np.int16) + (1 << bits - 1)).astype(np.uint8), bits)
    return (
        {"weight_packed": words, "weight_scale": q.scales, "weight_shape": np.array(w.shape, np.int64)},
        symmetric.dequantize(q),
    )


def _packed_affine(w: np.ndarray, *, bits: int) -> Layout:
    q = affine.quantize(w, bits=bits, block=(1, 32))
    stored = {
        "weight_packed": pack_words(q.codes, bits),
        "weight_scale": q.scales,
        "weight_zero_point": np.ascontiguousarray(pack_words(np.ascontiguousarray(q.zeros.T), bits).T),
        "weight_shape": np.array(w.shape, np.int64),
    }
    return stored, affine.dequantize(q)


def _int8(w: np.ndarray) -> Layout:
    q = symmetric.quantize(w, bits=8, block=w.shape)
    return {"weight": q.codes, "weight_scale": q.scales.reshape(1)}, symmetric.dequantize(q)


def _int8_affine(w: np.ndarray) -> Layout:
    q = affine.quantize(w, bits=8, block=(1, w.shape[1]))
    signed = {
        "weight": (q.codes.astype(np.int16) - 128).astype(np.int8),
        "weight_zero_point": (q.zeros.astype(np.int16) - 128).astype(np.int8),
    }
    return {**signed, "weight_scale": q.scales}, affine.dequantize(q)


def _fp8(w: np.ndarray, *, block: tuple[int, int]) -> Layout:
    rows, cols = (b or n for b, n in zip(block, w.shape, strict=True))
    q = minifloat.quantize(w, to=E4M3, block=(min(rows, w.shape[0]), cols))
    codes = q.codes.view(ml_dtypes.float8_e4m3fn)
    return {"weight": codes, "weight_scale": q.scales.astype(ml_dtypes.bfloat16)}, minifloat.dequantize(
        Quantized(q.codes, q.scales.astype(ml_dtypes.bfloat16)), to=E4M3
    )


def _renamed(layout: Layout) -> Layout:
    stored, meant = layout
    return {"weight": stored["weight"], "weight_scale_inv": stored["weight_scale"]}, meant


def _fp8_static(w: np.ndarray) -> Layout:
    """Store an FP8 matrix with a scalar scale, and scales of inputs and KV cache, as AutoFP8 and Model Optimizer do."""
    stored, meant = _fp8(w, block=(0, 0))
    scale = stored["weight_scale"].astype(np.float32).reshape(())
    return {**stored, "weight_scale": scale, "input_scale": np.array(3, np.float32), "k_scale": np.ones(1, "f4")}, meant


def _nvfp4(w: np.ndarray, *, divided: bool) -> Layout:
    q = nvfp4.quantize(w)
    codes, scales = nvfp4.pack(q.codes), q.scales.view(ml_dtypes.float8_e4m3fn)
    if not divided:
        meant = E2M1.decode(q.codes) * np.repeat(scales.astype(np.float32) * q.scale, 16, axis=1)
        return {"weight": codes, "weight_scale": scales, "weight_scale_2": q.scale}, meant
    inverse = (1 / q.scale).reshape(1)
    meant = E2M1.decode(q.codes) * np.repeat(scales.astype(np.float32) / inverse, 16, axis=1)
    return {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": inverse}, meant


def _llm_int8(w: np.ndarray) -> Layout:
    most = np.abs(w).max(axis=1).astype(np.float32)
    codes = np.rint(w / most[:, None] * 127).astype(np.int8)
    stored = {"weight": codes, "SCB": most, "weight_format": np.zeros((), np.uint8)}
    return stored, codes * (most / np.float32(127)).astype(np.float64)[:, None]


def _bitnet(w: np.ndarray) -> Layout:
    """Quantize to -1, 0 and 1, and pack four rows into the same bytes, one row from each quarter of the matrix."""
    scale = np.float32(1 / np.abs(w).mean())
    codes = np.clip(np.rint(w * scale), -1, 1).astype(np.int8)
    quarters = (codes + 1).astype(np.uint8).reshape(4, -1, w.shape[1])
    packed = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
    return {"weight": packed, "weight_scale": scale.reshape(1)}, codes * np.float64(np.float32(1) / scale)


def _mxfp4(w: np.ndarray) -> Layout:
    q = mx.quantize(w, to=E2M1)
    return {"weight_packed": mx.pack(q.codes, to=E2M1), "weight_scale": q.scales}, mx.dequantize(q, to=E2M1)


def compressed(form: str, *, bits: int, kind: str = "int", strategy: str, **weights: Any) -> dict[str, Any]:
    args = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": args, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
PACKED = compressed("pack-quantized", bits=4, strategy="group", group_size=32)
LAYOUTS: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": (AWQ_CONFIG, _awq),
    "gptq 4": (GPTQ_CONFIG, lambda w: _gptq(w, bits=4, version=1)),
    "gptq 3 v2": (
        {**GPTQ_CONFIG, "bits": 3, "checkpoint_format": "gptq_v2"},
        lambda w: _gptq(w, bits=3, version=2, index=False),
    ),
    "gptq 8": ({**GPTQ_CONFIG, "bits": 8}, lambda w: _gptq(w, bits=8, version=1)),
    "packed 4": (PACKED, lambda w: _packed(w, bits=4, group=32)),
    "packed 8 a row": (
        compressed("pack-quantized", bits=8, strategy="channel"),
        lambda w: _packed(w, bits=8, group=0),
    ),
    "packed 4, zero points": (
        compressed("pack-quantized", bits=4, strategy="group", group_size=32, symmetric=False),
        lambda w: _packed_affine(w, bits=4),
    ),
    "int8, one scale": (compressed("int-quantized", bits=8, strategy="tensor"), _int8),
    "int8 a row, zero points": (
        compressed("int-quantized", bits=8, strategy="channel", symmetric=False),
        _int8_affine,
    ),
    "fp8 a row": (
        compressed("float-quantized", bits=8, kind="float", strategy="channel"),
        lambda w: _fp8(w, block=(1, 0)),
    ),
    "fp8 in blocks": (
        compressed("naive-quantized", bits=8, kind="float", strategy="block", block_structure=[16, 32]),
        lambda w: _fp8(w, block=(16, 32)),
    ),
    "fp8 of DeepSeek": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 32]},
        lambda w: _renamed(_fp8(w, block=(16, 32))),
    ),
    "fp8, static": ({"quant_method": "fp8", "activation_scheme": "static"}, _fp8_static),
    "fp8 of fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        lambda w: _fp8(w, block=(1, 0)),
    ),
    "fp8 of modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, _fp8_static),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", bits=4, kind="float", strategy="tensor_group", group_size=16),
        lambda w: _nvfp4(w, divided=True),
    ),
    "nvfp4 of modelopt": (
        {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
        lambda w: _nvfp4(w, divided=False),
    ),
    "int8 of bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, _llm_int8),
    "bitnet": ({"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}, _bitnet),
    "mxfp4": (
        compressed("mxfp4-pack-quantized", bits=4, kind="float", strategy="group", group_size=32),
        _mxfp4,
    ),
}


def write_layout(folder: Path, layout: str) -> dict[str, np.ndarray]:
    """Write a checkpoint with all matrices in `layout`, except the head; return their exact weights by name."""
    settings, store = LAYOUTS[layout]
    return write_stored(folder, settings, lambda name, w: store(w))


def write_stored(
    folder: Path, settings: dict[str, Any], store: Callable[[str, np.ndarray], Any], *, config: dict[str, Any] = CONFIG
) -> dict[str, np.ndarray]:
    """Write a checkpoint in which `store` stores each matrix except the head; return the exact weights by name.

    `store` takes a matrix's name and the matrix, and returns the stored tensors by name and the exact weights.
    """
    tensors, exact = {}, {}
    for name, w in families.random_tensors(config).items():
        if is_matrix(name) and name != "lm_head.weight":
            stored, exact[name] = store(name, w)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": array for part, array in stored.items()}
        else:
            tensors[name] = w
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    families.write_safetensors(folder / "model.safetensors", tensors)
    return exact


def exact(tensor: Tensor) -> np.ndarray:
    return np.concatenate(list(exact_parts(tensor)))


@pytest.mark.sampled(8)  # 20 cases, 4 s
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_layout_means_the_weights_of_its_owner(layout, tmp_path):
    meant = write_layout(tmp_path, layout)
    checkpoint = open_checkpoint(tmp_path)
    assert len(meant) == 14
    for name, weights in meant.items():
        tensor = checkpoint.tensors[name]
        assert tensor.codes
        np.testing.assert_array_equal(exact(tensor), weights)
        np.testing.assert_array_equal(tensor.read(), weights.astype(np.float32))
    check_weights(checkpoint)
    params = load_params(checkpoint, dtype=FLOAT32, positions=1)
    assert isinstance(params.layers[1].qkv.weight, QuantizedMatrix)
    assert not isinstance(params.head, QuantizedMatrix)


@pytest.mark.parametrize(
    "settings",
    [
        {**GPTQ_CONFIG, "checkpoint_format": "marlin"},
        {**GPTQ_CONFIG, "is_marlin_format": True},
        {"quant_method": "marlin", "group_size": 32},
    ],
)
def test_marlin_means_the_weights_of_its_owner(settings, tmp_path, monkeypatch):
    monkeypatch.setitem(LAYOUTS, "marlin", (settings, _marlin))
    monkeypatch.setitem(CONFIG, "intermediate_size", 128)
    monkeypatch.setitem(CONFIG, "num_key_value_heads", 4)
    for name, weights in write_layout(tmp_path, "marlin").items():
        tensor = open_checkpoint(tmp_path).tensors[name]
        assert tensor.codes and tensor.codes.form == "int4"
        np.testing.assert_array_equal(exact(tensor), weights)


def test_marlin_needs_whole_tiles(tmp_path, monkeypatch):
    def store(w: np.ndarray) -> Layout:
        stored, meant = _gptq(w, bits=4, version=1)
        return {"B": np.zeros((4, 2 * len(w)), np.int32), "s": stored["scales"]}, meant

    monkeypatch.setitem(LAYOUTS, "marlin", ({"quant_method": "marlin", "group_size": 32}, store))
    write_layout(tmp_path, "marlin")
    assert mentions(refusal(tmp_path), "32 rows 64 columns marlin 16")


@pytest.mark.parametrize(("bits", "version"), [(4, 1), (3, 2)])
def test_gptq_in_another_order_of_columns_runs_in_float32(bits, version, tmp_path, monkeypatch):
    """GPTQ with reordered columns is decoded to float32 as AutoGPTQ does: scales[g_idx] * (q - zeros[g_idx])."""
    changes = {"bits": bits, "desc_act": True, "checkpoint_format": "gptq_v2" if version == 2 else "gptq"}

    def store(w: np.ndarray) -> Layout:
        order = np.random.RandomState(w.shape[1]).permutation(w.shape[1])
        stored, _ = _gptq(w[:, np.argsort(order)], bits=bits, version=version)
        q = gptq.unpack(gptq.PackedTensors(**stored), bits=bits, version=version)
        g_idx = stored["g_idx"][order]
        moved = q._replace(codes=q.codes[:, order])
        steps, zeros = q.scales.astype(np.float64)[:, g_idx], q.zeros.astype(np.float64)[:, g_idx]
        return gptq.pack(moved, bits=bits, version=version)._asdict() | {"g_idx": g_idx}, steps * (moved.codes - zeros)

    monkeypatch.setitem(LAYOUTS, "desc_act", (GPTQ_CONFIG | changes, store))
    meant = write_layout(tmp_path, "desc_act")
    checkpoint = open_checkpoint(tmp_path)
    for name, weights in meant.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].read(), weights.astype(np.float32))
        assert checkpoint.tensors[name].bytes < weights.size  # bytes in the file
    params = load_params(checkpoint, dtype=FLOAT32, positions=1)
    assert not isinstance(params.layers[1].qkv.weight, QuantizedMatrix)
    with pytest.raises(CheckpointError, match="already quantized"):
        calibrated(checkpoint, np.zeros((1, 4), np.int32), method="gptq")
    write_huggingface(checkpoint, tmp_path / "ours")
    again = open_checkpoint(tmp_path / "ours")
    for name, weights in meant.items():
        np.testing.assert_array_equal(again.tensors[name].read(), weights.astype(np.float32))


@pytest.mark.parametrize("zeros", [False, True])
def test_packed_integers_in_another_order_of_columns(zeros, tmp_path, monkeypatch):
    """In compressed-tensors files with reordered columns, weight_g_idx gives each column's group."""

    def store(w: np.ndarray) -> Layout:
        order = np.random.RandomState(w.shape[1]).permutation(w.shape[1])
        sorted_by_group = w[:, np.argsort(order)]
        stored, meant = _packed_affine(sorted_by_group, bits=4) if zeros else _packed(sorted_by_group, bits=4, group=32)
        words = pack_words(unpack_words(stored["weight_packed"], 4)[:, : w.shape[1]][:, order], 4)
        g_idx = (np.arange(w.shape[1]) // 32)[order].astype(np.int32)
        return {**stored, "weight_packed": words, "weight_g_idx": g_idx}, meant[:, order]

    monkeypatch.setitem(LAYOUTS, "actorder", (LAYOUTS["packed 4, zero points" if zeros else "packed 4"][0], store))
    meant = write_layout(tmp_path, "actorder")
    for name, weights in meant.items():
        np.testing.assert_array_equal(open_checkpoint(tmp_path).tensors[name].read(), weights.astype(np.float32))


def test_groups_of_modules_have_layouts_of_their_own(tmp_path):
    """As in llm-compressor's files, groups of modules may have different layouts.

    A group that targets a module's name takes precedence over one that targets its class.
    """
    layouts = {"down_proj": "fp8 a row", "layers.1.self_attn": "packed 8 a row", "": "packed 4"}
    targets = {"down_proj": ["re:.*down_proj$"], "layers.1.self_attn": [], "": ["Linear"]}
    targets["layers.1.self_attn"] = [f"model.layers.1.self_attn.{part}_proj" for part in "qkvo"]
    groups = {}
    for place, layout in layouts.items():
        settings = LAYOUTS[layout][0]
        groups[layout] = {
            **settings["config_groups"]["group_0"],
            "format": settings["format"],
            "targets": targets[place],
        }
    groups = {"first": {"weights": None, "targets": ["Attention"]}} | dict(reversed(groups.items()))
    mixed = {**LAYOUTS["packed 4"][0], "format": "mixed-precision", "config_groups": groups}
    stores = {place: LAYOUTS[layout][1] for place, layout in layouts.items()}
    meant = write_stored(
        tmp_path, mixed, lambda name, w: next(store for place, store in stores.items() if place in name)(w)
    )
    checkpoint = open_checkpoint(tmp_path)
    for name, weights in meant.items():
        np.testing.assert_array_equal(exact(checkpoint.tensors[name]), weights)
    assert {tensor.codes.form for tensor in checkpoint.tensors.values() if tensor.codes} == {"fp8", "int8", "int4"}


def test_exponents_may_have_a_dtype_of_their_own(tmp_path):
    """Files store the exponents of MXFP4 with dtype U8 or F8_E8M0; the bytes are the same."""
    settings, store = LAYOUTS["mxfp4"]

    def with_own_dtype(_: str, w: np.ndarray) -> Layout:
        stored, meant = store(w)
        return stored | {"weight_scale": stored["weight_scale"].view(ml_dtypes.float8_e8m0fnu)}, meant

    for name, weights in write_stored(tmp_path, settings, with_own_dtype).items():
        np.testing.assert_array_equal(exact(open_checkpoint(tmp_path).tensors[name]), weights)


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_model_optimizer_names_the_format_of_each_module(file, tmp_path):
    """With quant_algo MIXED_PRECISION, quantized_layers names the format of each module, as in NVIDIA's releases."""
    kinds = {"down_proj": ("W4A16_NVFP4", 16), "gate_proj": ("NVFP4", 16), "up_proj": ("MXFP8", 32)}

    def store(name: str, w: np.ndarray) -> Layout:
        if "up_proj" in name:
            q = mx.quantize(w, to=E4M3)
            stored = {"weight": q.codes.view(ml_dtypes.float8_e4m3fn), "weight_scale": q.scales}
            return stored, mx.dequantize(q, to=E4M3)
        return _nvfp4(w, divided=False) if any(part in name for part in kinds) else _fp8_static(w)

    modules = {}
    for name in families.random_tensors(CONFIG):
        if is_matrix(name) and name != "lm_head.weight":
            kind, group = next((kinds[part] for part in kinds if part in name), ("FP8", None))
            modules[name.removesuffix(".weight")] = {"quant_algo": kind} | ({"group_size": group} if group else {})
    inner = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": modules}
    if file == "config.json":
        meant = write_stored(tmp_path, {"quant_method": "modelopt", **inner}, store)
    else:
        meant = write_stored(tmp_path, {}, store)
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        (tmp_path / file).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": inner}))
    for name, weights in meant.items():
        np.testing.assert_array_equal(exact(open_checkpoint(tmp_path).tensors[name]), weights)


@pytest.mark.parametrize(
    ("layout", "file", "keys"),
    [
        ("gptq 4", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
        ("fp8 of modelopt", "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}),
    ],
)
def test_a_file_beside_config_json_says_how_matrices_are_quantized(layout, file, keys, tmp_path):
    meant = write_layout(tmp_path, layout)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert any(words in refusal(tmp_path) for words in ("no quantization_config for", "lacks the tensor"))
    (tmp_path / file).write_text(json.dumps(keys))
    for name, weights in meant.items():
        np.testing.assert_array_equal(exact(open_checkpoint(tmp_path).tensors[name]), weights)
    families.write_checkpoint(tmp_path, CONFIG)  # a file with plain weights ignores it
    assert not any(tensor.codes for tensor in open_checkpoint(tmp_path).tensors.values())


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_scales_of_a_cache_in_fp8_change_nothing(key, tmp_path):
    meant = write_layout(tmp_path, "fp8 a row")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw[key] = raw.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    stored, file = {}, tmp_path / "model.safetensors"
    for name in ("k_scale", "v_scale"):
        stored[f"model.layers.0.self_attn.{name}"] = np.ones(1, np.float32)
    families.write_safetensors(tmp_path / "scales.safetensors", stored)
    index = {"weight_map": dict.fromkeys(stored, "scales.safetensors")}
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    index["weight_map"] |= dict.fromkeys((name for name in header if name != "__metadata__"), "weights.safetensors")
    file.rename(tmp_path / "weights.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, weights in meant.items():
        np.testing.assert_array_equal(exact(open_checkpoint(tmp_path).tensors[name]), weights)


@pytest.mark.parametrize("layout", ["awq", "packed 4, zero points", "fp8 a row", "mxfp4", "int8 a row, zero points"])
def test_what_others_quantized_is_written_as_it_is(layout, tmp_path):
    (tmp_path / "theirs").mkdir()
    meant = write_layout(tmp_path / "theirs", layout)
    write_huggingface(open_checkpoint(tmp_path / "theirs"), tmp_path / "ours")
    again = open_checkpoint(tmp_path / "ours")
    for name, weights in meant.items():
        assert again.tensors[name].codes
        np.testing.assert_array_equal(exact(again.tensors[name]), weights)


def fails(folder: Path, layout: str, **changes: Any) -> str:
    """Write a checkpoint with changed keys in its quantization_config; return the error message that refuses it."""
    write_layout(folder, layout)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    return refusal(folder, named=str(folder))


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
DIFFERENT = {"a": {"weights": WEIGHTS}, "b": {"weights": {**WEIGHTS, "num_bits": 8}}}


def targeted(targets: list[Any]) -> dict[str, Any]:
    """Return two config groups with different bits: "a" targets all linear modules, "b" targets `targets`."""
    return {"a": {**DIFFERENT["a"], "targets": ["Linear"]}, "b": {**DIFFERENT["b"], "targets": targets}}


@pytest.mark.parametrize(
    ("layout", "changes", "what"),
    [
        (
            "awq",
            {"quant_method": "vptq"},
            'quant_method "vptq" compressed-tensors awq gptq marlin',
        ),
        ("awq", {"quant_method": ["awq"]}, "quant_method list not supported"),
        ("awq", {"bits": 3}, "AWQ 3 bits not supported"),
        ("awq", {"version": "marlin"}, 'version "marlin" gemm gemv gemv_fast'),
        ("awq", {"group_size": 16}, "qzeros int32 [2 8] config.json int32 [4 8]"),
        ("gptq 4", {"bits": 5}, "GPTQ 5 bits not supported"),
        ("gptq 4", {"bits": "4"}, 'bits "4" integer'),
        ("gptq 4", {"bits": 8}, "qweight int32 [8 64] config.json int32 [16 64]"),
        ("gptq 4", {"checkpoint_format": "exllama"}, 'GPTQ 4 bits "exllama" 2 3 4 8'),
        ("gptq 4", {"checkpoint_format": "marlin", "bits": 8}, 'GPTQ 8 bits "marlin"'),
        ("gptq 4", {"checkpoint_format": "marlin"}, "no tensor is quantized"),
        ("gptq 4", {"is_marlin_format": "yes"}, 'is_marlin_format "yes" true false'),
        ("packed 4", {"format": "marlin-24"}, 'format "marlin-24" "int" weights 4 bits group'),
        ("packed 4", {"config_groups": {}}, 'no group in config_groups "weights"'),
        ("packed 4", {"config_groups": DIFFERENT}, "targets is null expected strings"),
        ("packed 4", {"config_groups": targeted(["re:(a+)+$"])}, 'target "re:(a+)+$" names'),
        ("packed 4", {"config_groups": targeted(["re:.*.*.*.*x"])}, 'target "re:.*.*.*.*x" not supported 3 repeats'),
        ("packed 4", {"config_groups": targeted(["re:("])}, 'target "re:("'),
        ("packed 4", {"config_groups": targeted([7])}, "targets is a list expected strings"),
        ("packed 4", {"config_groups": {"a": {"weights": {**WEIGHTS, "strategy": "token"}}}}, 'strategy "token"'),
        ("packed 4", {"config_groups": {"a": {"weights": {**WEIGHTS, "num_bits": 3}}}}, "weights 3 bits not supported"),
        ("packed 4", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config not supported"),
        ("packed 4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config not supported"),
        (
            "packed 4",
            {"config_groups": {"a": {"weights": {**WEIGHTS, "symmetric": False}}}},
            "lacks tensor weight_zero_point",
        ),
        (
            "fp8 in blocks",
            {"config_groups": {"a": {"weights": {"type": "float", "strategy": "block"}}}},
            "block_structure null",
        ),
        ("int8, one scale", {"quant_method": "gptq", "bits": 4}, "no tensor is quantized"),
        ("awq", {"quant_method": "aqlm"}, "transformers aqlm identity weight"),
        ("awq", {"quant_method": "new"}, 'quant_method "new" original quantize `llamaspec convert --quantize`'),
        ("fp8 of DeepSeek", {"fmt": "e5m2"}, 'fp8 "e5m2"'),
        ("fp8 of DeepSeek", {"weight_block_size": [128]}, "weight_block_size list"),
        ("fp8 of DeepSeek", {"weight_block_size": [32, 32]}, "weight_scale_inv bfloat16 [4 2] config.json"),
        ("fp8 of modelopt", {"quant_algo": "W4A8_AWQ"}, 'modelopt quant_algo "W4A8_AWQ"'),
        (
            "fp8 of modelopt",
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"re:(": {"quant_algo": "FP8"}}},
            'target "re:("',
        ),
        ("bitnet", {"linear_class": "autobitlinear"}, 'bitnet "autobitlinear" "offline"'),
        ("int8 of bitsandbytes", {"load_in_8bit": False}, "neither load_in_4bit load_in_8bit not supported"),
    ],
)
def test_an_unsupported_quantization_config_is_refused(layout, changes, what, tmp_path):
    assert mentions(fails(tmp_path, layout, **changes), what)


@pytest.mark.parametrize(
    ("layout", "part", "value", "what"),
    [
        ("gptq 4", "g_idx", np.arange(64, dtype=np.int32) // 16, "g_idx groups 0 3"),
        ("gptq 4", "g_idx", np.full(64, -1, np.int32), "g_idx groups -1 -1"),
        ("packed 4", "weight_shape", np.array([64, 96], np.int64), "weight_shape [64 96]"),
        (
            "packed 4",
            "weight_g_idx",
            np.full(64, 2, np.int32),
            "weight_g_idx groups 2 2 2",
        ),
        ("fp8, static", "weight_scale_inv", np.ones(1, np.float32), "both weight_scale weight_scale_inv"),
        ("fp8, static", "weight_scale", None, "expected one of the tensors weight_scale weight_scale_inv neither"),
        ("int8 of bitsandbytes", "weight_format", np.array(2, np.uint8), "weight_format 2 0"),
        ("packed 4", "weight_scale", None, "tensor model.layers.1.mlp.up_proj.weight_scale"),
        ("packed 4", "weight_scale", np.full((96, 2), np.nan, np.float32), "nan finite number"),
        ("packed 4", "weight_scale", np.full((96, 2), np.inf, np.float32), "-inf finite number"),
        ("fp8 a row", "weight", np.full((96, 64), np.nan, ml_dtypes.float8_e4m3fn), "nan"),
    ],
)
def test_invalid_quantized_tensors_are_refused(layout, part, value, what, tmp_path):
    write_layout(tmp_path, layout)
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    names = {code: name for name, code in families.CODES.items()}
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            dtype = np.dtype(names[entry["dtype"]])
            tensors[name] = np.frombuffer(data[slice(*entry["data_offsets"])], dtype).reshape(entry["shape"])
    name = f"model.layers.1.mlp.up_proj.{part}"
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    families.write_safetensors(file, tensors)
    assert mentions(refusal(tmp_path), what)


def test_biases_of_zeros_and_scales_of_activations_are_no_part_of_a_model(tmp_path):
    write_layout(tmp_path, "awq")
    names = open_checkpoint(tmp_path).tensors.keys()
    _, store = LAYOUTS["awq"]
    tensors = {}
    for name, w in families.random_tensors(CONFIG).items():
        module = name.removesuffix(".weight")
        if is_matrix(name) and name != "lm_head.weight":
            tensors |= {f"{module}.{part}": array for part, array in store(w)[0].items()}
            tensors[f"{module}.bias"] = np.zeros(len(w), np.float16)
            tensors[f"{module}.input_scale"] = np.ones(1, np.float16)
        else:
            tensors[name] = w
    families.write_safetensors(tmp_path / "model.safetensors", tensors)
    assert open_checkpoint(tmp_path).tensors.keys() == names
    tensors["model.layers.0.mlp.up_proj.bias"] = np.ones(96, np.float16)
    families.write_safetensors(tmp_path / "model.safetensors", tensors)
    assert mentions(refusal(tmp_path), "up_proj.bias unexpected config.json")


WIDE = CONFIGS["2 to 1, wide, tied"]
WRITTEN = [
    *((scheme, replace(WIDE, layers=1)) for scheme in ("q8", "q4", "mxfp4")),
    *((scheme, CONFIGS[name]) for scheme in ("q8_row", "fp8") for name in ("1 to 1, biases, scaled, tied", "experts")),
    ("q8", replace(WIDE, layers=1, tied=False)),
]


@pytest.mark.parametrize(("scheme", "config"), WRITTEN)
def test_what_is_written_is_read_again(scheme, config, tmp_path):
    first = quantized(random_checkpoint(config, seed=3), scheme)
    write_huggingface(first, tmp_path / "hf")
    second = open_checkpoint(tmp_path / "hf")
    for name, tensor in first.tensors.items():
        again = second.tensors[name]
        assert bool(tensor.codes) == bool(again.codes)
        if tensor.codes and again.codes:
            assert tensor.codes.form == again.codes.form
            for expected, actual in zip(tensor.codes.parts(), again.codes.parts(), strict=True):
                np.testing.assert_array_equal(expected.codes, actual.codes)
                np.testing.assert_array_equal(expected.scales, actual.scales)
        else:
            np.testing.assert_array_equal(tensor.read(), again.read())
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    assert ("lm_head" in settings["ignore"]) == config.tied
    assert any("gate" in module for module in settings["ignore"]) == bool(config.experts)


def refuses(checkpoint: Checkpoint, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        write_huggingface(checkpoint, folder)
    assert not folder.exists()
    return str(caught.value)


def test_what_no_layout_holds_is_refused(tmp_path):
    plain = random_checkpoint(CONFIGS["experts"], seed=0)
    nf4 = refuses(quantized(plain, "nf4"), tmp_path / "a")
    assert re.search("bitsandbytes.*64.*q8_row", nf4)
    message = refuses(quantized(random_checkpoint(replace(WIDE, ffn=40), seed=0), "q4"), tmp_path / "b")
    assert re.search("have 40 weights.*64", message)
    row, fp8 = quantized(plain, "q8_row"), quantized(plain, "fp8")
    name = "model.layers.1.self_attn.o_proj.weight"
    mixed = replace(row, tensors={**row.tensors, name: fp8.tensors[name]})
    assert f"{name} has fp8 codes" in refuses(mixed, tmp_path / "c")
