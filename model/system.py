"""The operating system: memory, processors and the C library. All code that depends on Linux is in this module.

Each function has a fallback for a system without `/proc`, `/sys` or glibc, such as macOS.
"""

import ctypes
import mmap
import os
import platform
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

MEMORY = Path("/proc/meminfo")
PROCESSORS = Path("/proc/cpuinfo")
DRIVER = Path("/proc/driver/nvidia/version")
MAPPINGS = Path("/proc/self/maps")
PROCESS = Path("/proc/self/stat")
CGROUPS = (  # files with a control group's limit and use in bytes, for versions 2 and 1
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
CACHES = "/sys/devices/system/cpu/cpu{}/cache"

M_MMAP_THRESHOLD = -3  # glibc's <malloc.h>
MAP_FIXED = 0x10  # <sys/mman.h>, of Linux and of macOS
LARGE_BLOCK = 1 << 18  # bytes of the keys of a layer for 256 tokens, with 4 heads of 64 float32 values


def usable_cpus() -> list[int]:
    """Return the CPUs that this process may run on, or all CPUs if the system does not say."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


def processor() -> str:
    """Return the processor's model name, or its architecture if the system does not know the name."""
    names = (line.partition(":")[2].strip() for line in _lines(PROCESSORS) if line.startswith("model name"))
    return next(names, platform.machine())


def instructions() -> str:
    """Return the instruction sets of the processor, or "" if the system does not list them."""
    lines = (line.partition(":")[2].strip() for line in _lines(PROCESSORS) if line.startswith(("flags", "Features")))
    return next(lines, "")


def nvidia_driver() -> str | None:
    """Return the version of the NVIDIA driver from its kernel module, or None without a driver."""
    words = next(iter(_lines(DRIVER)), "").split()
    return next((word for word in words if word.count(".") and word.replace(".", "").isdigit()), None)


def last_level_cache_bytes(cpus: Iterable[int] | None = None) -> int | None:
    """Add up the last-level caches of `cpus`, by default the usable CPUs. Returns None if a size is unknown."""
    sizes: dict[str, int] = {}  # CPUs that share a cache: its bytes
    for cpu in usable_cpus() if cpus is None else cpus:
        try:
            caches = Path(CACHES.format(cpu)).glob("index*")
            last = max(caches, key=lambda cache: int((cache / "level").read_text()))
            sharing, size = ((last / name).read_text().strip() for name in ("shared_cpu_list", "size"))
            sizes[sharing] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):  # the file is missing, or has an unknown format
            return None
    return sum(sizes.values())


def cuda_memory() -> tuple[int, int] | None:
    """Return the free and total bytes of the first GPU that CUDA lists, or None without CUDA."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):  # the context that JAX uses
        return None
    try:
        if cuda.cuCtxPushCurrent_v2(context):
            return None
        failed = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)
    return None if failed else (free.value, total.value)


def nvidia_memory() -> tuple[int, int] | None:
    """Return the free and total bytes of this process's first GPU, as the driver counts them. Returns None without a
    driver.

    Unlike CUDA, the driver's library needs no GPU memory to answer.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    handle, counts = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
    if not first.isdigit() or library.nvmlInit_v2():
        return None
    try:
        failed = library.nvmlDeviceGetHandleByIndex_v2(int(first), ctypes.byref(handle))
        failed = failed or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(counts))
    finally:
        library.nvmlShutdown()
    return None if failed else (counts[1], counts[0])


def process_age() -> float:
    """Return the seconds since this process was started, to a hundredth, or 0 if the system does not say."""
    try:
        after_name = PROCESS.read_text().rpartition(")")[2].split()
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


def available_bytes() -> int:
    """Return how many more bytes of main memory this process can use, within the limit of its control group.

    Linux says how much memory is available. On other systems we count all installed memory as available.
    """
    available = _available_on_linux() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, used in CGROUPS:
        if (bytes_limit := _number(limit)) is not None and (bytes_used := _number(used)) is not None:
            available = min(available, max(bytes_limit - bytes_used, 0))
    return available


def return_freed_memory() -> None:
    """Return free blocks to the system, once. After compiling, glibc keeps about 100 MB that the weights could use."""
    if trim := _libc("malloc_trim"):
        trim(0)


def return_blocks_when_freed() -> None:
    """Make glibc return a block of at least `LARGE_BLOCK` bytes to the system as soon as the block is freed.

    By default glibc raises this limit whenever a larger block is freed. Then it takes caches and activations from a
    heap of each thread, and it does not return free blocks in the middle of a heap. With TinyLlama, such blocks are 90
    of 513 MB. With this setting, each prompt takes a millisecond longer, because the pages of each new block are mapped
    again. That is too much for small models.
    """
    if set_option := _libc("mallopt"):
        set_option(M_MMAP_THRESHOLD, LARGE_BLOCK)


def forget_code(folder: Path) -> None:
    """Drop the machine code of libraries under `folder` from memory. The system reads the code again when it runs.

    JAX's compiler leaves 107 MB of code in memory after it compiles TinyLlama. The compiled programs use 10 MB of it.
    """
    under, advise = os.path.realpath(folder) + os.sep, _libc("madvise")
    if not advise:
        return
    for mapping in _lines(MAPPINGS):
        match mapping.split(maxsplit=5):
            case [span, "r-xp", _, _, _, path] if path.startswith(under):
                start, stop = (int(address, 16) for address in span.split("-"))
                advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def use_huge_pages(memory: mmap.mmap, start: int, count: int) -> None:
    """Ask the system to use huge pages for `count` bytes of `memory` from `start` on."""
    if advice := getattr(mmap, "MADV_HUGEPAGE", None):
        memory.madvise(advice, start, count)


# Several threads may be in `at_bus_error`. The first one sets our handler, and the last one to leave restores the old
# handler.
_acts: list[Callable[[], bool]] = []
_before: list[int | None] = []
_acts_lock = Lock()


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_bus_error(number: int) -> None:
    handled = False
    try:
        handled = any(act() for act in reversed(_acts))
    finally:
        if not handled:  # otherwise the same instruction would fault again and again
            _set_bus_handler(ctypes.c_void_p(_before[-1]))


@contextmanager
def at_bus_error(act: Callable[[], bool]) -> Iterator[None]:
    """Call `act` when the process reads mapped memory past the end of a file that was truncated.

    `act` either ends the process, or maps other memory there and returns True, so that the read succeeds. If `act`
    returns False, we call the `act` of an outer context. Without an outer context, the process ends as usual. A Python
    signal handler would not help: it would run only after the faulting instruction, which repeats forever.
    """
    with _acts_lock:
        if not _acts:
            _before.append(_set_bus_handler(_on_bus_error))
        _acts.append(act)
    try:
        yield
    finally:
        with _acts_lock:
            _acts.remove(act)
            if not _acts:
                _set_bus_handler(ctypes.c_void_p(_before.pop()))


def _set_bus_handler(handler: Any) -> int | None:
    """Set the C library's handler of SIGBUS.

    Returns the address of the old handler, or None if the library cannot set one.
    """
    if not (set_handler := _libc("signal")):
        return None
    set_handler.restype = ctypes.c_void_p
    return set_handler(signal.SIGBUS, handler)


def map_zeros(begin: int, end: int) -> bool:
    """Map zeros over the pages of a mapped file from address `begin` to `end`. Returns whether that succeeded."""
    if begin >= end:
        return True
    if map := _libc("mmap"):
        map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        map.restype = ctypes.c_void_p
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        return map(begin, end - begin, mmap.PROT_READ, kind, -1, 0) == begin
    return False


def _libc(function: str) -> Any:
    """Return a function of the C library by name, or None if the library lacks it."""
    return getattr(ctypes.CDLL(None), function, None)


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, or [] if it cannot be read.

    The lines may contain paths, which may contain any byte except a newline.
    """
    try:
        return os.fsdecode(path.read_bytes()).split("\n")
    except OSError:
        return []


def _available_on_linux() -> int | None:
    sizes = (int(line.split()[1]) * 1024 for line in _lines(MEMORY) if line.startswith("MemAvailable:"))
    return next(sizes, None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # the file is missing, or contains "max"
        return None
