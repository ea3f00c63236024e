"""Campaigns: verify several contracts, each with a candidate in its own process, for the command line."""

import itertools
import os
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing import active_children, get_context
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn, Protocol, runtime_checkable

from llamaspec.verify.algebra.separate import Task, compare
from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import NoVerdict, Worker, check_seconds
from llamaspec.verify.candidates.process import ENDING, kill_all
from llamaspec.verify.catalogue import CONTRACTS, contract_for
from llamaspec.verify.contract import Contract
from llamaspec.verify.draws.domain import narrowed
from llamaspec.verify.draws.drawing import uniform
from llamaspec.verify.judging.examination import Examination, examine, takes
from llamaspec.verify.judging.formula import ALGEBRA, DIFFERENT
from llamaspec.verify.judging.judge import Finding
from llamaspec.verify.judging.runner import Progress, Report, unseen, verify
from llamaspec.verify.judging.timing import ROUNDS, timed
from llamaspec.verify.loose import dtypes_for, loosened
from llamaspec.verify.reports import replay as replays
from llamaspec.verify.reports.replay import Replay
from llamaspec.verify.reports.report import counterexample

SHAPES = 64  # most different shapes for jax, which compiles each
RETRIES = 16  # draws that we try with a dtype if all calls raised
COMPARING = 1 / 3  # share of the seconds for the comparison of formulas
LINES = 10  # most lines of a candidate's output that we show


@runtime_checkable
class Stage(Protocol):
    """Starts a progress bar with `total` steps. If `total` is None, it has one step per example or job of the run."""

    def __call__(self, stage: str, total: int | None = None, /) -> Progress: ...


@dataclass(frozen=True)
class Campaign:
    """Options of a run: how to call candidates, and for how long."""

    seed: int
    arrays: str = "jax"
    dtypes: tuple[str, ...] = ("float32",)
    extra_dtypes: tuple[str, ...] = ()  # not named by the user: fewer draws, and no verdict if a candidate refuses them
    device: str | None = None
    contiguous: bool = False  # candidates get only contiguous arrays
    python: str = sys.executable
    examples: int = 200
    seconds: float = 60.0  # limit for each op and dtype
    timeout: float = 60.0  # limit for each call
    shapes: int | None = None
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    folder: Path | None = None  # folder for replay files; None writes none
    deterministic: bool = False  # results that differ in their bits for the same inputs are a fault
    own: Mapping[str, Contract] | None = None  # the user's contracts, instead of ours
    contract_file: str | None = None  # the file of the user's contracts
    loose: str | None = None  # rounding of a weaker contract, such as bfloat16 or tf32x3
    timed: bool = False  # time a candidate if its contract holds
    against: str | None = None  # another candidate, to time for comparison
    algebra: bool = False  # also compare formulas, without rounding
    at: Mapping[str, Sequence[Any]] = field(
        default_factory=dict
    )  # sizes for timing; by default the largest that are drawn

    def fewer(self) -> "Campaign":
        """Return this campaign with a third of its draws and its time. We use it for extra dtypes."""
        shapes = None if self.shapes is None else -(-self.shapes // 3)
        return replace(self, examples=-(-self.examples // 3), seconds=self.seconds / 3, shapes=shapes)

    def contract(self, op: str) -> Contract:
        """Look up the contract of `op`; if `loose` is set, weaken it. Raises ValueError if there is no contract."""
        contract = contract_for(op, self.own or CONTRACTS)
        return loosened(contract, self.loose) if self.loose else contract

    def worker(self, candidate: str) -> Worker:
        """Make the process for a candidate."""
        return Worker(
            candidate,
            arrays=self.arrays,
            device=self.device,
            contiguous=self.contiguous,
            python=self.python,
            timeout=self.timeout,
        )


@dataclass(frozen=True)
class CandidateJob:
    """An op, a candidate for it, and the dtypes and draws that the candidate supports."""

    op: str
    candidate: str
    arrays: str | None = None  # None: the campaign's
    dtypes: tuple[str, ...] = ()  # supported dtypes; empty: all
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    shapes: int | None = None  # most different shapes
    share: float = 1.0  # share of the campaign's seconds
    timeout: float = 0.0  # seconds for a call, if more than the campaign's

    def within(self, campaign: Campaign) -> Campaign:
        """Return the campaign with this job's limits.

        If the job supports no dtype of the campaign, we use the job's dtypes instead.
        """
        dtypes = tuple(name for name in campaign.dtypes if not self.dtypes or name in self.dtypes)
        arrays = self.arrays or campaign.arrays
        return replace(
            campaign,
            arrays=arrays,
            dtypes=dtypes or self.dtypes,
            extra_dtypes=tuple(
                name for name in campaign.extra_dtypes if not self.dtypes or (name in self.dtypes and dtypes)
            ),
            seconds=self.share * campaign.seconds,
            timeout=max(self.timeout, campaign.timeout),
            shapes=campaign.shapes or self.shapes or (SHAPES if arrays == "jax" else None),
            only={**self.only, **campaign.only},
        )


@runtime_checkable
class Listed(Protocol):
    """A function that implements `op` with the definition's signature, as listed in `model.candidates.table`."""

    @property
    def op(self) -> str: ...
    @property
    def function(self) -> str: ...
    @property
    def only(self) -> Mapping[str, Sequence[Any]]: ...
    @property
    def dtypes(self) -> tuple[str, ...]: ...
    @property
    def kernel(self) -> bool: ...


def jobs_for(ops: Sequence[str], candidate: str) -> list[CandidateJob]:
    """Make jobs for the candidate MODULE:FUNCTION, or for the functions of MODULE with the names `ops`.

    MODULE may also be the path of a file. Raises ValueError if one function is named for several ops.

    >>> [job.candidate for job in jobs_for(["add", "softmax"], "mine.py")]
    ['mine.py:add', 'mine.py:softmax']
    """
    if ":" not in candidate:
        return [CandidateJob(op, f"{candidate}:{op}") for op in ops]
    if len(ops) != 1:
        raise ValueError("--candidate names one function: name one op. For several ops, give only the module")
    return [CandidateJob(ops[0], candidate)]


def jobs_of(ops: Sequence[str], listed: Iterable[Listed]) -> list[CandidateJob]:
    """Make a job for every candidate in `listed` that implements one of `ops`, in the order of `ops`."""
    patient: dict[str, Any] = {"shapes": 4, "timeout": 600.0}  # an interpreted kernel takes seconds per shape
    known = list(listed)
    return [
        CandidateJob(
            op,
            function.function,
            dtypes=function.dtypes,
            only=function.only,
            share=1 / 4,
            **(patient if function.kernel else {}),
        )
        for op in ops
        for function in known
        if function.op == op
    ]


Answer = tuple[Report, list[str]]  # a report and its lines for a person


def run(jobs: Sequence[CandidateJob], campaign: Campaign, *, progress: Stage) -> Iterator[Answer]:
    """Verify the candidate of each job, one after the other.

    Raises ImportError for a candidate that cannot be imported, and ValueError for a campaign that cannot run. Raises
    NoVerdict, a subclass of ValueError, if no verdict is possible.
    """
    _check(jobs, campaign)
    for job in jobs:
        yield from _run(job, campaign, progress)


def run_side_by_side(
    jobs: Sequence[CandidateJob], campaign: Campaign, *, at_once: int, progress: Stage
) -> Iterator[Answer]:
    """Run jobs in parallel processes, `at_once` at a time; `progress` counts finished jobs."""
    _check(jobs, campaign)
    earlier = set(active_children())
    # Spawn processes, because a process that imported jax cannot be forked.
    pool = ProcessPoolExecutor(at_once, mp_context=get_context("spawn"), initializer=_exit_on_sigterm)
    try:
        # Only this process handles Ctrl-C. The workers inherit that SIGINT is blocked.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        tasks = [pool.submit(_run_all, job, campaign) for job in jobs]
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        done = progress("ops")
        for count, task in enumerate(tasks, 1):
            yield from task.result()
            done(count)
    except BaseException:  # do not wait for running jobs: end them and their candidates
        pool.shutdown(wait=False, cancel_futures=True)
        workers = set(active_children()) - earlier
        for process in workers:
            process.terminate()
        for process in workers:
            process.join(ENDING)
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _exit_on_sigterm() -> None:
    """Make a pool process end its candidate on SIGTERM before it exits, even if a second SIGTERM arrives."""

    def end(*_: object) -> NoReturn:
        kill_all()
        os._exit(128 + signal.SIGTERM)

    def handle(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        # Python ignores an exception that is raised inside a callback of the garbage collector; hypothesis has one.
        sys.unraisablehook = end
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, handle)


def _check(jobs: Sequence[CandidateJob], campaign: Campaign) -> None:
    """Raise ValueError for an invalid time limit, dtype or `--set` value, before anything runs."""
    check_seconds(campaign.seconds)
    for name in (*campaign.dtypes, *campaign.extra_dtypes):
        precision(name)
    for job in jobs:
        narrowed(campaign.contract(job.op), {**job.within(campaign).only, **campaign.at})
    if campaign.against:
        if any(job.candidate == campaign.against for job in jobs):
            raise ValueError(f"--against {campaign.against} is the candidate itself: name a different candidate")
        with campaign.worker(campaign.against) as rival:
            rival.start()


def _run_all(job: CandidateJob, campaign: Campaign) -> list[Answer]:
    try:
        return list(_run(job, campaign, unseen))
    except SystemExit:  # otherwise the pool gives this process the next job
        os._exit(1)


def _run(job: CandidateJob, campaign: Campaign, progress: Stage) -> Iterator[Answer]:
    contract, campaign = campaign.contract(job.op), job.within(campaign)
    violated = False
    with campaign.worker(job.candidate) as worker:
        worker.start()
        for dtype in campaign.dtypes:
            report = _verified(contract, worker, dtype, campaign, progress)
            report, printed = _answer(report, contract, job, campaign)
            violated = violated or report.outcome == "violated"
            if campaign.timed and report.outcome == "within bounds":
                report, lines = _timed(contract, worker, report, campaign, progress)
                printed += lines
            yield report, printed
        for dtype in campaign.extra_dtypes if not violated else ():
            before = worker.answers
            try:
                report = _verified(contract, worker, dtype, campaign.fewer(), progress)
            except NoVerdict as error:
                report = _not_taken(contract, worker, dtype, campaign, str(error))
            finding = report.worst.finding
            if finding and finding.kind == "raised" and worker.answers == before:
                draws = itertools.islice(uniform(contract, None, campaign.only, seed=campaign.seed), RETRIES)
                if not takes(contract, worker, precision(dtype), draws):
                    report = _not_taken(contract, worker, dtype, campaign, f"raised {finding.message}")
            yield _answer(report, contract, job, campaign)


def _verified(contract: Contract, worker: Worker, dtype: str, campaign: Campaign, progress: Stage) -> Report:
    report = verify(
        contract,
        worker,
        precision=precision(dtype),
        examples=campaign.examples,
        seed=campaign.seed,
        seconds=campaign.seconds,
        shapes=campaign.shapes,
        only=campaign.only,
        deterministic=campaign.deterministic,
        progress=progress(f"{contract.name} {dtype}"),
    )
    return replace(report, output_lines=worker.output_lines, contiguous=campaign.contiguous)


def _answer(report: Report, contract: Contract, job: CandidateJob, campaign: Campaign) -> Answer:
    """Save a replay of the counterexample, compare formulas, and write the lines of the report."""
    replay = _save(contract, report, campaign)
    report = _compared(report, job, campaign)
    return report, _lines(report, contract, replay=replay)


def _compared(report: Report, job: CandidateJob, campaign: Campaign) -> Report:
    """With `--algebra`, compare the candidate's formula with the definition.

    A difference is a violation, even if all results are within their bounds.
    """
    if not campaign.algebra or report.outcome == "not judged":
        return report
    task = Task(
        op=job.op,
        candidate=job.candidate,
        dtype=report.dtype,
        seed=campaign.seed,
        seconds=campaign.seconds * COMPARING,
        contract_file=campaign.contract_file,
        only=campaign.only,
    )
    formula = compare(task)
    report = replace(report, formula=formula)
    if formula.outcome != DIFFERENT or report.outcome == "violated":
        return report
    hidden = "all results are within their bounds: rounding hides the difference"
    condition = hidden if report.outcome == "within bounds" else "the results are suspicious, too"
    finding = Finding(ALGEBRA, formula.message, condition)
    return replace(report, worst=Examination(formula.draw, report.worst.hard, report.worst.alarm, finding))


def _timed(contract: Contract, worker: Worker, report: Report, campaign: Campaign, progress: Stage) -> Answer:
    """Time the candidate, and also the candidate of --against. If timing fails, keep the verdict and add the reason."""
    with ExitStack() as stack:
        rivals = [stack.enter_context(campaign.worker(campaign.against))] if campaign.against else []
        try:
            timing = timed(
                contract,
                [worker, *rivals],
                precision(report.dtype),
                only={**campaign.only, **campaign.at},
                seed=campaign.seed,
                limit=campaign.seconds,
                progress=progress(f"{contract.name} {report.dtype}, timed", ROUNDS),
            )
        except NoVerdict as error:
            return report, [f"  {error}"]
    return replace(report, timing=timing), timing.lines()


def _not_taken(contract: Contract, worker: Worker, dtype: str, campaign: Campaign, why: str) -> Report:
    return Report(contract.name, worker.name, dtype, campaign.seed, 0, 0.0, Examination({}), not_taken=why)


def _lines(report: Report, contract: Contract, *, replay: str | None) -> list[str]:
    """Format the lines of a report, and the last lines that the candidate printed."""
    lines = counterexample(report, contract, replay=replay)
    if report.output_lines:
        lines.append(
            "  the last lines that the candidate printed:"
            if len(report.output_lines) > LINES
            else "  the candidate printed:"
        )
        lines += [f"    {line}" for line in report.output_lines[-LINES:]]
    return lines


def again(path: Path, campaign: Campaign, *, candidate: str | None, arrays: str | None) -> Answer:
    """Repeat the call that a replay file describes, or make the same call with a different candidate or array library.

    Raises ValueError for a file that cannot be replayed, and ImportError like `run`.
    """
    saved = replays.load(path)
    contract = campaign.contract(saved.op)
    inputs = precision(dtypes_for(campaign.loose, [saved.dtype])[0] if campaign.loose else saved.dtype)
    replays.check(saved, contract, path)
    start = monotonic()
    with replace(campaign, arrays=arrays or saved.arrays).worker(candidate or saved.candidate) as worker:
        worker.start()
        examination = examine(contract, worker, inputs, saved.draw, deterministic=campaign.deterministic)
        report = Report(
            saved.op,
            worker.name,
            saved.dtype,
            None,
            1,
            monotonic() - start,
            examination,
            compared=examination.compared,
            output_lines=worker.output_lines,
            differs=examination.differs,
            weaker=contract.weaker,
        )
    if examination.finding is None and not examination.compared:
        raise NoVerdict(f"{path}: no verdict, because no number of the result has a bound to compare with")
    return report, _lines(report, contract, replay=None)


def _save(contract: Contract, report: Report, campaign: Campaign) -> str | None:
    """Write a replay file. Return the command that uses it, or the reason why we could not write it."""
    finding = report.worst.finding
    if finding is None or campaign.folder is None:
        return None
    inputs = replays.digest(contract, report.dtype, report.worst.draw)
    saved = Replay(
        op=report.op,
        candidate=report.candidate,
        arrays=campaign.arrays,
        dtype=report.dtype,
        draw=report.worst.draw,
        inputs=inputs,
        finding=f"{finding.kind}: {finding.message}",
    )
    try:
        own = f" --contract {shlex.quote(campaign.contract_file)}" if campaign.contract_file else ""
        own += f" --loose u={campaign.loose}" if campaign.loose else ""
        return f"llamaspec verify --replay {shlex.quote(str(replays.save(saved, campaign.folder)))}{own}"
    except OSError as error:
        return f"no replay file was written: {error.filename or campaign.folder}: {error.strerror}"
