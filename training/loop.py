"""A training from its beginning, or from its last checkpoint, to a directory that holds the model.

    DIR/tokenizer.model, chat_template.jinja …   as the model will have them
    DIR/step-00001200.safetensors              weights and optimizer, the last two; a run goes on from the last
    DIR/model/                                 at the end: what `load` takes, in bfloat16

The documents of a step are a function of the seed and of the step's number. A run that was killed and goes on ends
with the weights of one that was not.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llamaspec.model.checkpoints.checkpoint import os_errors, refused
from llamaspec.model.checkpoints.staging import new_file
from llamaspec.model.device import default_device
from llamaspec.model.parallel.processes import agreed
from llamaspec.model.tensors import tensor_shapes
from llamaspec.reference.config import Config
from llamaspec.training.data import Batch, Source, batches, stops
from llamaspec.training.evaluation import Evaluation, evaluate, rows_at_once
from llamaspec.training.objective import WHOLE, Tensors, compile_step, initial_tensors, optimizer, remat
from llamaspec.training.parallel import even, spread
from llamaspec.training.recipe import Recipe, check_at_least_one, check_recipe
from llamaspec.training.saving import checkpoints, load_state, save_state, write_model

STREAMS = 2  # batches computed side by side: one alone leaves parts of two cores idle


def steps_ahead(platform: str) -> int:
    """Choose how many steps are handed to the device before the loss of an earlier one is read.

    A GPU would wait, in every step, until the host has read the loss, made batches and started programs again. On a CPU
    the host is the device.
    """
    return 0 if platform == "cpu" else 1


class StepReport(NamedTuple):
    """The state of a training after a step."""

    step: int  # steps done
    loss: float  # nats per counted token of the last
    rate: float  # tokens a second, padding not counted
    seconds: float  # since the beginning, pauses not counted
    evaluation: Evaluation | None = None


class _Begun(NamedTuple):
    """A step that the device was given, and may still compute."""

    step: int
    nats: jax.Array  # of all its predictions
    predictions: int
    tokens: int


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
    and the first writes there. `report` is called after each step, on a GPU when the next one has begun, and again
    after each evaluation. Raises CheckpointError where a file cannot be used, ValueError for a recipe that cannot be,
    and FloatingPointError for a loss that is not finite: each a single line.
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
        tensors, state = over.place((tensors, state))
        zeros = jax.jit(zeros, out_shardings=over.shardings((tensors, np.float32(0))))
        streams_at_once = 1  # since devices would meet in two programs in different orders, and wait forever
    ahead = steps_ahead(platform)
    pool, writer = ThreadPoolExecutor(streams_at_once), ThreadPoolExecutor(1)
    side_by_side: Any = map if ahead else pool.map  # a device that the host is ahead of runs programs in their order

    def add_up(parts: list[Batch]) -> tuple[Tensors, Any]:
        """Sum the gradients and the nats of all predictions of `parts`."""
        sums = zeros()
        for part in parts:
            sums = step.add_gradient(*sums, tensors, *map(on_devices, (part.ids, part.weights)))
        return sums if ahead else jax.block_until_ready(sums)

    def finished(one: _Begun) -> StepReport:
        """Wait for a step, and report it."""
        nonlocal seconds, since
        loss = float(one.nats) / one.predictions
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss of step {one.step} is {loss}: try a smaller --lr")
        now = time.perf_counter()
        took, since = now - since, now
        seconds += took
        taken = StepReport(one.step, loss, one.tokens / took, seconds)
        report(taken)
        return taken

    # The documents of the next step are made while this one is computed, which takes as long on a GPU.
    following = writer.submit(source.training, begun, recipe)
    waiting: deque[_Begun] = deque()
    since = time.perf_counter()
    for number in range(begun, recipe.steps):
        chosen = following.result()
        following = writer.submit(source.training, number + 1, recipe)
        parts = list(batches(chosen, rows=even(min(recipe.batch, rows), devices), context=context))
        count = sum(int(part.counted.sum()) for part in parts)
        if not count:
            raise ValueError(f"step {number + 1} has nothing to learn within {context} tokens: try a larger context")
        streams = side_by_side(add_up, (parts[first::streams_at_once] for first in range(streams_at_once)))
        gradient, nats = total(*streams)
        tensors, state = step.update(tensors, state, gradient, np.float32(count))
        done = number + 1
        waiting.append(_Begun(done, nats, count, sum(min(len(d.ids), context) for d in chosen)))
        evaluates, saves = (done % every == 0 or done == recipe.steps for every in (eval_every, save_every))
        due = len(waiting) if evaluates or saves else max(0, len(waiting) - ahead)
        taken = [finished(waiting.popleft()) for _ in range(due)]
        if evaluates:
            score = partial(_score, step.score, on_devices)
            evaluation = evaluate(tensors, recipe.config, source, score=score, rows=rows)
            report(taken[-1]._replace(evaluation=evaluation))
        if saves:
            held: tuple[Tensors, Any] = over.whole((tensors, state)) if over else (tensors, state)
            if writes:
                save_state(out, done, seconds, recipe, *held)
        if evaluates or saves:
            since = time.perf_counter()  # no step takes the time of these
    weights = over.whole(tensors) if over else tensors
    if writes:
        write_model(out, recipe, source, weights)
    return out / "model"


def _score(score: Callable, on_devices: Callable, tensors: Tensors, ids: np.ndarray, importance: np.ndarray) -> Any:
    return score(tensors, on_devices(ids), on_devices(importance))


def parameters(config: Config) -> int:
    """Count the weights of a model."""
    return sum(int(np.prod(shape)) for shape in tensor_shapes(config).values())
