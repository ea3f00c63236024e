"""Functions of this package that are called as the reference is, and the draws that each is made for.

A function is in this table because a module of this package holds it as a `OwnCandidate`: nothing else names it.
"""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import llamaspec.model.candidates
from llamaspec.model.candidates.own import OwnCandidate


class ListedCandidate(NamedTuple):
    """A function for `op`, by the name that `llamaspec verify --candidate` takes."""

    op: str
    function: str
    only: dict[str, list[Any]]  # narrowed draws of the op's contract
    dtypes: tuple[str, ...]
    kernel: bool  # takes seconds a call, and more for each new shape, if it is interpreted


def found() -> Iterator[ListedCandidate]:
    """Yield the candidates that the modules of this package hold."""
    for name in sorted(module.name for module in pkgutil.iter_modules(llamaspec.model.candidates.__path__)):
        if name == "table":
            continue
        module = f"{llamaspec.model.candidates.__name__}.{name}"
        for attribute, value in vars(import_module(module)).items():
            if isinstance(value, OwnCandidate):
                yield ListedCandidate(value.op, f"{module}:{attribute}", value.only, value.dtypes, value.kernel)


CANDIDATES = sorted(found(), key=lambda candidate: (candidate.kernel, candidate.op, candidate.function))
