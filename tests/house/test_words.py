"""Rules for all files: docstrings begin with allowed words, and test files have unique names."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.processes import REPOSITORY

UNCLEAR = re.compile(r"(What|Of|Which|Where|Those|The same)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def sources() -> dict[str, str]:
    """Read the Python files of the repository, by path, without hidden and generated folders."""
    generated, paths = {"build", "dist", "__pycache__"}, []
    for folder, folders, files in REPOSITORY.walk():
        folders[:] = [name for name in folders if name not in generated and not name.startswith(".")]  # not entered
        paths += [folder / name for name in files if name.endswith(".py") and not name.startswith(".")]
    return {path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a tree and all statements in it. Expressions are skipped, because they contain no docstring."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr):
            yield from statements(node)


def unclear_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and first line of each docstring that begins with a forbidden word."""
    for node in statements(parsed(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)) and UNCLEAR.match(text):
            yield node.body[0].lineno, text.splitlines()[0]


def test_docstrings_open_with_a_verb_or_a_noun_phrase():
    assert [
        f"{path}:{at} {text}" for path, source in sources().items() for at, text in unclear_docstrings(source)
    ] == []


def test_an_unclear_docstring_is_seen():
    source = '"""What it is."""\nclass A:\n    """Those that count."""\n    def f():\n        """Whatever is."""'
    within = '\nif A:\n    try:\n        def g():\n            """Which is within."""\n    finally:\n        pass'
    assert [line for line, _ in unclear_docstrings(source + within)] == [1, 3, 9]


def test_names_of_test_files_are_unique():
    """No two test files have the same name, so that a comment or `pytest -k` can refer to one file."""
    names = [Path(path).name for path in sources() if path.startswith("tests/") and "/test_" in path]
    assert len(names) > 100 and [name for name, count in Counter(names).items() if count > 1] == []
