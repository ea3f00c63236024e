"""Runs the parts of the suite in order, each in a new process, within a common time limit."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from llamaspec.benchmarks.common.report import Row, skipped
from llamaspec.benchmarks.suites.gpu.clock import Deadline

# By default the first process takes most of the GPU's memory, and each process has a NumPy thread for every core.
BESIDE_OTHERS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OPENBLAS_NUM_THREADS": "2"}

CANNOT_RUN = 3  # exit status of a part that cannot run on this machine; its last line gives the reason
GRACE = 5.0
BATCH = 15.0  # grace of a part that compiles several cases for 8 seconds between looks at the clock
PATIENCE = 600.0  # grace of the first part, which must report a missing GPU even on a slow machine
CACHE = "JAX_COMPILATION_CACHE_DIR"
DRY_SECONDS = 600.0  # for each part of a dry run, on a slow machine too
# Cache every program, even one that compiles quickly, as the command does.
KEEP_ALL = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
# JAX does not look for a GPU, and interpreted kernels, which call back into Python, do not wait for a free thread.
ON_A_CPU = {"JAX_PLATFORMS": "cpu", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0", "NPROC": "16"}


@dataclass(frozen=True)
class SuitePart:
    """The work of one process, or of several processes that share it."""

    section: str  # section of the report, and name in benchmarks/suites/gpu/__main__.py
    seconds: float  # time limit; the next part may use the remaining time
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    grace: float = GRACE  # seconds beyond the limit before the process is killed
    starts: bool = False  # whether the part gets its start time, and the compile cache that such parts share
    shares: int = 1  # processes at once that share the work

    def shared_out(self) -> list["SuitePart"]:
        """Split the part into `shares` parts with one process each."""
        if self.shares == 1:
            return [self]
        shares = [{"share": i, "shares": self.shares} for i in range(self.shares)]
        return [replace(self, options={**self.options, **share}, shares=1) for share in shares]

    @property
    def name(self) -> str:
        return ", ".join([self.section, *(f"{name} {value}" for name, value in self.options.items())])


class SectionRow(NamedTuple):
    """A row, and the section of the report that it belongs to."""

    section: str
    row: Row


def plan(suite: str, *, dry: bool, batch: int = 1) -> list[SuitePart]:
    """Plan the parts of a suite: `gpu`, `models`, `kernels`, `variants` or `tuning`.

    The most important part comes first, because the last parts are skipped if the time runs out. All parts together
    take at most 530 seconds. Only the suite `models`, which is one part of `gpu`, uses `batch`.
    """
    if suite == "tuning":
        return [SuitePart("memory", 25, grace=PATIENCE), SuitePart("tuning", 505)]
    if suite == "models":
        return [
            SuitePart("memory", 25, grace=PATIENCE),
            SuitePart("models", 230, {"batch": batch} if batch > 1 else {}),
        ]
    if suite == "variants":
        return [SuitePart("memory", 25, grace=PATIENCE), SuitePart("kernels", 505, {"variants": True}, grace=BATCH)]
    if suite == "kernels":
        # The number of processes is coprime to the number of ops, so that each process has cases of every op.
        shares = 1 if dry else 13
        return [
            SuitePart("memory", 25, grace=PATIENCE),
            SuitePart("right", 150, {"varied": True}, environment=BESIDE_OTHERS, shares=shares, grace=20),
            SuitePart("clearing", 20),
            SuitePart("attention", 25),
            SuitePart("kernels", 310, {"backwards": True}, grace=BATCH),
        ]
    return [
        SuitePart("memory", 25, grace=PATIENCE),
        SuitePart("right", 80, environment=BESIDE_OTHERS, shares=1 if dry else 4),  # mostly compiling
        SuitePart("models", 195),
        SuitePart("attention", 25),
        SuitePart("kernels", 110, grace=BATCH),
        SuitePart("launching", 65),
        SuitePart("starting", 20, {"label": "cold"}, starts=True),
        SuitePart("starting", 10, {"label": "warm"}, starts=True),
    ]


def run_suite(
    suite: str, *, dry: bool, batch: int = 1, progress: Callable[[str, float], object] = lambda stage, share: None
) -> Iterator[SectionRow]:
    """Run a suite.

    Yields every row, starting with the row of the machine. `batch` is the batch size of the suite `models`.

    A part that is killed, dies, or cannot begin in time yields a row that says so. Raises ValueError if the suite
    cannot run on this machine.
    """
    planned = plan(suite, dry=dry, batch=batch)
    clock, planned_seconds, total = Deadline(0), 0.0, sum(part.seconds for part in planned)
    with tempfile.TemporaryDirectory(prefix="llamaspec-bench-") as cache:
        for part in planned:
            progress(part.name, planned_seconds / total)
            planned_seconds += part.seconds
            remaining = DRY_SECONDS if dry else clock.remaining + planned_seconds
            if remaining < part.seconds / 2:
                yield SectionRow(part.section, skipped(part.name))
                continue
            for row in run_shares(part, scale="dry" if dry else "full", seconds=remaining, cache=cache):
                if part.section == "memory" and "skipped" in row.row:
                    raise ValueError(f"the machine could not be measured: {row.row['why']}")
                yield row


def run_shares(part: SuitePart, **how: Any) -> Iterator[SectionRow]:
    """Run all shares of a part at the same time, and yield their rows.

    After an interruption, yields the rows so far, and then raises the exception again.
    """
    shares = part.shared_out()
    results: list[list[SectionRow]] = [[] for _ in shares]
    processes: list[subprocess.Popen] = []
    interrupted: BaseException | None = None

    def run(share: SuitePart, rows: list[SectionRow]) -> None:
        for row in run_part(share, started=processes.append, **how):
            if not interrupted:  # the interruption is reported once, for the whole part
                rows.append(row)

    with ThreadPoolExecutor(len(shares)) as pool:
        try:
            list(pool.map(run, shares, results))
        except (KeyboardInterrupt, SystemExit) as end:
            interrupted = end
            for process in processes:
                process.kill()
    yield from chain(*results)
    if interrupted:
        raise interrupted


def run_part(
    part: SuitePart,
    *,
    scale: str,
    seconds: float,
    cache: str,
    started: Callable[[subprocess.Popen], object] = lambda process: None,
) -> Iterator[SectionRow]:
    """Run a part in a new process, and yield its rows. Calls `started` with the process when it has started.

    Raises ValueError with the part's message if the part cannot run on this machine.
    """
    options = {**part.options, **({"began": time.time()} if part.starts else {})}
    arguments = [part.section, "--scale", scale, "--seconds", str(seconds), "--options", json.dumps(options)]
    paths = [str(Path(__file__).parents[4]), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, **part.environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {CACHE: cache, **KEEP_ALL} if part.starts else {}
    with tempfile.TemporaryFile("w+") as errors:
        late = threading.Event()
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "llamaspec.benchmarks.suites.gpu", *arguments],
            env=environment | (ON_A_CPU if scale == "dry" else {}),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process:
            started(process)
            timer = threading.Timer(seconds + part.grace, lambda: (late.set(), process.kill()))
            timer.start()
            try:
                assert process.stdout
                yield from (SectionRow(part.section, json.loads(line)) for line in process.stdout)
                status = process.wait()
            finally:
                timer.cancel()
                process.kill()  # no-op if it has ended
        errors.seek(0)
        last = next((line for line in reversed(errors.read().splitlines()) if line.strip()), "no message on stderr")
    if status == CANNOT_RUN:
        raise ValueError(last)
    if late.is_set():
        yield SectionRow(part.section, skipped(part.name, "it took too long and was killed"))
    elif status:
        yield SectionRow(part.section, skipped(part.name, f"it ended with {status}: {last}"))
