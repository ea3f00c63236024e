"""Elastic depth: the first layers of a trained model are a model; the loss and its gradient are the definition's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from llamaspec.model.checkpoints.checkpoint import Checkpoint, CheckpointError
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.checkpoints.smaller import first_layers
from llamaspec.model.weights.loading import load_params
from llamaspec.training.objectives.distillation import distillation
from llamaspec.training.objectives.elastic import mean_over
from llamaspec.training.objectives.objective import Objective
from llamaspec.training.objectives.supervised import supervised
from llamaspec.training.ops import PACKED
from llamaspec.training.saving import checkpoints
from llamaspec.training.steps import compile_step
from llamaspec.training.trainable import all_weights
from tests.training.test_training import llamaspec, refusal
from tests.training.test_tune import (  # noqa: F401
    FLOAT32,
    ROUNDINGS,
    TINY,
    assert_same_slopes,
    base,
    data,
    documents,
    exact,
    write_tiny,
)

STATIC: dict[str, Any] = {"ops": PACKED, "dtype": FLOAT32, "rows": 2, "length": 16}


def totals(objective: Objective, tensors: Any, frozen: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Sum what an objective reports, and its gradient, over the documents."""
    step = compile_step(objective.loss, optax.sgd(1.0), platform="cpu")
    sums: Any = (jax.tree.map(jnp.zeros_like, tensors), {name: jnp.zeros(()) for name in objective.sums})
    for batch in objective.work(documents()).batches:
        sums = step.add_gradient(*sums, tensors, frozen, *batch)
    return {name: float(value) for name, value in sums[1].items()}, jax.tree.map(np.asarray, sums[0])


def test_the_gradient_at_several_depths_is_the_definitions(base):  # noqa: F811
    trainable = all_weights(base, context=16, dtype=FLOAT32)
    objective = supervised(trainable.params, config=TINY, depths=(1, 2), **STATIC)
    sums, slopes = totals(objective, trainable.tensors, trainable.frozen)
    expected, exact_slopes = exact(base, depths=(1, 2))
    assert abs(sums["loss"] - expected) <= ROUNDINGS * expected
    assert_same_slopes(slopes, exact_slopes)
    for depth in (1, 2):
        own, _ = exact(first_layers(base, depth))
        assert abs(sums[f"loss_at_{depth}"] - own) <= ROUNDINGS * own


def test_sums_without_a_depth_belong_to_the_whole_model():
    """The loss is the mean over the depths; every other sum belongs to the last depth."""
    total, sums = mean_over((1, 2), [jnp.array(3.0), jnp.array(5.0)], lambda own: {"loss": own, "right": -own})
    assert sums == {"loss": 4, "right": -5, "loss_at_1": 3, "right_at_1": -3, "loss_at_2": 5, "right_at_2": -5}
    assert total == 4


def test_each_depth_learns_from_the_teacher(base):  # noqa: F811
    """The loss of a distillation at a depth is the loss of the model of this depth."""
    teacher = load_params(base, dtype=FLOAT32, positions=16)

    def distilled(student: Checkpoint, depths: tuple[int, ...]) -> dict[str, float]:
        trainable = all_weights(student, context=16, dtype=FLOAT32)
        configs = {"config": student.config, "teacher_config": TINY}
        objective = distillation(trainable.params, temperature=2.0, depths=depths, **configs, **STATIC)
        return totals(objective, trainable.tensors, (trainable.frozen, teacher))[0]

    sums = distilled(base, (1, 2))
    own = distilled(first_layers(base, 1), ())
    assert sums["loss_at_1"] == pytest.approx(own["loss"], rel=ROUNDINGS)
    assert sums["same_top_at_1"] == own["same_top"]
    assert sums["loss_at_2"] == pytest.approx(0, abs=ROUNDINGS)
    assert sums["loss"] == pytest.approx((sums["loss_at_1"] + sums["loss_at_2"]) / 2, rel=ROUNDINGS)


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("two") / "model", layers=2)


def test_the_first_layers_of_a_trained_model_are_a_model(two_layers, data, tmp_path):  # noqa: F811
    """`convert --layers` writes the trained first layers, and a resumed training has the same weights."""
    command = ("tune", str(two_layers), "--data", str(data), "--elastic-depth=1", "--steps=4", "--lr=0.02", "--json")
    out, plot = tmp_path / "out", tmp_path / "loss.svg"
    code, printed, log = llamaspec(*command, "--save-every=2", f"--plot={plot}", "--out", str(out))
    assert code == 0, log
    steps = [json.loads(line) for line in printed.splitlines()]
    assert steps[3]["loss_at_1"] < steps[0]["loss_at_1"] and steps[3]["loss_at_2"] < steps[0]["loss_at_2"]
    assert plot.read_text().count(">loss, 1 layers</text>") == 1
    trained = {name: tensor.read() for name, tensor in open_checkpoint(out / "model").tensors.items()}

    checkpoints(out)[-1].unlink()  # as if killed before its last step
    (out / "model").rename(tmp_path / "model")
    code, _, log = llamaspec(*command, "--resume", "--out", str(out))
    assert code == 0, log
    for name, tensor in open_checkpoint(out / "model").tensors.items():
        assert np.array_equal(tensor.read(), trained[name])

    code, _, log = llamaspec("convert", f"{out}/model", f"{tmp_path}/small", "--to=safetensors", "--layers=1")
    assert code == 0, log
    small = open_checkpoint(tmp_path / "small")
    assert small.config == replace(open_checkpoint(two_layers).config, layers=1)
    for name, tensor in small.tensors.items():
        assert np.array_equal(tensor.read(), trained[name])


def test_depths_that_no_smaller_model_has_are_one_line(two_layers, data, tmp_path):  # noqa: F811
    command = ("tune", str(two_layers), "--data", str(data), "--out", str(tmp_path / "out"))
    assert "with a depth of 2, no smaller model has depth 2" in refusal(*command, "--elastic-depth=1,2")
    assert "with a depth of 2, no smaller model has depth 0" in refusal(*command, "--elastic-depth=0")
    fewer = refusal(*command, "--method=distill", "--keep-layers=1", "--elastic-depth=1")
    assert "with a depth of 1, no smaller model has depth 1" in fewer
    assert "--elastic-depth needs --method supervised or distill" in refusal(
        *command, "--elastic-depth=1", "--method=preference"
    )
    with pytest.raises(CheckpointError, match="has only 2 layers, not 3"):
        first_layers(open_checkpoint(two_layers), 3)
