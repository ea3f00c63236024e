"""Route each call of an op to a kernel or to XLA, by the shapes of the arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Form = tuple[Any, ...]  # hashable: the tree, shapes and dtypes of a kernel's arrays, and its static arguments


@dataclass(frozen=True)
class KernelOp[**P, R]:
    """A kernel for an op, and the functions that replace the kernel in other calls."""

    kernel: Callable[P, R]
    plain: Callable[P, R]
    prompt: Callable[P, R]  # for arguments without a form
    form: Callable[P, Form | None]  # the form of arguments; it decides whether the kernel accepts them


@dataclass(frozen=True)
class Routed[**P, R]:
    """An op that calls its kernel if the form of the arguments is in `accepted`, and `op.plain` if it is in `refused`.

    Raises ValueError for any other form: the table was made for another model, batch or cache.
    """

    name: str
    op: KernelOp[P, R]
    accepted: frozenset[Form]
    refused: frozenset[Form]

    def __call__(self, *arguments: P.args, **fixed: P.kwargs) -> R:
        form = self.op.form(*arguments, **fixed)
        if form is None:
            return self.op.prompt(*arguments, **fixed)
        if form in self.accepted:
            return self.op.kernel(*arguments, **fixed)
        if form in self.refused:
            return self.op.plain(*arguments, **fixed)
        raise ValueError(f"{self.name} got arguments of a form that this table of ops was not made for")


def form_of(arrays: Any, *static: Any) -> Form:
    """Make the form of arrays (or their shapes) and static arguments."""
    leaves, tree = jax.tree.flatten(arrays)
    return tree, tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves), *static
