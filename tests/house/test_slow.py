"""`make test` leaves out exactly the tests that are marked as slow."""

import shutil
import subprocess

import pytest

from tests.conftest import is_sampled
from tests.support.processes import REPOSITORY


@pytest.mark.parametrize(
    ("count", "total", "sampled"),
    [
        (1, 3, [True, False, False]),
        (2, 4, [True, False, True, False]),
        (2, 5, [True, False, False, True, False]),
        (3, 2, [True, True]),
    ],
)
def test_sampled_cases_are_spread_evenly(count: int, total: int, sampled: list[bool]):
    assert [is_sampled(place, total, count) for place in range(total)] == sampled


def test_the_first_cases_can_be_sampled():
    assert [is_sampled(place, 5, 2, first=True) for place in range(5)] == [True, True, False, False, False]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", range(3))
def test_the_cases_that_are_not_sampled_are_slow(case, request):
    name = request.node.nodeid.partition("[")[0]
    cases = [item for item in request.session.items if item.nodeid.partition("[")[0] == name]
    assert sum(item.get_closest_marker("slow") is None for item in cases) == 1


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_ci_leaves_out_nothing():
    """`make test` skips slow tests and draws fewer examples; `make ci` runs all tests with the default number of
    examples.

    With the oldest supported jax, CI runs the tests of `make test`.
    """
    fast, all_of_them = (
        subprocess.run(["make", "-n", target], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
        for target in ("test", "ci")
    )
    assert "not slow" in fast and "brief" in fast
    complete_runs = [line for line in all_of_them.splitlines() if ".venv/bin/python -m pytest" in line]
    assert len(complete_runs) == 1 and "not slow" not in complete_runs[0] and "brief" not in complete_runs[0]
