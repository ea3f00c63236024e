"""Candidates: functions that may be wrong in every way there is, called so that nothing they do gets out.

`Direct` calls a function in this process, as tests do. `Worker` calls one in a process of its own, which is killed
when it hangs and noticed when it crashes.
"""

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from llamaspec.verify.candidates import worker
from llamaspec.verify.candidates.clock import FEWEST
from llamaspec.verify.candidates.process import SAID, Process, printable

LIBRARIES = ("jax", "numpy", "torch", "cupy")  # whose arrays a candidate may be handed
STARTING = 120.0  # seconds that importing a candidate may take


class NoVerdict(ValueError):
    """Nothing can be said of a candidate: the machine, or this Python, lacks something, or nothing was compared."""


class Failure(NamedTuple):
    """Why a call gave nothing that could be compared."""

    kind: str  # raised, hung, crashed, reply or dtype
    message: str


class Outputs(NamedTuple):
    """Arrays that a call returned, the names of the arguments that it wrote to, and which result before it."""

    arrays: tuple[np.ndarray, ...]
    changed: tuple[str, ...]
    overwritten: int = 0  # how many calls before this one the result was returned that it wrote to; 0 for none


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

    `timeout` is in seconds, for a call. Raises ValueError for an unknown library, for a device of one that names none,
    and for a timeout that is no time.
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
        if device and arrays in ("numpy", "cupy"):
            raise ValueError(f"arrays of {arrays} are on no device that has a name: {device} is one of jax or torch")
        self.device = device
        self.python = python
        self.timeout = check_seconds(timeout)
        self.answers = 0  # calls that returned something
        self._process: Process | None = None
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
        process = Process(self.python, [self.name, self.arrays, self.device or ""])
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
        return self._asked(positional, keyword, None, self.timeout)[1]

    def timed(
        self, positional: dict[str, Any], keyword: dict[str, Any], *, seconds: float
    ) -> tuple[list[float], Outputs | Failure]:
        """Call it again and again for about so many `seconds`: the seconds of each call, and the outcome of the last.

        Raises NoVerdict as `call` does.
        """
        return self._asked(positional, keyword, seconds, seconds + 2 * FEWEST * self.timeout)

    def _asked(
        self, positional: dict[str, Any], keyword: dict[str, Any], seconds: float | None, patience: float
    ) -> tuple[list[float], Outputs | Failure]:
        if self._process is None:
            self.start()
        process = self._process
        assert process is not None
        try:
            if process.said_too_much():
                raise ValueError("a second reply")
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
            failure = Failure("reply", "wrote something else than its result to the pipe that the judge reads")
        self.stop()
        return [], failure

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._said = (self._said + self._process.said())[-SAID:]
            self._process.end()
            self._process = None


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
    return Outputs(tuple(arrays), changed, int(reply.overwritten))
