"""What is verified: a function that may be wrong in every way there is, called so that nothing it does gets out.

`Direct` calls a function in this process, as tests do; `Worker` calls one in a process of its own, which is killed
when it hangs and noticed when it crashes.
"""

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


class Failure(NamedTuple):
    """Why a call gave nothing that could be compared."""

    kind: str  # raised, hung or crashed
    message: str


class Outputs(NamedTuple):
    """What a call returned, and the names of the arguments that it wrote to."""

    arrays: tuple[np.ndarray, ...]
    changed: tuple[str, ...]


@runtime_checkable
class Candidate(Protocol):
    """A function under verification."""

    @property
    def name(self) -> str: ...

    def call(self, positional: dict[str, Any], keyword: dict[str, Any]) -> Outputs | Failure:
        """Call it with all `positional` in order and all `keyword` by name."""
        ...


class Direct:
    """A function called in this process."""

    def __init__(self, function: Callable[..., Any], *, arrays: str = "numpy", name: str | None = None):
        self.function = function
        self.arrays = check_library(arrays)
        self.name = name or f"{function.__module__}:{function.__qualname__}"

    def call(self, positional: dict[str, Any], keyword: dict[str, Any]) -> Outputs | Failure:
        request = _as_bytes(positional), _as_bytes(keyword)
        reply = worker.call(self.function, list(request[0].values()), request[1], self.arrays, None)
        return _outcome(reply, positional)


class Worker:
    """A function called `package.module:function`, in a process that is started when it is needed."""

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
        self.timeout = timeout
        self._process: _Process | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process, as `call` does too. Raises ImportError where the function cannot be imported there."""
        self.stop()
        process = _Process(self.python, [self.name, self.arrays, self.device or ""])
        try:
            problem = process.reply(STARTING)
        except TimeoutError:
            problem = f"{self.name}: importing it took more than {STARTING:g} s"
        except EOFError:
            problem = f"{self.name}: importing it ended the process: {process.how_it_ended()}"
        if problem:
            process.end()
            raise ImportError(problem)
        self._process = process

    def call(self, positional: dict[str, Any], keyword: dict[str, Any]) -> Outputs | Failure:
        if self._process is None:
            self.start()
        process = self._process
        assert process is not None
        try:
            process.request([list(_as_bytes(positional).values()), _as_bytes(keyword)])
            return _outcome(worker.Reply(*process.reply(self.timeout)), positional)
        except TimeoutError:
            failure = Failure("hung", f"no answer within {self.timeout:g} s")
        except (EOFError, BrokenPipeError):
            failure = Failure("crashed", process.how_it_ended())
        self.stop()
        return failure

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """`verify.worker`, running. Raises ImportError for a Python that cannot be run."""

    def __init__(self, python: str, arguments: list[str]):
        # -P: or that program's folder would come first in sys.path, and verify/pytest.py be found as pytest.
        command = [python, "-P", str(Path(worker.__file__)), *arguments]
        same = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environment = same if python == sys.executable else None
        self._stderr = tempfile.TemporaryFile()
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environment,
                start_new_session=True,  # so that what it starts ends with it
            )
        except OSError as error:
            self._stderr.close()
            raise ImportError(f"{python} cannot be run: {error.strerror}") from None

    def request(self, message: Any) -> None:
        assert self._popen.stdin is not None
        worker.write_frame(self._popen.stdin, message)

    def reply(self, seconds: float) -> Any:
        """The next frame. Raises TimeoutError, and EOFError where the process has ended."""
        assert self._popen.stdout is not None
        return worker.read_frame(_Impatient(self._popen.stdout.fileno(), seconds))

    def how_it_ended(self) -> str:
        """Signal or status, and the last line that it said."""
        try:
            code = self._popen.wait(ENDING)
        except subprocess.TimeoutExpired:
            return "it closed its standard output"
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"{how}: {last[:200]}" if last else how

    def end(self) -> None:
        try:
            os.killpg(self._popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._popen.kill()
        self._popen.communicate()
        self._stderr.close()


class _Impatient:
    """Reads from a pipe, but not for longer than some seconds in all; then raises TimeoutError."""

    def __init__(self, pipe: int, seconds: float):
        self.pipe = pipe
        self.end = monotonic() + seconds

    def read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            ready, _, _ = select.select([self.pipe], [], [], max(self.end - monotonic(), 0))
            if not ready:
                raise TimeoutError
            part = os.read(self.pipe, count - len(data))
            if not part:
                break
            data += part
        return bytes(data)


def check_library(arrays: str) -> str:
    """Raises ValueError for an array library that candidates cannot be handed arrays of."""
    if arrays not in LIBRARIES:
        raise ValueError(f"arrays are handed over as {', '.join(LIBRARIES)}; got {arrays}")
    return arrays


def _as_bytes(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: worker.to_bytes(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()
    }


def _outcome(reply: worker.Reply, positional: dict[str, Any]) -> Outputs | Failure:
    if reply.failure is not None:
        return Failure("raised", reply.failure)
    names = list(positional)
    changed = tuple(names[int(name)] if name.isdigit() else name for name in reply.changed)
    return Outputs(tuple(worker.to_numpy(array) for array in reply.outputs), changed)
