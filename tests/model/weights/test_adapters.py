"""Adapters in a running model: merged into floats, and applied next to codes, within the bounds of one definition."""

from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest

from llamaspec.model.candidates.walking import tables, walkable
from llamaspec.model.checkpoints.adapter import adapted, merged
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.llama import choose_dtype, load_backend
from llamaspec.model.options import RunOptions
from llamaspec.model.running.reference_backend import ReferenceBackend, load_reference_params
from llamaspec.model.weights.adapted import Adapted
from llamaspec.model.weights.loading import abstract_params, load_params
from llamaspec.model.weights.params import weight_bytes
from llamaspec.reference.lora import lora_merged
from llamaspec.verify.judging.walk import walk_through
from tests.support.random_models import CONFIGS, random_adapter, random_checkpoint

CONFIG = replace(CONFIGS["2 to 1, wide, tied"], layers=1)
FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
ADAPTER = random_adapter(CONFIG, seed=2, parts=("q", "v", "o", "up", "down"), rslora=True)
IDS = [3, 1, 4, 1, 5]


def base(scheme: str | None = None, dtype: np.dtype = FLOAT32) -> Checkpoint:
    checkpoint = random_checkpoint(CONFIG, seed=1, dtype=dtype)
    return quantized(checkpoint, scheme) if scheme else checkpoint


@pytest.mark.sampled(2)  # 2 s each
@pytest.mark.parametrize("scheme", [None, "q4", "nf4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_and_applied_are_within_the_bounds_of_the_definition(scheme, dtype):
    """Each op of a model with an adapter is within its bound, whether the adapter is merged or applied.

    The definition has the matrices W + s B A in float64. The merged model is as `convert` writes it.
    """
    kind = np.dtype(dtype)
    applied = adapted(base(scheme, kind), ADAPTER, merges=False)
    ops = tables()["cpu"].ops
    model, merged_model = (walkable(checkpoint, ops, dtype=kind, rows=26) for checkpoint in (applied, merged(applied)))
    if kind == FLOAT32:  # in bfloat16, merging rounds the weights once more
        merged_model = replace(merged_model, exact=model.exact)
    for walked in (model, merged_model):
        _, report = walk_through(walked, config=CONFIG, dtype=dtype, seed=3)
        assert report.outcome == "within bounds", report
    assert isinstance(model.params.layers[0].qkv.weight, Adapted)
    assert not isinstance(merged_model.params.layers[0].qkv.weight, Adapted)


@pytest.mark.parametrize(
    ("scheme", "merges", "applies"), [(None, True, False), (None, False, True), ("q4", True, True)]
)
def test_products_apply_the_adapter_of_codes_and_one_that_is_chosen_per_request(scheme, merges, applies):
    """Products apply an adapter if the matrix is quantized, or if each request chooses an adapter.

    Any other adapter is merged into its matrix.

    The shapes for compilation are the shapes of the loaded arrays.
    """
    checkpoint = adapted(base(scheme), ADAPTER, merges=merges)
    params = load_params(checkpoint, dtype=FLOAT32, positions=4)
    shapes = abstract_params(CONFIG, dtype=FLOAT32, positions=4, tensors=checkpoint.tensors)
    assert jax.tree.structure(params) == jax.tree.structure(shapes)
    for array, shape in zip(jax.tree.leaves(params), jax.tree.leaves(shapes), strict=True):
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
    assert isinstance(params.layers[0].qkv.weight, Adapted) == applies


@pytest.mark.parametrize("scheme", [None, "q4"])
def test_the_reference_computes_with_the_sum(scheme):
    checkpoint = adapted(base(), ADAPTER)
    logits = load_backend(checkpoint, RunOptions(backend="reference", quantize=scheme)).logits(IDS)
    tensors = dict(base(scheme).tensors)
    for name, (a, b) in ADAPTER.pairs.items():
        weight = lora_merged(tensors[name].read(), a, b, scale=ADAPTER.scale)
        tensors[name] = tensors[name]._replace(codes=None, read=lambda weight=weight: weight)
    params = load_reference_params(replace(checkpoint, tensors=tensors))
    expected = ReferenceBackend(params, CONFIG, capacity=len(IDS)).logits(IDS)
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
    plain = load_backend(base(), RunOptions(backend="reference", quantize=scheme)).logits(IDS)
    assert np.abs(logits - plain).max() > 0.1 * np.abs(plain).max()


def test_codes_stay_codes():
    """An adapter of a quantized model needs only the memory of its two small matrices."""
    models = base("q4"), adapted(base("q4"), ADAPTER)
    plain, with_adapter = (
        weight_bytes(abstract_params(CONFIG, dtype=FLOAT32, positions=4, tensors=model.tensors)) for model in models
    )
    assert with_adapter - plain == sum(pair.a.nbytes + pair.b.nbytes for pair in ADAPTER.pairs.values())


def test_an_adapter_does_not_change_the_dtype_in_which_a_model_runs():
    for dtype, scheme in ((FLOAT32, None), (BFLOAT16, None), (FLOAT32, "q4")):
        plain = base(scheme, dtype)
        assert choose_dtype(None, adapted(plain, ADAPTER), platform="gpu") == choose_dtype(None, plain, platform="gpu")


def test_the_compiled_model_has_the_logits_of_the_reference():
    checkpoint = adapted(base("q4"), ADAPTER)
    exact = load_backend(checkpoint, RunOptions(backend="reference")).logits(IDS)
    np.testing.assert_allclose(load_backend(checkpoint).logits(IDS), exact, rtol=0, atol=1e-4 * np.abs(exact).max())


def test_activations_are_not_emulated_with_an_adapter():
    with pytest.raises(ValueError, match="adapter"):
        load_backend(adapted(base("q4"), ADAPTER), RunOptions(emulate_activations="q8_0"))
