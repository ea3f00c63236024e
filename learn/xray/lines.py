"""Runs definitions, and records their code, the executed lines, and the shapes of the arrays that each line assigned.

    runs = Runs()
    y = runs(rmsnorm, x, weight, eps=1e-5)
    runs.listings[0].steps

Python reports the lines while it runs the function (`sys.settrace`), so a branch that was not taken is not marked.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any, NamedTuple

import numpy as np


class RunLine(NamedTuple):
    """A line that was executed."""

    line: int  # index in `Listing.lines`
    shapes: dict[str, list[int]]  # names of the arrays that the line assigned, with their shapes


class Listing(NamedTuple):
    """A function of `reference/` without its docstring, and the lines that one call executed."""

    name: str
    file: str
    first: int  # number of the function's first line in the file
    lines: list[str]
    numbers: list[int]  # the number in the file of each of `lines`
    steps: list[RunLine]


class Runs:
    """Calls functions of `reference/`, and keeps a `Listing` of the first call of each function."""

    def __init__(self) -> None:
        self.listings: list[Listing] = []

    def __call__(self, function: Callable, *arguments: Any, **options: Any) -> Any:
        """Call a function, and record its lines if this is its first call."""
        value, listing = run(function, *arguments, **options)
        if listing.name not in [known.name for known in self.listings]:
            self.listings.append(listing)
        return value


def run(function: Callable, *arguments: Any, **options: Any) -> tuple[Any, Listing]:
    """Call a function, and return its value and its listing.

    >>> from llamaspec.reference.add import add
    >>> value, listing = run(add, np.ones(2), np.ones(2))
    >>> value, [listing.lines[step.line].strip()[:8] for step in listing.steps]
    (array([2., 2.]), ['return x'])
    """
    function = inspect.unwrap(function)
    watched = function.__code__
    seen: list[tuple[int, dict[str, Any]]] = []  # (line, the variables before the line runs)

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event in ("line", "return"):
            seen.append((frame.f_lineno, dict(frame.f_locals)))
        return local

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        return local if frame.f_code is watched else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        value = function(*arguments, **options)
    finally:
        sys.settrace(before)
    return value, _listing(function, seen)


def _listing(function: Callable, seen: list[tuple[int, dict[str, Any]]]) -> Listing:
    source, first = inspect.getsourcelines(function)
    body = _without_docstring(source)
    statements = _first_lines(source)
    steps: list[RunLine] = []
    for (number, before), (_, after) in pairwise(seen):
        line = body.index(statements[number - first])
        shapes = {
            name: list(value.shape)
            for name, value in after.items()
            if isinstance(value, np.ndarray) and value is not before.get(name)
        }
        if steps and steps[-1].line == line:  # Python reports some lines of a long statement more than once
            steps[-1].shapes.update(shapes)
        else:
            steps.append(RunLine(line, shapes))
    module = inspect.getmodule(function)
    assert module is not None
    file = module.__name__.replace(".", "/") + ".py"
    lines = [source[i].rstrip("\n") for i in body]
    return Listing(function.__name__, file, first, lines, [first + i for i in body], steps)


def _definition(source: list[str]) -> ast.FunctionDef:
    node = ast.parse(textwrap.dedent("".join(source))).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def _without_docstring(source: list[str]) -> list[int]:
    """Return the indices of the lines of a function, without its docstring."""
    node = _definition(source)
    left_out = range(0)
    if ast.get_docstring(node):
        left_out = range(node.body[0].lineno - 1, node.body[0].end_lineno or 0)
    return [i for i in range(len(source)) if i not in left_out]


def _first_lines(source: list[str]) -> dict[int, int]:
    """Map every line of a function to the first line of its innermost statement."""
    firsts = {i: i for i in range(len(source))}
    for node in ast.walk(_definition(source)):  # outer statements first
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef):
            for line in range(node.lineno - 1, node.end_lineno or node.lineno):
                firsts[line] = node.lineno - 1
    return firsts
