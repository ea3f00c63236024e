"""Mutants: implementations with one bug each, which a contract must find.

Each file of `verify/mutants` has plain implementations in float32, written like kernels, with blocks, tails and running
sums. The contracts must accept them. Each implementation comes with a list of changes to its source, and each change
makes a likely bug:

    eps outside the root
        - np.sqrt(mean + eps)
        + np.sqrt(mean) + eps
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamaspec.reference.quantizers.ggml_activations import bfloat16
from llamaspec.reference.quantizers.minifloat import E4M3


@dataclass(frozen=True)
class Mutant:
    """A change to the source of an implementation: replace `old`, which occurs once, by `new`."""

    name: str
    old: str
    new: str


@dataclass(frozen=True)
class Implementation:
    """A right implementation and its mutants."""

    function: Callable[..., Any]
    mutants: tuple[Mutant, ...]
    only: Mapping[str, Sequence[Any]]  # the draws that the function supports
    op: str = ""  # if it is not the function's name

    @property
    def of(self) -> str:
        """Return the name of the op that the function implements."""
        return self.op or self.function.__name__

    @property
    def name(self) -> str:
        """Return the function's name for `--candidate`."""
        return f"{self.function.__module__}:{self.function.__qualname__}"

    def text(self, mutant: Mutant | None = None) -> str:
        """Return the source of the right function, or of a mutant.

        Raises ValueError unless `old` of the mutant occurs exactly once in the right function.
        """
        source = textwrap.dedent(inspect.getsource(self.function))
        if mutant is None:
            return source
        if source.count(mutant.old) != 1:
            raise ValueError(
                f"{self.function.__name__}, {mutant.name}: expected {mutant.old!r} exactly once in the function"
            )
        return source.replace(mutant.old, mutant.new)

    def mutated(self, mutant: Mutant) -> Callable[..., Any]:
        """Compile a mutant and return its function. Raises ValueError as `text` does."""
        source = self.text(mutant)
        helpers = {"bf16": bf16, "f16": f16, "full_spans": full_spans, "kept": {}}  # `kept` lasts between calls
        # A class has no __globals__, and the module of a user's file may not be in sys.modules.
        of_module = getattr(self.function, "__globals__", None) or vars(sys.modules[self.function.__module__])
        scope: dict[str, Any] = {**helpers, **of_module}
        exec(compile(source, f"<{mutant.name}>", "exec"), scope)
        return scope[self.function.__name__]


def implementation(
    function: Callable[..., Any], changes: str, *, only: Mapping[str, Sequence[Any]] | None = None, op: str = ""
) -> Implementation:
    """Parse `changes`, which lists mutants of `function`.

    The function implements `op`, by default the op with the function's name.

    `changes` has the names of mutants; under each name, old lines begin with "-" and new lines with "+".

    >>> implementation(f32, '''
    ... narrower than it should be
    ...     - np.float32
    ...     + np.float16
    ... ''').mutants
    (Mutant(name='narrower than it should be', old='np.float32', new='np.float16'),)
    """
    mutants: list[Mutant] = []
    name, old, new = "", [], []
    for line in [*changes.splitlines(), "end"]:
        if not line.strip():
            continue
        if change := re.fullmatch(r"    ([-+]) ?(.*)", line):
            (old if change[1] == "-" else new).append(change[2])
            continue
        if name:
            mutants.append(Mutant(name, "\n".join(old), "\n".join(new)))
        name, old, new = line.strip(), [], []
    return Implementation(function, tuple(mutants), only or {}, op)


def f32(array: Any) -> np.ndarray:
    """Convert to float32."""
    return np.asarray(array).astype(np.float32)


def bf16(array: Any) -> np.ndarray:
    """Round to bfloat16 and convert back to float32."""
    return bfloat16(f32(array)).astype(np.float32)


def e4m3(array: Any) -> np.ndarray:
    """Round to the fp8 format e4m3 and return the codes, uint8. Numbers that round beyond 448 become NaN.

    >>> [hex(code) for code in e4m3([1.0, -464.0, 465.0, np.nan])]
    ['0x38', '0xfe', '0x7f', '0x7f']
    """
    numbers = f32(array).astype(np.float64)
    codes = E4M3.encode(np.nan_to_num(numbers))
    return np.where(np.abs(numbers) <= 464, codes, codes | 0x7F)


def f16(array: Any) -> np.ndarray:
    """Round to float16 and convert back to float32."""
    return np.asarray(array).astype(np.float16).astype(np.float32)


def spans(length: int, block: int) -> list[slice]:
    """Cut range(`length`) into slices of `block` elements. The last slice may be shorter.

    >>> spans(5, 3)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def full_spans(length: int, block: int) -> list[slice]:
    """Cut like `spans`, but leave out a shorter last block, unless it is the only block.

    >>> full_spans(5, 3), full_spans(2, 3)
    ([slice(0, 3, None)], [slice(0, 2, None)])
    """
    return spans(length, block)[: max(length // block, 1)]
