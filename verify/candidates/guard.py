"""A guard over what a candidate in this process is judged by: definitions, bounds, and the functions under them.

A candidate in a process of its own cannot reach them. One in a test can, by a patch of `reference.softmax.softmax`,
say, that a test library or a shortcut made: then both sides agree, whatever the kernel does. Seen are names of modules,
attributes of classes, and the code of functions. A candidate that searches the memory of the process is not stopped.
"""

import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from llamaspec.verify.candidates.candidate import Candidate, Failure, Outputs

OURS = ("llamaspec.reference", "llamaspec.verify")  # and the modules under them
JUDGES = (*OURS, "numpy", "math")

CODE = ("__code__", "__defaults__", "__kwdefaults__")

Snapshot = list[tuple[str, Any, dict[str, Any]]]  # what is looked at: its name, itself, and attributes that it has


def snapshot() -> Snapshot:
    """The attributes of all modules that a verdict rests on, of their classes, and the code of their functions."""
    found: Snapshot = []
    for name, module in list(sys.modules.items()):
        if name in JUDGES or name.startswith(tuple(f"{ours}." for ours in OURS)):
            attributes = {key: value for key, value in vars(module).items() if not key.startswith("__")}
            found.append((name, module, attributes))
            for key, value in attributes.items():
                if getattr(value, "__module__", None) == name:
                    found += _within(f"{name}.{key}", value)
    return found


def _within(name: str, value: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The parts of a class or a function that may be changed, and of what a decorator put it around."""
    if isinstance(value, FunctionType):
        yield name, value, {key: getattr(value, key) for key in CODE}
    if (wrapped := getattr(value, "__wrapped__", None)) is not None:
        yield from _within(name, wrapped)
    if isinstance(value, type):
        attributes = dict(vars(value))
        yield name, value, attributes
        for key, part in attributes.items():
            part = part.fget if isinstance(part, property) else getattr(part, "__func__", part)
            if isinstance(part, FunctionType):
                yield from _within(f"{name}.{key}", part)


def changes(before: Snapshot) -> list[str]:
    """Names that have another value than `before`, as module.name. They get their old one again."""
    found = []
    for name, holder, attributes in before:
        now = {key: getattr(holder, key) for key in attributes} if isinstance(holder, FunctionType) else vars(holder)
        for key, value in attributes.items():
            if now.get(key) is not value:
                found.append(f"{name}.{key}")
                setattr(holder, key, value)
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
        """Call the candidate, and look whether anything was changed by then: by it, or before it."""
        outcome = self.candidate.call(positional, keyword)
        found = changes(self.before)
        if not found:
            return outcome
        return Failure("definition", f"{', '.join(found[:3])} was changed, which the candidate is judged by")
