"""Models that `benchmarks.gpu.code_forms` times: their ops are kernels, and a directory is loaded as they are."""

import doctest
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import llamaspec.model.weights.loading
from llamaspec.benchmarks.gpu import stored
from llamaspec.benchmarks.gpu.stored import DIRECTORIES, FILES, SCHEMES, shapes_of, type_in_file
from llamaspec.benchmarks.kernel_cases.case import BFLOAT16
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.device import HOPPER, Device
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.ops.gpu import pallas_ops
from llamaspec.model.tensors import EMBEDDING, HEAD
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.gpu_codes import Stacked
from llamaspec.model.weights.loading import load_params
from llamaspec.reference.quantizers import affine, awq, gptq
from tests.model.checkpoints.test_quantized_checkpoints import AWQ_CONFIG, CONFIG, GPTQ_CONFIG, LAYOUTS, write_stored

TINYLLAMA = SHAPES["tinyllama-1.1b"]
WIDE = {**CONFIG, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}  # rows of whole words


def in_gptq(w: np.ndarray, *, bits: int) -> dict[str, np.ndarray]:
    return gptq.pack(affine.quantize(w, bits=bits, block=(1, 128)), bits=bits, version=1)._asdict()


OF_128: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": (AWQ_CONFIG, lambda w: (awq.pack(awq.quantize(w, group=128))._asdict(), w)),
    "gptq 4": (GPTQ_CONFIG, lambda w: (in_gptq(w, bits=4), w)),
    "gptq 8": ({**GPTQ_CONFIG, "bits": 8}, lambda w: (in_gptq(w, bits=8), w)),
}
KIND_OF = {
    "awq": "AWQ or GPTQ",
    "gptq 4": "AWQ or GPTQ",
    "gptq 8": "GPTQ of 8 bits",
    "fp8 a row": "FP8 a row",
    "mxfp4": "MXFP4",
}


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llamaspec.model.weights.loading, "default_device", lambda: Device("gpu", "NVIDIA H200", HOPPER))


@pytest.mark.sampled(1)  # 1 s each
@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("kind", ["Q4_K_M", "Q5_K_M"])
def test_a_file_of_mixed_types_runs_by_kernels_alone(kind: str):
    """llama.cpp gives v and down more bits in about half of the layers, and the head in all files."""
    params = shapes_of(TINYLLAMA, kind, positions=256)
    assert sum(isinstance(layer.qkv.weight, Stacked) for layer in params.layers) == 10
    assert isinstance(params.head, QuantizedMatrix) and params.head.group == 16
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
    _, reasons = pallas_ops(TINYLLAMA, params, capacity=256)
    assert not any(reasons.values())


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("layout", sorted(KIND_OF))
def test_a_directory_is_loaded_in_the_shapes_that_are_timed(layout: str, tmp_path: Path):
    settings, store = OF_128.get(layout) or LAYOUTS[layout]
    settings = settings | ({"group_size": 128} if layout in OF_128 else {})
    write_stored(tmp_path, settings, lambda name, w: store(w), config=WIDE)
    checkpoint = open_checkpoint(tmp_path)
    loaded = load_params(checkpoint, dtype=BFLOAT16, positions=8)
    assert jax.eval_shape(lambda: loaded) == shapes_of(checkpoint.config, KIND_OF[layout], positions=8)
    assert isinstance(loaded.layers[0].qkv.weight, QuantizedMatrix) and not isinstance(loaded.head, QuantizedMatrix)


def test_types_in_files_are_those_of_llama_cpp():
    """By the quantizer's own code (llama-quant.cpp), for 32 layers."""
    config = SHAPES["llama-3.1-8b"]

    def types(kind: str, role: str) -> list[str]:
        return [type_in_file(f"model.layers.{layer}.{role}.weight", kind, config) for layer in range(config.layers)]

    assert types("Q3_K_M", "mlp.down_proj") == ["Q5_K"] * 2 + ["Q4_K"] * 30
    assert types("Q3_K_M", "self_attn.v_proj") == ["Q5_K"] * 2 + ["Q4_K"] * 30
    assert set(types("Q3_K_M", "self_attn.o_proj")) == {"Q4_K"} and set(types("Q3_K_M", "mlp.up_proj")) == {"Q3_K"}
    assert [*map(set, (types("Q2_K", f"self_attn.{part}_proj") for part in "qkvo"))] == [
        {"Q2_K"}, {"Q2_K"}, {"Q4_K"}, {"Q3_K"},
    ]  # fmt: skip
    assert types("IQ4_NL", "mlp.down_proj") == ["Q5_K"] * 4 + ["IQ4_NL"] * 28
    assert types("Q4_K_M", "mlp.down_proj").count("Q6_K") == types("Q5_K_M", "self_attn.v_proj").count("Q6_K") == 16
    heads = {kind: (type_in_file(HEAD, kind, config), type_in_file(EMBEDDING, kind, config)) for kind in FILES}
    assert heads["Q8_0"] == ("Q8_0", "Q8_0") and heads["Q4_0"] == ("Q6_K", "Q4_0") and heads["Q2_K"] == ("Q6_K", "Q2_K")


def test_kinds_have_one_name_each():
    assert len({*DIRECTORIES, *FILES, *SCHEMES}) == len(DIRECTORIES) + len(FILES) + len(SCHEMES)
    found = doctest.testmod(stored)
    assert found.attempted and not found.failed
