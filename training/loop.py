"""The training loop: starts anew or from the last checkpoint, and takes the steps of a task.

    DIR/step-00001200.safetensors   the last two checkpoints: trained tensors and optimizer

The documents of a step depend only on the task and the step's number. So a run that was killed and resumed ends with
the same weights as an uninterrupted one.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from llamaspec.model.checkpoints.checkpoint import os_errors, refused
from llamaspec.model.checkpoints.staging import new_file
from llamaspec.model.device import default_device
from llamaspec.model.parallel.processes import agreed
from llamaspec.training.parallel import Spread
from llamaspec.training.recipe import check_at_least_one
from llamaspec.training.saving import checkpoints, load_state, save_state
from llamaspec.training.steps import Sums, Tensors, TrainingFunctions

STREAMS = 2  # batches computed in parallel, because one batch cannot keep two cores busy
MOST_SKIPPED = 3  # steps in a row whose gradient is not finite


def steps_ahead(platform: str) -> int:
    """Return how many steps we submit to the device before we read the loss of an earlier step.

    If we read each loss immediately, a GPU would wait in every step while the host makes batches and starts programs.
    On a CPU the host is the device, so submitting early gains nothing.
    """
    return 0 if platform == "cpu" else 1


class Work(NamedTuple):
    """The documents of a step."""

    batches: Sequence[tuple[np.ndarray, ...]]  # the arguments of the loss
    divisor: float  # of the gradient and the reported sums: predictions, pairs or answers
    tokens: int  # without padding


class Task(NamedTuple):
    """A training: everything that the loop needs to run it."""

    steps: int
    tensors: Tensors  # to train, at the start
    frozen: Any  # other arrays that the loss reads
    transform: optax.GradientTransformation
    step: TrainingFunctions
    sums: tuple[str, ...]  # the names of the sums that the loss reports
    documents: Callable[[int, Tensors | None], Work]  # returns the documents of a step; steps count from 0
    identity: Mapping[str, Any]  # everything that the weights depend on, as JSON types; a resumed run needs the same
    evaluate: Callable[[Tensors], Any] | None = None  # scores the tensors
    files: Mapping[str, bytes] = {}  # name: bytes of a file to write into the folder at the start
    over: Spread | None = None  # several devices
    draws: bool = False  # whether the documents depend on the tensors, as samples do


class StepReport(NamedTuple):
    """The state of a training after a step."""

    step: int  # completed steps
    loss: float  # per prediction, pair or answer of this step
    rate: float  # tokens per second, without padding
    seconds: float  # time spent in steps, without evaluations, checkpoints and interruptions
    measures: Mapping[str, float] = {}  # what the objective reports besides the loss, by name
    skipped: bool = False  # the gradient was not finite, so the weights stayed as they were
    evaluation: Any = None


class _Submitted(NamedTuple):
    """A step that we have submitted to the device and that may still be running."""

    step: int
    sums: Sums
    work: Work
    finite: jax.Array


def run(
    task: Task,
    out: str | Path,
    *,
    resume: bool = False,
    eval_every: int = 200,
    save_every: int = 100,
    report: Callable[[StepReport], object] = lambda step: None,
) -> Tensors:
    """Take the steps of a task, and return the trained tensors.

    With `resume`, we continue from the last checkpoint in `out`. With several processes, all of them read `out`, and
    only the first writes there. We call `report` after each step (on a GPU, once the next step has started) and after
    each evaluation. Raises CheckpointError for an unusable file. Raises FloatingPointError if `MOST_SKIPPED` gradients
    in a row, or the weights to save, are not finite. Each message is one line.
    """
    out = Path(out)
    check_at_least_one(eval_every=eval_every, save_every=save_every)
    tensors, state, begun, seconds = _start(task, out, resume=resume)
    if task.over:
        tensors, state = task.over.place((tensors, state))
    loop = _Loop(task, tensors, state, seconds, report)
    for number in range(begun, task.steps):
        done = number + 1
        evaluates, saves = (done % every == 0 or done == task.steps for every in (eval_every, save_every))
        loop.submit(number)
        latest = loop.finish(everything=evaluates or saves)
        if evaluates and task.evaluate and latest:
            report(latest._replace(evaluation=task.evaluate(loop.tensors)))
        # During skipped steps the weights do not change, so the checkpoints stay, too.
        if saves and (not loop.skipped or done == task.steps):
            loop.save(out, done)
        if evaluates or saves:
            loop.since = time.perf_counter()  # the time of a step does not include evaluations and checkpoints
    return task.over.gather(loop.tensors) if task.over else loop.tensors


def _start(task: Task, out: Path, *, resume: bool) -> tuple[Tensors, Any, int, float]:
    """Return tensors, optimizer state, completed steps and seconds of a new training, or of the last checkpoint."""
    tensors = task.tensors
    state = task.transform.init(tensors)
    saved = checkpoints(out)
    if saved and not resume:
        raise refused(out, "already contains a training run: continue it with --resume, or choose a different --out")
    if resume and not saved:
        raise refused(out, "contains no checkpoint that --resume could continue")
    if saved:
        tensors, state, begun, seconds = load_state(saved[-1], task.identity, tensors, state)
        if jax.process_count() > 1 and (first := agreed(begun)) != begun:
            raise refused(
                out,
                f"has checkpoints up to step {begun}, but process 0 sees step {first}: all processes need the same "
                "--out folder",
            )
        return tensors, state, begun, seconds
    with os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    for name, data in task.files.items() if jax.process_index() == 0 else ():
        with new_file(out / name, replace=True) as staged:
            staged.write_bytes(data)
    return tensors, state, 0, 0.0


class _Loop:
    """The state of a training that is running."""

    def __init__(self, task: Task, tensors: Tensors, state: Any, seconds: float, report: Callable):
        self.tensors, self.skipped, self.since = tensors, 0, time.perf_counter()
        self._task, self._state, self._seconds, self._report = task, state, seconds, report
        self._ahead = steps_ahead(default_device().platform)
        # Devices could run two programs in different orders, and wait for each other forever.
        self._streams = 1 if task.over else STREAMS
        zeros = lambda: (jax.tree.map(jnp.zeros_like, tensors), {name: jnp.zeros(()) for name in task.sums})  # noqa: E731
        shardings = task.over.shardings((tensors, dict.fromkeys(task.sums, np.float32(0)))) if task.over else None
        self._zeros = jax.jit(zeros, out_shardings=shardings)
        self._total = jax.jit(lambda *streams: jax.tree.map(lambda *sums: sum(sums), *streams))
        self._pool, self._writer = ThreadPoolExecutor(self._streams), ThreadPoolExecutor(1)
        self._next: Future[Work] | None = None  # the documents of the next step to submit
        self._waiting: deque[_Submitted] = deque()

    def submit(self, number: int) -> None:
        """Start the step `number` on the device."""
        task, work = self._task, self._documents(number)
        parts = (work.batches[first :: self._streams] for first in range(self._streams))
        side_by_side: Any = map if self._ahead else self._pool.map  # ahead of the device, programs run in order
        gradient, sums = self._total(*side_by_side(self._add_up, parts))
        count = np.float32(work.divisor)
        self.tensors, self._state, finite = task.step.update(self.tensors, self._state, gradient, count)
        self._waiting.append(_Submitted(number + 1, sums, work, finite))

    def _documents(self, number: int) -> Work:
        """Return the documents of a step, and let a thread make the documents of the next step during this one."""
        if self._task.draws:
            return self._task.documents(number, self.tensors)
        work = self._next.result() if self._next else self._task.documents(number, None)
        if number + 1 < self._task.steps:
            self._next = self._writer.submit(self._task.documents, number + 1, None)
        return work

    def _add_up(self, batches: Sequence[tuple[np.ndarray, ...]]) -> tuple[Tensors, Sums]:
        """Add up the gradients of several batches, and the sums to report."""
        task, totals = self._task, self._zeros()
        for batch in batches:
            arrays = map(task.over.documents if task.over else np.asarray, batch)
            totals = task.step.add_gradient(*totals, self.tensors, task.frozen, *arrays)
        return totals if self._ahead else jax.block_until_ready(totals)

    def finish(self, *, everything: bool) -> StepReport | None:
        """Wait for submitted steps, and report each. Returns the last report.

        Unless `everything` is set, up to `steps_ahead` of the latest steps may still be running.
        """
        latest = None
        while len(self._waiting) > (0 if everything else self._ahead):
            latest = self._finish(self._waiting.popleft())
        return latest

    def _finish(self, submitted: _Submitted) -> StepReport:
        means = {name: float(value) / submitted.work.divisor for name, value in submitted.sums.items()}
        finite = bool(submitted.finite)
        self.skipped = 0 if finite else self.skipped + 1
        now = time.perf_counter()
        took, self.since = now - self.since, now
        self._seconds += took
        loss, rate = means.pop("loss"), submitted.work.tokens / took
        step_report = StepReport(submitted.step, loss, rate, self._seconds, means, skipped=not finite)
        self._report(step_report)
        if self.skipped == MOST_SKIPPED:
            first = submitted.step - MOST_SKIPPED + 1
            what = f"the gradients of steps {first} to {submitted.step} are not finite"
            raise FloatingPointError(f"{what}: start again with a different --out and a smaller --lr")
        return step_report

    def save(self, out: Path, step: int) -> None:
        """Write a checkpoint. For NaN or infinity, raises FloatingPointError and keeps the previous checkpoints."""
        over = self._task.over
        tensors, state = over.gather((self.tensors, self._state)) if over else (self.tensors, self._state)
        if jax.process_index() == 0:
            save_state(out, step, self._seconds, self._task.identity, tensors, state)
