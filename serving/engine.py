"""The engine: a thread that repeatedly makes a plan, runs the plan on a device, and delivers the drawn tokens."""

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
from jaxtyping import Bool, Float

from llamaspec.model.options import check_ids
from llamaspec.model.running.session import tokens_at_once
from llamaspec.serving.executor import Executor, PlanResult, Reports, ending_ids
from llamaspec.serving.request import (
    MOST_STOPS,
    NO_WAY_ON,
    DeadEnd,
    Deliver,
    Embedding,
    Event,
    Finished,
    FinishReason,
    PromptLogprobs,
    QueueFull,
    Request,
    Stats,
    Tokens,
)
from llamaspec.serving.scheduler import Limits, Plan, RequestEnd, Scheduler
from llamaspec.serving.watchdog import LOOK, STEP_SECONDS, DeviceHangs, Watchdog

NOT_NUMBERS = "the model computed logits that are not finite numbers"
# Clients get no details, because messages of exceptions may contain paths and other internals.
FAILED = "the engine failed; see the server's log for the cause"
NO_RULE = "the grammar of this answer failed; see the server's log for the cause"

log = logging.getLogger("llamaspec.serving")


@dataclass
class Open:
    """An unfinished request, with the function that delivers its events and what it has delivered so far."""

    request: Request
    deliver: Deliver
    prompt: list[Reports] = field(default_factory=list)  # log-probabilities of the prompt, not delivered yet
    read: int = 0  # prompt tokens whose log-probabilities or hidden states we have
    total: Float[np.ndarray, " dim"] | None = None  # sum of the hidden states of these tokens
    drawn: int = 0  # tokens delivered
    message: str | None = None  # the error message of the request


class BatchingEngine:
    """An `Engine` that runs an executor in its own thread. A lock guards the state that other threads use."""

    def __init__(
        self,
        executor: Executor,
        limits: Limits,
        *,
        vocab: int,
        dim: int,
        eos: frozenset[int],
        adapters: Collection[str] = (),
        step_seconds: float = STEP_SECONDS,
    ):
        """Start the thread. `vocab`, `dim` and `eos` describe the executor's model, and `adapters` are the names of its
        adapters.

        If a step takes more than `step_seconds`, we assume that the device hangs, and the engine fails.
        """
        self.context, self.vocab, self.dim = limits.context, vocab, dim
        self.failed: BaseException | None = None
        self._executor, self._limits, self._eos = executor, limits, eos
        self._adapters = frozenset(adapters)
        self._scheduler = Scheduler(limits)
        self._open: dict[int, Open] = {}
        self._submitted = 0
        self._completion_tokens = 0
        self._finished: Counter[FinishReason] = Counter()
        self._step_seconds = float("inf")
        self._accepts, self._closing = True, False
        self._changed = threading.Condition()
        self._step, self._steps = None, 0  # number of the current step (None: between steps), and how many have begun
        self._watchdog = Watchdog(step_seconds)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Queue a request (see `Engine.submit`)."""
        check_ids(request.prompt, self.vocab)
        check_ids([*request.stop_ids, *request.logit_bias], self.vocab)
        if len(ending_ids(request, self._eos)) > MOST_STOPS:
            raise ValueError(
                f"stop_token_ids: expected at most {MOST_STOPS} ids (including the model's own), got "
                f"{len(ending_ids(request, self._eos))}"
            )
        if request.adapter and request.adapter not in self._adapters:
            raise ValueError(f"adapter: the engine has no adapter named {request.adapter}")
        with self._changed:
            if not self._accepts:
                raise QueueFull(
                    "the engine has failed"
                    if self.failed
                    else "the engine is shutting down and accepts no new requests"
                )
            number = self._submitted
            self._scheduler.submit(number, request, monotonic())
            self._submitted += 1
            self._open[number] = Open(request, deliver)
            self._changed.notify_all()
            return number

    def cancel(self, number: int) -> None:
        """Cancel a request (see `Engine.cancel`)."""
        with self._changed:
            self._scheduler.cancel(number)
            self._changed.notify_all()

    def drain(self, seconds: float) -> bool:
        """Stop accepting requests and wait for the running ones (see `Engine.drain`)."""
        with self._changed:
            self._accepts = False
            ended = self._changed.wait_for(lambda: not self._open, seconds)
            self._cancel_all()
            self._changed.wait_for(lambda: not self._open)
            return ended

    def close(self) -> None:
        """End all requests and the engine's thread (see `Engine.close`)."""
        with self._changed:
            self._accepts, self._closing = False, True
            self._cancel_all()
            self._changed.notify_all()
        # If the device hangs, the thread never ends.
        if threading.current_thread() is not self._thread and not isinstance(self.failed, DeviceHangs):
            self._thread.join()

    def stats(self) -> Stats:
        """Return the engine's counters (see `Engine.stats`)."""
        with self._changed:
            scheduler, pool = self._scheduler, self._scheduler.pool
            return Stats(
                waiting=len(scheduler.waiting),
                running=len(scheduler.running),
                pages_free=len(pool.free),
                pages_held=len(pool.holders),
                pages_cached=len(pool.idle),
                preemptions=scheduler.preemptions,
                prompt_tokens=scheduler.prompt_tokens,
                cached_tokens=scheduler.cached_tokens,
                completion_tokens=self._completion_tokens,
                finished=dict(self._finished),
            )

    def _cancel_all(self) -> None:
        for number in self._open:
            self._scheduler.cancel(number)
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            try:
                log.exception("the engine failed")
            finally:
                self._fail_all(error)
        finally:
            self._ended.set()

    def _watch(self) -> None:
        """Wait until the engine ends. If a step takes too long, fail the engine."""
        while not self._ended.wait(LOOK):
            with self._changed:  # otherwise the step might end between the check and the failure
                if not self._watchdog.look(step=self._step, now=monotonic()):
                    continue
                error = DeviceHangs(f"a step has not finished within {self._watchdog.seconds:g} s")
                self.failed, self._accepts = error, False
            log.error("the device hangs: %s", error)
            return self._tell_all()

    def _fail_all(self, error: BaseException) -> None:
        """Fail the engine with `error`, unless the watchdog has already failed it."""
        with self._changed:
            if self.failed is not None:
                return
            self.failed, self._accepts = error, False
        self._tell_all()

    def _tell_all(self) -> None:
        """End all open requests with an error. We do not use the scheduler, because it may be in a broken state."""
        with self._changed:
            unfinished = [*self._open.values()]
        for job in unfinished:
            with suppress(Exception):
                job.deliver(Finished("error", len(job.request.prompt), job.drawn, 0, FAILED))
        with self._changed:
            self._finished["error"] += len(unfinished)
            self._open.clear()
            self._changed.notify_all()

    def _turn(self) -> bool:
        """Make and run one plan. Returns False once the engine has failed, or is closed and has no open request."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or not self._scheduler.idle)
            if self._closing and self._scheduler.idle:
                return False
            plan = self._scheduler.plan(monotonic(), burst=tokens_at_once(self._step_seconds, self._limits.burst))
            works = bool(plan.chunk or plan.rows)
            if not works:
                self._scheduler.done({})
            jobs = {number: list(job.drawn) for number, job in self._scheduler.running.items()}
            requests = {number: job.request for number, job in self._open.items()}
        self._tell(plan.ended)
        if not works:
            return True
        masks = {
            row.number: self._mask(row.number, jobs[row.number])
            for row in plan.rows
            if requests[row.number].allowed and row.after is None
        }
        began = monotonic()
        self._step, self._steps = self._steps, self._steps + 1
        outcome = self._executor.run(plan, requests, masks)
        with self._changed:
            self._step = None
            if self.failed is not None:  # the watchdog failed the engine during this step
                return False
        if plan.rows and not plan.chunk:
            self._step_seconds = (monotonic() - began) / max(row.steps for row in plan.rows)
        with self._changed:
            news = self._scheduler.done(outcome.draws)
        self._report_prompt(plan, outcome)
        self._report_embedding(plan, outcome)
        for number, tokens, skipped, ended in news:
            if tokens:
                self._deliver_tokens(number, tokens, outcome.reports.get(number), skipped)
            if ended and ended.reason == "error":
                self._open[number].message = NOT_NUMBERS
            if ended:
                self._tell([ended])
        return True

    def _mask(self, number: int, drawn: list[int]) -> Bool[np.ndarray, " vocab"]:
        """Return the mask of tokens that may follow `drawn`, according to the request's function `allowed`.

        If this function raises, the request ends with an error.
        """
        job = self._open[number]
        assert job.request.allowed is not None
        try:
            mask = np.asarray(job.request.allowed(drawn), bool)
            if mask.shape != (self.vocab,) or not mask.any():
                raise ValueError(
                    f"expected a mask [{self.vocab}] that allows a token, got {mask.shape} with {mask.sum()} tokens"
                )
        except DeadEnd:
            self._fail(number, NO_WAY_ON)
            return np.ones(self.vocab, bool)
        except Exception:
            log.exception("request %d: computing the mask of allowed tokens failed", number)
            self._fail(number, NO_RULE)
            return np.ones(self.vocab, bool)
        return mask

    def _fail(self, number: int, message: str) -> None:
        """End one request with an error, and discard what the current plan computes for it."""
        with self._changed:
            self._open[number].message = message
            self._scheduler.cancel(number, "error")

    def _report_prompt(self, plan: Plan, outcome: PlanResult) -> None:
        """Collect log-probabilities of a prompt, and deliver them when the whole prompt is prefilled."""
        if plan.chunk is None or outcome.prompt is None or (job := self._open.get(plan.chunk.number)) is None:
            return
        if plan.chunk.start < job.read or job.read == len(job.request.prompt) - 1:
            return  # the request was preempted, so its prompt is prefilled a second time
        job.prompt.append(outcome.prompt)
        job.read += len(plan.chunk.tokens)
        if job.read == len(job.request.prompt) - 1:
            logprobs = tuple(value for part in job.prompt for value in part.logprobs)
            top = tuple(value for part in job.prompt for value in part.top)
            job.prompt = []
            if np.isfinite(logprobs).all():
                self._deliver(plan.chunk.number, PromptLogprobs(logprobs, top))
            else:
                self._fail(plan.chunk.number, NOT_NUMBERS)

    def _report_embedding(self, plan: Plan, outcome: PlanResult) -> None:
        """Add up the hidden states of a prompt, and deliver its embedding when the whole prompt is prefilled."""
        if plan.chunk is None or outcome.pooled is None or (job := self._open.get(plan.chunk.number)) is None:
            return
        if plan.chunk.start == 0:  # the first chunk, perhaps again after a preemption
            job.read, job.total = 0, np.zeros(outcome.pooled.total.shape)
        assert plan.chunk.start == job.read and job.total is not None
        job.total = job.total + outcome.pooled.total
        job.read += len(plan.chunk.tokens)
        if job.read < len(job.request.prompt):
            return
        event = Embedding(np.asarray(outcome.pooled.last), (job.total / job.read).astype(np.float32))
        if np.isfinite(event).all():
            self._deliver(plan.chunk.number, event)
        else:
            self._fail(plan.chunk.number, NOT_NUMBERS)

    def _deliver_tokens(self, number: int, tokens: tuple[int, ...], reports: Reports | None, skipped: int) -> None:
        self._completion_tokens += len(tokens)
        self._open[number].drawn += len(tokens)
        if reports is None:
            self._deliver(number, Tokens(tokens, None, None))
        else:
            self._deliver(number, Tokens(tokens, reports.logprobs[skipped:], reports.top[skipped:]))

    def _tell(self, ended: Iterable[RequestEnd]) -> None:
        for end in ended:
            message = self._open[end.number].message if end.reason == "error" else None
            event = Finished(end.reason, end.prompt_tokens, end.completion_tokens, end.cached_tokens, message)
            self._deliver(end.number, event)
            with self._changed:
                del self._open[end.number]
                self._finished[end.reason] += 1
                self._changed.notify_all()

    def _deliver(self, number: int, event: Event) -> None:
        """Deliver an event of a request. If its `deliver` function raises, only that request is cancelled."""
        try:
            self._open[number].deliver(event)
        except Exception:
            with self._changed:
                self._scheduler.cancel(number)
