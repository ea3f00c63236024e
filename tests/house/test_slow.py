"""`make test` leaves out what `tests/slow.py` names, and nothing else."""

import ast
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from tests.conftest import is_slow
from tests.slow import SLOW, First
from tests.support.processes import REPOSITORY


def test_every_slow_test_exists():
    """A test that was renamed would be fast again, unnoticed."""
    defined = {
        f"{path}::{node.name}"
        for path in {name.split("::")[0] for name in SLOW}
        for node in ast.walk(ast.parse((REPOSITORY / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    tests = {name.partition("[")[0] for name in SLOW if "::" in name}
    assert tests and tests - defined == set()


@pytest.mark.parametrize(
    ("kept", "ids", "slow"),
    [
        (0, ["t.py::test_a"], [True]),
        (0, ["t.py::test_a[1]", "t.py::test_a[2]"], [True, True]),
        (1, ["t.py::test_a[1]", "t.py::test_a[2]", "t.py::test_a[3]"], [False, True, True]),
        (2, ["t.py::test_a[1]", "t.py::test_a[2]", "t.py::test_a[3]", "t.py::test_a[4]"], [False, True, False, True]),
        (First(2), ["t.py::test_a[1]", "t.py::test_a[2]", "t.py::test_a[3]"], [False, False, True]),
        (3, ["t.py::test_a[1]", "t.py::test_a[2]"], [False, False]),
        (1, ["t.py::test_ab", "u.py::test_a", "t.py::test_a[b[::c]]"], [False, False, False]),
    ],
)
def test_some_cases_of_a_slow_test_stay(kept: int, ids: list[str], slow: list[bool]):
    judged = is_slow([SimpleNamespace(nodeid=node) for node in ids], {"t.py::test_a": kept})
    assert judged == slow


def test_a_case_or_a_file_can_be_slow():
    items = [SimpleNamespace(nodeid=node) for node in ("t.py::test_a[1]", "t.py::test_a[2]", "u.py::test_b", "v.py::c")]
    assert is_slow(items, {"t.py::test_a[1]": 0, "u.py": 0}) == [True, False, True, False]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_ci_leaves_out_nothing():
    """`make test` draws fewer examples of fewer tests; `make ci` runs every test with the examples of the default.

    With the oldest jax it runs what `make test` does.
    """
    fast, all_of_them = (
        subprocess.run(["make", "-n", target], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
        for target in ("test", "ci")
    )
    assert "not slow" in fast and "brief" in fast
    whole = [line for line in all_of_them.splitlines() if ".venv/bin/python -m pytest" in line]
    assert len(whole) == 1 and "not slow" not in whole[0] and "brief" not in whole[0]
