"""Waits for other threads and processes. A busy machine may take any time, so only what never comes is a failure.

A claim that something ends at once is not one about a clock either: it ends while what it must not wait for goes on, or
with little processor time.
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

PATIENCE = 240.0  # seconds until what a test waits for counts as never coming
TICKS = os.sysconf("SC_CLK_TCK")  # a second


def until(condition: Callable[[], object], *, pause: float = 0.01) -> None:
    """Wait until something holds; look every `each` seconds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(pause)


def wait_for_end(process: subprocess.Popen[Any]) -> float:
    """Wait until a process has ended, and give the processor seconds of its main thread. Raises TimeoutError.

    `process.wait` must not have been called: it takes away the figures that Linux keeps of a process.
    """
    opened = os.pidfd_open(process.pid)
    try:
        if not select.select([opened], [], [], PATIENCE)[0]:
            raise TimeoutError("the process does not end")
    finally:
        os.close(opened)
    return main_thread_seconds(process.pid)


def main_thread_seconds(process: int) -> float:
    """Give the processor seconds that the main thread of a process has taken."""
    return sum(map(int, _stat(f"{process}/task/{process}")[11:13])) / TICKS


def session_seconds(leader: int) -> float:
    """Give the processor seconds that the processes of a session have taken, with the children they have waited for."""
    return sum(sum(map(int, fields[11:15])) for fields in _session(leader)) / TICKS


def session_lives(leader: int) -> bool:
    """Tell whether a process of a session runs."""
    return any(fields[0] not in "ZX" for fields in _session(leader))


def processes_in(folder: Path) -> list[int]:
    """List the processes that have this folder as their current one."""
    ids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended meanwhile, or is not ours
            if Path("/proc", name, "cwd").readlink() == folder:
                ids.append(int(name))
    return ids


def _session(leader: int) -> Iterator[list[str]]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = _stat(name)
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        if int(fields[3]) == leader:
            yield fields


def _stat(place: str) -> list[str]:
    """Give the fields that Linux tells of a process or a thread, from its state on: see proc_pid_stat(5)."""
    return Path("/proc", place, "stat").read_text().rpartition(")")[2].split()


@contextmanager
def held_port() -> Iterator[int]:
    """Hold a port that only a process which is told of it will take.

    A socket that is bound keeps Linux from giving the port to anybody who asks for any. It does not listen, so a server
    with SO_REUSEADDR, as Python's are, can still be bound there.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def listens(port: int) -> bool:
    """Tell whether anybody listens at a port of this machine."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
    except ConnectionRefusedError:
        return False
    return True
