"""Quantizing on the device gives the reference's codes and scales bit for bit, in the layout that products read."""

import jax
import ml_dtypes
import numpy as np
import pytest

from llamaspec.model.checkpoints.checkpoint import Tensor
from llamaspec.model.checkpoints.codes import exact_parts, quantized
from llamaspec.model.weights.forms.table import CLASS_OF_FORM
from llamaspec.model.weights.quantizing import quantized_on_device
from llamaspec.reference.quantizers.schemes import SCHEMES
from tests.support.random_models import SMALL, random_checkpoint


def codes_of(weights: np.ndarray, scheme: str):
    """Quantize a matrix as `--quantize` does, and return its codes."""
    checkpoint = random_checkpoint(SMALL, seed=0)
    name = "model.layers.0.mlp.down_proj.weight"
    checkpoint.tensors[name] = Tensor(weights.shape, weights.dtype, lambda: weights)  # type: ignore
    codes = quantized(checkpoint, scheme).tensors[name].codes
    assert codes and codes.source is checkpoint.tensors[name]
    return codes


def awkward(rows: int, cols: int) -> np.ndarray:
    """Draw weights of many magnitudes, with rounding ties, zeros of both signs, powers of 2, and groups of zeros."""
    rng = np.random.default_rng(cols)
    weights = rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-40, 8, (rows, 1)))
    weights[1] = rng.integers(-254, 255, cols) / 2 * 0.0625  # half steps, with a scale that is a power of 2
    weights[1, ::32] = 127 * 0.0625
    weights[2] = rng.integers(-14, 15, cols) / 2
    weights[2, ::32] = 7
    weights[3] = np.where(rng.integers(0, 2, cols), 0.0, -0.0)
    weights[4] = np.exp2(rng.integers(-20, 20, cols))
    weights[5] *= 2.0**-88 / np.abs(weights[5]).max()
    return weights.astype(np.float32)


@pytest.mark.sampled(12)  # 24 cases, 6 s
@pytest.mark.parametrize(
    ("dtype", "cols"), [(np.float32, 320), (np.float32, 100), (ml_dtypes.bfloat16, 256), (np.float16, 64)]
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_and_scales_are_the_references(scheme, dtype, cols):
    weights = awkward(24, cols)
    if dtype == np.float16:
        weights = np.clip(weights, -60000, 60000)
    weights = weights.astype(dtype)
    codes = codes_of(weights, scheme)
    actual, are_exact = quantized_on_device(weights, codes)
    assert are_exact
    exact = CLASS_OF_FORM[codes.form].stored(SCHEMES[scheme].quantize(weights), codes)
    assert jax.tree.structure(actual) == jax.tree.structure(exact)
    for leaf, exact_leaf in zip(jax.tree.leaves(actual), jax.tree.leaves(exact), strict=True):
        assert leaf.dtype == exact_leaf.dtype
        assert np.asarray(leaf).tobytes() == exact_leaf.tobytes()


def test_matrices_of_one_shape_share_a_program():
    compiled: list[float] = []

    def listen(event: str, duration_secs: float, **about: str | int):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for scale in (1, 2):
            weights = awkward(23, 64) * np.float32(scale)
            quantized_on_device(weights, codes_of(weights, "q8"))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == 1


@pytest.mark.parametrize("top", [1e-38, 2.0**-91, 1e-44, 1e30])
def test_groups_beyond_what_is_exact_are_told(top):
    weights = np.zeros((4, 128), np.float32)
    weights[2, 70] = top
    assert not quantized_on_device(weights, codes_of(weights, "q8")).exact


def test_parts_of_a_source_are_what_is_quantized():
    weights = awkward(24, 64)
    codes = codes_of(weights, "q4")
    assert codes.source and np.array_equal(np.concatenate(list(exact_parts(codes.source))), weights)
