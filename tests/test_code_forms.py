"""Files that `benchmarks.gpu.code_forms` times, in the shapes of a published model: every op of them is a kernel."""

import jax
import pytest

import model.weights.gpu_codes
from benchmarks.gpu.code_forms import MIXES, file_params
from model.insight.shapes import SHAPES
from model.ops.gpu import pallas_ops
from model.running.device import HOPPER, Device
from model.weights.codes import QuantizedMatrix
from model.weights.gpu_codes import Stacked

TINYLLAMA = SHAPES["tinyllama-1.1b"]


@pytest.mark.parametrize("kind", sorted(MIXES))
def test_a_file_of_mixed_types_runs_by_kernels_alone(kind, monkeypatch):
    """llama.cpp gives v and down more bits in about half of the layers, and the head in all files."""
    monkeypatch.setattr(model.weights.gpu_codes, "default_device", lambda: Device("gpu", "NVIDIA H200", HOPPER))
    params = file_params(TINYLLAMA, kind, positions=256)
    assert sum(isinstance(layer.qkv.weight, Stacked) for layer in params.layers) == 10
    assert isinstance(params.head, QuantizedMatrix) and params.head.group == 16
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
    _, reasons = pallas_ops(TINYLLAMA, params, capacity=256)
    assert not any(reasons.values())
