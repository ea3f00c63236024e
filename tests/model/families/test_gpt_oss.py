"""gpt-oss: attention sinks in every implementation of attention, the experts' layout, and code that refuses sinks."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamaspec.learn.trace import trace
from llamaspec.model.cache import LayerCache, LayerPages, empty_cache
from llamaspec.model.candidates.walking import WalkableModel
from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.checkpoints.safetensors_header import read_header
from llamaspec.model.forward import forward
from llamaspec.model.ops.attention import SPANS, attend
from llamaspec.model.ops.cpu import cpu_attend
from llamaspec.model.ops.gpu import pallas_ops
from llamaspec.model.ops.table import Positions
from llamaspec.model.ops.xla import XLA
from llamaspec.model.weights.loading import abstract_params
from llamaspec.reference.attention import causal_mask
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers import mx
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.reference.quantizers.minifloat import E2M1
from llamaspec.reference.rope import YarnScaling
from llamaspec.verify.bounds import running_error as bound
from llamaspec.verify.bounds.running_error import exactly
from tests.goldens.make_families import FOLDER, random_tensors, write_checkpoint
from tests.support.families import write_safetensors
from tests.support.random_models import SMALL
from tests.support.refusals import mentions

GOLDEN = json.loads((FOLDER / "gpt-oss-mxfp4.json").read_text())
DENSE = json.loads((FOLDER / "gpt-oss.json").read_text())
EXPERTS = "model.layers.1.mlp.experts"
CAPACITY, PAGE = 12, 4


def in_pages(cache: LayerCache) -> LayerPages:
    """Convert a contiguous cache of one sequence to a paged cache with pages in reverse order."""
    k, v = (a[0].reshape(a.shape[1], -1, PAGE, a.shape[3]).swapaxes(0, 1)[::-1] for a in cache)
    return LayerPages(k, v, jnp.arange(CAPACITY // PAGE, dtype=jnp.int32)[None, ::-1])


@pytest.mark.sampled(3)  # 10 cases, 6 s
@pytest.mark.parametrize(
    ("form", "seq", "kv_heads"),
    [
        (attend, 5, 2),
        (partial(attend, spans=SPANS._replace(longest=5)), 5, 2),  # in blocks
        (cpu_attend, 1, 2),
        (cpu_attend, 1, 4),  # reads keys in place
        (lambda q, cache, *arguments, **fixed: attend(q, in_pages(cache), *arguments, **fixed), 3, 2),
    ],
    ids=["spans", "blocks", "one", "one in place", "pages"],
)
@pytest.mark.parametrize("window", [None, 3])
def test_sinks_are_within_the_bound_in_every_form(form, seq: int, kv_heads: int, window: int | None):
    config = replace(SMALL, heads=4, kv_heads=kv_heads, head_dim=64, sinks=True)
    rng = np.random.default_rng(seq)
    q = rng.normal(size=(seq, 4, 64)).astype(np.float32)
    k, v = rng.normal(size=(2, CAPACITY, kv_heads, 64)).astype(np.float32)
    sinks = np.array([-3.0, 0.5, 2.0, 90.0], np.float32)
    start, used = CAPACITY - 1 - seq, CAPACITY - 1
    cache = LayerCache(*(jnp.asarray(a.swapaxes(0, 1)[None]) for a in (k, v)))
    nowhere = jnp.zeros((1, seq, 0))
    positions = Positions(start + jnp.arange(seq, dtype=jnp.int32)[None], nowhere, nowhere)
    h = jax.jit(partial(form, window=window, config=config))(jnp.asarray(q[None]), cache, positions, sinks=sinks)
    mask = causal_mask(seq, used, offset=start, window=window)
    keys, values = (exactly(a[:used]) for a in (k, v))
    expected = bound.attend(exactly(q), keys, values, mask, unit=0.0, blocks=3, sinks=sinks.astype(np.float64))
    assert (np.abs(np.asarray(h)[0] - expected.value) <= expected.error).all()
    without = bound.attend(exactly(q), keys, values, mask, unit=0.0)
    assert (np.abs(without.value - expected.value).max(axis=1) > 1e-3).all()


def opened(directory: Path, golden: dict, changes: dict[str, np.ndarray | None]):
    """Write and open a golden's checkpoint, after `changes` replace some tensors; None removes a tensor."""
    (directory / "config.json").write_text(json.dumps(golden["config"]))
    tensors = random_tensors(golden["config"], golden["tensors"]) | changes
    write_safetensors(directory / "model.safetensors", {name: a for name, a in tensors.items() if a is not None})
    return open_checkpoint(directory)


def stored(path: Path) -> dict[str, np.ndarray]:
    file = MappedFile(path)
    return {name: file.array(entry.dtype, entry.shape, entry.offset) for name, entry in read_header(file).items()}


def test_mxfp4_experts_run_from_codes_and_are_written_as_they_were(tmp_path):
    write_checkpoint(tmp_path, GOLDEN)
    checkpoint, arrays = open_checkpoint(tmp_path), stored(tmp_path / "model.safetensors")
    codes = mx.unpack(arrays[f"{EXPERTS}.gate_up_proj_blocks"].reshape(3, 64, -1), to=E2M1)
    gate_and_up = mx.dequantize(Quantized(codes, arrays[f"{EXPERTS}.gate_up_proj_scales"]), to=E2M1)
    for name, first in (("w1", 0), ("w3", 1)):  # gate and up alternate
        tensor = checkpoint.tensors[f"model.layers.1.block_sparse_moe.experts.2.{name}.weight"]
        assert tensor.codes and tensor.codes.form == "mxfp4"
        np.testing.assert_array_equal(tensor.read(), gate_and_up[2, first::2])

    write_huggingface(checkpoint, tmp_path / "again")
    again = stored(tmp_path / "again" / "model.safetensors")
    assert again.keys() == arrays.keys()
    assert all(np.array_equal(again[name], arrays[name]) for name in arrays)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["quantization_config"] == GOLDEN["config"]["quantization_config"]


def test_what_is_not_as_config_json_says_is_named(tmp_path):
    def refusal(name: str, array: np.ndarray | None, golden: dict = GOLDEN) -> str:
        with pytest.raises(CheckpointError) as error:
            opened(tmp_path, golden, {f"{EXPERTS}.{name}": array})
        return str(error.value).removeprefix(f"{tmp_path}: ")

    byte = np.zeros((3, 64, 2), np.uint8)
    scales = f"{EXPERTS}.gate_up_proj_scales"
    assert mentions(refusal("gate_up_proj_scales", None), f"lacks {scales}")
    shapes = "uint8 [2, 64, 2] [3, 64, 2]"
    assert mentions(refusal("gate_up_proj_scales", byte[:2]), f"{scales} {shapes} config.json")
    assert mentions(refusal("down_proj_bias", byte[:, :, 0]), f"{EXPERTS}.down_proj_bias uint8 [3, 64]")
    assert mentions(refusal("down_proj", byte.astype(np.float32)), f"'{EXPERTS}.down_proj' unexpected config.json")
    assert refusal("gate_up_proj", None, DENSE).endswith(f" {EXPERTS}.gate_up_proj")
    changed = DENSE | {"config": DENSE["config"] | {"num_local_experts": 9}}
    first = "model.layers.0.mlp.experts.down_proj_bias"
    assert mentions(refusal("gate_up_proj", None, changed), f"{first} [5, 64] [9, 64] config.json")
    changed = DENSE | {"config": DENSE["config"] | {"swiglu_limit": 6.0}}
    assert mentions(refusal("gate_up_proj", None, changed), "swiglu_limit 6.0 7.0")


def test_other_matrices_in_codes_are_not_written(tmp_path):
    write_checkpoint(tmp_path, GOLDEN)
    checkpoint = quantized(open_checkpoint(tmp_path), "q8")
    with pytest.raises(CheckpointError, match="cannot write quantized matrices of gpt_oss"):
        write_huggingface(checkpoint, tmp_path / "again")


def test_a_config_json_without_rope_has_that_of_the_release(tmp_path):
    config = {key: value for key, value in DENSE["config"].items() if key != "rope_scaling"}
    scaling = opened(tmp_path, DENSE | {"config": config}, {}).config.scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.factor, scaling.original_context, scaling.truncate) == (32.0, 4096, False)


def model_of(config: Config):
    return abstract_params(config, dtype=np.dtype(jnp.bfloat16), positions=256)


def test_kernels_and_traces_refuse_sinks():
    config = replace(SMALL, dim=128, heads=2, kv_heads=2, head_dim=64, ffn=128, experts=2, experts_per_token=1)
    config = replace(config, sinks=True, expert_bias=True, activation="clamped_silu")
    params = model_of(config)
    ops, reasons = pallas_ops(config, params, capacity=256)
    assert reasons["attend"] == reasons["attend_prompt"] and "sinks = True" in (reasons["attend"] or "")
    cache = jax.eval_shape(partial(empty_cache, config, batch=1, capacity=256, dtype=np.dtype(jnp.bfloat16)))
    for seq in (1, 3):  # XLA's form gets the sinks
        tokens = jax.ShapeDtypeStruct((1, seq), np.int32)
        logits, _ = jax.eval_shape(partial(forward, config=config, ops=ops), params, tokens, cache)
        assert logits.shape == (1, seq, config.vocab)
    never = cast(Any, lambda _: pytest.fail("nothing is computed"))
    with pytest.raises(ValueError, match="sinks, expert bias"):
        trace(WalkableModel(None, None, XLA, never, never, never), [1], config=config, dtype="float32")
