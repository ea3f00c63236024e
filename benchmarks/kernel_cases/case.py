"""An op at one shape and dtype: what to call, with arrays of which shapes, and what the compiler may make of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from verify.running_error import Approx

FLOAT32, BFLOAT16 = np.dtype(jnp.float32), np.dtype(jnp.bfloat16)


class Limits(NamedTuple):
    """What the compiler may make of a kernel: no worse than what was seen when it was designed."""

    registers: int = 255  # a thread
    instructions: float | None = None  # of a thread, per weight, in the main loop
    eager: bool = True  # loads weights while the kernel before it still runs; else nothing that a first cache keeps
    wgmma: bool = False  # leaves its products to the tensor cores
    loop: int | None = None  # instructions of the main loop, where it does not go over weights


LATE = Limits(eager=False)  # of a kernel without weights


class Work(NamedTuple):
    """How much is asked of a model at once."""

    several: bool = False  # vectors, tokens and sequences: not one alone, but more, too
    capacity: int = 4096  # positions of the cache
    chunk: int = 256  # tokens of a prompt
    page: int = 64  # positions of a page
    sequences: int = 8  # that share pages

    def batches(self, *sizes: int) -> tuple[int, ...]:
        """Of the sizes of a batch, those that are asked for.

        >>> Work().batches(1, 8), Work(several=True).batches(1, 8)
        ((1,), (1, 8))
        """
        return sizes if self.several else sizes[:1]


@dataclass(frozen=True)
class Case:
    """An op at one shape and dtype, in three forms that take the same arguments."""

    op: str
    shape: str
    dtype: str
    function: Callable[..., Any]  # our kernels; where they are products, with a `tile` if wanted
    arrays: tuple[Any, ...]  # shapes and dtypes; of a quantized matrix, `ScaledCodes` of them
    kernels: Mapping[str, Limits]  # that it consists of
    plain: Callable[..., Any] = field(kw_only=True)  # as XLA compiles it
    exact: Callable[..., Approx | tuple[Approx, ...]] = field(kw_only=True)  # of NumPy arrays, with error bounds
    bits: float = 0  # of a weight in memory; 0: it has none
    streams: bool = True  # its copies come from memory, once, and memory bounds it
    flops: int = 0  # 0: so few that memory bounds it
    given: Mapping[int, Any] = field(default_factory=dict)  # arguments for which not any number will do
    donated: tuple[int, ...] = ()  # arrays that are updated in place
    models: tuple[str, ...] = ()  # that have it

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape} {self.dtype}"

    @property
    def bytes(self) -> int:
        """What has to be read and written, each once; what is updated in place changes by next to nothing."""
        results = jax.tree.leaves(jax.eval_shape(self.plain, *self.arrays))
        held = sum(_bytes(self.arrays[i]) for i in self.donated)
        return sum(map(_bytes, jax.tree.leaves(self.arrays))) + sum(map(_bytes, results)) - 2 * held


def _bytes(a: jax.ShapeDtypeStruct) -> int:
    return prod(a.shape) * a.dtype.itemsize


def array(*shape: int, dtype: np.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def times(batch: int) -> str:
    """How a shape names more than one vector, token or sequence.

    >>> times(1), times(8)
    ('', ' x8')
    """
    return f" x{batch}" if batch > 1 else ""
