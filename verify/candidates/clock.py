"""Time a call until its result is ready.

`verify.candidates.worker` loads this file in the candidate's process, so the file imports nothing of this project. The
worker loads it before the candidate: a candidate that replaces `time.perf_counter` then does not replace our clock.
With torch or cupy on a GPU, we clear the L2 cache before each call, including lines that a candidate or another program
made persistent. We measure the call with GPU events. The time includes work that the call started on other streams. jax
has no events, so we measure the time until the call's result is ready.

Each timed call gets different numbers: we swap two elements of every floating-point array. So a candidate that caches
results by the numbers of its inputs finds no cached result, or returns a wrong one. Only the last call gets the
original numbers, and only its result is read and judged.
"""

import ctypes
from collections.abc import Callable, Sequence
from importlib import import_module
from random import SystemRandom
from sys import modules
from time import perf_counter
from typing import Any

import numpy as np

FEWEST = 3  # timed calls
FLUSH = 2**28  # bytes: more than a second-level cache has
SETTLED = ("numpy", "torch", "jax", "jaxlib", "cupy")  # libraries that compute an array before they return it


# Bytes of an element, and the bits of its exponent, by dtype.
FLOATING = {
    "float16": (2, 0x7C00),
    "bfloat16": (2, 0x7F80),
    "float32": (4, 0x7F80_0000),
    "float64": (8, 0x7FF0_0000_0000_0000),
}
SLACK = 1e-4  # seconds by which GPU events may differ from the processor's clock


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
        """Return whether the next call may be the last: `end` has passed, and this is at least call number `FEWEST`."""
        return len(self.times) >= FEWEST - 1 and perf_counter() >= end

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
        _end_persistence()
        torch.empty(FLUSH, dtype=torch.int8, device=on_gpu[0].device).zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        result, called, outside = _between(start, end, torch.cuda.synchronize, function, positional, keyword)
        self.times.append(_plausible(start.elapsed_time(end) / 1000, called) + outside)
        return result

    def _cupy(self, function: Callable[..., Any], positional: list, keyword: dict[str, Any]) -> Any:
        cupy = import_module("cupy")
        _end_persistence()
        cupy.zeros(FLUSH, dtype="int8")
        start, end = (cupy.cuda.Event() for _ in range(2))
        wait = cupy.cuda.runtime.deviceSynchronize
        result, called, outside = _between(start, end, wait, function, positional, keyword)
        self.times.append(_plausible(cupy.cuda.get_elapsed_time(start, end) / 1000, called) + outside)
        return result


def _between(
    start: Any, end: Any, wait: Callable[[], Any], function: Callable[..., Any], positional: list, keyword: dict
) -> tuple[Any, float, float]:
    """Call `function` between the GPU events `start` and `end`.

    Return the result, the seconds until the function returned, and the seconds for which other streams still ran after
    the event `end`. `wait` waits for all streams.
    """
    wait()
    start.record()
    began = perf_counter()
    result = function(*positional, **keyword)
    called = perf_counter() - began
    end.record()
    end.synchronize()
    before = perf_counter()
    wait()  # waits for every stream
    between = perf_counter()
    wait()  # nothing is running: this measures the wait itself
    return result, called, max((between - before) - (perf_counter() - between), 0.0)


def _plausible(measured: float, called: float) -> float:
    """Return `measured`, the seconds between two GPU events. Raises RuntimeError if the function took longer to return.

    `called` is the seconds until the function returned. The GPU is idle at the first event, and gets the second event
    after the function has returned.
    """
    if measured < called - max(SLACK, 0.1 * called):
        raise RuntimeError(f"GPU events measured {measured:.3g} s, but the function returned after {called:.3g} s")
    return measured


def _end_persistence() -> None:
    """Turn persisting lines of the GPU's L2 cache into normal lines, so that clearing the cache evicts them."""
    try:
        ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache()
    except (OSError, AttributeError):  # another GPU, or an old driver
        pass


def timed(caller: Any, positional: list, keyword: dict[str, Any], seconds: float) -> tuple[list[float], Any]:
    """Time calls of a `worker.Caller` after one untimed call. Return the seconds of each, and the last call's reply.

    All calls but the last get `varied` inputs. We read only the last result, and only after the clock has stopped,
    since reading a result may take a hundred times as long as computing it. If a result is of a type that may compute
    only when it is read (a lazy array), the call has failed.
    """
    clock = Clock(caller.library)

    def varied_inputs() -> tuple[list, dict[str, Any]]:
        return [varied(value) for value in positional], {name: varied(value) for name, value in keyword.items()}

    reply = caller(*varied_inputs())  # compiles
    end = perf_counter() + seconds

    def settled(results: Sequence[Any]) -> bool:
        if later := [type(value).__name__ for value in results if not _settled(value)]:
            raise TypeError(f"returned {later[0]}: reading it may compute it after the clock has stopped")
        return True

    while not (reply.failure or reply.unavailable or clock.enough(end)):
        reply = caller(*varied_inputs(), clock.measure, lambda results: False)
    if not (reply.failure or reply.unavailable):
        reply = caller(positional, keyword, clock.measure, settled)
    return clock.times, reply


def varied(value: Any) -> Any:
    """Swap two random elements of `value`, if it is a `worker.Array` of floating-point numbers.

    Infinities (for example in a mask) and NaNs stay in their places.
    """
    size, exponent = FLOATING.get(getattr(value, "dtype", ""), (0, 0))
    count = len(value.bytes) // size if size else 0
    if count < 2:
        return value
    words = np.frombuffer(bytearray(value.bytes), f"u{size}")
    pair = SystemRandom().sample(range(count), 2)
    if np.any(words[pair] & exponent == exponent):
        return value
    words[pair] = words[pair[::-1]]
    return value._replace(bytes=words.tobytes())


def _settled(value: Any) -> bool:
    """Tell whether the type of a result belongs to a known array library, so that reading the result computes nothing.

    A candidate's own type can give any module name in `__module__`, so we check that this module really has the type.
    """
    kind = type(value)
    module = modules.get(kind.__module__) if kind.__module__.partition(".")[0] in SETTLED else None
    return isinstance(value, np.generic | float | int) or getattr(module, kind.__qualname__, None) is kind
