"""The machine that something is timed on: its name, and how fast it reads, copies and multiplies."""

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

COPIES = 16  # repeats of the random numbers: drawing all of an array takes a CPU longer than measuring
PAGE = 4096  # bytes; arrays are a multiple of it, so that they have `COPIES` times whole rows
ROW = 1024  # numbers that a CPU reads to write `LANES` sums of them
VERSIONS = ("llamaspec", "jax", "jaxlib", "numpy", "jax-cuda13-plugin", "nvidia-cudnn-cu13")
KEPT = "machine.json"  # a file in a user's cache folder


class Sizes(NamedTuple):
    """The sizes of the arrays: more than caches hold, and enough to fill the device."""

    bytes: int
    side: int  # of the square matrices
    effort: Effort


SIZES = {"cpu": Sizes(256 << 20, 2048, Effort(7)), "gpu": Sizes(2 << 30, 8192, Effort(9, in_flight=10))}
BEYOND_CACHE = 4  # times the last cache: much of an array as large as the cache would come from there


class Ceilings(NamedTuple):
    """The most that a machine does a second, measured on random numbers: zeros are faster."""

    copy: float  # bytes a second, those read and those written
    read: float
    flops: dict[str, float]  # a second, of a product of two matrices, by dtype

    def floor(self, *, bytes: int | float, flops: int | float, dtype: str) -> float:
        """Give the least seconds of a computation that reads `bytes` and takes `flops` operations in `dtype`.

        >>> Ceilings(8.0, 10.0, {"float32": 100.0}).floor(bytes=20.0, flops=100.0, dtype="float32")
        2.0
        """
        return Cost(bytes, flops).seconds(bandwidth=self.read, rate=self.flops[dtype])


def about() -> dict[str, Any]:
    """Describe device, driver and versions, to print with every figure."""
    return {
        **_identity(),
        "driver": nvidia_driver(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "versions": {name: version for name in VERSIONS if (version := _version(name))},
    }


def _identity() -> dict[str, str]:
    """Name the device and the processor: a measured rate holds only for them."""
    device = jax.devices()[0]
    return {
        "device": f"{device.platform} {device.device_kind}",
        "processor": f"{os.cpu_count()} x {processor()}",
    }


def this_machine(dtype: str) -> DeviceLimits:
    """Measure the default device for `model.insight.plan`, with products in `dtype`."""
    named, free, device = _identity(), free_bytes(), default_device()
    ceilings = measure_ceilings([dtype])
    name = named["processor"] if device.platform == "cpu" else named["device"]
    return DeviceLimits(name, device.platform, free, ceilings.read, ceilings.flops, last_level_cache() or 0)


def last_level_cache() -> int | None:
    """Give the bytes of the caches next to memory, of all CPUs that this process may run on.

    None for a GPU, and if the system does not say.
    """
    return last_level_cache_bytes() if jax.default_backend() == "cpu" else None


def from_cache(*, bytes: int | float, seconds: int | float, read: int | float, cache: int | None) -> bool:
    """Whether bytes that are read again and again come from a cache of `cache` bytes.

    They do if they fit in it. If its size is not known, they do if they come faster than memory, which gave `read`
    bytes a second.

    >>> from_cache(bytes=6e6, seconds=1.0, read=1e9, cache=32 << 20)
    True
    >>> [from_cache(bytes=6e9, seconds=seconds, read=1e9, cache=None) for seconds in (1.0, 6.5)]
    [True, False]
    """
    return bytes <= cache if cache else bytes / seconds > read


def keep_read_rate(folder: Path, ceilings: Mapping[str, Any]) -> None:
    """Write the measured rate of reading to a file in `folder`, for programs that have no time to measure."""
    _keep(folder, read=ceilings["read"])


def kept_read_rate(folder: Path) -> float | None:
    """Read what `keep_read_rate` wrote. None if there is nothing, or the file is another machine's."""
    return _kept(folder).get("read")


def keep_link(folder: Path, devices: int, link: Link) -> None:
    """Write the measured link between `devices` devices to the file of `keep_read_rate`."""
    _keep(folder, links={**_kept(folder).get("links", {}), str(devices): link._asdict()})


def kept_link(folder: Path, devices: int) -> Link | None:
    """Read what `keep_link` wrote for `devices` devices. Returns None as `kept_read_rate` does."""
    links = _kept(folder).get("links", {}).get(str(devices))
    return links and Link(**links)


def _keep(folder: Path, **measured: Any) -> None:
    (folder / KEPT).write_text(json.dumps({**_kept(folder), **_identity(), **measured}))


def _kept(folder: Path) -> dict[str, Any]:
    """Read all that was measured of this machine; nothing of another."""
    try:
        stored = json.loads((folder / KEPT).read_text())
    except (OSError, ValueError):
        return {}
    return stored if all(stored.get(name) == value for name, value in _identity().items()) else {}


def reading_in_words(folder: Path | None, *, bytes: int | float, seconds: int | float) -> str:
    """Say at what rate `bytes` are read that are read again and again, each time in `seconds`.

    Unless a cache holds them, the words name the share of the rate that `keep_read_rate` wrote to `folder`. Nothing is
    measured.
    """
    read = kept_read_rate(folder) if folder else None
    rate = bytes / seconds
    words = f"{rate / 1e9:.1f} GB/s"
    if from_cache(bytes=bytes, seconds=seconds, read=read or math.inf, cache=last_level_cache()):
        return f"{words}, from a cache"
    return f"{words}, {100 * rate / read:.0f} % of what bench measured" if read else words


def measure_ceilings(dtypes: Sequence[str], sizes: Sizes | None = None) -> Ceilings:
    """Measure the default device. Raises KeyError for one that is neither a CPU nor a GPU."""
    sizes = sizes or _sizes()
    buffers = [jnp.tile(_drawn(sizes), (COPIES, 1)) for _ in range(2)]
    # We copy between two buffers, since new memory would have to be mapped first.
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
    """A measurement of the bytes a second that the default device reads, made each time it is called.

    It adds up an array of `bytes` bytes elementwise, on all cores of a CPU, and writes few sums. A CPU reads one array
    from start to end, in huge pages, as weights lie. A GPU reads all copies side by side.
    """

    def __init__(self, sizes: Sizes | None = None):
        sizes = sizes or _sizes()
        drawn = _drawn(sizes)
        if jax.default_backend() == "cpu":
            array = aligned_zeros((COPIES * drawn.size // ROW, ROW), np.dtype(np.float32))
            array.reshape(COPIES, -1)[:] = drawn
            self._copies = jax.device_put(array, may_alias=True)
            parts = [np.s_[:, i : i + LANES] for i in range(0, ROW, LANES)]
        else:
            self._copies = jnp.tile(drawn, (COPIES, 1))
            parts = list(range(COPIES))
        # The sums go to the same place each time, since new memory would have to be mapped first.
        summed = jax.jit(lambda a, into: sum(a[part] for part in parts), donate_argnums=1, keep_unused=True)
        self._sums = jnp.zeros_like(self._copies[parts[0]])
        self._summed, self._effort = summed, sizes.effort
        self.bytes = self._copies.nbytes + self._sums.nbytes

    def __call__(self) -> float:
        return self.bytes / measure(self._sum, self._effort).median

    def _sum(self) -> jax.Array:
        self._sums = self._summed(self._copies, self._sums)
        return self._sums


def _sizes() -> Sizes:
    """Choose sizes for the default device.

    Large servers have caches of hundreds of megabytes, but a process there may have little memory. Two arrays take a
    quarter of it at most.
    """
    sizes = SIZES[jax.default_backend()]
    most = free_bytes() // 8 // PAGE * PAGE
    return sizes._replace(bytes=max(sizes.bytes, min(BEYOND_CACHE * (last_level_cache() or 0), most)))


def _drawn(sizes: Sizes) -> jax.Array:
    return random_numbers(0, 1, sizes.bytes // (4 * COPIES), dtype="float32")


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def random_numbers(seed: int, *shape: int, dtype: Any) -> jax.Array:
    """Draw normal numbers on the device."""
    return _normal(jax.random.key(seed, impl="rbg"), shape, np.dtype(dtype))


def _matrix_rate(dtype: str, sizes: Sizes) -> float:
    a, b = (random_numbers(seed, sizes.side, sizes.side, dtype=dtype) for seed in (1, 2))
    product = jax.jit(dot)
    return 2 * sizes.side**3 / measure(lambda: product(a, b), sizes.effort).median


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
