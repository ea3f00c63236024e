"""Divide rows between thread blocks, without masked loads.

A load brings a vector of at most 16 bytes to each of the 128 threads of a block. It cannot load less for some threads.
But the length of a row need not be a multiple of a load. So we cut a row into spans of whole loads. The rest of the row
is its tail, a span that starts early enough to end with the row:

    |--------|--------|--------|--------|           spans, a thread block each
                                   |-------|        the tail, in the block of the last span

We never read or write past the end, and need no padding. Elements in both the tail and the last span are read twice,
the second time from the cache, and written twice, with the same numbers by the same block. Sums count them once.

Callers pad rows shorter than 128. A row of odd length is read with 2 or 4 bytes per thread at a time, because wider
vectors would be misaligned in every other row.

Grids are (span, row), because the last axis may have 2^31 - 1 blocks, and the other axis only 65,535.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from llamaspec.pallas_kernels.parts.compat import THREADS
from llamaspec.pallas_kernels.unsupported import Unsupported

DTYPES = (np.dtype(jnp.float32), np.dtype(jnp.bfloat16))
MAX_ELEMENTS = 2**31 - 1  # positions are int32


@dataclass(frozen=True)
class Span:
    """Consecutive elements of a row, in the registers of a thread block."""

    start: Any  # position in the row, often only known at run time
    size: int
    step: int = THREADS  # elements per load: one vector per thread
    overlap: int = 0  # number of first elements that are also in the span before

    @property
    def slice(self) -> Any:
        return pl.ds(self.start, self.size)

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=self.step // THREADS)

    def load(self, ref) -> Array:
        """Load `ref`, which has the span's size, without converting it."""
        return plgpu.load(ref, layout=self.layout)

    def positions(self) -> Array:
        """Return each element's position in the row."""
        return plgpu.broadcasted_iota(jnp.int32, (self.size,), 0, layout=self.layout) + self.start

    def only_new(self, values: Array, neutral: float) -> Array:
        """Put `neutral` in place of elements that are also in the previous span."""
        if not self.overlap:
            return values
        place = plgpu.broadcasted_iota(jnp.int32, (self.size,), 0, layout=self.layout)
        return jnp.where(place >= self.overlap, values, neutral)


@dataclass(frozen=True)
class Spans:
    """A row of `length` elements, cut into spans of `size`, a multiple of `step`."""

    length: int
    step: int
    size: int

    @classmethod
    def of(cls, length: int, dtype: np.dtype, *, size: int) -> "Spans":
        """Cut a row of at least 128 elements into spans of about `size`, with the widest loads that fit its length."""
        widest = 16 // np.dtype(dtype).itemsize
        vector = max(v for v in (1, 2, 4, 8) if v <= widest and length % v == 0 and v * THREADS <= length)
        step = vector * THREADS
        return cls(length, step, min(-(-size // step), length // step) * step)

    @property
    def count(self) -> int:
        """The number of complete spans, which is also the number of thread blocks per row."""
        return self.length // self.size

    @cached_property
    def tail(self) -> Span | None:
        leftover = self.length % self.size
        if not leftover:
            return None
        size = -(-leftover // self.step) * self.step
        return Span(self.length - size, size, self.step, overlap=size - leftover)

    @property
    def pieces(self) -> int:
        """The number of spans, including the tail."""
        return self.count + (self.tail is not None)

    @property
    def of_row(self) -> list[Span]:
        """The spans of a row that fits in a single block: one, or two if it has a tail."""
        assert self.count == 1
        first = Span(0, self.size, self.step)
        return [first] if self.tail is None else [first, self.tail]

    def visit(self, block: Array, work: Callable[[Any, Span], None]) -> None:
        """Call `work(number, span)` for the span of thread block `block`, and in the last block also for the tail."""
        work(block, Span(block * self.size, self.size, self.step))
        if (tail := self.tail) is not None:

            @pl.when(block == self.count - 1)
            def _():
                work(self.count, tail)


def check_rows(op: str, x: Array, *, most: int = MAX_ELEMENTS) -> None:
    """Raise Unsupported unless x is float32 or bfloat16, with rows of 1 to `most` elements."""
    if x.dtype not in DTYPES:
        raise Unsupported(f"{op} takes float32 or bfloat16, got {x.dtype}")
    if not x.ndim or not x.shape[-1]:
        raise Unsupported(f"{op} takes rows of at least one element, got shape {list(x.shape)}")
    if x.shape[-1] > most:
        raise Unsupported(f"{op} takes rows of at most {most} elements, got {x.shape[-1]}")


def as_rows(x: Array, *, pad: float) -> Array:
    """Reshape [*batch, length] to [rows, length], and pad rows shorter than a thread block."""
    x = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    short = THREADS - x.shape[-1]
    return jnp.pad(x, ((0, 0), (0, short)), constant_values=pad) if short > 0 else x
