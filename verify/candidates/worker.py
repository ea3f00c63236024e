"""Call one function in a process of its own, so that a candidate may hang or crash, and lives in any Python.

`verify.candidates.process` runs this file as a program, with nothing but NumPy and the candidate's own libraries: the
file imports nothing of this project. Requests come on stdin, and replies go out on what was stdout. Both are frames: a
JSON header, then the bytes of the arrays that the header names. What the candidate prints goes to a file of its own.
`hand_over`, `read_back` and `Caller` also serve candidates in the same process.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
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
    """An array as bytes in this machine's order: bfloat16 has no NumPy dtype where ml_dtypes is missing."""

    dtype: str
    shape: tuple[int, ...]
    bytes: bytes


def to_bytes(array: np.ndarray) -> Array:
    """The bytes of any array of numbers, with its numbers kept where it has another byte order."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return Array(array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes())


def to_numpy(array: Array) -> np.ndarray:
    """A new array that may be written to.

    Raises ImportError for a dtype that needs ml_dtypes where that is missing, and TypeError, AttributeError or
    ValueError for bytes that are no array.
    """
    try:
        dtype = np.dtype(array.dtype)
    except TypeError:
        dtype = np.dtype(getattr(import_module("ml_dtypes"), array.dtype))
    return np.frombuffer(bytearray(array.bytes), dtype).reshape(array.shape)


def hand_over(array: Array, library: str, device: str | None) -> Any:
    """`array` as an array of `library`, on `device` (a name the library knows; None: its default)."""
    if library == "numpy":
        return to_numpy(array)
    if library == "jax":
        jax = import_module("jax")
        return jax.device_put(to_numpy(array), jax.devices(device)[0] if device else None)
    if library == "cupy":
        return import_module("cupy").asarray(to_numpy(array))
    torch = import_module("torch")
    if array.dtype == "bfloat16":
        bits = torch.from_numpy(np.frombuffer(bytearray(array.bytes), np.int16).reshape(array.shape))
        return bits.view(torch.bfloat16).to(device)
    return torch.from_numpy(to_numpy(array)).to(device)


def read_back(value: Any) -> Array:
    """Read any array: of a library that is known here, or through DLPack, or of what NumPy can read.

    A GPU ends all that it does on any stream before. Raises TypeError for what holds no numbers.
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
        raise TypeError(f"returned {type(value).__name__}, which is no array")
    if array.dtype.type is np.void:
        raise TypeError(f"returned an array of {array.dtype}, which is no number")
    return to_bytes(array)


class Reply(NamedTuple):
    """Outcome of a call: outputs, and the positions or names of the arguments that it changed; or why there are none.

    `unavailable` says what this Python or this machine lacks, which is no fault of the candidate. `overwritten` is 1
    where the call wrote to the result of the call before it, 2 for the one before that, and 0 for none.
    """

    outputs: list[Array]
    changed: list[str]
    failure: str | None = None
    unavailable: str | None = None
    overwritten: int = 0


class Caller:
    """Calls `function` with arrays handed over. The last results are read again, since buffers may be used in turn."""

    def __init__(self, function: Callable[..., Any], library: str, device: str | None):
        self.function, self.library, self.device = function, library, device
        self._held: list[list[tuple[Array, Any]]] = []  # by call, the last one first

    def __call__(
        self,
        positional: list,
        keyword: dict,
        call: Callable[..., Any] | None = None,
        read: Callable[[Any], bool] = lambda results: True,
    ) -> Reply:
        """Call the function, through `call` where that is given; `read` is shown the results, which it may leave."""

        def given(value: Any) -> Any:
            return hand_over(value, self.library, self.device) if isinstance(value, Array) else value

        held, self._held = self._held, []  # a call that fails may have left anything in them
        try:
            arguments = [given(value) for value in positional]
            named = {name: given(value) for name, value in keyword.items()}
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
        at = next((n for n, arrays in enumerate(held, 1) if any(_changed(*one) for one in arrays)), 0)
        self._held = [list(zip(outputs, results, strict=True)), *held[: at - 1 if at else None]]
        earlier = [sum(len(array.bytes) for array, _ in arrays) for arrays in self._held[1:]]
        while len(self._held) > (1 if call else HELD) or sum(earlier[: len(self._held) - 1]) > MOST_HELD:
            self._held.pop()
        return Reply(outputs, changed, overwritten=at)

    def timed(self, positional: list, keyword: dict, seconds: float) -> tuple[list[float], Reply]:
        """Time calls for about so many `seconds`, after one that is not timed, each with arrays of its own.

        The reply is that of the last call.
        """
        return _neighbor("clock").timed(self, positional, keyword, seconds)


def _neighbor(name: str) -> Any:
    """The module in a file beside this one, whose folder no candidate should have in its path."""
    spec = spec_from_file_location(
        f"verify_{name}", os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    )
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _no_arrays(library: str, device: str | None, error: Exception) -> str:
    """One line for a person who asked for arrays that cannot be made here."""
    return f"no arrays of {library}{f' on {device}' if device else ''}: {_describe(error)}"


def _changed(before: Array, after: Any) -> bool:
    try:
        return read_back(after).bytes != before.bytes
    except Exception:  # a donated buffer, for example, cannot be read any more
        return True


def _describe(error: Exception) -> str:
    """One line that names what was raised, and the innermost line of code outside this file and Python's imports."""
    inner = (__file__, import_module.__code__.co_filename, "<frozen importlib.")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(inner)]
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}{': ' if message else ''}{message}{where}"


def load(name: str) -> Callable[..., Any]:
    """The function called `package.module:function` or `path/to/file.py:function`.

    `kernelbench:CALL:file.py:Class` is a class of a KernelBench problem, called in one of the ways of
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
        raise ImportError(f"a candidate is named package.module:function or file.py:function, got {name}")
    try:
        found: Any = _module_in(module) if module.endswith(".py") else import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ImportError(f"{name} cannot be imported: {_describe(error)}") from error
    if not callable(found):
        raise ImportError(f"{name} is no function, but a {type(found).__name__}")
    return found


def load_file(path: str) -> Any:
    """Import the file at `path`. Raises ImportError with one line for what cannot be imported."""
    try:
        return _module_in(path)
    except Exception as error:
        raise ImportError(f"{path} cannot be imported: {_describe(error)}") from error


def _module_in(path: str) -> Any:
    """The module in the file at `path`, which may import its neighbors."""
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
    """A loader that compiles the file as it is now.

    Python takes compiled code for that of a file whose size and second of change are the same, which may be another:
    a kernel that was judged, mended by a program and judged again.
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
            return {"dtype": value.dtype, "shape": value.shape, "bytes": len(value.bytes)}
        if isinstance(value, dict):
            return {"items": [[key, encode(item)] for key, item in value.items()]}
        if isinstance(value, list):
            return [encode(item) for item in value]
        return value

    header = json.dumps(encode(message)).encode()
    stream.write(len(header).to_bytes(8, "little") + header + b"".join(blobs))
    stream.flush()


HEADER = 2**24  # bytes of JSON that a frame may have
HELD, MOST_HELD = 4, 2**28  # results that are held, and bytes of those before the last


def read_frame(stream: Readable, *, most: int | None = None) -> Any:
    """Read what `write_frame` wrote.

    Raises EOFError where the stream ends, and with `most`, the bytes that its arrays may have in all, ValueError for a
    frame that is none or that announces more. Nothing is read of what is too much.
    """

    def take(count: int) -> bytes:
        data = stream.read(count)
        if len(data) != count:
            raise EOFError
        return data

    def array(fields: dict) -> Array:
        nonlocal left
        dtype, shape, size = str(fields["dtype"]), tuple(map(int, fields["shape"])), int(fields["bytes"])
        left -= size
        if most is not None and (size < 0 or left < 0):
            raise ValueError(f"a frame of more than {most} bytes")
        return Array(dtype, shape, take(size))

    def decode(value: Any) -> Any:
        if isinstance(value, list):
            return [decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "items" in value:
            return {key: decode(item) for key, item in value["items"]}
        return array(value)

    left = most or 0
    length = int.from_bytes(take(8), "little")
    if most is not None and length > HEADER:
        raise ValueError("no frame")
    try:
        return decode(json.loads(take(length)))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("no frame") from error


OPEN_FILES = 4096
FILE = 2**33  # bytes that a file may have, and what is printed; a model that is downloaded has some gigabytes
GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap", "/dev/kfd")  # of NVIDIA, under Windows and on a Jetson too, and AMD


def limit_resources() -> None:
    """Limit this process and each that it starts, so that one out of hand gets an error and takes no machine along.

    Memory that it may write to, whether or not it did, ends at what the machine has; so do threads, by their stacks.
    Beside a GPU, whose driver maps memory as it likes, there is no such limit. A limit that is lower already stays,
    and one that the system refuses is left out.
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

    The first frame out is None, or a pair: why the candidate cannot be called, and whether it was imported. The file
    descriptor `prints` takes what the candidate writes to stdout. Its stdin, and that of what it starts, is empty.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(prints, 1)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that what was printed outlives a crash
    limit_resources()
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
    caller = Caller(function, library, device)
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
