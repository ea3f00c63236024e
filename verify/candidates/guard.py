"""A guard for the definitions and bounds that judge a candidate in this process.

A candidate in its own process cannot change the definitions and bounds. A candidate in a test can, for example by
patching `reference.softmax.softmax`: then the kernel and the definition agree, even if both are wrong. The guard
notices changes to names in modules, attributes of classes, and code of functions. It does not stop a candidate that
searches the memory of the process.
"""

import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from llamaspec.verify.candidates.candidate import Candidate, Failure, Outputs

OWN_PACKAGES = ("llamaspec.reference", "llamaspec.verify")  # these packages and the modules under them
JUDGES = (*OWN_PACKAGES, "numpy", "math")

CODE = ("__code__", "__defaults__", "__kwdefaults__")

Snapshot = list[tuple[str, Any, dict[str, Any]]]  # name, object and attributes of each part that is watched


def snapshot() -> Snapshot:
    """Record the attributes of all modules and classes that a verdict depends on, and the code of their functions."""
    parts: Snapshot = []
    for name, module in list(sys.modules.items()):
        if name in JUDGES or name.startswith(tuple(f"{package}." for package in OWN_PACKAGES)):
            attributes = {key: value for key, value in vars(module).items() if not key.startswith("__")}
            parts.append((name, module, attributes))
            for key, value in attributes.items():
                if getattr(value, "__module__", None) == name:
                    parts += _parts_of(f"{name}.{key}", value)
    return parts


def _parts_of(name: str, value: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the parts of a class or function that other code may change; for decorated functions, also the original."""
    if isinstance(value, FunctionType):
        yield name, value, {key: getattr(value, key) for key in CODE}
    if (wrapped := getattr(value, "__wrapped__", None)) is not None:
        yield from _parts_of(name, wrapped)
    if isinstance(value, type):
        attributes = dict(vars(value))
        yield name, value, attributes
        for key, part in attributes.items():
            part = part.fget if isinstance(part, property) else getattr(part, "__func__", part)
            if isinstance(part, FunctionType):
                yield from _parts_of(f"{name}.{key}", part)


def changes(before: Snapshot) -> list[str]:
    """List the names that changed since `before`, as module.name, and restore their old values."""
    changed = []
    for name, holder, attributes in before:
        now = {key: getattr(holder, key) for key in attributes} if isinstance(holder, FunctionType) else vars(holder)
        for key, value in attributes.items():
            if now.get(key) is not value:
                changed.append(f"{name}.{key}")
                setattr(holder, key, value)
    return changed


class Guarded:
    """A candidate in this process that must not change its judge."""

    def __init__(self, candidate: Candidate, before: Snapshot):
        self.candidate = candidate
        self.before = before

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def layouts(self) -> tuple[str, ...]:
        return self.candidate.layouts

    def call(self, positional: dict[str, Any], keyword: dict[str, Any]) -> Outputs | Failure:
        """Call the candidate, then check whether a definition or a bound was changed, by this call or earlier."""
        outcome = self.candidate.call(positional, keyword)
        changed = changes(self.before)
        if not changed:
            return outcome
        names = ", ".join(sorted(changed)[:3])  # sorted, because the order of imports may differ
        return Failure("definition", f"{names} was changed, but it judges the candidate's results")
