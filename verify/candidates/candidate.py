"""Candidates: functions under verification, called so that a bug in them cannot harm the judge.

`Direct` calls a function in this process, as tests do. `Worker` calls it in a separate process, kills that process if
it hangs, and notices if it crashes.
"""

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from llamaspec.verify.candidates import worker
from llamaspec.verify.candidates.clock import FEWEST
from llamaspec.verify.candidates.process import OUTPUT, Process, printable

LIBRARIES = ("jax", "numpy", "torch", "cupy")  # array libraries that a candidate may use
STRIDED = ("numpy", "torch")  # libraries whose arrays have strides that a candidate must follow
STARTING = 120.0  # seconds allowed for importing a candidate


class NoVerdict(ValueError):
    """No verdict is possible: this machine or this Python lacks something, or no number was compared."""


class NotJudged(NoVerdict):
    """No verdict on one draw: the candidate ran out of memory, or does not take a keyword argument of the draw."""


class Failure(NamedTuple):
    """Reason why a call returned nothing to compare."""

    kind: str  # raised, hung, crashed, reply or dtype
    message: str


class Outputs(NamedTuple):
    """The arrays that a call returned, and the names of the inputs that the call changed.

    It also says whether the call overwrote an earlier result.
    """

    arrays: tuple[np.ndarray, ...]
    changed: tuple[str, ...]
    overwritten: int = 0  # 1: the previous call's result; 2: the one before that; 0: none


@runtime_checkable
class Candidate(Protocol):
    """A function under verification."""

    @property
    def name(self) -> str: ...

    @property
    def layouts(self) -> tuple[str, ...]:
        """The memory layouts, except contiguous, in which we may pass arrays: some of `worker.LAYOUTS`."""
        ...

    def call(self, positional: dict[str, Any], keyword: dict[str, Any]) -> Outputs | Failure:
        """Call the function with all `positional` arguments in order and all `keyword` arguments by name.

        Raises NoVerdict if we cannot convert the arrays to the candidate's library, or if a module that the candidate
        imports is missing.
        """
        ...


class Direct:
    """A function called in this process."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        arrays: str = "numpy",
        name: str | None = None,
        contiguous: bool = False,
    ):
        self.function = function
        self.arrays = check_library(arrays)
        self.layouts = layouts_for(arrays, contiguous=contiguous)
        self.name = name or f"{function.__module__}:{function.__qualname__}"
        self._caller = worker.Caller(function, self.arrays, None)

    def call(self, positional: dict[str, Any], keyword: dict[str, Any]) -> Outputs | Failure:
        return _outcome(self._caller(list(_as_bytes(positional).values()), _as_bytes(keyword)), positional)


class Worker:
    """A function, named `package.module:function` or `file.py:function`, that runs in a separate process.

    The process starts at the first call.

    `timeout` is the time limit of a call in seconds. Raises ValueError for an unknown array library, for a device with
    a library that does not let us choose one (NumPy, CuPy), and for a timeout that is not positive.
    """

    def __init__(
        self,
        name: str,
        *,
        arrays: str = "jax",
        device: str | None = None,
        contiguous: bool = False,
        python: str = sys.executable,
        timeout: float = 60.0,
    ):
        self.name = name
        self.arrays = check_library(arrays)
        if device and arrays in ("numpy", "cupy"):
            raise ValueError(f"--device {device} needs arrays of jax or torch, got {arrays}")
        self.device = device
        self.layouts = layouts_for(arrays, contiguous=contiguous)
        self.python = python
        self.timeout = check_seconds(timeout)
        self.answers = 0  # calls that returned something
        self._process: Process | None = None
        self._output = b""

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def output_lines(self) -> list[str]:
        """The last lines that the candidate printed, with control characters escaped."""
        now = self._process.output() if self._process else b""
        return [printable(line) for line in (self._output + now)[-OUTPUT:].decode(errors="replace").splitlines()]

    def start(self) -> None:
        """Start the process. The first `call` does this, too.

        Raises ImportError if the process cannot import the function, and NoVerdict if it cannot create arrays.
        """
        self.stop()
        process = Process(self.python, [self.name, self.arrays, self.device or ""])
        self._process = process  # from here on `stop` ends it, also after an exception
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
            problem = f"{self.name}: importing it wrote unexpected bytes to the pipe that the judge reads"
        if problem:
            self.stop()
            raise (NoVerdict if imported else ImportError)(printable(str(problem)))

    def call(self, positional: dict[str, Any], keyword: dict[str, Any]) -> Outputs | Failure:
        return self._request(positional, keyword, None, self.timeout)[1]

    def timed(
        self, positional: dict[str, Any], keyword: dict[str, Any], *, seconds: float
    ) -> tuple[list[float], Outputs | Failure]:
        """Call the function for about `seconds`. Return the seconds of each call, and the outcome of the last call.

        Raises NoVerdict as `call` does.
        """
        return self._request(positional, keyword, seconds, seconds + 2 * FEWEST * self.timeout)

    def _request(
        self, positional: dict[str, Any], keyword: dict[str, Any], seconds: float | None, patience: float
    ) -> tuple[list[float], Outputs | Failure]:
        if self._process is None:
            self.start()
        process = self._process
        assert process is not None
        try:
            if process.has_extra_reply():
                raise ValueError("the process sent a second reply to one request")
            process.request([list(_as_bytes(positional).values()), _as_bytes(keyword), seconds], self.timeout)
            *reply, times = [*process.reply(patience), *([[]] if seconds is None else [])]
            outcome = _outcome(worker.Reply(*reply), positional)
            self.answers += isinstance(outcome, Outputs)
            if isinstance(outcome, Outputs) or outcome.kind == "raised":
                return [float(time) for time in times], outcome
            failure = outcome
        except TimeoutError:
            failure = Failure("hung", f"no answer within {patience:g} s")
        except (EOFError, BrokenPipeError):
            failure = Failure("crashed", process.how_it_ended())
        except (ValueError, TypeError) as error:
            if isinstance(error, NoVerdict):
                raise
            failure = Failure("reply", "wrote unexpected bytes to the pipe that the judge reads")
        self.stop()
        return [], failure

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._output = (self._output + self._process.output())[-OUTPUT:]
            self._process.end()
            self._process = None


def layouts_for(arrays: str, *, contiguous: bool) -> tuple[str, ...]:
    """List the layouts, except contiguous, that input arrays of the library `arrays` may get.

    The list is empty if the library has no strided arrays, or if `contiguous` is true.
    """
    return worker.LAYOUTS if arrays in STRIDED and not contiguous else ()


def in_layout(arguments: dict[str, Any], layout: str) -> dict[str, Any]:
    """Mark the float arrays among `arguments`, so that the candidate gets them in the memory layout `layout`."""

    def real(value: Any) -> bool:
        return isinstance(value, np.ndarray) and value.dtype.kind in "fV"

    return {
        name: worker.to_bytes(value)._replace(layout=layout) if layout and real(value) else value
        for name, value in arguments.items()
    }


def check_seconds(seconds: float) -> float:
    """Return `seconds` if it is positive; infinity is allowed. Raises ValueError otherwise."""
    if math.isnan(seconds) or seconds <= 0:
        raise ValueError(f"expected a number of seconds above 0, got {seconds:g}")
    return float(seconds)


def check_library(arrays: str) -> str:
    """Return `arrays` if it names a supported library. Raises ValueError otherwise."""
    if arrays not in LIBRARIES:
        raise ValueError(f"expected arrays of {', '.join(LIBRARIES)}; got {arrays}")
    return arrays


def _as_bytes(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: worker.to_bytes(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()
    }


def _outcome(reply: worker.Reply, positional: dict[str, Any]) -> Outputs | Failure:
    """Convert a reply to outputs or a failure.

    Raises ValueError or TypeError if the reply is malformed, because the candidate may have forged it. Raises NoVerdict
    if the reply says that this machine or this Python lacks something.
    """
    if reply.unavailable is not None:
        raise NoVerdict(printable(str(reply.unavailable)))
    if reply.failure is not None:
        return Failure("raised", printable(str(reply.failure)))
    names = list(positional)
    try:
        changed = tuple(names[int(name)] if name.isdigit() else name for name in reply.changed)
    except (AttributeError, IndexError) as error:
        raise ValueError("the reply names arguments that do not exist") from error
    arrays = []
    for array in reply.outputs:
        if not isinstance(array, worker.Array):
            raise ValueError("an output is not an array")
        try:
            arrays.append(worker.to_numpy(array))
        except (TypeError, AttributeError, ImportError):
            return Failure(
                "dtype", f"returned an array of {printable(array.dtype)[:100]}, which is not a dtype of numbers"
            )
    return Outputs(tuple(arrays), changed, int(reply.overwritten))
