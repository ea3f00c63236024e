"""The process that runs a candidate: `verify.candidates.worker`, with a time limit on every read and write."""

import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

from llamaspec.verify.candidates import worker

ENDING = 5.0  # seconds that a process may take to end once its pipes are closed
LOOKING = 0.1  # seconds between checks whether a silent process still runs
REPLY = 2**30  # most bytes of all arrays of a reply
OUTPUT = 2**16  # bytes of a candidate's output that we keep
CHUNK = 2**20  # bytes read from a pipe at once
RUNNING: set["Process"] = set()  # processes to kill when the judge ends


class Process:
    """A running `verify.candidates.worker`. Raises ImportError for a Python that cannot be run."""

    def __init__(self, python: str, arguments: list[str]):
        # -P: otherwise the worker's folder comes first in sys.path, and a candidate's `import process` finds ours.
        command = [python, "-P", str(Path(worker.__file__)), *arguments]
        inherited = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environment = inherited if python == sys.executable else None
        self._stderr, self._stdout = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        try:
            self._popen = subprocess.Popen(
                [*command, str(self._stdout.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environment,
                pass_fds=[self._stdout.fileno()],
                start_new_session=True,  # so that we can kill its children with it
            )
        except OSError as error:
            self._stderr.close()
            self._stdout.close()
            raise ImportError(f"{python} cannot be run: {error.strerror}") from None
        RUNNING.add(self)

    def request(self, message: Any, seconds: float) -> None:
        """Send a frame. Raises TimeoutError if the process does not read it, and BrokenPipeError if it has exited."""
        worker.write_frame(_Impatient(self._popen, seconds), message)

    def reply(self, seconds: float) -> Any:
        """Read the next frame.

        Raises TimeoutError if no frame arrives in time, EOFError if the process has ended, and ValueError for bytes
        that are not a frame.
        """
        return worker.read_frame(_Impatient(self._popen, seconds), most=REPLY)

    def has_extra_reply(self) -> bool:
        """Return whether the pipe holds one reply too many, for example the real reply after a forged one."""
        assert self._popen.stdout is not None
        return any(select.select([self._popen.stdout.fileno()], [], [], 0))

    def output(self) -> bytes:
        """Return the last bytes that the process printed."""
        return _end_of(self._stdout)

    def how_it_ended(self) -> str:
        """Describe how the process ended: its signal or exit status, and the last line that it wrote to stderr."""
        try:
            code = self._popen.wait(ENDING)
        except subprocess.TimeoutExpired:
            return "it closed its standard output"
        output = _end_of(self._stderr).decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(output) if line.strip()), "")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"{how}: {printable(last[:200])}" if last else how

    def kill(self) -> None:
        """Kill the process and its group without waiting."""
        try:
            os.killpg(self._popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._popen.kill()
        RUNNING.discard(self)  # last: until then, `kill_all` in another thread still kills it

    def end(self) -> None:
        """Kill the process and its group, and wait only for the process.

        A daemon that left the group may keep the pipes open as long as it runs, so we do not wait for their end.
        """
        self.kill()
        self._popen.wait()
        for file in (self._popen.stdin, self._popen.stdout, self._stderr, self._stdout):
            try:
                if file:
                    file.close()
            except BrokenPipeError:  # a request that was not written in full
                pass


def kill_all() -> None:
    """Kill every running process: a candidate that hangs would not notice that its judge has ended."""
    for process in list(RUNNING):  # a copy: another thread may start or end a process meanwhile
        process.kill()


def _end_of(file: Any) -> bytes:
    """Read the last bytes of a file that another process writes, without moving the shared file position."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), OUTPUT, max(size - OUTPUT, 0))


class _Impatient:
    """The pipes of a process, with one time limit for all reads and writes together.

    When the time is up, reads and writes raise TimeoutError.
    """

    def __init__(self, process: subprocess.Popen, seconds: float):
        assert process.stdin is not None and process.stdout is not None
        self.process, self.stdin, self.stdout = process, process.stdin.fileno(), process.stdout.fileno()
        self.end = monotonic() + seconds

    def read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count and self._wait(self.stdout, to_write=False):
            part = os.read(self.stdout, min(count - len(data), CHUNK))
            if not part:
                break
            data += part
        return bytes(data)

    def write(self, data: bytes) -> None:
        os.set_blocking(self.stdin, False)
        remaining = memoryview(data)
        while len(remaining):
            if not self._wait(self.stdin, to_write=True):
                raise BrokenPipeError
            remaining = remaining[os.write(self.stdin, remaining[:CHUNK]) :]

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def _wait(self, pipe: int, *, to_write: bool) -> bool:
        """Wait for the pipe. Return False if the process has ended, even if its child still holds the pipe open."""
        pipes = ([], [pipe]) if to_write else ([pipe], [])
        while True:
            ended = self.process.poll() is not None
            patience = 0.0 if ended else min(LOOKING, max(self.end - monotonic(), 0))
            ready = any(select.select(*pipes, [], patience))
            if ready or ended:
                return ready
            if monotonic() >= self.end:
                raise TimeoutError


def printable(text: str) -> str:
    r"""Escape the control characters in `text`, which a terminal would obey.

    >>> printable("a \x1b[31mred\x07 kernel")
    'a \\x1b[31mred\\x07 kernel'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
