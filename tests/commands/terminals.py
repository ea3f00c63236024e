"""Run a command in a pseudo-terminal, and read what a user would see."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes import REPOSITORY
from tests.support.waiting import PATIENCE

CTRL_C, CTRL_Z = "\x03", "\x1a"
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# The first terminal that a session leader opens becomes its controlling terminal, and its keys send signals.
_START = """
import os, signal
os.close(os.open(os.ttyname(0), os.O_RDWR))
signal.signal(signal.SIGINT, signal.default_int_handler)
{}
import llamaspec
llamaspec.main()
"""


class Terminal:
    """A command that runs in a pseudo-terminal, and its output.

    Methods raise TimeoutError with the output if the command does not answer in time.
    """

    def __init__(self, process: subprocess.Popen[bytes], end: int):
        self.process, self._end, self._written = process, end, b""

    @property
    def output(self) -> str:
        """Return the output so far, without control sequences for cursor and color."""
        return CONTROLS.sub("", self._written.decode(errors="replace")).replace("\r\n", "\n")

    def wait_for(self, text: str, *, times: int = 1) -> None:
        """Wait until the output contains `text` at least `times` times."""
        limit = time.monotonic() + PATIENCE
        while self.output.count(text) < times:
            if not self._read(limit):
                raise TimeoutError(f"{text!r} is not in {self.output!r}")

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def wait(self) -> tuple[int, str]:
        """Wait until the command has ended; return its status and all its output."""
        limit = time.monotonic() + PATIENCE
        while self._read(limit):
            pass
        return self.process.wait(PATIENCE), self.output

    def _read(self, limit: float) -> bool:
        """Read more output until `limit`. Return False if the output has ended or no output came."""
        if not select.select([self._end], [], [], max(limit - time.monotonic(), 0))[0]:
            return False
        try:
            part = os.read(self._end, 1 << 16)
        except OSError:  # Linux raises this once the other end is closed
            return False
        self._written += part
        return bool(part)


@contextmanager
def at_terminal(*arguments: str, cwd: Path, columns: int = 80, first: str = "") -> Iterator[Terminal]:
    """Run a `llamaspec` command with stdin, stdout and stderr in a new terminal; kill it when the block ends.

    The process first runs the Python code `first`.
    """
    master, terminal_end = pty.openpty()
    termios.tcsetwinsize(master, (40, columns))
    environment = {name: value for name, value in os.environ.items() if name not in ("NPROC", "NO_COLOR")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "COLUMNS": str(columns), "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-c", _START.format(first), *arguments],
        stdin=terminal_end,
        stdout=terminal_end,
        stderr=terminal_end,
        cwd=cwd,
        env=environment | {"PROMPT_TOOLKIT_NO_CPR": "1"},  # nothing here answers a request for the cursor's position
        start_new_session=True,
    )
    os.close(terminal_end)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait(PATIENCE)
        os.close(master)
