"""The parts of the suite in their order, each in a process of its own, within the time that all of them have."""

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

from benchmarks.gpu.clock import Clock
from benchmarks.report import Row, skipped

# Or the first process takes most of the memory, and each as many threads for NumPy as there are cores.
BESIDE_OTHERS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OPENBLAS_NUM_THREADS": "2"}

CANNOT_RUN = 3  # the exit status of a part that says why on its last line
GRACE = 5.0
BATCH = 15.0  # grace of a part that compiles several cases at once, for 8 seconds, and then looks at the clock
PATIENCE = 600.0  # the first part alone can say that there is no GPU, however slow the machine is
CACHE = "JAX_COMPILATION_CACHE_DIR"
DRY_SECONDS = 600.0  # for each part of a dry run, which is as slow as its machine
# As the command does: every program is kept, however quickly it was compiled.
KEEP_ALL = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
# A GPU is not looked for, and a program that calls back into Python, as interpreted kernels do, does not wait for it.
ON_A_CPU = {"JAX_PLATFORMS": "cpu", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0", "NPROC": "16"}


@dataclass(frozen=True)
class Part:
    """What a process does."""

    section: str  # of the report, and name in benchmarks/gpu/__main__.py
    seconds: float  # that it may take; what it leaves, the next may take
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    grace: float = GRACE  # seconds that it may be late with what it began, before it is ended
    starts: bool = False  # it is told when it was started, and finds what others like it compiled
    shares: int = 1  # processes that it is shared out among, all at once

    def shared_out(self) -> list["Part"]:
        """A part for each share."""
        if self.shares == 1:
            return [self]
        shares = [{"share": i, "shares": self.shares} for i in range(self.shares)]
        return [replace(self, options={**self.options, **share}, shares=1) for share in shares]

    @property
    def name(self) -> str:
        return ", ".join([self.section, *(f"{name} {value}" for name, value in self.options.items())])


class Found(NamedTuple):
    """A row of a section."""

    section: str
    row: Row


def plan(suite: str, *, dry: bool) -> list[Part]:
    """The parts of the suite `gpu`; of `models`, which is one of them; of `kernels` and `variants`, which have what it
    has no time for; of `tuning`.

    What matters most comes first: what is last is left out where time runs out. 530 seconds in all, at most.
    """
    if suite == "tuning":
        return [Part("memory", 25, grace=PATIENCE), Part("tuning", 505)]
    if suite == "models":
        return [Part("memory", 25, grace=PATIENCE), Part("models", 230)]
    if suite == "variants":
        return [Part("memory", 25, grace=PATIENCE), Part("kernels", 505, {"variants": True}, grace=BATCH)]
    if suite == "kernels":
        # As many processes as have no factor in common with the number of ops: each has some cases of all.
        shares = 1 if dry else 13
        return [
            Part("memory", 25, grace=PATIENCE),
            Part("right", 150, {"varied": True}, environment=BESIDE_OTHERS, shares=shares, grace=20),
            Part("clearing", 20),
            Part("attention", 25),
            Part("kernels", 310, {"backwards": True}, grace=BATCH),
        ]
    return [
        Part("memory", 25, grace=PATIENCE),
        Part("right", 80, environment=BESIDE_OTHERS, shares=1 if dry else 4),  # most of it is compiling
        Part("models", 195),
        Part("attention", 25),
        Part("kernels", 110, grace=BATCH),
        Part("launching", 65),
        Part("starting", 20, {"label": "cold"}, starts=True),
        Part("starting", 10, {"label": "warm"}, starts=True),
    ]


def run_suite(
    suite: str, *, dry: bool, progress: Callable[[str, float], object] = lambda stage, share: None
) -> Iterator[Found]:
    """Every row, part by part; the first is the machine's. Raises ValueError where the suite cannot run.

    A part that is ended, dies or cannot begin any more gives a row that says so.
    """
    planned = plan(suite, dry=dry)
    clock, due, total = Clock(0), 0.0, sum(part.seconds for part in planned)
    with tempfile.TemporaryDirectory(prefix="llamaspec-bench-") as cache:
        for part in planned:
            progress(part.name, due / total)
            due += part.seconds
            left = DRY_SECONDS if dry else clock.left + due
            if left < part.seconds / 2:
                yield Found(part.section, skipped(part.name))
                continue
            for found in run_shares(part, scale="dry" if dry else "full", seconds=left, cache=cache):
                if part.section == "memory" and "skipped" in found.row:
                    raise ValueError(f"the machine could not be measured: {found.row['why']}")
                yield found


def run_shares(part: Part, **how: Any) -> Iterator[Found]:
    """The rows of a part, by its shares; of those that are interrupted, what they had found."""
    shares = part.shared_out()
    found: list[list[Found]] = [[] for _ in shares]
    processes: list[subprocess.Popen] = []
    interrupted: BaseException | None = None

    def run(share: Part, rows: list[Found]) -> None:
        for row in run_part(share, started=processes.append, **how):
            if not interrupted:  # or it says that it was ended
                rows.append(row)

    with ThreadPoolExecutor(len(shares)) as pool:
        try:
            list(pool.map(run, shares, found))
        except (KeyboardInterrupt, SystemExit) as end:
            interrupted = end
            for process in processes:
                process.kill()
    yield from chain(*found)
    if interrupted:
        raise interrupted


def run_part(
    part: Part,
    *,
    scale: str,
    seconds: float,
    cache: str,
    started: Callable[[subprocess.Popen], object] = lambda process: None,
) -> Iterator[Found]:
    """The rows of a part, whose process `started` is told of.

    Raises ValueError, in the part's words, where it cannot run on this machine.
    """
    options = {**part.options, **({"began": time.time()} if part.starts else {})}
    arguments = [part.section, "--scale", scale, "--seconds", str(seconds), "--options", json.dumps(options)]
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, **part.environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {CACHE: cache, **KEEP_ALL} if part.starts else {}
    with tempfile.TemporaryFile("w+") as said:
        late = threading.Event()
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "benchmarks.gpu", *arguments],
            env=environment | (ON_A_CPU if scale == "dry" else {}),
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        ) as process:
            started(process)
            timer = threading.Timer(seconds + part.grace, lambda: (late.set(), process.kill()))
            timer.start()
            try:
                assert process.stdout
                yield from (Found(part.section, json.loads(line)) for line in process.stdout)
                status = process.wait()
            finally:
                timer.cancel()
                process.kill()  # where nobody waits for the rest
        said.seek(0)
        last = next((line for line in reversed(said.read().splitlines()) if line.strip()), "without a word")
    if status == CANNOT_RUN:
        raise ValueError(last)
    if late.is_set():
        yield Found(part.section, skipped(part.name, "it took too long, and was ended"))
    elif status:
        yield Found(part.section, skipped(part.name, f"it ended with {status}: {last}"))
