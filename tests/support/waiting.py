"""Wait for other threads and processes. A busy machine may be slow, so a test fails only if an event never happens.

Some tests check that a process or call ends at once. They do not measure wall-clock time. They check that it ends while
something that it must not wait for still runs, or that it uses little processor time.
"""

import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PATIENCE = 240.0  # seconds after which a test counts an event as never happening
TICKS = os.sysconf("SC_CLK_TCK")  # clock ticks per second


def until(condition: Callable[[], object], *, pause: float = 0.01) -> None:
    """Wait until `condition` is true; check every `pause` seconds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(pause)


def wait_for_end(process: subprocess.Popen[Any]) -> float:
    """Wait until a process ends; return the processor seconds of its main thread, or raise TimeoutError.

    Do not call `process.wait` before: it reaps the process, and Linux then drops its statistics.
    """
    opened = os.pidfd_open(process.pid)
    try:
        if not select.select([opened], [], [], PATIENCE)[0]:
            raise TimeoutError("the process does not end")
    finally:
        os.close(opened)
    return main_thread_seconds(process.pid)


def main_thread_seconds(process: int) -> float:
    """Return the processor seconds that the main thread of a process has used."""
    return sum(map(int, _stat(f"{process}/task/{process}")[11:13])) / TICKS


def session_seconds(leader: int) -> float:
    """Return the processor seconds used by all processes of a session, and by children that they have waited for."""
    return sum(sum(map(int, fields[11:15])) for fields in _session(leader)) / TICKS


def session_lives(leader: int) -> bool:
    """Return whether any process of a session still runs."""
    return any(fields[0] not in "ZX" for fields in _session(leader))


def processes_in(folder: Path) -> list[int]:
    """List the processes that have `folder` as their current folder."""
    ids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if Path("/proc", name, "cwd").readlink() == folder:
                ids.append(int(name))
    return ids


def _session(leader: int) -> Iterator[list[str]]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = _stat(name)
        except (FileNotFoundError, ProcessLookupError):  # the process has ended
            continue
        if int(fields[3]) == leader:
            yield fields


def _stat(place: str) -> list[str]:
    """Read the fields of /proc/PLACE/stat from the process state on; see proc_pid_stat(5)."""
    return Path("/proc", place, "stat").read_text().rpartition(")")[2].split()


@contextmanager
def held_port() -> Iterator[int]:
    """Reserve a port for a process that gets the port's number as an argument.

    The port is bound, so Linux gives it to no process that asks for any free port. It does not listen, so a server with
    SO_REUSEADDR, which Python's servers set, can still bind it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def listens(port: int) -> bool:
    """Return whether a server listens at `port` on this machine."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
    except ConnectionRefusedError:
        return False
    return True
