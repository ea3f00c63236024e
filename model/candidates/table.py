"""Lists our implementations of reference functions, with the inputs that each implementation supports.

The table lists every `OwnCandidate` in the modules of this package, so a new candidate needs no other entry.
"""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import llamaspec.model.candidates
from llamaspec.model.candidates.own import OwnCandidate


class ListedCandidate(NamedTuple):
    """A candidate for `op`, with the name that `llamaspec verify --candidate` expects."""

    op: str
    function: str
    only: dict[str, list[Any]]  # argument: the only values to draw for it
    dtypes: tuple[str, ...]
    kernel: bool  # whether it is a kernel; an interpreted kernel takes seconds per call


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
