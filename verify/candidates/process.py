"""The process that a candidate runs in: `verify.candidates.worker`, with pipes that nobody waits at forever."""

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
LOOKING = 0.1  # seconds between two looks at whether a process that does not answer still runs
REPLY = 2**30  # bytes that the arrays of a reply may have
SAID = 2**16  # bytes that are kept of what a candidate prints
CHUNK = 2**20  # bytes read from a pipe at once
RUNNING: set["Process"] = set()  # the processes that a judge which ends at once must not leave behind


class Process:
    """`verify.candidates.worker`, running. Raises ImportError for a Python that cannot be run."""

    def __init__(self, python: str, arguments: list[str]):
        # -P: otherwise the worker's folder comes first in sys.path, and a candidate's `import process` finds ours.
        command = [python, "-P", str(Path(worker.__file__)), *arguments]
        same = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environment = same if python == sys.executable else None
        self._stderr, self._stdout = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        try:
            self._popen = subprocess.Popen(
                [*command, str(self._stdout.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environment,
                pass_fds=[self._stdout.fileno()],
                start_new_session=True,  # so that what it starts ends with it
            )
        except OSError as error:
            self._stderr.close()
            self._stdout.close()
            raise ImportError(f"{python} cannot be run: {error.strerror}") from None
        RUNNING.add(self)

    def request(self, message: Any, seconds: float) -> None:
        """Send a frame. Raises TimeoutError where nobody reads it, and BrokenPipeError where nobody is left to."""
        worker.write_frame(_Impatient(self._popen, seconds), message)

    def reply(self, seconds: float) -> Any:
        """The next frame.

        Raises TimeoutError, EOFError where the process has ended, and ValueError for what is no frame.
        """
        return worker.read_frame(_Impatient(self._popen, seconds), most=REPLY)

    def said_too_much(self) -> bool:
        """Check for something to read though nothing was asked, such as the reply after a forged one."""
        assert self._popen.stdout is not None
        return any(select.select([self._popen.stdout.fileno()], [], [], 0))

    def said(self) -> bytes:
        """The end of what was printed."""
        return _end_of(self._stdout)

    def how_it_ended(self) -> str:
        """Signal or status, and the last line on stderr."""
        try:
            code = self._popen.wait(ENDING)
        except subprocess.TimeoutExpired:
            return "it closed its standard output"
        said = _end_of(self._stderr).decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"{how}: {printable(last[:200])}" if last else how

    def kill(self) -> None:
        """Kill the process and its group, and wait for nothing."""
        try:
            os.killpg(self._popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._popen.kill()
        RUNNING.discard(self)  # last: before that, `kill_all` in another thread still sees to it

    def end(self) -> None:
        """Kill the process and its group, and wait for the process alone.

        A daemon that left the group may hold the pipes open for as long as it runs, so nobody waits for their end.
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
    """Kill every process that runs: a candidate that hangs would not notice that its judge has ended."""
    for process in list(RUNNING):  # a copy in one step: another thread may start or end one meanwhile
        process.kill()


def _end_of(file: Any) -> bytes:
    """The last bytes of a file that another process writes, and that shares its position with this one."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), SAID, max(size - SAID, 0))


class _Impatient:
    """The pipes of a process, read or written for no longer than some seconds in all; then raises TimeoutError."""

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
        rest = memoryview(data)
        while len(rest):
            if not self._wait(self.stdin, to_write=True):
                raise BrokenPipeError
            rest = rest[os.write(self.stdin, rest[:CHUNK]) :]

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def _wait(self, pipe: int, *, to_write: bool) -> bool:
        """Wait for the pipe: False where the process has ended, though a child of it may hold the pipe open."""
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
    r"""`text` without what a terminal would obey.

    >>> printable("a \x1b[31mred\x07 kernel")
    'a \\x1b[31mred\\x07 kernel'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
