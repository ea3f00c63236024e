"""An op that has a kernel, routed by the shapes of its arguments, about which the kernel was asked before."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Form = tuple[Any, ...]  # hashable: the tree, shapes and dtypes of the arrays that a kernel is called with, and the rest


@dataclass(frozen=True)
class KernelOp[**P, R]:
    """An op that has a kernel."""

    kernel: Callable[P, R]
    plain: Callable[P, R]
    prompt: Callable[P, R]  # the plain form for arguments without a `form`
    form: Callable[P, Form | None]  # all of the arguments that decides whether the kernel takes them


@dataclass(frozen=True)
class Routed[**P, R]:
    """An op that calls its kernel with arguments of the `accepted` forms, and the plain form with those `refused`.

    Raises ValueError for arguments of another form: the table was made for another model, batch or cache.
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
    """Make the form of arrays, or of their shapes, and of what is static."""
    leaves, tree = jax.tree.flatten(arrays)
    return tree, tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves), *static
