"""The machine that we measure on: its name, and how fast it reads, copies and multiplies."""

import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llamaspec.model.device import default_device, free_bytes
from llamaspec.model.insight.cost import Cost
from llamaspec.model.insight.plan import DeviceLimits, Link
from llamaspec.model.insight.timing import Effort, measure
from llamaspec.model.ops.products import dot
from llamaspec.model.system import last_level_cache_bytes, nvidia_driver, processor
from llamaspec.model.weights.groups import LANES
from llamaspec.model.weights.loading import aligned_zeros

COPIES = (
    16  # an array repeats its random numbers this often, because drawing more would take a CPU longer than measuring
)
PAGE = 4096  # bytes; array sizes are multiples of this, so that each copy has complete rows
ROW = 1024  # numbers that a CPU reads for every `LANES` sums that it writes
VERSIONS = ("llamaspec", "jax", "jaxlib", "numpy", "jax-cuda13-plugin", "nvidia-cudnn-cu13")
RATES_FILE = "machine.json"  # the file of measured rates in a user's cache folder


class ArraySizes(NamedTuple):
    """The sizes of the arrays for measuring: larger than caches, and large enough to keep the device busy."""

    bytes: int
    side: int  # rows and columns of the square matrices
    effort: Effort


SIZES = {"cpu": ArraySizes(256 << 20, 2048, Effort(7)), "gpu": ArraySizes(2 << 30, 8192, Effort(9, in_flight=10))}
BEYOND_CACHE = (
    4  # an array has this many times the size of the last-level cache; part of a smaller one would stay in it
)


class Ceilings(NamedTuple):
    """The highest rates of a machine. We measure them with random numbers, because arrays of zeros would be faster."""

    copy: float  # bytes per second, read and written together
    read: float
    flops: dict[str, float]  # dtype: operations per second of a product of two matrices

    def floor(self, *, bytes: int | float, flops: int | float, dtype: str) -> float:
        """Return the least seconds for a computation that reads `bytes` bytes and takes `flops` operations in `dtype`.

        >>> Ceilings(8.0, 10.0, {"float32": 100.0}).floor(bytes=20.0, flops=100.0, dtype="float32")
        2.0
        """
        return Cost(bytes, flops).seconds(bandwidth=self.read, rate=self.flops[dtype])


def about() -> dict[str, Any]:
    """Describe the device, the driver and the versions of packages, to print with every measurement."""
    return {
        **_identity(),
        "driver": nvidia_driver(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "versions": {name: version for name in VERSIONS if (version := _version(name))},
    }


def _identity() -> dict[str, str]:
    """Return the names of the device and the processor. A stored rate is valid only if both names are the same."""
    device = jax.devices()[0]
    return {
        "device": f"{device.platform} {device.device_kind}",
        "processor": f"{os.cpu_count()} x {processor()}",
    }


def this_machine(dtype: str) -> DeviceLimits:
    """Measure the default device for `model.insight.plan`, with matrix products in `dtype`."""
    named, free, device = _identity(), free_bytes(), default_device()
    ceilings = measure_ceilings([dtype])
    name = named["processor"] if device.platform == "cpu" else named["device"]
    kernels = device.kernels if device.platform == "gpu" else ""
    return DeviceLimits(name, device.platform, free, ceilings.read, ceilings.flops, last_level_cache() or 0, kernels)


def last_level_cache() -> int | None:
    """Return the bytes of the last-level caches of all CPUs that this process may run on.

    Returns None for a GPU, or if the system does not report the caches.
    """
    return last_level_cache_bytes() if jax.default_backend() == "cpu" else None


def from_cache(*, bytes: int | float, seconds: int | float, read: int | float, cache: int | None) -> bool:
    """Return whether reads come from a cache, if we read the same `bytes` bytes repeatedly, each time in `seconds`.

    If the size of the cache is known (`cache` bytes), the answer is yes if the data fits in it. If `cache` is None, the
    answer is yes if we read faster than `read` bytes per second, the measured rate of memory.

    >>> from_cache(bytes=6e6, seconds=1.0, read=1e9, cache=32 << 20)
    True
    >>> [from_cache(bytes=6e9, seconds=seconds, read=1e9, cache=None) for seconds in (1.0, 6.5)]
    [True, False]
    """
    return bytes <= cache if cache else bytes / seconds > read


def keep_read_rate(folder: Path, ceilings: Mapping[str, Any]) -> None:
    """Write the measured rate of reading to a file in `folder`, for commands that do not measure it."""
    _keep(folder, read=ceilings["read"])


def kept_read_rate(folder: Path) -> float | None:
    """Return the rate that `keep_read_rate` wrote; None if there is no file, or if another machine wrote it."""
    return _stored_rates(folder).get("read")


def keep_link(folder: Path, devices: int, link: Link) -> None:
    """Write the measured link between `devices` devices to the file of `keep_read_rate`."""
    _keep(folder, links={**_stored_rates(folder).get("links", {}), str(devices): link._asdict()})


def kept_link(folder: Path, devices: int) -> Link | None:
    """Return the link that `keep_link` wrote for `devices` devices.

    Returns None if there is no such link in the file, or if another machine wrote the file.
    """
    links = _stored_rates(folder).get("links", {}).get(str(devices))
    return links and Link(**links)


def _keep(folder: Path, **measured: Any) -> None:
    (folder / RATES_FILE).write_text(json.dumps({**_stored_rates(folder), **_identity(), **measured}))


def _stored_rates(folder: Path) -> dict[str, Any]:
    """Return all measurements in the file; {} if there is no file, or if another machine wrote it."""
    try:
        stored = json.loads((folder / RATES_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return stored if all(stored.get(name) == value for name, value in _identity().items()) else {}


def reading_in_words(folder: Path | None, *, bytes: int | float, seconds: int | float) -> str:
    """Describe the rate of reading, if the same `bytes` bytes are read repeatedly, each time in `seconds`.

    Unless the bytes come from a cache, the description also gives the rate as a percentage of the rate that
    `keep_read_rate` wrote to `folder`. This function measures nothing.
    """
    read = kept_read_rate(folder) if folder else None
    rate = bytes / seconds
    words = f"{rate / 1e9:.1f} GB/s"
    if from_cache(bytes=bytes, seconds=seconds, read=read or math.inf, cache=last_level_cache()):
        return f"{words}, from a cache"
    return f"{words}, {100 * rate / read:.0f} % of the bandwidth that bench measured" if read else words


def measure_ceilings(dtypes: Sequence[str], sizes: ArraySizes | None = None) -> Ceilings:
    """Measure the rates of the default device. Raises KeyError for a device that is neither a CPU nor a GPU."""
    sizes = sizes or _sizes()
    buffers = [jnp.tile(_random_array(sizes), (COPIES, 1)) for _ in range(2)]
    # We copy between two existing buffers, because the system would first have to map new memory.
    negate = jax.jit(lambda a, into: -a, donate_argnums=1, keep_unused=True)

    def copy() -> jax.Array:
        buffers.reverse()
        buffers[1] = negate(*buffers)
        return buffers[1]

    copying, moved = measure(copy, sizes.effort).median, buffers[0].nbytes
    buffers.clear()
    flops = {dtype: _matrix_rate(dtype, sizes) for dtype in dtypes}
    return Ceilings(2 * moved / copying, Reader(sizes)(), flops)


class Reader:
    """A function that measures how many bytes per second the default device reads.

    Each call adds up parts of an array elementwise, on all cores of a CPU, and writes a few sums. `bytes` counts both
    reads and writes. A CPU reads the array from start to end, in huge pages, as it reads weights. On a GPU, the array
    has several copies of the same numbers, which are read in parallel.
    """

    def __init__(self, sizes: ArraySizes | None = None):
        sizes = sizes or _sizes()
        drawn = _random_array(sizes)
        if jax.default_backend() == "cpu":
            array = aligned_zeros((COPIES * drawn.size // ROW, ROW), np.dtype(np.float32))
            array.reshape(COPIES, -1)[:] = drawn
            self._copies = jax.device_put(array, may_alias=True)
            parts = [np.s_[:, i : i + LANES] for i in range(0, ROW, LANES)]
        else:
            self._copies = jnp.tile(drawn, (COPIES, 1))
            parts = list(range(COPIES))
        # We write the sums to the same buffer each time, because the system would first have to map new memory.
        summed = jax.jit(lambda a, into: sum(a[part] for part in parts), donate_argnums=1, keep_unused=True)
        self._sums = jnp.zeros_like(self._copies[parts[0]])
        self._summed, self._effort = summed, sizes.effort
        self.bytes = self._copies.nbytes + self._sums.nbytes

    def __call__(self) -> float:
        return self.bytes / measure(self._sum, self._effort).median

    def _sum(self) -> jax.Array:
        self._sums = self._summed(self._copies, self._sums)
        return self._sums


def _sizes() -> ArraySizes:
    """Choose array sizes for the default device.

    The arrays should be larger than the caches, which have hundreds of megabytes on large servers. But a process may
    have little memory there. So we enlarge the two arrays beyond their usual size only up to a quarter of the free
    memory.
    """
    sizes = SIZES[jax.default_backend()]
    most = free_bytes() // 8 // PAGE * PAGE
    return sizes._replace(bytes=max(sizes.bytes, min(BEYOND_CACHE * (last_level_cache() or 0), most)))


def _random_array(sizes: ArraySizes) -> jax.Array:
    return random_numbers(0, 1, sizes.bytes // (4 * COPIES), dtype="float32")


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def random_numbers(seed: int, *shape: int, dtype: Any) -> jax.Array:
    """Draw normally distributed numbers on the device."""
    return _normal(jax.random.key(seed, impl="rbg"), shape, np.dtype(dtype))


def _matrix_rate(dtype: str, sizes: ArraySizes) -> float:
    a, b = (random_numbers(seed, sizes.side, sizes.side, dtype=dtype) for seed in (1, 2))
    product = jax.jit(dot)
    return 2 * sizes.side**3 / measure(lambda: product(a, b), sizes.effort).median


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
