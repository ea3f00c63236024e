"""Mutants: implementations with one thing wrong, which a contract must tell from the right one.

Each file of `verify/mutants` holds one plain implementation in float32, in the manner of a kernel, with blocks, tails
and running sums, which its contract must accept; and a list of changes to its text, each a bug that is easily made:

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

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Mutant:
    """A change to the text of an implementation: `old`, which occurs once, becomes `new`."""

    name: str
    old: str
    new: str


@dataclass(frozen=True)
class Implementation:
    """A right implementation and the wrong ones."""

    function: Callable[..., Any]
    mutants: tuple[Mutant, ...]
    only: Mapping[str, Sequence[Any]]  # the draws that the function is made for

    @property
    def name(self) -> str:
        """As `--candidate` takes it."""
        return f"{self.function.__module__}:{self.function.__qualname__}"

    def mutated(self, mutant: Mutant) -> Callable[..., Any]:
        """The wrong function. Raises ValueError where `old` is not in the text of the right one exactly once."""
        source = textwrap.dedent(inspect.getsource(self.function))
        if source.count(mutant.old) != 1:
            raise ValueError(f"{self.function.__name__}, {mutant.name}: {mutant.old!r} must occur once in it")
        helpers = {"bf16": bf16, "f16": f16, "whole": whole}
        scope: dict[str, Any] = {**helpers, **vars(sys.modules[self.function.__module__])}
        exec(compile(source.replace(mutant.old, mutant.new), f"<{mutant.name}>", "exec"), scope)
        return scope[self.function.__name__]


def implementation(
    function: Callable[..., Any], changes: str, *, only: Mapping[str, Sequence[Any]] | None = None
) -> Implementation:
    """`function` and its mutants, from a text: names, and under each the old lines after "-" and the new after "+".

    >>> implementation(f32, '''
    ... narrower than it should be
    ...     - np.float32
    ...     + np.float16
    ... ''').mutants
    (Mutant(name='narrower than it should be', old='np.float32', new='np.float16'),)
    """
    found: list[Mutant] = []
    name, old, new = "", [], []
    for line in [*changes.splitlines(), "end"]:
        if not line.strip():
            continue
        if change := re.fullmatch(r"    ([-+]) ?(.*)", line):
            (old if change[1] == "-" else new).append(change[2])
            continue
        if name:
            found.append(Mutant(name, "\n".join(old), "\n".join(new)))
        name, old, new = line.strip(), [], []
    return Implementation(function, tuple(found), only or {})


def f32(array: Any) -> np.ndarray:
    """In float32, as every kernel computes."""
    return np.asarray(array).astype(np.float32)


def bf16(array: Any) -> np.ndarray:
    """Rounded to bfloat16, and back in float32: what a mutant does that computes too narrowly."""
    return np.asarray(array).astype(ml_dtypes.bfloat16).astype(np.float32)


def f16(array: Any) -> np.ndarray:
    """Rounded to float16, and back in float32."""
    return np.asarray(array).astype(np.float16).astype(np.float32)


def spans(length: int, block: int) -> list[slice]:
    """The blocks of a loop over `length`, the last one shorter.

    >>> spans(5, 3)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def whole(length: int, block: int) -> list[slice]:
    """The same without a last one that is shorter, unless it is the only one: what a mutant does that forgets tails.

    >>> whole(5, 3), whole(2, 3)
    ([slice(0, 3, None)], [slice(0, 2, None)])
    """
    return spans(length, block)[: max(length // block, 1)]
