"""Cases: an op at one shape and dtype, the functions and arrays to call, and limits on the compiled kernel."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llamaspec.reference.config import Config
from llamaspec.verify.bounds.running_error import Approx

FLOAT32, BFLOAT16 = np.dtype(jnp.float32), np.dtype(jnp.bfloat16)


class KernelLimits(NamedTuple):
    """Limits on the machine code of a compiled kernel: the figures that we counted when we designed the kernel."""

    registers: int = 255  # of a thread, at most
    instructions: float | None = None  # instructions of a thread per weight in the main loop, at most
    eager: bool = True  # whether the kernel must load weights while the previous kernel still runs
    wgmma: bool = False  # whether the kernel must multiply on the tensor cores
    loop: int | None = None  # instructions of a main loop that does not read weights, at most


LATE = KernelLimits(eager=False)  # for a kernel without weights, which loads nothing early


class KernelWork(NamedTuple):
    """Sizes of a model's work: cache positions, tokens per prompt chunk, positions per page, and sequences."""

    several: bool = False  # several vectors, tokens and sequences, too
    capacity: int = 4096  # positions of the cache
    chunk: int = 256  # tokens of a prompt
    page: int = 64  # positions of a page
    sequences: int = 8  # sequences that share pages

    def batches(self, *sizes: int) -> tuple[int, ...]:
        """Choose the sizes of a batch: all of `sizes` if `several`, otherwise only the first.

        >>> KernelWork().batches(1, 8), KernelWork(several=True).batches(1, 8)
        ((1,), (1, 8))
        """
        return sizes if self.several else sizes[:1]


@dataclass(frozen=True)
class Case:
    """An op at one shape and dtype: our kernel, XLA's op and the exact op, which take the same arguments."""

    op: str
    shape: str
    dtype: str
    function: Callable[..., Any]  # our kernels; products take a `tile`, too
    arrays: tuple[Any, ...]  # shapes and dtypes; `ScaledCodes` of them for a quantized matrix
    kernels: Mapping[str, KernelLimits]  # the kernels that it launches
    plain: Callable[..., Any] = field(kw_only=True)  # the op in jax.numpy, which XLA compiles
    exact: Callable[..., Approx | tuple[Approx, ...]] = field(
        kw_only=True
    )  # takes NumPy arrays, returns values and error bounds
    bits: float = 0  # bits of a weight in memory; 0 without weights
    streams: bool = True  # whether the op reads its arrays once and memory bounds its speed
    flops: int = 0  # 0 if memory bounds the op's speed
    values: Mapping[int, Any] = field(default_factory=dict)  # arguments that cannot be random numbers
    donated: tuple[int, ...] = ()  # indices of the arrays that are updated in place
    models: tuple[str, ...] = ()  # models that have this case

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape} {self.dtype}"

    @property
    def bytes(self) -> int:
        """The bytes to read and write. Arrays updated in place do not count, because few of their bytes change."""
        results = jax.tree.leaves(jax.eval_shape(self.plain, *self.arrays))
        donated_bytes = sum(_bytes(self.arrays[i]) for i in self.donated)
        return sum(map(_bytes, jax.tree.leaves(self.arrays))) + sum(map(_bytes, results)) - 2 * donated_bytes


def _bytes(a: jax.ShapeDtypeStruct) -> int:
    return prod(a.shape) * a.dtype.itemsize


@dataclass(frozen=True)
class CaseFamily:
    """Cases of the kernel table, which a function makes from a model's config, a dtype and an amount of work."""

    cases: Callable[[Config, np.dtype, KernelWork], Iterator[Case]]

    def __call__(self, config: Config, dtype: np.dtype, work: KernelWork) -> Iterator[Case]:
        return self.cases(config, dtype, work)


class Meeting(NamedTuple):
    """A model, a dtype and other arguments, from which a `Variant` builds its cases."""

    model: str
    dtype: np.dtype
    options: Mapping[str, int] = {}


@dataclass(frozen=True)
class Variant:
    """Cases with a feature that no published Llama has: a function that makes them, and arguments for its calls."""

    cases: Callable[..., Iterator[Case]]
    meetings: tuple[Meeting, ...]

    def __call__(self, config: Config, dtype: np.dtype, work: KernelWork, **options: int) -> Iterator[Case]:
        return self.cases(config, dtype, work, **options)


TWO_MODELS = ("tinyllama-1.1b", "llama-3.1-8b")  # with heads of 64 and of 128, so most kinds of cases
EVERYWHERE = tuple(Meeting(model, dtype) for model in TWO_MODELS for dtype in (FLOAT32, BFLOAT16))


def array(*shape: int, dtype: np.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def times(batch: int) -> str:
    """Return the suffix of a shape's name for `batch` vectors, tokens or sequences. It is empty if `batch` is 1.

    >>> times(1), times(8)
    ('', ' x8')
    """
    return f" x{batch}" if batch > 1 else ""
