"""Rounding and pruning while training: the definitions' values, gradients, masks, and the written weights."""

import json
from dataclasses import replace
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamaspec.commands.tune import pruning as parse_pruning
from llamaspec.model.checkpoints.adapter import adapted, read_adapter
from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.tensors import quantizable
from llamaspec.reference.quantizers import qat
from llamaspec.reference.quantizers.pruning import fine_grained, n_of_m
from llamaspec.reference.quantizers.schemes import SCHEMES
from llamaspec.training.constraints import ROUNDED, pruning, rounded, rounding
from tests.support.random_models import SMALL, random_checkpoint
from tests.training.test_training import llamaspec, refusal
from tests.training.test_tune import command, data, model  # noqa: F401

FLOAT32 = np.dtype(np.float32)


@pytest.mark.parametrize("scheme", ROUNDED)
def test_rounding_is_the_schemes_and_its_gradient_passes(scheme):
    """Rounded weights equal the scheme's decoded weights, and the straight-through gradient equals `qat.gradient`."""
    rule = SCHEMES[scheme]
    w = np.random.default_rng(0).normal(size=(5, 100)).astype(FLOAT32)
    w[2] = 0
    group = rule.group or w.shape[1]
    padded = np.pad(w, ((0, 0), (0, -w.shape[1] % group)))
    codes = rule.encode(padded, group)
    expected = rule.decode(codes)[:, : w.shape[1]]
    largest = 2 ** (rule.code_bits - 1) - 1
    round_rows = jax.jit(lambda w: rounded(w, rule.group, largest))
    np.testing.assert_allclose(round_rows(w), expected, rtol=2.0**-22)

    dy = np.random.default_rng(1).normal(size=w.shape)
    scales = np.repeat(np.asarray(codes.scales, np.float64), group, axis=1)[:, : w.shape[1]]
    fake = qat.fake_quantize(w, np.where(scales == 0, 1.0, scales), np.zeros(1), lowest=-largest, highest=largest)
    slope = jax.vjp(round_rows, jnp.asarray(w))[1](jnp.asarray(dy, jnp.float32))[0]
    np.testing.assert_array_equal(slope, qat.gradient(dy, fake).astype(FLOAT32))


def test_only_matrices_are_rounded():
    checkpoint = random_checkpoint(SMALL, seed=0)
    constraint = rounding(checkpoint, "q4")
    for name, tensor in checkpoint.tensors.items():
        same = np.array_equal(constraint.apply(name, jnp.asarray(tensor.read()), None), tensor.read())
        assert same == (name not in quantizable(SMALL)), name


@pytest.mark.parametrize("kept", [0.25, (2, 4)])
def test_masks_are_the_definitions(kept):
    checkpoint = random_checkpoint(SMALL, seed=0)
    constraint = pruning(checkpoint, kept)
    assert len(constraint.arrays) == 7 * SMALL.layers
    for name, tensor in checkpoint.tensors.items():
        w = tensor.read()
        actual = np.asarray(constraint.apply(name, jnp.asarray(w), constraint.arrays))
        if name not in constraint.arrays:
            assert np.array_equal(actual, w)
            continue
        mask = n_of_m(w, n=2, m=4) if kept == (2, 4) else fine_grained(w, keep=w.size // 4)
        assert np.array_equal(actual, np.where(mask, w, 0))
        slope = jax.grad(lambda a, name=name: jnp.sum(constraint.apply(name, a, constraint.arrays)))(jnp.asarray(w))
        assert np.array_equal(slope, mask)


def test_rows_that_do_not_fill_the_groups_are_refused():
    with pytest.raises(CheckpointError, match=r"q_proj.weight: rows of 24 weights do not fill groups of 5"):
        pruning(random_checkpoint(SMALL, seed=0), (2, 5))


def test_a_pruned_model_stays_pruned(command, tmp_path):  # noqa: F811
    code, _, log = llamaspec(*command, "--prune=2:4", "--out", str(tmp_path / "out"))
    assert code == 0, log
    tensors = open_checkpoint(tmp_path / "out" / "model").tensors
    before = open_checkpoint(command[1]).tensors
    name = "model.layers.0.mlp.up_proj.weight"
    mask = n_of_m(before[name].read(), n=2, m=4)
    w = tensors[name].read()
    assert np.array_equal(w != 0, mask) and not np.array_equal(w, before[name].read() * mask)


def test_a_model_loses_heads_and_channels(command, tmp_path):  # noqa: F811
    """The written model has a smaller config, and learns from the whole model."""
    options = ("--prune=heads:0.5,channels:0.25", "--method=distill", "--steps=2", "--json", "--out", f"{tmp_path}/out")
    code, printed, log = llamaspec(*command, *options)
    assert code == 0, log
    losses = [json.loads(line)["loss"] for line in printed.splitlines()]
    assert losses[0] > losses[-1] > 0
    written, config = open_checkpoint(tmp_path / "out" / "model"), open_checkpoint(command[1]).config
    assert written.config == replace(config, heads=2, kv_heads=1, ffn=6)


def test_masks_and_smaller_models_combine():
    context, option = click.Context(click.Command("tune")), click.Option(["--prune"])
    assert parse_pruning(context, option, "2:4, heads:0.5") == {"prune": (2, 4), "keep_heads": 0.5}


@pytest.mark.parametrize("lora", [(), ("--lora=2",)], ids=["all weights", "adapters on codes"])
def test_training_with_rounding_learns(command, tmp_path, lora):  # noqa: F811
    out = tmp_path / "out"
    code, printed, log = llamaspec(*command, "--quantize=q4", "--json", *lora, "--out", str(out))
    assert code == 0, log
    losses = [json.loads(line)["loss"] for line in printed.splitlines()]
    assert losses[-1] < losses[0]
    base = open_checkpoint(command[1])
    if lora:
        changed = adapted(base, read_adapter(out, base.config)).tensors
    else:
        changed = open_checkpoint(out / "model").tensors
    name = "model.layers.0.mlp.up_proj.weight"
    assert not np.array_equal(changed[name].read(), base.tensors[name].read())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--quantize=nf4",), "--quantize nf4 needs --lora; without --lora, --quantize takes q8, q8_row, q4"),
        (("--prune=2:4", "--lora=2"), "--prune cannot be combined with --lora or --quantize"),
        (("--prune=heads:0.5", "--lora=2"), "--prune cannot be combined with --lora or --quantize"),
        (("--prune=1.5",), "'1.5' is neither a share between 0 and 1, nor 2:4, heads:SHARE or channels:SHARE"),
        (("--prune=heads:0.5,heads:0.2",), "'heads:0.5,heads:0.2' has two shares of the same parts"),
        (("--prune=0.5,2:4",), "'0.5,2:4' has two shares of the same parts"),
        (("--prune=heads:0.9",), "with 2 key-value heads, a share of 0.9 removes none of them"),
        (("--prune=layers:0.5",), "'layers:0.5' is neither a share between 0 and 1"),
    ],
)
def test_options_that_exclude_each_other_are_one_line(command, tmp_path: Path, arguments, words):  # noqa: F811
    assert words in refusal(*command, *arguments, "--out", str(tmp_path / "out"))
