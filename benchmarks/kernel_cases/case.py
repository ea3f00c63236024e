"""An op at one shape and dtype: what to call, with arrays of which shapes, and what the compiler may make of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from model.shapes import SHAPES
from reference.config import Config

FLOAT32, BFLOAT16 = np.dtype(jnp.float32), np.dtype(jnp.bfloat16)


class Limits(NamedTuple):
    """What the compiler may make of a kernel: no worse than what was seen when it was designed."""

    registers: int = 255  # a thread
    instructions: float | None = None  # of a thread, per weight, in the main loop
    eager: bool = True  # loads weights while the kernel before it still runs
    wgmma: bool = False  # leaves its products to the tensor cores


@dataclass(frozen=True)
class Case:
    """An op at one shape and dtype."""

    op: str
    shape: str
    dtype: str
    function: Callable[..., Any]
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    kernels: Mapping[str, Limits]  # that it consists of
    bits: float = 0  # of a weight in memory; 0: it has none
    streams: bool = True  # its copies come from memory, once, and memory bounds it
    donated: tuple[int, ...] = ()  # arrays that are updated in place
    models: tuple[str, ...] = ()  # that have it

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape} {self.dtype}"


def array(*shape: int, dtype: np.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def batches(config: Config, *sizes: int) -> tuple[int, ...]:
    """Every model decodes one sequence at a time; one of them, several at once, or a chunk of a prompt."""
    return sizes if config == SHAPES["llama-3.1-8b"] else (1,)


def times(batch: int) -> str:
    """How a shape names more than one vector, token or sequence.

    >>> times(1), times(8)
    ('', ' x8')
    """
    return f" x{batch}" if batch > 1 else ""
