"""`Routed`, an op that calls a kernel or XLA, depending on the shapes and dtypes of the arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Form = tuple[Any, ...]  # hashable: the tree, shapes and dtypes of a kernel's arrays, and its static arguments


@dataclass(frozen=True)
class KernelOp[**P, R]:
    """A kernel for an op, and the functions that we call if the kernel does not accept the arguments."""

    kernel: Callable[P, R]
    plain: Callable[P, R]  # for a decoding step that the kernel refuses
    prompt: Callable[P, R]  # for arguments that have no form, as in a prompt
    form: Callable[P, Form | None]  # returns the form of the arguments, which decides whether the kernel accepts them


@dataclass(frozen=True)
class Routed[**P, R]:
    """An op that chooses its implementation by the form (shapes and dtypes) of the arguments.

    It calls the kernel for a form in `accepted`, and `op.plain` for a form in `refused`. If `op.form` returns None (for
    a prompt), it calls `op.prompt`. Raises ValueError for any other form, because the table of ops was then built for a
    different model, batch or cache.
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
        what = "shapes and dtypes for which this table of ops was not built"
        raise ValueError(f"{self.name} got arguments with {what}: it is for a different model, batch or cache")


def form_of(arrays: Any, *static: Any) -> Form:
    """Return the form (see `Form`) of arrays, or of their shapes, and of static arguments."""
    leaves, tree = jax.tree.flatten(arrays)
    return tree, tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves), *static
