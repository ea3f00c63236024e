"""Runs of several contracts, each on a candidate in a process of its own: what the command line asks for."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


def run(
    jobs: Sequence[tuple[Contract, str]], campaign: Campaign, *, progress: Callable[[str], Progress]
) -> Iterator[tuple[Report, list[str]]]:
    """Hold the candidate of each job to its contract; gives each report with the lines that tell of it.

    Raises ImportError for a candidate that cannot be imported, before it is called, and ValueError for a campaign
    that cannot be run.
    """
    precisions = [precision(name) for name in campaign.dtypes]
    shapes = campaign.shapes or (SHAPES if campaign.arrays == "jax" else None)
    for contract, candidate in jobs:
        with campaign.worker(candidate) as worker:
            worker.start()
            for wanted in precisions:
                report = verify(
                    contract,
                    worker,
                    precision=wanted,
                    examples=campaign.examples,
                    seed=campaign.seed,
                    seconds=float(campaign.seconds),
                    shapes=shapes,
                    only=campaign.only,
                    progress=progress(f"{contract.name} {wanted.name}"),
                )
                yield report, counterexample(report, contract, replay=_save(contract, report, campaign))


def again(path: Path, campaign: Campaign, *, candidate: str | None) -> tuple[Report, list[str]]:
    """Call the candidate of a replay file, or another one, as the file says.

    Raises ValueError for a file that cannot be replayed, and ImportError as `run` does.
    """
    saved = replays.load(path)
    contract = contract_for(saved.op)
    wanted = precision(saved.dtype)
    if replays.digest(contract, saved.dtype, saved.draw) != saved.inputs:
        raise ValueError(f"{path}: its draw no longer stands for the same inputs; it was made by another version")
    start = monotonic()
    with campaign.worker(candidate or saved.candidate) as worker:
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
