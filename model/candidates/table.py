"""A table of this package's functions with signatures of the reference, and of the inputs that each supports.

The table lists every `OwnCandidate` in the modules of this package, so a new candidate needs no other entry.
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
    only: dict[str, list[Any]]  # fewer values to draw, by argument, than the contract of `op` has
    dtypes: tuple[str, ...]
    kernel: bool  # a kernel; if interpreted, it takes seconds per call, and more for each new shape


def listed_candidates() -> Iterator[ListedCandidate]:
    """Yield the candidates in the modules of this package."""
    for name in sorted(module.name for module in pkgutil.iter_modules(llamaspec.model.candidates.__path__)):
        if name == "table":
            continue
        module = f"{llamaspec.model.candidates.__name__}.{name}"
        for attribute, value in vars(import_module(module)).items():
            if isinstance(value, OwnCandidate):
                yield ListedCandidate(value.op, f"{module}:{attribute}", value.only, value.dtypes, value.kernel)


CANDIDATES = sorted(listed_candidates(), key=lambda candidate: (candidate.kernel, candidate.op, candidate.function))
