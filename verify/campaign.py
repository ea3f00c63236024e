"""Several contracts, each with a candidate in a process of its own: what the command line asks for."""

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import active_children, get_context
from pathlib import Path
from time import monotonic
from typing import Any

from verify import replay as replays
from verify.candidate import Worker
from verify.catalogue import contract_for
from verify.contract import Contract
from verify.precision import precision
from verify.replay import Replay
from verify.report import counterexample
from verify.runner import Progress, Report, examine, verify

SHAPES = 64  # different shapes at most for jax, which compiles for each


@dataclass(frozen=True)
class Campaign:
    """How candidates are called, and how long."""

    seed: int
    arrays: str = "jax"
    dtypes: tuple[str, ...] = ("float32",)
    device: str | None = None
    python: str = sys.executable
    examples: int = 200
    seconds: float = 60.0  # for each op and dtype
    timeout: float = 60.0  # for each call
    shapes: int | None = None
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    folder: Path | None = None  # for replay files; None writes none

    def worker(self, candidate: str) -> Worker:
        """The process that a candidate runs in."""
        return Worker(
            candidate, arrays=self.arrays, device=self.device, python=self.python, timeout=float(self.timeout)
        )


@dataclass(frozen=True)
class Job:
    """An op, a function for it, and what of a campaign that function is made for."""

    op: str
    candidate: str
    arrays: str | None = None  # None: what the campaign hands over
    dtypes: tuple[str, ...] = ()  # the only ones that it takes, if it does not take all
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    shapes: int | None = None  # and this many different ones at most
    share: float = 1.0  # of the campaign's seconds
    timeout: float = 0.0  # for a call, where that is more than the campaign's

    def within(self, campaign: Campaign) -> Campaign:
        """The campaign as this job takes part in it: in dtypes of its own where it takes none of the others."""
        dtypes = tuple(name for name in campaign.dtypes if not self.dtypes or name in self.dtypes)
        arrays = self.arrays or campaign.arrays
        return replace(
            campaign,
            arrays=arrays,
            dtypes=dtypes or self.dtypes,
            seconds=self.share * campaign.seconds,
            timeout=max(self.timeout, campaign.timeout),
            shapes=campaign.shapes or self.shapes or (SHAPES if arrays == "jax" else None),
            only={**self.only, **campaign.only},
        )


Told = tuple[Report, list[str]]  # and the lines that tell of it


def run(jobs: Sequence[Job], campaign: Campaign, *, progress: Callable[[str], Progress]) -> Iterator[Told]:
    """Hold the candidate of each job to its contract, one after the other.

    Raises ImportError for a candidate that cannot be imported, before it is called, and ValueError for a campaign
    that cannot be run.
    """
    for name in campaign.dtypes:
        precision(name)
    for job in jobs:
        yield from _run(job, campaign, progress)


def run_side_by_side(
    jobs: Sequence[Job], campaign: Campaign, *, at_once: int, progress: Callable[[str], Progress]
) -> Iterator[Told]:
    """`run`, with so many jobs at once; progress is told how many are done."""
    for name in campaign.dtypes:
        precision(name)
    # Fresh processes: what imported jax cannot be forked.
    with ProcessPoolExecutor(at_once, mp_context=get_context("spawn")) as pool:
        # Ctrl-C is for this process: the others inherit that SIGINT is blocked, and are ended below.
        others = active_children()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        tasks = [pool.submit(_run_all, job, campaign) for job in jobs]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done = progress("ops")
        try:
            for count, task in enumerate(tasks, 1):
                yield from task.result()
                done(count)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            for process in active_children():
                if process not in others:
                    process.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _run_all(job: Job, campaign: Campaign) -> list[Told]:
    return list(_run(job, campaign, lambda stage: lambda examples: None))


def _run(job: Job, campaign: Campaign, progress: Callable[[str], Progress]) -> Iterator[Told]:
    contract, campaign = contract_for(job.op), job.within(campaign)
    with campaign.worker(job.candidate) as worker:
        worker.start()
        for dtype in campaign.dtypes:
            report = verify(
                contract,
                worker,
                precision=precision(dtype),
                examples=campaign.examples,
                seed=campaign.seed,
                seconds=float(campaign.seconds),
                shapes=campaign.shapes,
                only=campaign.only,
                progress=progress(f"{job.op} {dtype}"),
            )
            yield report, counterexample(report, contract, replay=_save(contract, report, campaign))


def again(path: Path, campaign: Campaign, *, candidate: str | None, arrays: str | None) -> Told:
    """Call the candidate of a replay file as the file says; or another one, or with the arrays of another library.

    Raises ValueError for a file that cannot be replayed, and ImportError as `run` does.
    """
    saved = replays.load(path)
    contract = contract_for(saved.op)
    wanted = precision(saved.dtype)
    if replays.digest(contract, saved.dtype, saved.draw) != saved.inputs:
        raise ValueError(f"{path}: its draw no longer stands for the same inputs; it was made by another version")
    start = monotonic()
    with replace(campaign, arrays=arrays or saved.arrays).worker(candidate or saved.candidate) as worker:
        worker.start()
        examination = examine(contract, worker, wanted, saved.draw)
    report = Report(saved.op, worker.name, saved.dtype, campaign.seed, 1, monotonic() - start, examination)
    return report, counterexample(report, contract)


def _save(contract: Contract, report: Report, campaign: Campaign) -> str | None:
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
    return str(replays.save(told, campaign.folder))


def choices(texts: Sequence[str]) -> dict[str, list[Any]]:
    """What a person writes to narrow draws. Raises ValueError.

    >>> choices(["dim=128,256", "window=null,3", "hidden=none,every other", "lengths=[1,2],[3]"])
    {'dim': [128, 256], 'window': [None, 3], 'hidden': ['none', 'every other'], 'lengths': [(1, 2), (3,)]}
    """
    chosen = {}
    for text in texts:
        name, _, listed = text.partition("=")
        if not name or not listed:
            raise ValueError(f"a draw is narrowed as NAME=VALUE,VALUE, got {text}")
        try:
            found = json.loads(f"[{listed}]")
        except json.JSONDecodeError:
            found = listed.split(",")
        chosen[name] = [tuple(value) if isinstance(value, list) else value for value in found]
    return chosen
