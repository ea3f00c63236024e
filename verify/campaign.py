"""Campaigns: several contracts, each with a candidate in a process of its own, as the command line asks for."""

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
from typing import Any, Protocol, runtime_checkable

from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import NoVerdict, Worker, check_seconds
from llamaspec.verify.candidates.process import ENDING
from llamaspec.verify.catalogue import CONTRACTS, contract_for
from llamaspec.verify.contract import Contract
from llamaspec.verify.draws.domain import narrowed
from llamaspec.verify.draws.drawing import uniform
from llamaspec.verify.judging.examination import Examination, examine, takes
from llamaspec.verify.judging.runner import Progress, Report, unseen, verify
from llamaspec.verify.judging.timing import ROUNDS, timed
from llamaspec.verify.loose import dtypes_for, loosened
from llamaspec.verify.reports import replay as replays
from llamaspec.verify.reports.replay import Replay
from llamaspec.verify.reports.report import counterexample

SHAPES = 64  # different shapes at most for jax, which compiles for each
OTHERS = 16  # draws that a dtype is tried with, where all calls have raised
LINES = 10  # shown at most of those that a candidate printed


@runtime_checkable
class Stage(Protocol):
    """Begins a bar of so many steps; without `total`, of the examples or jobs of the whole."""

    def __call__(self, stage: str, total: int | None = None, /) -> Progress: ...


@dataclass(frozen=True)
class Campaign:
    """How candidates are called, and for how long."""

    seed: int
    arrays: str = "jax"
    dtypes: tuple[str, ...] = ("float32",)
    beside: tuple[str, ...] = ()  # dtypes that nobody asked for: fewer draws, and no verdict where they are not taken
    device: str | None = None
    python: str = sys.executable
    examples: int = 200
    seconds: float = 60.0  # for each op and dtype
    timeout: float = 60.0  # for each call
    shapes: int | None = None
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    folder: Path | None = None  # for replay files; None writes none
    deterministic: bool = False  # other bits for the same inputs are a fault
    own: Mapping[str, Contract] | None = None  # contracts that take the place of ours
    contract_file: str | None = None  # that holds them, where they are one's own
    loose: str | None = None  # dtype of a weaker contract
    timed: bool = False  # where the contract holds
    against: str | None = None  # another candidate that is timed beside it
    at: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # sizes for that; else the largest that are drawn

    def fewer(self) -> "Campaign":
        """The campaign for a dtype that nobody asked for: a third of everything."""
        shapes = None if self.shapes is None else -(-self.shapes // 3)
        return replace(self, examples=-(-self.examples // 3), seconds=self.seconds / 3, shapes=shapes)

    def contract(self, op: str) -> Contract:
        """The contract of an op. Raises ValueError for one that has none, or no weaker one where that is declared."""
        held = contract_for(op, self.own or CONTRACTS)
        return loosened(held, self.loose) if self.loose else held

    def worker(self, candidate: str) -> Worker:
        """The process that a candidate runs in."""
        return Worker(candidate, arrays=self.arrays, device=self.device, python=self.python, timeout=self.timeout)


@dataclass(frozen=True)
class Job:
    """An op, a function for it, and the part of a campaign that the function is made for."""

    op: str
    candidate: str
    arrays: str | None = None  # None: the campaign's
    dtypes: tuple[str, ...] = ()  # the ones that it takes; empty: all
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    shapes: int | None = None  # different shapes at most
    share: float = 1.0  # share of the campaign's seconds
    timeout: float = 0.0  # for a call, where that is more than the campaign's

    def within(self, campaign: Campaign) -> Campaign:
        """The campaign as this job takes part in it: in dtypes of its own where it takes none of the others."""
        dtypes = tuple(name for name in campaign.dtypes if not self.dtypes or name in self.dtypes)
        arrays = self.arrays or campaign.arrays
        return replace(
            campaign,
            arrays=arrays,
            dtypes=dtypes or self.dtypes,
            beside=tuple(name for name in campaign.beside if not self.dtypes or (name in self.dtypes and dtypes)),
            seconds=self.share * campaign.seconds,
            timeout=max(self.timeout, campaign.timeout),
            shapes=campaign.shapes or self.shapes or (SHAPES if arrays == "jax" else None),
            only={**self.only, **campaign.only},
        )


@runtime_checkable
class Listed(Protocol):
    """A function for `op` that is known to be called as the definition is, as `model.candidates.table` lists them."""

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


def jobs_for(ops: Sequence[str], candidate: str) -> list[Job]:
    """Jobs for a candidate called MODULE:FUNCTION, or for the functions of a MODULE that are called as `ops` are.

    A module may be named by its file. Raises ValueError for one function and several ops.

    >>> [job.candidate for job in jobs_for(["add", "softmax"], "mine.py")]
    ['mine.py:add', 'mine.py:softmax']
    """
    if ":" not in candidate:
        return [Job(op, f"{candidate}:{op}") for op in ops]
    if len(ops) != 1:
        raise ValueError("--candidate is one function: name the op that it is, or the module alone for several")
    return [Job(ops[0], candidate)]


def jobs_of(ops: Sequence[str], listed: Iterable[Listed]) -> list[Job]:
    """Jobs for those of the `listed` candidates that are for `ops`, op by op."""
    patient: dict[str, Any] = {"shapes": 4, "timeout": 600.0}  # a kernel in the interpreter takes seconds for a shape
    known = list(listed)
    return [
        Job(op, one.function, dtypes=one.dtypes, only=one.only, share=1 / 4, **(patient if one.kernel else {}))
        for op in ops
        for one in known
        if one.op == op
    ]


Told = tuple[Report, list[str]]  # and the lines that tell of it


def run(jobs: Sequence[Job], campaign: Campaign, *, progress: Stage) -> Iterator[Told]:
    """Hold the candidate of each job to its contract, one after the other.

    Raises ImportError for a candidate that cannot be imported, before it is called, and ValueError for a campaign
    that cannot be run, NoVerdict included.
    """
    _check(jobs, campaign)
    for job in jobs:
        yield from _run(job, campaign, progress)


def run_side_by_side(jobs: Sequence[Job], campaign: Campaign, *, at_once: int, progress: Stage) -> Iterator[Told]:
    """`run`, with so many jobs at once; progress is told how many are done."""
    _check(jobs, campaign)
    others = set(active_children())
    # Fresh processes: one that imported jax cannot be forked.
    pool = ProcessPoolExecutor(at_once, mp_context=get_context("spawn"), initializer=_end_when_told)
    try:
        # Ctrl-C is for this process. SIGINT is blocked in the others from their first instant: they inherit that.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        tasks = [pool.submit(_run_all, job, campaign) for job in jobs]
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        done = progress("ops")
        for count, task in enumerate(tasks, 1):
            yield from task.result()
            done(count)
    except BaseException:  # nobody waits for jobs under way: they end, and their candidates with them
        pool.shutdown(wait=False, cancel_futures=True)
        ours = set(active_children()) - others
        for process in ours:
            process.terminate()
        for process in ours:
            process.join(ENDING)
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _end_when_told() -> None:
    """Let a process of the pool end its candidate before itself, whatever comes meanwhile."""
    signal.signal(signal.SIGTERM, lambda number, _: (signal.signal(number, signal.SIG_IGN), sys.exit(128 + number)))


def _check(jobs: Sequence[Job], campaign: Campaign) -> None:
    """Raise ValueError for a time, a dtype or a narrowed draw that means nothing, before anything runs."""
    check_seconds(campaign.seconds)
    for name in (*campaign.dtypes, *campaign.beside):
        precision(name)
    for job in jobs:
        narrowed(campaign.contract(job.op), {**job.within(campaign).only, **campaign.at})
    if campaign.against:
        if any(job.candidate == campaign.against for job in jobs):
            raise ValueError(f"{campaign.against} is timed beside another candidate, not beside itself")
        with campaign.worker(campaign.against) as other:
            other.start()


def _run_all(job: Job, campaign: Campaign) -> list[Told]:
    try:
        return list(_run(job, campaign, unseen))
    except SystemExit:  # or the pool would hand this process the next job
        os._exit(1)


def _run(job: Job, campaign: Campaign, progress: Stage) -> Iterator[Told]:
    contract, campaign = campaign.contract(job.op), job.within(campaign)
    violated = False
    with campaign.worker(job.candidate) as worker:
        worker.start()
        for dtype in campaign.dtypes:
            report = _verified(contract, worker, dtype, campaign, progress)
            violated = violated or report.outcome == "violated"
            told = _told(report, contract, replay=_save(contract, report, campaign))
            if campaign.timed and report.outcome == "within bounds":
                report, lines = _timed(contract, worker, report, campaign, progress)
                told += lines
            yield report, told
        for dtype in campaign.beside if not violated else ():
            before = worker.answers
            try:
                report = _verified(contract, worker, dtype, campaign.fewer(), progress)
            except NoVerdict as error:
                report = _not_taken(contract, worker, dtype, campaign, str(error))
            finding = report.worst.finding
            if finding and finding.kind == "raised" and worker.answers == before:
                others = itertools.islice(uniform(contract, None, campaign.only, seed=campaign.seed), OTHERS)
                if not takes(contract, worker, precision(dtype), others):
                    report = _not_taken(contract, worker, dtype, campaign, f"raised {finding.message}")
            yield report, _told(report, contract, replay=_save(contract, report, campaign))


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
    return replace(report, said=worker.said)


def _timed(contract: Contract, worker: Worker, report: Report, campaign: Campaign, progress: Stage) -> Told:
    """Time the candidate, and the one beside it; the verdict stays where that cannot be done."""
    with ExitStack() as stack:
        others = [stack.enter_context(campaign.worker(campaign.against))] if campaign.against else []
        try:
            timing = timed(
                contract,
                [worker, *others],
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


def _told(report: Report, contract: Contract, *, replay: str | None) -> list[str]:
    """Lines of a report, and the last ones that the candidate printed."""
    lines = counterexample(report, contract, replay=replay)
    if report.said:
        lines.append("  it printed, at last:" if len(report.said) > LINES else "  it printed:")
        lines += [f"    {line}" for line in report.said[-LINES:]]
    return lines


def again(path: Path, campaign: Campaign, *, candidate: str | None, arrays: str | None) -> Told:
    """Call the candidate of a replay file as the file says; or another one, or with the arrays of another library.

    Raises ValueError for a file that cannot be replayed, and ImportError as `run` does.
    """
    saved = replays.load(path)
    contract = campaign.contract(saved.op)
    wanted = precision(dtypes_for(campaign.loose, [saved.dtype])[0] if campaign.loose else saved.dtype)
    replays.check(saved, contract, path)
    start = monotonic()
    with replace(campaign, arrays=arrays or saved.arrays).worker(candidate or saved.candidate) as worker:
        worker.start()
        found = examine(contract, worker, wanted, saved.draw, deterministic=campaign.deterministic)
        report = Report(
            saved.op,
            worker.name,
            saved.dtype,
            None,
            1,
            monotonic() - start,
            found,
            compared=found.compared,
            said=worker.said,
            differs=found.differs,
            weaker=contract.weaker,
        )
    if found.finding is None and not found.compared:
        raise NoVerdict(f"{path}: no number was compared, which is no verdict")
    return report, _told(report, contract, replay=None)


def _save(contract: Contract, report: Report, campaign: Campaign) -> str | None:
    """Write a replay file, and say how to use it, or why it could not be written: the verdict holds all the same."""
    finding = report.worst.finding
    if finding is None or campaign.folder is None:
        return None
    inputs = replays.digest(contract, report.dtype, report.worst.draw)
    told = Replay(
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
        return f"llamaspec verify --replay {shlex.quote(str(replays.save(told, campaign.folder)))}{own}"
    except OSError as error:
        return f"no replay file was written: {error.filename or campaign.folder}: {error.strerror}"
