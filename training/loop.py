"""The training loop: starts anew or from the last checkpoint, and writes a directory with the model.

    DIR/tokenizer.model, chat_template.jinja …   the model's files
    DIR/step-00001200.safetensors              the last two checkpoints: weights and optimizer
    DIR/model/                                 at the end: the model in bfloat16, for `load`

The documents of a step depend only on the seed and the step's number. So a run that was killed and resumed ends with
the same weights as an uninterrupted one.
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
from llamaspec.training.evaluation import HeldOutLoss, evaluate, rows_at_once
from llamaspec.training.objective import WHOLE_ATTENTION, Tensors, compile_step, initial_tensors, optimizer, remat
from llamaspec.training.parallel import even, spread
from llamaspec.training.recipe import Recipe, check_at_least_one, check_recipe
from llamaspec.training.saving import checkpoints, load_state, save_state, write_model

STREAMS = 2  # batches computed in parallel: a single batch leaves two cores partly idle


def steps_ahead(platform: str) -> int:
    """Choose how many steps to submit to the device before we read the loss of an earlier one.

    If we read each loss at once, a GPU would wait in every step while the host makes batches and starts programs. On a
    CPU the host is the device, so nothing is gained.
    """
    return 0 if platform == "cpu" else 1


class StepReport(NamedTuple):
    """The state of a training after a step."""

    step: int  # completed steps
    loss: float  # nats per counted token of this step
    rate: float  # tokens per second, without padding
    seconds: float  # from the start of the training, without evaluations, checkpoints and interruptions
    evaluation: HeldOutLoss | None = None


class _Begun(NamedTuple):
    """A step that was submitted to the device and may still be running."""

    step: int
    nats: jax.Array  # the sum over all predictions of the step
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
    """Train, and return the directory of the model.

    `resume` continues from the last checkpoint in `out`. `devices` share the documents of a step. With `fsdp` they also
    share weights and optimizer state, otherwise each device has a copy. With several processes, all read `out` and only
    the first writes there. We call `report` after each step (on a GPU, once the next one has started) and after each
    evaluation. Raises CheckpointError for an unusable file, ValueError for an invalid recipe, and FloatingPointError
    for a loss that is not finite, each with a one-line message.
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
        raise refused(out, "contains a training already: --resume continues it")
    if resume and not saved:
        raise refused(out, "contains no checkpoint to resume from")
    if (out / "model").exists():
        raise refused(out / "model", "exists already: this training is done")
    if saved:
        tensors, state, begun, seconds = load_state(saved[-1], recipe, tensors, state)
        if jax.process_count() > 1 and (first := agreed(begun)) != begun:
            raise refused(
                out, f"ends with step {begun}, but process 0 has step {first}: all processes need the same folder"
            )
    else:
        with os_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        for name, data in source.files.items() if writes else ():
            with new_file(out / name, replace=True) as staged:
                staged.write_bytes(data)
    ops = remat(WHOLE_ATTENTION) if recipe.remat else WHOLE_ATTENTION
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
        streams_at_once = 1  # devices could run two programs in different orders, and wait for each other forever
    ahead = steps_ahead(platform)
    pool, writer = ThreadPoolExecutor(streams_at_once), ThreadPoolExecutor(1)
    side_by_side: Any = map if ahead else pool.map  # if the host runs ahead, the device runs programs in order

    def add_up(parts: list[Batch]) -> tuple[Tensors, Any]:
        """Sum the gradients and the nats of all predictions of `parts`."""
        sums = zeros()
        for part in parts:
            sums = step.add_gradient(*sums, tensors, *map(on_devices, (part.ids, part.weights)))
        return sums if ahead else jax.block_until_ready(sums)

    def finished(step_begun: _Begun) -> StepReport:
        """Wait for a step, and report it."""
        nonlocal seconds, since
        loss = float(step_begun.nats) / step_begun.predictions
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss of step {step_begun.step} is {loss}: try a smaller --lr")
        now = time.perf_counter()
        took, since = now - since, now
        seconds += took
        finished_steps = StepReport(step_begun.step, loss, step_begun.tokens / took, seconds)
        report(finished_steps)
        return finished_steps

    # We make the next step's documents during this step; on a GPU both take equally long.
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
        count_due = len(waiting) if evaluates or saves else max(0, len(waiting) - ahead)
        finished_steps = [finished(waiting.popleft()) for _ in range(count_due)]
        if evaluates:
            score = partial(_score, step.score, on_devices)
            evaluation = evaluate(tensors, recipe.config, source, score=score, rows=rows)
            report(finished_steps[-1]._replace(evaluation=evaluation))
        if saves:
            complete: tuple[Tensors, Any] = over.gather((tensors, state)) if over else (tensors, state)
            if writes:
                save_state(out, done, seconds, recipe, *complete)
        if evaluates or saves:
            since = time.perf_counter()  # evaluations and checkpoints do not count as time of a step
    weights = over.gather(tensors) if over else tensors
    if writes:
        write_model(out, recipe, source, weights)
    return out / "model"


def _score(score: Callable, on_devices: Callable, tensors: Tensors, ids: np.ndarray, importance: np.ndarray) -> Any:
    return score(tensors, on_devices(ids), on_devices(importance))


def parameters(config: Config) -> int:
    """Count the weights of a model."""
    return sum(int(np.prod(shape)) for shape in tensor_shapes(config).values())
