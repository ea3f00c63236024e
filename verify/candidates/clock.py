"""Time a call until its result is ready.

`verify.candidates.worker` loads this file in the candidate's process, so it imports nothing of this project. With torch
or cupy on a GPU, we clear the L2 cache before each call, and measure the call with GPU events. The time includes work
that the call started on other streams. jax has no events, so we measure the time until the call's result is ready.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from sys import modules
from time import perf_counter
from typing import Any

import numpy as np

FEWEST = 3  # timed calls
FLUSH = 2**28  # bytes: more than a second-level cache has
SETTLED = ("numpy", "torch", "jax", "jaxlib", "cupy")  # libraries that compute an array before they return it


class Clock:
    """A clock for calls with arrays of one library."""

    def __init__(self, library: str):
        self.measure: Callable[[Callable[..., Any], list, dict[str, Any]], Any] = {
            "jax": self._jax,
            "torch": self._torch,
            "cupy": self._cupy,
        }.get(library, self._plain)
        self.times: list[float] = []  # seconds

    def enough(self, end: float) -> bool:
        """Return whether it is later than `end`, and at least `FEWEST` calls have been timed."""
        return len(self.times) >= FEWEST and perf_counter() >= end

    def _plain(self, function: Callable[..., Any], positional: list, keyword: dict[str, Any]) -> Any:
        start = perf_counter()
        result = function(*positional, **keyword)
        self.times.append(perf_counter() - start)
        return result

    def _jax(self, function: Callable[..., Any], positional: list, keyword: dict[str, Any]) -> Any:
        jax = import_module("jax")
        devices = {device for value in positional if isinstance(value, jax.Array) for device in value.devices()}
        for device in devices:
            if device.platform != "cpu":
                jax.block_until_ready(jax.device_put(np.zeros(FLUSH, np.int8), device))
        jax.block_until_ready((positional, keyword))
        return self._plain(lambda *a, **n: jax.block_until_ready(function(*a, **n)), positional, keyword)

    def _torch(self, function: Callable[..., Any], positional: list, keyword: dict[str, Any]) -> Any:
        torch = import_module("torch")
        on_gpu = [value for value in (*positional, *keyword.values()) if getattr(value, "is_cuda", False)]
        if not on_gpu:
            return self._plain(function, positional, keyword)
        torch.empty(FLUSH, dtype=torch.int8, device=on_gpu[0].device).zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        result, outside = _between(start, end, torch.cuda.synchronize, function, positional, keyword)
        self.times.append(start.elapsed_time(end) / 1000 + outside)
        return result

    def _cupy(self, function: Callable[..., Any], positional: list, keyword: dict[str, Any]) -> Any:
        cupy = import_module("cupy")
        cupy.zeros(FLUSH, dtype="int8")
        start, end = (cupy.cuda.Event() for _ in range(2))
        wait = cupy.cuda.runtime.deviceSynchronize
        result, outside = _between(start, end, wait, function, positional, keyword)
        self.times.append(cupy.cuda.get_elapsed_time(start, end) / 1000 + outside)
        return result


def _between(
    start: Any, end: Any, wait: Callable[[], Any], function: Callable[..., Any], positional: list, keyword: dict
) -> tuple[Any, float]:
    """Call `function` between the GPU events `start` and `end`.

    Return the result, and the seconds for which other streams still ran after the event `end`. `wait` waits for all
    streams.
    """
    wait()
    start.record()
    result = function(*positional, **keyword)
    end.record()
    end.synchronize()
    before = perf_counter()
    wait()  # waits for every stream
    between = perf_counter()
    wait()  # nothing is running: this measures the wait itself
    return result, max((between - before) - (perf_counter() - between), 0.0)


def timed(caller: Any, positional: list, keyword: dict[str, Any], seconds: float) -> tuple[list[float], Any]:
    """Time calls of a `worker.Caller` after one untimed call. Return the seconds of each, and the last call's reply.

    We read only the last result, and only after the clock has stopped, since reading a result may take a hundred times
    as long as computing it. If a result is of a type that may compute only when it is read (a lazy array), the call has
    failed.
    """
    clock, done = Clock(caller.library), False
    reply = caller(positional, keyword)  # compiles
    end = perf_counter() + seconds

    def last(results: Sequence[Any]) -> bool:
        nonlocal done
        done = clock.enough(end)
        if done and (later := [type(value).__name__ for value in results if not _settled(value)]):
            raise TypeError(f"returned {later[0]}, which may compute when it is read, after the clock has stopped")
        return done

    while not (reply.failure or reply.unavailable or done):
        reply = caller(positional, keyword, clock.measure, last)
    return clock.times, reply


def _settled(value: Any) -> bool:
    """Tell whether the type of a result belongs to a known array library, so that reading the result computes nothing.

    A candidate's own type can give any module name in `__module__`, so we check that this module really has the type.
    """
    kind = type(value)
    module = modules.get(kind.__module__) if kind.__module__.partition(".")[0] in SETTLED else None
    return isinstance(value, np.generic | float | int) or getattr(module, kind.__qualname__, None) is kind
