"""Adapter files in PEFT's layout: written files are read back, and bad files are refused in one line.

Merging an adapter into a matrix gives the same products as applying the adapter next to the matrix.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from llamaspec.model.checkpoints.adapter import (
    CONFIG,
    WEIGHTS,
    Adapter,
    adapted,
    adapter_notes,
    merged,
    read_adapter,
    with_adapter,
    write_adapter,
)
from llamaspec.model.checkpoints.checkpoint import CheckpointError, LowRank
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.llama import load_backend
from llamaspec.model.ops.gpu_products import prompt_product
from llamaspec.model.ops.products import cpu_product, dot
from llamaspec.model.options import RunOptions
from llamaspec.model.weights.adapted import Adapted
from llamaspec.model.weights.loading import load_params
from llamaspec.model.weights.params import Linear, adapted_params
from llamaspec.reference.lora import lora
from llamaspec.verify.bounds.running_error import gamma
from tests.goldens import make_peft
from tests.support.goldens import read_golden
from tests.support.random_models import CONFIGS, SMALL, random_adapter, random_checkpoint
from tests.support.refusals import mentions
from tests.support.strategies import assert_within, seeds

FLOAT32 = np.dtype(np.float32)
WIDE = CONFIGS["2 to 1, wide, tied"]
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(random_adapter(SMALL, rslora=True), tmp_path, SMALL, base="a/model")
    return tmp_path


def test_an_adapter_is_read_as_it_was_written(folder):
    adapter, expected = read_adapter(folder, SMALL), random_adapter(SMALL, rslora=True)
    assert (adapter.rank, adapter.alpha, adapter.rslora) == (3, 6.0, True)
    assert adapter.pairs.keys() == expected.pairs.keys() and len(adapter.pairs) == 3 * SMALL.layers
    for name, pair in adapter.pairs.items():
        assert all(np.array_equal(*both) for both in zip(pair, expected.pairs[name], strict=True)), name


def test_the_files_may_be_in_the_subfolder_adapter(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("tuned")
    folder.rename(outside / "adapter")
    assert read_adapter(outside, SMALL).pairs.keys() == random_adapter(SMALL).pairs.keys()


@pytest.mark.parametrize(
    ("base", "path", "differs"),
    [
        ("a/model", "x/model", False),
        ("a/model", "x/model-chat", True),  # a folder
        ("./model.bin", "model.bin", False),
        ("a/model", "models--a--model/snapshots/0f3", False),
        ("a/Model", "model-Q4_K_M.gguf", False),
        ("a/model", "other.gguf", True),
        ("", "x/model", False),
    ],
)
def test_an_adapter_of_another_base_gets_a_note(tmp_path, base, path, differs):
    write_adapter(random_adapter(SMALL), tmp_path, SMALL, base=base)
    if path.endswith((".gguf", ".bin")):
        (tmp_path / path).touch()
    checkpoint = replace(random_checkpoint(SMALL, seed=1), path=str(tmp_path / path), notes=("first",))
    first, *notes = with_adapter(checkpoint, tmp_path).notes
    assert first == "first" and len(notes) == differs
    assert all(mentions(note, f"made for {base} fit {Path(path).name}") for note in notes)


def test_a_relative_path_into_the_hubs_cache_gives_the_models_name(folder, tmp_path, monkeypatch):
    (tmp_path / "models--owner--base" / "snapshots" / "1234").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "models--owner--base")
    adapter = replace(read_adapter(folder, SMALL), base="owner/base")
    checkpoint = replace(random_checkpoint(SMALL, seed=1), path="snapshots/1234")
    assert adapter_notes(adapter, checkpoint, folder) == []


def test_an_adapter_with_its_own_chat_template_gets_a_note(folder):
    checkpoint = replace(random_checkpoint(SMALL, seed=1), path="a/model")
    assert with_adapter(checkpoint, folder).notes == ()
    (template := folder / "chat_template.jinja").touch()
    (note,) = with_adapter(checkpoint, folder).notes
    assert mentions(note, f"own chat template --template {template}")


def test_the_files_have_pefts_names(folder):
    tensors, values = load_file(folder / WEIGHTS), json.loads((folder / CONFIG).read_text())
    assert tensors[NAME].shape == (3, SMALL.dim)
    assert tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"].shape == (SMALL.dim, 3)
    assert values["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    assert (values["peft_type"], values["r"], values["lora_alpha"], values["use_rslora"]) == ("LORA", 3, 6.0, True)
    assert values["base_model_name_or_path"] == "a/model"


GOLDENS = Path(__file__).parents[2] / "goldens"


def reference_logits(adapter: Adapter) -> np.ndarray:
    checkpoint = adapted(random_checkpoint(SMALL, seed=1), adapter)
    return load_backend(checkpoint, RunOptions(backend="reference")).logits(make_peft.IDS)


@pytest.mark.parametrize("name", [*make_peft.OWN, *make_peft.PEFTS])
def test_an_adapter_has_the_logits_that_peft_computes(name, tmp_path):
    """We and PEFT read each other's files. Our logits, with the adapter applied or merged, equal PEFT's.

    goldens/make_peft.py stored PEFT's logits.
    """
    golden = read_golden("peft")
    if name in make_peft.OWN:
        assert make_peft.write_own(tmp_path)[name] == golden["digests"][name]  # the file that PEFT has read
        folder = tmp_path / name
    else:
        folder = GOLDENS / name
    logits = reference_logits(read_adapter(folder, SMALL))
    for expected in map(np.array, golden["logits"][name].values()):
        assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.abs(logits - reference_logits(Adapter(1, 1.0, {}))).max() > 0.1 * np.abs(logits).max()


def changed(key: str, value: Any) -> Callable[[Path], object]:
    """Return a function that changes a key of the adapter's configuration."""

    def change(folder: Path) -> None:
        values = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(values | {key: value}))

    return change


def stored(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], object]:
    """Return a function that changes the adapter's tensors."""

    def change_file(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return change_file


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (changed("peft_type", "IA3"), 'peft_type "IA3" LORA'),
        (changed("use_dora", True), "use_dora true false"),
        (changed("bias", "all"), 'bias "all" "none"'),
        (changed("modules_to_save", ["lm_head"]), "modules_to_save list"),
        (changed("rank_pattern", {"q_proj": 4}), "rank_pattern object"),
        (changed("init_lora_weights", "pissa"), 'init_lora_weights "pissa" true'),
        (changed("arrow_config", {"top_k": 3}), "arrow_config object null"),
        (changed("r", 0), "r 0 rank least 1"),
        (changed("r", 4), "] r 4"),
        (changed("lora_alpha", "x"), 'lora_alpha "x" number'),
        (changed("lora_alpha", 1e39), "lora_alpha 1e+39 float32"),
        (changed("lora_alpha", 10**400), "lora_alpha float32"),
        (changed("use_rslora", 1), "use_rslora 1 true false"),
        (stored(lambda t: t.pop(NAME)), "self_attn.q_proj one lora_A lora_B"),
        (stored(lambda t: t.update({NAME: t[NAME][:, 1:]})), "shape [3 23] [3 24]"),
        (stored(lambda t: t.update(x=t.pop(NAME))), "'x' matrix model"),
        (stored(lambda t: t.update({NAME: np.full((3, 24), np.nan, FLOAT32)})), "nan finite number"),
        (stored(lambda t: t.clear()), "does not contain an adapter"),
        (lambda folder: (folder / CONFIG).unlink(), "No such file"),
        (lambda folder: (folder / WEIGHTS).unlink(), "No such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(folder, damage, words):
    damage(folder)
    with pytest.raises(CheckpointError) as error:
        read_adapter(folder, SMALL)
    assert mentions(str(error.value), words) and str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [FLOAT32, np.dtype(ml_dtypes.bfloat16)])
def test_merged_weights_are_rounded_once(dtype):
    checkpoint, adapter = random_checkpoint(SMALL, seed=1, dtype=dtype), random_adapter(SMALL)
    sums = merged(adapted(checkpoint, adapter))
    assert not any(tensor.adapter for tensor in sums.tensors.values())
    for name, tensor in sums.tensors.items():
        plain = checkpoint.tensors[name].read()
        assert (tensor.shape, tensor.dtype) == (plain.shape, plain.dtype)
        if name not in adapter.pairs:
            assert np.array_equal(tensor.read(), plain)
            continue
        a, b = (np.asarray(m, np.float64) for m in adapter.pairs[name])
        exact, size = plain + 2.0 * b @ a, np.abs(plain) + 2.0 * np.abs(b) @ np.abs(a)
        unit = float(ml_dtypes.finfo(dtype).eps) / 2
        assert_within(tensor.read().astype(np.float64), exact, (unit + 2 * gamma(8)) * size)


@pytest.mark.parametrize("product", [dot, cpu_product, prompt_product])
@pytest.mark.parametrize("scheme", [None, "q4", "nf4"])
def test_the_adapted_product_is_within_the_bound_of_the_definition(product, scheme):
    """For adapters of q and v, the product with the stacked matrix [q; k; v] is within LoRA's error bound.

    The matrices are floats or codes.
    """
    checkpoint, adapter = random_checkpoint(WIDE, seed=1), random_adapter(WIDE, seed=2)
    run = quantized(checkpoint, scheme) if scheme else checkpoint
    params = adapted_params(load_params(run, dtype=FLOAT32, positions=4), WIDE, adapter.pairs, scale=adapter.scale)
    qkv = params.layers[0].qkv
    assert isinstance(qkv, Linear) and isinstance(qkv.weight, Adapted)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    compiled = jax.jit(product)

    @given(seed=seeds, vectors=st.sampled_from([1, 5]))
    def check(seed, vectors):
        x = np.random.default_rng(seed).normal(size=(vectors, WIDE.dim)).astype(FLOAT32)
        y, at = np.asarray(compiled(jnp.asarray(x), qkv.weight)), 0
        for name in names:
            w = run.tensors[name].read()
            a, b = adapter.pairs.get(name, LowRank(np.zeros((3, WIDE.dim)), np.zeros((len(w), 3))))
            exact = lora(x, w, a, b, scale=adapter.scale)
            size = lora(np.abs(x), np.abs(w), np.abs(a), np.abs(b), scale=adapter.scale)
            # Each number of a sum over `dim` products, then of a sum over the rank; decoding and scaling round too.
            assert_within(y[:, at : at + len(w)], exact, gamma(WIDE.dim + 16) * size)
            at += len(w)
        assert at == y.shape[1]

    check()


def test_a_tree_without_adapters_stays_the_same_arrays():
    params = load_params(random_checkpoint(SMALL, seed=1), dtype=FLOAT32, positions=4)
    same = adapted_params(params, SMALL, {}, scale=1.0)
    assert all(a is b for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(same), strict=True))
