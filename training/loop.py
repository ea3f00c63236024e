"""A training from its beginning, or from its last checkpoint, to a directory that holds the model.

    DIR/tokenizer.model, chat_template.jinja …   as the model will have them
    DIR/step-00001200.safetensors              weights and optimizer, the last two; a run goes on from the last
    DIR/model/                                 at the end: what `load` takes, in bfloat16

The documents of a step are a function of the seed and of the step's number. A run that was killed and goes on ends
with the weights of one that was not.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from model.checkpoints.checkpoint import os_errors, refused
from model.checkpoints.staging import new_file
from model.parallel.processes import agreed
from model.running.device import default_device
from model.tensors import tensor_shapes
from reference.config import Config
from training.data import Batch, Source, batches, stops
from training.evaluation import Evaluation, evaluate, rows_at_once
from training.objective import WHOLE, Tensors, compile_step, initial_tensors, optimizer, remat
from training.parallel import even, spread
from training.recipe import Recipe, check_at_least_one, check_recipe
from training.saving import checkpoints, load_state, save_state, write_model

STREAMS = 2  # batches computed side by side: one alone leaves parts of two cores idle


class StepReport(NamedTuple):
    """The state of a training after a step."""

    step: int  # steps done
    loss: float  # nats per counted token of the last
    rate: float  # tokens a second, padding not counted
    seconds: float  # since the beginning, pauses not counted
    evaluation: Evaluation | None = None


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
    """Train, and give the directory of the model.

    `resume` goes on from the last checkpoint in `out`. The documents of a step are spread over `devices`; with `fsdp`
    each holds a part of the weights and of the optimizer, otherwise all of them. Of several processes all read `out`,
    and the first writes there. `report` is called after each step, and again after each evaluation. Raises
    CheckpointError where a file cannot be used, ValueError for a recipe that cannot be, and FloatingPointError for a
    loss that is not finite: each a single line.
    """
    out = Path(out)
    check_recipe(recipe, bos=source.bos, stops=stops(source))
    check_at_least_one(eval_every=eval_every, save_every=save_every)
    over = spread(recipe.config, devices=devices, fsdp=fsdp) if devices > 1 else None
    writes = jax.process_index() == 0
    transform = optimizer(lr=recipe.lr, steps=recipe.steps, warm_up=recipe.warm_up, decay=recipe.decay)
    tensors = initial_tensors(recipe.config, seed=recipe.seed)
    state, begun, seconds = transform.init(tensors), 0, 0.0
    saved = checkpoints(out)
    if saved and not resume:
        raise refused(out, "holds a training already: --resume goes on with it")
    if resume and not saved:
        raise refused(out, "holds no checkpoint to resume from")
    if (out / "model").exists():
        raise refused(out / "model", "exists already: this training is done")
    if saved:
        tensors, state, begun, seconds = load_state(saved[-1], recipe, tensors, state)
        if jax.process_count() > 1 and (first := agreed(begun)) != begun:
            raise refused(out, f"ends with step {begun}, that of process 0 with {first}: all processes need one folder")
    else:
        with os_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        for name, data in source.files.items() if writes else ():
            with new_file(out / name, replace=True) as staged:
                staged.write_bytes(data)
    ops = remat(WHOLE) if recipe.remat else WHOLE
    platform = default_device().platform
    step = compile_step(recipe.config, transform, ops=ops, dtype=np.dtype(recipe.dtype), platform=platform, over=over)
    rows, streams_at_once = rows_at_once(platform) * devices, STREAMS
    context = recipe.config.context
    zeros = jax.jit(lambda: (jax.tree.map(jnp.zeros_like, tensors), jnp.zeros(())))
    total = jax.jit(lambda *streams: jax.tree.map(lambda *sums: sum(sums), *streams))
    on_devices = over.documents if over else np.asarray
    if over:
        zeros = partial(over.place, jax.tree.map(np.zeros_like, (tensors, np.zeros((), np.float32))))
        tensors, state = over.place((tensors, state))
        streams_at_once = 1  # since devices would meet in two programs in different orders, and wait forever

    def add_up(parts: list[Batch]) -> tuple[Tensors, Any]:
        """Sum the gradients and the nats of all predictions of `parts`."""
        sums = zeros()
        for part in parts:
            sums = step.add_gradient(*sums, tensors, *map(on_devices, (part.ids, part.weights)))
        return jax.block_until_ready(sums)

    # The documents of the next step are made while this one is computed, which takes as long on a GPU.
    pool, writer = ThreadPoolExecutor(streams_at_once), ThreadPoolExecutor(1)
    following = writer.submit(source.training, begun, recipe)
    for number in range(begun, recipe.steps):
        start = time.perf_counter()
        chosen = following.result()
        following = writer.submit(source.training, number + 1, recipe)
        parts = list(batches(chosen, rows=even(min(recipe.batch, rows), devices), context=context))
        count = sum(int(part.counted.sum()) for part in parts)
        if not count:
            raise ValueError(f"step {number + 1} has nothing to learn within {context} tokens: try a larger context")
        streams = pool.map(add_up, (parts[first::streams_at_once] for first in range(streams_at_once)))
        gradient, nats = total(*streams)
        tensors, state = step.update(tensors, state, gradient, np.float32(count))
        loss = float(nats) / count
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss of step {number + 1} is {loss}: try a smaller --lr")
        took = time.perf_counter() - start
        seconds += took
        done = number + 1
        taken = StepReport(done, loss, sum(min(len(d.ids), context) for d in chosen) / took, seconds)
        report(taken)
        if done % eval_every == 0 or done == recipe.steps:
            score = partial(_score, step.score, on_devices)
            evaluation = evaluate(tensors, recipe.config, source, score=score, rows=rows)
            report(taken._replace(evaluation=evaluation))
        if done % save_every == 0 or done == recipe.steps:
            held: tuple[Tensors, Any] = over.whole((tensors, state)) if over else (tensors, state)
            if writes:
                save_state(out, done, seconds, recipe, *held)
    weights = over.whole(tensors) if over else tensors
    if writes:
        write_model(out, recipe, source, weights)
    return out / "model"


def _score(score: Callable, on_devices: Callable, tensors: Tensors, ids: np.ndarray, importance: np.ndarray) -> Any:
    return score(tensors, on_devices(ids), on_devices(importance))


def parameters(config: Config) -> int:
    """Count the weights of a model."""
    return sum(int(np.prod(shape)) for shape in tensor_shapes(config).values())
