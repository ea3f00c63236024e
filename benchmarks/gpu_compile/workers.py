"""Processes that do one thing at a time, each within a time limit: a compiler may hang, and it may abort."""

import multiprocessing
from collections.abc import Callable
from typing import Any, NamedTuple


class Failure(NamedTuple):
    """Why there is no result."""

    reason: str


class Worker:
    """A process that calls `function` over and over; a new one after each failure."""

    def __init__(self, function: Callable[[Any], Any]):
        self._function = function
        self._process: Any = None

    def __call__(self, argument: Any, *, limit: float) -> Any:
        """`function(argument)`, or a `Failure` where it raised, killed its process or took longer than `limit` s."""
        if self._process is None:
            # Not forked: the parent may hold threads and locks of jax.
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(self._function, theirs), daemon=True)
            self._process.start()
            theirs.close()
        self._pipe.send(argument)
        if not self._pipe.poll(limit):
            self.stop()
            return Failure(f"took longer than {limit:g} s")
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode
            self.stop()
            return Failure(f"died of signal {-code}" if code < 0 else f"ended with exit code {code}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def _serve(function: Callable[[Any], Any], pipe: Any) -> None:
    while True:
        try:
            argument = pipe.recv()
        except EOFError:
            return
        try:
            result = function(argument)
        except Exception as error:
            # All of it is one line, of which the beginning says what is wrong.
            result = Failure(f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
        pipe.send(result)
