"""A guard over what a candidate in this process is judged by: definitions, bounds, and the functions under them.

A candidate in a process of its own cannot reach them. One in a test can, by a patch of `reference.softmax.softmax`,
say, that a test library or a shortcut made: then both sides agree, whatever the kernel does.
"""

import sys
from typing import Any

from verify.candidate import Candidate, Failure, Outputs

JUDGES = ("reference", "verify", "numpy", "math")  # modules, and for the first two those under them

Snapshot = dict[str, dict[str, Any]]  # by module and name


def snapshot() -> Snapshot:
    """The names of all modules that a verdict rests on, and their values."""
    return {
        name: dict(vars(module))
        for name, module in list(sys.modules.items())
        if name in JUDGES or name.partition(".")[0] in JUDGES[:2]
    }


def changes(before: Snapshot) -> list[str]:
    """Names that have another value than `before`, as module.name. They get their old one again."""
    found = []
    for module, names in before.items():
        now = vars(sys.modules[module]) if module in sys.modules else names
        for name, value in names.items():
            if not name.startswith("__") and now.get(name) is not value:
                found.append(f"{module}.{name}")
                now[name] = value
    return found


class Guarded:
    """A candidate in this process that must leave alone what it is judged by."""

    def __init__(self, candidate: Candidate, before: Snapshot):
        self.candidate = candidate
        self.before = before

    @property
    def name(self) -> str:
        return self.candidate.name

    def call(self, positional: dict[str, Any], keyword: dict[str, Any]) -> Outputs | Failure:
        """Call the candidate, unless it was changed before, and look again afterwards."""
        if found := changes(self.before):
            return self._failure(found)
        outcome = self.candidate.call(positional, keyword)
        found = changes(self.before)
        return self._failure(found) if found else outcome

    def _failure(self, found: list[str]) -> Failure:
        return Failure("definition", f"{', '.join(found[:3])} was changed, which the candidate is judged by")
