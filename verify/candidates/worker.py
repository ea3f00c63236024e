"""Call one function in a separate process, which may hang or crash, and may run a different Python.

`verify.candidates.process` runs this file as a program with only NumPy and the candidate's own libraries, so the file
imports nothing of this project. Requests come on stdin, and replies go out on the original stdout. Both are frames: a
JSON header, then the bytes of the arrays that the header names. The candidate's output goes to a separate file.
`hand_over`, `read_back` and `Caller` also serve candidates in the same process.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from io import TextIOWrapper
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Readable(Protocol):
    def read(self, count: int, /) -> bytes: ...


@runtime_checkable
class Writable(Protocol):
    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...


class Array(NamedTuple):
    """An array as bytes in this machine's byte order.

    The dtype is a string: NumPy has no bfloat16 without ml_dtypes.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: bytes
    layout: str = ""  # one of `LAYOUTS`, or contiguous


LAYOUTS = ("rows apart", "transposed", "expanded", "offset")  # how arrays lie in memory that are not contiguous


def placed(array: np.ndarray, layout: str) -> tuple[np.ndarray, tuple[int, ...], int]:
    """Make a flat buffer that holds `array` in a layout. Return the buffer, the strides and the offset, in elements.

    "rows apart" leaves a gap after each row, as if a row were part of a longer, fused row. "transposed" stores the axes
    in reverse order. "expanded" applies to an array that repeats one slice along its first axis; it stores the slice
    once, and the first axis has the stride 0. "offset" starts after one element. The gaps contain numbers of the array.

    >>> placed(np.array([[1, 2], [3, 4]]), "transposed")
    (array([1, 3, 2, 4]), (1, 2), 0)
    """
    shape, offset = array.shape, int(layout == "offset")
    wide = (*shape[:-1], 2 * shape[-1]) if layout == "rows apart" and len(shape) > 1 else shape
    if layout == "expanded" and shape and array.tobytes() == array[:1].tobytes() * len(array):  # 0 is not -0
        wide = (1, *shape[1:])
    order = wide[::-1] if layout == "transposed" else wide
    strides = [int(np.prod(order[axis + 1 :], dtype=int)) for axis in range(len(order))]
    if layout == "transposed":
        strides = strides[::-1]
    if wide[:1] != shape[:1]:
        strides[0] = 0
    buffer = np.resize(array.ravel(), int(np.prod(wide, dtype=int)) + offset)
    _strided(buffer, shape, strides, offset)[...] = array
    return buffer, tuple(strides), offset


def _strided(buffer: np.ndarray, shape: tuple[int, ...], strides: Iterable[int], offset: int) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(buffer[offset:], shape, [stride * buffer.itemsize for stride in strides])


def to_bytes(array: np.ndarray) -> Array:
    """Convert an array of numbers to bytes in this machine's byte order."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return Array(array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes())


def to_numpy(array: Array) -> np.ndarray:
    """Convert `array` to a new, writable NumPy array.

    Raises ImportError if the dtype needs ml_dtypes and this package is missing. Raises TypeError, AttributeError or
    ValueError if the bytes do not describe an array.
    """
    try:
        dtype = np.dtype(array.dtype)
    except TypeError:
        dtype = np.dtype(getattr(import_module("ml_dtypes"), array.dtype))
    return np.frombuffer(bytearray(array.bytes), dtype).reshape(array.shape)


def hand_over(array: Array, library: str, device: str | None) -> Any:
    """Convert `array` to an array of `library` on `device` (a name that the library knows, or None for its default)."""
    if library == "numpy":
        whole = to_numpy(array)
        if not array.layout or not whole.size:
            return whole
        buffer, strides, offset = placed(whole, array.layout)
        return _strided(buffer, array.shape, strides, offset)
    if library == "jax":
        jax = import_module("jax")
        return jax.device_put(to_numpy(array), jax.devices(device)[0] if device else None)
    if library == "cupy":
        return import_module("cupy").asarray(to_numpy(array))
    torch = import_module("torch")
    whole = to_numpy(array._replace(dtype="int16") if array.dtype == "bfloat16" else array)
    strided = bool(array.layout and whole.size)
    buffer, strides, offset = placed(whole, array.layout) if strided else (whole, (), 0)
    tensor = torch.from_numpy(buffer)
    tensor = (tensor.view(torch.bfloat16) if array.dtype == "bfloat16" else tensor).to(device)
    return torch.as_strided(tensor, array.shape, strides, offset) if strided else tensor


def read_back(value: Any) -> Array:
    """Read an array of a known library, or an array that DLPack or NumPy can read.

    If the array is on a GPU, we first wait for all streams of the GPU. Raises TypeError for values that are not
    numbers.
    """
    if type(value).__module__.partition(".")[0] == "torch":
        if value.is_cuda:
            import_module("torch").cuda.synchronize(value.device)
        value = value.detach().cpu().contiguous()
        if str(value.dtype) == "torch.bfloat16":
            bits = value.view(import_module("torch").int16).numpy()
            return Array("bfloat16", bits.shape, bits.tobytes())
        value = value.numpy()
    elif hasattr(value, "get") and hasattr(value, "__cuda_array_interface__"):
        if hasattr(value, "device"):
            value.device.synchronize()
        value = value.get()
    elif not hasattr(value, "__array__") and hasattr(value, "__dlpack__"):
        value = np.from_dlpack(value)
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.kind in "SUMm":
        raise TypeError(f"expected an array, got {type(value).__name__}")
    if array.dtype.type is np.void:
        raise TypeError(f"expected an array of numbers, got {array.dtype}")
    return to_bytes(array)


class Reply(NamedTuple):
    """Outcome of a call: its outputs, or why it failed; and the positions or names of arguments that it changed.

    `unavailable` says what this Python or this machine lacks, which is not the candidate's fault. `overwritten` is 1 if
    the call wrote to the previous call's result, 2 for the result before that, and 0 for none.
    """

    outputs: list[Array]
    changed: list[str]
    failure: str | None = None
    unavailable: str | None = None
    overwritten: int = 0


class Caller:
    """Calls `function` with arrays of a library, converted from bytes.

    Every call also reads recent results again, to notice if `function` has overwritten them.
    """

    def __init__(self, function: Callable[..., Any], library: str, device: str | None, clock: Any = None):
        self.function, self.library, self.device, self.clock = function, library, device, clock
        self._recent: list[list[tuple[Array, Any]]] = []  # recent results, newest first

    def __call__(
        self,
        positional: list,
        keyword: dict,
        call: Callable[..., Any] | None = None,
        read: Callable[[Any], bool] = lambda results: True,
    ) -> Reply:
        """Call the function, or `call(function, arguments, named)` if `call` is not None.

        Reads the results back only if `read(results)` is true.
        """

        def handed_over(value: Any) -> Any:
            return hand_over(value, self.library, self.device) if isinstance(value, Array) else value

        earlier_results, self._recent = self._recent, []  # a failed call may have left any state
        try:
            arguments = [handed_over(value) for value in positional]
            named = {name: handed_over(value) for name, value in keyword.items()}
        except Exception as error:
            return Reply([], [], unavailable=_no_arrays(self.library, self.device, error))
        try:
            with np.errstate(all="ignore"):
                result = call(self.function, arguments, named) if call else self.function(*arguments, **named)
            results = result if isinstance(result, tuple | list) else (result,)
            if not read(results):
                return Reply([], [])
            outputs = [read_back(value) for value in results]
        except ImportError as error:
            return Reply([], [], unavailable=_describe(error))
        except Exception as error:
            return Reply([], [], _describe(error))
        before = {**{str(i): value for i, value in enumerate(positional)}, **keyword}
        after = {**{str(i): value for i, value in enumerate(arguments)}, **named}
        changed = [name for name, value in before.items() if isinstance(value, Array) and _changed(value, after[name])]
        at = next((n for n, arrays in enumerate(earlier_results, 1) if any(_changed(*pair) for pair in arrays)), 0)
        self._recent = [list(zip(outputs, results, strict=True)), *earlier_results[: at - 1 if at else None]]
        earlier = [sum(len(array.bytes) for array, _ in arrays) for arrays in self._recent[1:]]
        while len(self._recent) > (1 if call else RECENT) or sum(earlier[: len(self._recent) - 1]) > RECENT_BYTES:
            self._recent.pop()
        return Reply(outputs, changed, overwritten=at)

    def timed(self, positional: list, keyword: dict, seconds: float) -> tuple[list[float], Reply]:
        """Time calls for about `seconds` after one untimed call, each with new arrays. The reply is the last call's."""
        return self.clock.timed(self, positional, keyword, seconds)


def _neighbor(name: str) -> Any:
    """Load a file next to this one by its path, since our folder must not be in the candidate's `sys.path`."""
    spec = spec_from_file_location(
        f"verify_{name}", os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    )
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _no_arrays(library: str, device: str | None, error: Exception) -> str:
    """Say in one line why arrays of this library cannot be created here."""
    return f"cannot create arrays of {library}{f' on {device}' if device else ''}: {_describe(error)}"


def _changed(before: Array, after: Any) -> bool:
    try:
        return read_back(after).bytes != before.bytes
    except Exception:  # a donated buffer, for example, cannot be read again
        return True


def _describe(error: Exception) -> str:
    """Describe an exception in one line, with the innermost line of code outside this file and Python's imports."""
    inner = (__file__, import_module.__code__.co_filename, "<frozen importlib.")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(inner)]
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}{': ' if message else ''}{message}{where}"


def load(name: str) -> Callable[..., Any]:
    """Load the function called `package.module:function` or `path/to/file.py:function`.

    `kernelbench:CALL:file.py:Class` loads a class of a KernelBench problem, and calls it through the function CALL of
    `verify.candidates.kernelbench_calls`. Raises ImportError with one line for anything else.
    """
    if name.startswith("kernelbench:") and name.count(":") > 2:
        _, call, name = name.split(":", 2)
        calls = _neighbor("kernelbench_calls")
        try:
            return calls.CALLS[call](calls.Problem(_module_in(name.rpartition(":")[0]), name.rpartition(":")[2]))
        except Exception as error:
            raise ImportError(f"{name} cannot be imported: {_describe(error)}") from error
    module, _, path = name.rpartition(":")
    if not module or not path:
        raise ImportError(f"expected package.module:function or file.py:function, got {name}")
    try:
        value: Any = _module_in(module) if module.endswith(".py") else import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except Exception as error:
        raise ImportError(f"{name} cannot be imported: {_describe(error)}") from error
    if not callable(value):
        raise ImportError(f"{name}: expected a function, got {type(value).__name__}")
    return value


def load_file(path: str) -> Any:
    """Import the file at `path`. Raises ImportError with one line if that fails."""
    try:
        return _module_in(path)
    except Exception as error:
        raise ImportError(f"{path} cannot be imported: {_describe(error)}") from error


def _module_in(path: str) -> Any:
    """Import the file at `path`. The file may import other files of its folder."""
    folder, file = os.path.split(os.path.abspath(path))
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {path}")
    name = file.removesuffix(".py")
    spec = spec_from_file_location(name, path, loader=_AsWritten(name, path))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.path.insert(0, folder)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class _AsWritten(SourceFileLoader):
    """A loader that always compiles the current source of a file.

    Python reuses a .pyc if size and mtime (in seconds) match. A program may repair a kernel within that second, and
    then we would judge the old code.
    """

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def write_frame(stream: Writable, message: Any) -> None:
    """Write a JSON header, with every Array's bytes after it."""
    blobs: list[bytes] = []

    def encode(value: Any) -> Any:
        if isinstance(value, Array):
            blobs.append(value.bytes)
            return {
                "dtype": value.dtype,
                "shape": value.shape,
                "bytes": len(value.bytes),
                "layout": value.layout,
            }
        if isinstance(value, dict):
            return {"items": [[key, encode(item)] for key, item in value.items()]}
        if isinstance(value, list):
            return [encode(item) for item in value]
        return value

    header = json.dumps(encode(message)).encode()
    stream.write(len(header).to_bytes(8, "little") + header + b"".join(blobs))
    stream.flush()


HEADER = 2**24  # most bytes of JSON in a frame
RECENT, RECENT_BYTES = 4, 2**28  # how many recent results we keep, and most bytes of all but the newest


def read_frame(stream: Readable, *, most: int | None = None) -> Any:
    """Read what `write_frame` wrote.

    Raises EOFError at the end of the stream. `most` limits the size of all arrays in bytes. If `most` is set, raises
    ValueError for a malformed frame, and for a frame with larger arrays, before reading the arrays.
    """

    def take(count: int) -> bytes:
        data = stream.read(count)
        if len(data) != count:
            raise EOFError
        return data

    def array(fields: dict) -> Array:
        nonlocal budget
        dtype, shape, size = str(fields["dtype"]), tuple(map(int, fields["shape"])), int(fields["bytes"])
        budget -= size
        if most is not None and (size < 0 or budget < 0):
            raise ValueError(f"expected a frame of at most {most} bytes")
        return Array(dtype, shape, take(size), str(fields.get("layout", "")))

    def decode(value: Any) -> Any:
        if isinstance(value, list):
            return [decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "items" in value:
            return {key: decode(item) for key, item in value["items"]}
        return array(value)

    budget = most or 0
    length = int.from_bytes(take(8), "little")
    if most is not None and length > HEADER:
        raise ValueError("malformed frame")
    try:
        return decode(json.loads(take(length)))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("malformed frame") from error


OPEN_FILES = 4096
FILE = 2**33  # most bytes of a file and of the output; a downloaded model has some gigabytes
GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap", "/dev/kfd")  # NVIDIA's, also in WSL and on a Jetson, and AMD's


def limit_resources() -> None:
    """Limit the resources of this process and its children, so that a runaway candidate gets an error.

    Writable memory is limited to the machine's memory. This also limits the number of threads, because each needs
    memory for its stack. On a machine with a GPU there is no memory limit, since its driver maps far more than it uses.
    We never raise a limit, and skip limits that the system refuses.
    """
    try:
        import resource
    except ImportError:  # not a Unix
        return
    limits = {"RLIMIT_FSIZE": FILE, "RLIMIT_NOFILE": OPEN_FILES, "RLIMIT_CORE": 0}
    with suppress(ValueError, OSError):
        if not any(map(os.path.exists, GPUS)):
            limits["RLIMIT_DATA"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name, most in limits.items():
        kind = getattr(resource, name)
        soft, hard = (most if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(kind))
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (min(most, soft), min(most, hard)))


def serve(candidate: str, library: str, device: str | None, prints: int) -> None:
    """Answer requests until stdin ends.

    We first write a frame. It contains None if the candidate can be called, otherwise a pair: the reason, and whether
    the import succeeded. Output of the candidate to stdout goes to the file descriptor `prints`. The stdin of the
    candidate and its children is empty.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(prints, 1)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that output survives a crash
    limit_resources()
    clock = _neighbor("clock")  # before the candidate, which may replace what it imports
    sys.path.insert(0, os.getcwd())
    try:
        function = load(candidate)
    except ImportError as error:
        write_frame(replies, [str(error), False])
        return
    try:
        hand_over(to_bytes(np.zeros(1, np.float32)), library, device)
    except Exception as error:
        write_frame(replies, [_no_arrays(library, device, error), True])
        return
    write_frame(replies, None)
    caller = Caller(function, library, device, clock)
    while True:
        try:
            positional, keyword, seconds = read_frame(requests)
        except EOFError:
            return
        if seconds is None:
            write_frame(replies, list(caller(positional, keyword)))
        else:
            times, reply = caller.timed(positional, keyword, seconds)
            write_frame(replies, [*reply, times])


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3] or None, int(sys.argv[4]))
