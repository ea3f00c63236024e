"""How much memory a model takes, and whether it is there, before any of it is allocated."""

import ctypes
import os
from pathlib import Path

import jax

OVERHEAD = 400_000_000  # bytes beside weights and cache: the interpreter, JAX, compiled programs, activations


def available_bytes() -> int:
    """Main memory that this process can still take: what Linux calls available, within the cgroup's limit."""
    available = _meminfo_available()
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if (bytes_limit := _number(limit)) is not None and (bytes_used := _number(used)) is not None:
            available = min(available, max(bytes_limit - bytes_used, 0))
    return available


def device_bytes() -> int:
    """Memory of JAX's default device that is free: a GPU's own, or the machine's."""
    device = jax.devices()[0]
    if device.platform == "cpu" or not (stats := device.memory_stats()):
        return available_bytes()
    return stats["bytes_limit"] - stats["bytes_in_use"]


def return_freed_memory() -> None:
    """Have the allocator give back what is free: after compiling, glibc sits on a hundred MB that weights will need."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def check_fits(*, weights: int, cache: int, context: int, available: int) -> None:
    """Raise MemoryError, with the sums in the message, if weights and cache do not fit."""
    if weights + cache + OVERHEAD > available:
        raise MemoryError(
            f"{gigabytes(weights)} of weights and {gigabytes(cache)} of cache for a context of {context} tokens "
            f"do not fit in the {gigabytes(available)} of memory that are free"
        )


def gigabytes(count: int) -> str:
    """
    >>> gigabytes(4_400_000_000)
    '4.4 GB'
    """
    return f"{count / 1e9:,.1f} GB"


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # no /proc: not Linux, or hidden
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
