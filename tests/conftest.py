"""Everything here runs on a laptop: JAX on the CPU, and outside data only from the folder that LLAMASPEC_DATA names."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

import cli

# Before anything imports jax. A test of the GPU sets it itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# An interpreted kernel is a program that calls back into Python, which runs programs itself: where the first holds the
# threads that those need, as on two cores, it waits for ever. NPROC is how many threads XLA makes, for lack of it as
# many as there are cores: with 1 the tests of whole models wait for ever each time, with 2 some times.
os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "0")
os.environ["NPROC"] = "16"

# The first call of every new shape compiles, so a deadline would only measure the compiler; explaining a failure
# runs it many times more. CI draws the same examples every time: a push is judged by its change, not by luck,
# while every run elsewhere draws anew.
settings.register_profile(
    "quick",
    max_examples=20,
    deadline=None,
    print_blob=True,
    derandomize=bool(os.environ.get("CI")),
    phases=set(Phase) - {Phase.explain},
)
settings.register_profile("thorough", max_examples=500, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

NEEDS_DATA = "needs outside data: set LLAMASPEC_DATA"


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory) -> None:
    """Compiled programs and histories of commands go where pytest cleans up, not to the caches of whoever runs it."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of models and tokenizers that are not ours to copy into the repository."""
    if not os.environ.get("LLAMASPEC_DATA"):
        pytest.skip(NEEDS_DATA)
    folder = Path(os.environ["LLAMASPEC_DATA"]).resolve()
    assert folder.is_dir(), f"LLAMASPEC_DATA names {folder}, which is no folder"
    return folder


def pytest_terminal_summary(terminalreporter) -> None:
    skipped = [report for report in terminalreporter.getreports("skipped") if NEEDS_DATA in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} skipped for want of outside data: LLAMASPEC_DATA is unset")


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    """Run a command in this process; returns exit code, stdout and stderr."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["llamaspec", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capfd.readouterr()
        return int(end.value.code or 0), out, err

    return run
