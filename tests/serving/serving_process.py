"""Run `llamaspec serve` without a model in its own process: `python -m tests.serving.serving_process PORT [FILES]`."""

import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.serving.serving_site import FakeEngine, make_site, words_of
from tests.support.processes import REPOSITORY
from tests.support.waiting import listens, until


class Process(NamedTuple):
    """A server process that a test can kill."""

    port: int
    process: subprocess.Popen[Any]
    log: Path


@contextmanager
def served(*, log: Path, port: int = 0, files: int = 0) -> Iterator[Process]:
    """Run a server with this log file and port, and with `files` as its limit of open files.

    Port 0 means any free port; 0 files means the default limit.
    """
    command = [sys.executable, "-m", "tests.serving.serving_process", str(port), str(files)]
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=out, text=True)
    try:
        assert process.stdout is not None
        match = re.fullmatch(r"port (\d+)\n", process.stdout.readline())
        assert match is not None
        until(lambda: listens(int(match[1])))
        yield Process(int(match[1]), process, log)
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    """Serve until a signal arrives. The exit status is 0 if all requests ended well."""
    from dataclasses import replace

    from llamaspec.commands.interrupt import answered_at_once
    from llamaspec.commands.serve import _bound, _run
    from llamaspec.serving.connections import ClientLimits, allow_files

    port, files = map(int, sys.argv[1:])
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    limits = ClientLimits(drain_seconds=3600.0)
    limits = replace(limits, connections=allow_files(limits.connections))
    engine = FakeEngine(lambda request: words_of(request) * 1000, seconds=0.001, context=100_000)
    engine.pause = 1000  # so a long request never ends by itself
    with answered_at_once(), _bound("127.0.0.1", port) as bound:
        print(f"port {bound.getsockname()[1]}", flush=True)
        sys.exit(0 if _run(make_site(engine, limits=limits), bound, "fake") else 1)


if __name__ == "__main__":
    main()
