"""Training from scratch, as `llamaspec train` does it.

DIR/tokenizer.model, chat_template.jinja …   files that the model needs besides its weights
DIR/step-00001200.safetensors              the last two checkpoints: weights and optimizer
DIR/model/                                 at the end: the model in bfloat16, for `load`
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.device import default_device
from llamaspec.model.tensors import Role, weights
from llamaspec.reference.config import Config
from llamaspec.training.data import Source, batches, stops
from llamaspec.training.evaluation import evaluate, rows_at_once
from llamaspec.training.loop import StepReport, Task, Work, run
from llamaspec.training.objectives.supervised import of_documents, summed_loss
from llamaspec.training.ops import WHOLE_ATTENTION, remat
from llamaspec.training.optimizers import optimizer
from llamaspec.training.parallel import round_up, spread
from llamaspec.training.recipe import Recipe, check_recipe
from llamaspec.training.saving import write_model
from llamaspec.training.steps import Tensors, compile_step, reproducible

EMBEDDING_STD = 0.02


def initial_tensors(config: Config, *, seed: int) -> Tensors:
    """Make initial weights: norms of one, biases of zero, and random matrices that preserve the scale of their inputs.

    The matrices that write to the residual stream are smaller, so that all layers together add as much as one layer.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for weight in weights(config):
        if weight.role is Role.BIAS:
            values = np.zeros(weight.shape)
        elif weight.role is Role.NORM:
            values = np.ones(weight.shape)
        else:
            std = EMBEDDING_STD if weight.role is Role.EMBEDDING else weight.shape[1] ** -0.5
            if weight.part in ("o", "down", "expert_down"):
                std /= math.sqrt(2 * config.layers)
            values = rng.normal(0.0, std, weight.shape)
        tensors[weight.name] = jnp.asarray(values, jnp.float32)
    return tensors


def train(
    recipe: Recipe,
    source: Source,
    out: str | Path,
    *,
    resume: bool = False,
    eval_every: int = 200,
    save_every: int = 100,
    devices: int = 1,
    fsdp: bool = False,
    report: Callable[[StepReport], object] = lambda step: None,
) -> Path:
    """Train a model, and return its directory.

    With `resume`, training continues from the last checkpoint in `out`. `devices` is the number of devices that share
    the documents of a step. With `fsdp`, they also share weights and optimizer state; otherwise each device has a copy.
    Calls `report` and raises exceptions as `loop.run` does. Also raises ValueError for an invalid recipe.
    """
    out = Path(out)
    check_recipe(recipe, bos=source.bos, stops=stops(source))
    over = spread(recipe.config, devices=devices, fsdp=fsdp) if devices > 1 else None
    if (out / "model").exists():
        raise refused(out / "model", "already exists: this training run is complete")
    ops = remat(WHOLE_ATTENTION) if recipe.remat else WHOLE_ATTENTION
    static: dict[str, Any] = {"config": recipe.config, "ops": ops, "dtype": np.dtype(recipe.dtype)}
    loss = over.loss(summed_loss, **static) if over else partial(summed_loss, **static)

    platform = default_device().platform
    rows, context = rows_at_once(platform) * devices, recipe.config.context

    def documents(step: int, _: Tensors | None) -> Work:
        chosen = source.training(step, recipe)
        parts = list(batches(chosen, rows=round_up(min(recipe.batch, rows), devices), context=context))
        count = sum(int(part.counted.sum()) for part in parts)
        if not count:
            raise ValueError(f"step {step + 1} has nothing to learn within {context} tokens: try a larger context")
        return Work([(part.ids, part.weights) for part in parts], count, sum(min(len(d.ids), context) for d in chosen))

    on_devices = over.documents if over else np.asarray
    compiled = reproducible(loss, platform)

    def score(tensors: Tensors, ids: np.ndarray, importance: np.ndarray) -> Any:
        return compiled(tensors, on_devices(ids), on_devices(importance))

    transform = optimizer(lr=recipe.lr, steps=recipe.steps, warm_up=recipe.warm_up, decay=recipe.decay)
    task = Task(
        steps=recipe.steps,
        tensors=initial_tensors(recipe.config, seed=recipe.seed),
        frozen=None,
        transform=transform,
        step=compile_step(of_documents(loss), transform, platform=platform),
        sums=("loss",),
        documents=documents,
        identity=identity(recipe, source),
        evaluate=partial(evaluate, config=recipe.config, source=source, score=score, rows=rows),
        files=source.files,
        over=over,
    )
    tensors = run(task, out, resume=resume, eval_every=eval_every, save_every=save_every, report=report)
    if jax.process_index() == 0:
        write_model(out, recipe, source, tensors)
    return out / "model"


def identity(recipe: Recipe, source: Source) -> dict[str, Any]:
    """Return what the trained weights depend on: the recipe, and digests of the documents and the tokenizer."""
    return asdict(recipe) | dict(source.digests)
