"""Candidates: functions that may be wrong in every way there is, called so that nothing they do gets out.

`Direct` calls a function in this process, as tests do. `Worker` calls one in a process of its own, which is killed
when it hangs and noticed when it crashes.
"""

import math
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from verify import worker

LIBRARIES = ("jax", "numpy", "torch", "cupy")  # whose arrays a candidate may be handed
STARTING = 120.0  # seconds that importing a candidate may take
ENDING = 5.0  # seconds that a process may take to end once its pipes are closed
LOOKING = 0.1  # seconds between two looks at whether a process that does not answer still runs
REPLY = 2**30  # bytes that the arrays of a reply may have
SAID = 2**16  # bytes that are kept of what a candidate prints
CHUNK = 2**20  # bytes read from a pipe at once


class NoVerdict(ValueError):
    """Nothing can be said of a candidate: the machine, or this Python, lacks something, or nothing was compared."""


class Failure(NamedTuple):
    """Why a call gave nothing that could be compared."""

    kind: str  # raised, hung, crashed, reply or dtype
    message: str


class Outputs(NamedTuple):
    """Arrays that a call returned, the names of the arguments that it wrote to, and whether to the result before."""

    arrays: tuple[np.ndarray, ...]
    changed: tuple[str, ...]
    overwritten: bool = False  # the call wrote to the result of the call before


@runtime_checkable
class Candidate(Protocol):
    """A function under verification."""

    @property
    def name(self) -> str: ...

    def call(self, positional: dict[str, Any], keyword: dict[str, Any]) -> Outputs | Failure:
        """Call it with all `positional` in order and all `keyword` by name.

        Raises NoVerdict where the arrays cannot be handed over, or where the candidate lacks a module that it imports.
        """
        ...


class Direct:
    """A function called in this process."""

    def __init__(self, function: Callable[..., Any], *, arrays: str = "numpy", name: str | None = None):
        self.function = function
        self.arrays = check_library(arrays)
        self.name = name or f"{function.__module__}:{function.__qualname__}"
        self._caller = worker.Caller(function, self.arrays, None)

    def call(self, positional: dict[str, Any], keyword: dict[str, Any]) -> Outputs | Failure:
        return _outcome(self._caller(list(_as_bytes(positional).values()), _as_bytes(keyword)), positional)


class Worker:
    """A function called `package.module:function` or `file.py:function`, in a process that starts when it is needed.

    `timeout` is in seconds, for a call. Raises ValueError for an unknown library, and for a timeout that is no time.
    """

    def __init__(
        self,
        name: str,
        *,
        arrays: str = "jax",
        device: str | None = None,
        python: str = sys.executable,
        timeout: float = 60.0,
    ):
        self.name = name
        self.arrays = check_library(arrays)
        self.device = device
        self.python = python
        self.timeout = check_seconds(timeout)
        self._process: _Process | None = None
        self._said = b""

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def said(self) -> list[str]:
        """Last lines that the candidate printed, as text that a terminal may show."""
        now = self._process.said() if self._process else b""
        return [printable(line) for line in (self._said + now)[-SAID:].decode(errors="replace").splitlines()]

    def start(self) -> None:
        """Start the process, as `call` does too.

        Raises ImportError where the function cannot be imported there, and NoVerdict where arrays cannot be made.
        """
        self.stop()
        process = _Process(self.python, [self.name, self.arrays, self.device or ""])
        self._process = process  # from here on `stop` ends it, whatever is raised
        imported = False
        try:
            problem = process.reply(STARTING)
            if problem:
                problem, imported = problem
        except TimeoutError:
            problem = f"{self.name}: importing it took more than {STARTING:g} s"
        except EOFError:
            problem = f"{self.name}: importing it ended the process: {process.how_it_ended()}"
        except ValueError:
            problem = f"{self.name}: importing it wrote something else than an answer to the pipe that the judge reads"
        if problem:
            self.stop()
            raise (NoVerdict if imported else ImportError)(printable(str(problem)))

    def call(self, positional: dict[str, Any], keyword: dict[str, Any]) -> Outputs | Failure:
        if self._process is None:
            self.start()
        process = self._process
        assert process is not None
        try:
            if process.said_too_much():
                raise ValueError("a second reply")
            process.request([list(_as_bytes(positional).values()), _as_bytes(keyword)], self.timeout)
            outcome = _outcome(worker.Reply(*process.reply(self.timeout)), positional)
            if isinstance(outcome, Outputs) or outcome.kind == "raised":
                return outcome
            failure = outcome
        except TimeoutError:
            failure = Failure("hung", f"no answer within {self.timeout:g} s")
        except (EOFError, BrokenPipeError):
            failure = Failure("crashed", process.how_it_ended())
        except (ValueError, TypeError) as error:
            if isinstance(error, NoVerdict):
                raise
            failure = Failure("reply", "wrote something else than its result to the pipe that the judge reads")
        self.stop()
        return failure

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._said = (self._said + self._process.said())[-SAID:]
            self._process.end()
            self._process = None


class _Process:
    """`verify.worker`, running. Raises ImportError for a Python that cannot be run."""

    def __init__(self, python: str, arguments: list[str]):
        # -P: or that program's folder would come first in sys.path, and verify/pytest.py be found as pytest.
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

    def end(self) -> None:
        """Kill the process and its group, and wait for the process alone.

        A daemon that left the group may hold the pipes open for as long as it runs, so nobody waits for their end.
        """
        try:
            os.killpg(self._popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._popen.kill()
        self._popen.wait()
        for file in (self._popen.stdin, self._popen.stdout, self._stderr, self._stdout):
            try:
                if file:
                    file.close()
            except BrokenPipeError:  # a request that was not written in full
                pass


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


def check_seconds(seconds: float) -> float:
    """`seconds` as a number above 0, or infinite. Raises ValueError for any other."""
    if math.isnan(seconds) or seconds <= 0:
        raise ValueError(f"a time is a number of seconds above 0; got {seconds:g}")
    return float(seconds)


def check_library(arrays: str) -> str:
    """`arrays`, the name of a library. Raises ValueError for one whose arrays candidates cannot be handed."""
    if arrays not in LIBRARIES:
        raise ValueError(f"arrays are handed over as {', '.join(LIBRARIES)}; got {arrays}")
    return arrays


def _as_bytes(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: worker.to_bytes(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()
    }


def _outcome(reply: worker.Reply, positional: dict[str, Any]) -> Outputs | Failure:
    """Read a reply, which the candidate may have forged. Raises NoVerdict, and ValueError or TypeError for garbage."""
    if reply.unavailable is not None:
        raise NoVerdict(printable(str(reply.unavailable)))
    if reply.failure is not None:
        return Failure("raised", printable(str(reply.failure)))
    names = list(positional)
    try:
        changed = tuple(names[int(name)] if name.isdigit() else name for name in reply.changed)
    except (AttributeError, IndexError) as error:
        raise ValueError("changed arguments that there are not") from error
    arrays = []
    for array in reply.outputs:
        if not isinstance(array, worker.Array):
            raise ValueError("an output that is no array")
        try:
            arrays.append(worker.to_numpy(array))
        except (TypeError, AttributeError, ImportError):
            return Failure("dtype", f"returned an array of {printable(array.dtype)[:100]}, which is no number here")
    return Outputs(tuple(arrays), changed, reply.overwritten is True)
