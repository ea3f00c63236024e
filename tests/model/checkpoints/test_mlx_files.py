"""MLX's layouts in Hugging Face folders are read as MLX reads them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.cache import empty_cache
from llamaspec.model.checkpoints.gguf.write import write_gguf
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.mlx import read_mlx
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.forward import forward
from llamaspec.model.ops.cpu import CPU
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.embedding import Embedding
from llamaspec.model.weights.loading import load_params
from llamaspec.reference import llama
from llamaspec.reference.quantizers import mlx
from tests.goldens.quantizers.make_mlx_files import GROUP, MODELS, WEIGHTS, digest, plain_tensors, setting
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.model.checkpoints.stored_goldens import arrays_of, weights_read
from tests.support import families
from tests.support.goldens import read_golden
from tests.support.refusals import mentions, refusal
from tests.support.strategies import seeds

GOLDENS = read_golden("quantizers/mlx_files")
ROWS, COLS = GOLDENS["shape"]
CASES = GOLDENS["cases"]
FLOAT32 = np.dtype(np.float32)
FORWARD = jax.jit(forward, static_argnames=("config", "ops"))
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.mark.parametrize("case", CASES)
def test_matrices_are_read_as_mlx_reads_them(case):
    golden = CASES[case]
    rule, arrays = read_mlx(Fields(golden["config"], "config.json")), arrays_of(golden["tensors"])
    assert arrays.keys() == rule.stored(ROWS, COLS).keys()
    weights = weights_read(rule, arrays, (ROWS, COLS), rows=2)
    assert hashlib.sha256(weights.astype("<f4").tobytes()).hexdigest() == golden["read"]


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("affine")])
def test_the_definition_makes_the_codes_of_mlx(case):
    golden, dtype = CASES[case], DTYPES[CASES[case]["dtype"]]
    bits, group = golden["config"]["bits"], golden["config"]["group_size"]
    q = mlx.quantize(WEIGHTS(ROWS, COLS).astype(dtype), bits=bits, group=group)
    expected = arrays_of(golden["tensors"])
    np.testing.assert_array_equal(mlx.pack(q.codes, bits=bits), expected["weight"])
    np.testing.assert_array_equal(mlx.unpack(expected["weight"], bits=bits), q.codes)
    np.testing.assert_array_equal(q.scales.astype(dtype), expected["scales"])
    np.testing.assert_array_equal(q.biases.astype(dtype), expected["biases"])


@given(
    weights=st.builds(Weights, kind=st.sampled_from(KINDS), seed=seeds, exponent=st.integers(-20, 60)),
    bits=st.sampled_from(mlx.BITS),
)
def test_weights_are_within_a_step(weights, bits):
    w = weights(2, 64)
    q = mlx.quantize(w, bits=bits, group=32)
    scale, bias = (np.repeat(np.abs(a.astype(np.float64)), 32, axis=1) for a in (q.scales, q.biases))
    last = 2**bits - 1
    assert np.all(np.abs(w - mlx.dequantize(q)) <= scale + 2.0**-24 * (8 * last * scale + 2 * bias))
    inside = (q.codes > 0) & (q.codes < last)
    half = scale / 2 + 2.0**-24 * (8 * last * scale + 2 * bias)
    assert np.all(np.abs(w - mlx.dequantize(q))[inside] <= half[inside])


def test_only_sizes_of_mlx_are_quantized():
    with pytest.raises(ValueError, match="2, 3, 4, 5, 6, 8 bits, not 7"):
        mlx.quantize(np.ones((1, 32)), bits=7, group=32)
    with pytest.raises(ValueError, match="do not fill words"):
        mlx.pack(np.zeros(4, np.uint8), bits=4)


def stored_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Make the tensors that mlx-lm saves for a model of `MODELS`."""
    plain: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for name, w in plain_tensors(config).items():
        stem, _, expert = name.removesuffix(".weight").partition(".experts.")
        if expert:
            part = expert.partition(".")[2]
            experts.setdefault(f"{stem}.switch_mlp.{parts.get(part, part)}.weight", []).append(w)
        else:
            plain[name] = w
    tensors: dict[str, np.ndarray] = {}
    for name, w in (plain | {name: np.stack(matrices) for name, matrices in experts.items()}).items():
        module = name.removesuffix(".weight")
        sizes = setting(module) if w.ndim > 1 else False
        if not sizes:
            tensors[name] = w
            continue
        bits = sizes["bits"] if isinstance(sizes, dict) else 4
        q = mlx.quantize(w, bits=bits, group=GROUP)
        tensors |= {name: mlx.pack(q.codes, bits=bits), f"{module}.scales": q.scales, f"{module}.biases": q.biases}
    return tensors


def write(folder: Path, model: str, settings: Any = None, **changes: Any) -> dict[str, np.ndarray]:
    """Write a model of `MODELS` as mlx-lm writes it.

    A keyword in `changes` names a tensor, with "/" in place of ".". Its value replaces the tensor; None removes it.
    """
    golden = GOLDENS["models"][model]
    tensors = stored_tensors(MODELS[model])
    assert digest(tensors) == golden["sha256"]
    for name, array in changes.items():
        tensors[name.replace("/", ".")] = array
    values = {"quantization": golden["quantization"], "quantization_config": golden["quantization"]}
    (folder / "config.json").write_text(json.dumps(MODELS[model] | (values if settings is None else settings)))
    families.write_safetensors(
        folder / "model.safetensors", {name: array for name, array in tensors.items() if array is not None}
    )
    return tensors


def assert_golden(model: str, logits: np.ndarray) -> None:
    golden = GOLDENS["models"][model]
    expected = np.array(golden["logits"])
    np.testing.assert_allclose(logits[golden["positions"]], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def exact_logits(path: Path, model: str) -> np.ndarray:
    """Compute logits in float64 with the reference, from the weights of a file or folder."""
    checkpoint, tokens = open_checkpoint(path), np.array(GOLDENS["models"][model]["tokens"])
    config = checkpoint.config
    return llama.forward(load_reference_params(checkpoint), tokens, llama.empty_cache(config), config=config)[0]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_mlx_lm_has_its_logits(model, tmp_path):
    write(tmp_path, model)
    assert_golden(model, exact_logits(tmp_path, model))
    tensors = open_checkpoint(tmp_path).tensors
    plain = {name for name, tensor in tensors.items() if len(tensor.shape) > 1 and not tensor.codes}
    assert {name for name in plain if ".gate." not in name} == {"model.layers.1.self_attn.o_proj.weight"}


@pytest.mark.parametrize("model", ["llama, tied", "qwen3-moe"])
def test_a_model_of_mlx_lm_runs_from_its_codes(model, tmp_path):
    write(tmp_path, model)
    checkpoint, tokens = open_checkpoint(tmp_path), np.array([GOLDENS["models"][model]["tokens"]], np.int32)
    params = load_params(checkpoint, dtype=FLOAT32, positions=32)
    assert isinstance(params.layers[1].qkv.weight, QuantizedMatrix) and isinstance(params.embedding, Embedding)
    cache = empty_cache(checkpoint.config, batch=1, capacity=32, dtype=FLOAT32)
    assert_golden(model, np.asarray(FORWARD(params, tokens, cache, config=checkpoint.config, ops=CPU)[0])[0])


@pytest.mark.parametrize("model", ["llama, tied", "qwen3-moe"])
def test_a_model_of_mlx_lm_is_written_in_other_formats(model, tmp_path):
    (tmp_path / "mlx").mkdir()
    write(tmp_path / "mlx", model)
    checkpoint = open_checkpoint(tmp_path / "mlx")
    write_huggingface(checkpoint, tmp_path / "plain")
    write_gguf(checkpoint, tmp_path / "model.gguf")
    for written in ("plain", "model.gguf"):
        assert_golden(model, exact_logits(tmp_path / written, model))


@pytest.mark.parametrize("keys", [("quantization",), ("quantization_config",)])
def test_either_object_of_config_json_is_enough(keys, tmp_path):
    settings = dict.fromkeys(keys, GOLDENS["models"]["phi3"]["quantization"])
    write(tmp_path, "phi3", settings)
    assert_golden("phi3", exact_logits(tmp_path, "phi3"))


def test_a_module_may_be_named_as_not_quantized(tmp_path):
    sizes = {"group_size": GROUP, "bits": 4, "model.layers.1.self_attn.o_proj": False}
    write(tmp_path, "llama, tied", {"quantization": GOLDENS["models"]["llama, tied"]["quantization"] | sizes})
    assert open_checkpoint(tmp_path).tensors["model.layers.1.self_attn.o_proj.weight"].codes is None
    sizes["model.layers.1.self_attn.q_proj"] = False
    write(tmp_path, "llama, tied", {"quantization": GOLDENS["models"]["llama, tied"]["quantization"] | sizes})
    assert mentions(refusal(tmp_path), "q_proj.weight has shape [32, 4], expected [32, 32]")


def test_joined_experts_need_no_quantization(tmp_path):
    """Experts that mlx-lm joins into one tensor are read even if the model is not quantized."""
    config = MODELS["qwen3-moe"]
    tensors = plain_tensors(config)
    experts = {name: w for name, w in tensors.items() if ".experts." in name}
    joined = {name: w for name, w in tensors.items() if name not in experts}
    for layer in range(config["num_hidden_layers"]):
        for part in ("gate_proj", "up_proj", "down_proj"):
            stem = f"model.layers.{layer}.mlp"
            own = [experts[f"{stem}.experts.{expert}.{part}.weight"] for expert in range(config["num_experts"])]
            joined[f"{stem}.switch_mlp.{part}.weight"] = np.stack(own)
    (tmp_path / "config.json").write_text(json.dumps(config))
    families.write_safetensors(tmp_path / "model.safetensors", joined)
    checkpoint = open_checkpoint(tmp_path)
    for name, w in families.by_our_names(experts).items():
        np.testing.assert_array_equal(checkpoint.tensors[name].read(), w)


@pytest.mark.parametrize(
    ("model", "changes", "what"),
    [
        (
            "phi3",
            {"model/layers/0/mlp/gate_up_proj/scales": None},
            "lacks the tensor model.layers.0.mlp.gate_proj",
        ),
        ("phi3", {"lm_head/biases": np.full((48, 1), np.nan, np.float32)}, "lm_head nan"),
        (
            "phi3",
            {"lm_head/scales": np.ones((48, 2), np.float32)},
            "the tensor lm_head.scales is float32 [48, 2], expected",
        ),
        ("llama, tied", {"lm_head/weight": np.zeros((48, 4), np.uint32)}, "lm_head.weight model.embed_tokens.weight"),
        (
            "mixtral",
            {"model/layers/0/block_sparse_moe/switch_mlp/up_proj/scales": np.ones((3, 64, 1), np.float32)},
            "switch_mlp.up_proj.scales has shape [3, 64, 1], expected 4 matrices, one per expert",
        ),
        (
            "mixtral",
            {"model/layers/0/block_sparse_moe/switch_mlp/up_proj/scales": np.ones((4, 0, 1), np.float32)},
            "switch_mlp.up_proj.scales has shape [4, 0, 1], expected 4 matrices, one per expert",
        ),
    ],
)
def test_invalid_quantized_tensors_are_refused(model, changes, what, tmp_path):
    write(tmp_path, model, **changes)
    assert mentions(refusal(tmp_path), what)


def test_a_false_number_of_experts_is_refused_at_once(tmp_path):
    write(tmp_path, "qwen3-moe")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_experts": 10_000, "num_hidden_layers": 10_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert mentions(refusal(tmp_path), "10000 layers experts 100000")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"mode": "affine2"}, 'quantization: mode "affine2" is not supported (only affine, mxfp4, mxfp8, nvfp4)'),
        ({"mode": ["affine"]}, "quantization: mode a list is not supported"),
        (
            {"bits": 7},
            "quantization: 7 bits in groups of 32 are not supported (only 2, 3, 4, 5, 6, 8 bits",
        ),
        ({"group_size": 48}, "quantization: 4 bits in groups of 48 are not supported"),
        ({"group_size": "64"}, 'group_size is "64", expected an integer'),
        (
            {"mode": "mxfp4", "bits": 8},
            "mxfp4 with 8 bits in groups of 32 is not supported (only 4 bits",
        ),
        ({"lm_head": {"bits": 1}}, "quantization: 1 bits in groups of 64 are not supported"),
        ({"re:lm_head": {"bits": 4}}, 'target "re:lm_head" is not supported (only names)'),
        ({"group_size": 64}, "rows have 32 weights, expected a multiple of 64 (the group size)"),
    ],
)
def test_an_unsupported_quantization_config_is_refused(changes, what, tmp_path):
    write(tmp_path, "phi3", {"quantization": GOLDENS["models"]["phi3"]["quantization"] | changes})
    assert mentions(refusal(tmp_path, named=str(tmp_path)), what)
