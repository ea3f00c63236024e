"""`llamaspec verify` runs if only NumPy, Hypothesis, ml_dtypes, click and jaxtyping are installed."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.processes import REPOSITORY
from tests.support.waiting import PATIENCE

NEEDED = ("click", "hypothesis", "jaxtyping", "ml_dtypes", "numpy", "sortedcontainers", "wadler_lindig")
WRONG = """
import numpy as np


def softmax(x):
    wide = x.astype(np.float32)
    top = wide.max(axis=-1, keepdims=True)
    e = np.exp(wide - np.where(np.isinf(top), 0, top))
    return (e / (e.sum(axis=-1, keepdims=True) + np.float32(1e-6))).astype(x.dtype)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Make a folder with only the packages in `NEEDED`."""
    folder = tmp_path_factory.mktemp("site")
    for name in NEEDED:
        package = distribution(name)
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(package.locate_file(top))))
    return folder


@pytest.fixture
def verify(installed, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    (tmp_path / "mine.py").write_text(WRONG)
    (tmp_path / "right.py").write_text(WRONG.replace(" + np.float32(1e-6)", " + np.float32(1e-37)"))

    def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(REPOSITORY)])}
        command = [sys.executable, "-S", "-m", "llamaspec", "verify", *arguments]  # -S: without site-packages
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


def test_a_group_of_the_project_has_what_is_needed():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    group = project["dependency-groups"]["verify"]
    named = {requirement.split(">")[0] for requirement in group}
    assert named == {*NEEDED} - {"sortedcontainers", "wadler_lindig"}  # dependencies of hypothesis and jaxtyping
    assert {*group} <= {*project["project"]["dependencies"]}


@pytest.mark.parametrize("guide", ["verify-your-kernel.md", "verify-triton.md"])
def test_the_guides_install_the_group_before_llamaspec(guide):
    """Guides install the dependency group before llamaspec. In the other order, pip warns of missing dependencies."""
    text = (REPOSITORY / "docs" / guide).read_text(encoding="utf-8")
    assert text.index("pip install --group PATH/TO/llamaspec/pyproject.toml:verify") < text.index(
        "pip install --no-deps PATH/TO/llamaspec"
    )


def test_there_is_no_jax(installed):
    command = [sys.executable, "-S", "-c", "import jax"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True)
    assert "No module named 'jax'" in done.stderr


def test_a_kernel_is_judged_with_numpy_arrays(verify, tmp_path):
    done = verify("softmax", "--candidate", "mine.py", "--seed", "1", "--github", "--junit", "out.xml", status=1)
    assert done.stdout.startswith("violated      softmax float32  mine.py:softmax")
    seed, annotation = done.stderr.splitlines()
    assert seed == "seed 1"
    assert annotation.startswith("::error title=violated%3A softmax float32,file=mine.py,line=5::rows=")
    assert "%0Alaw: broken law (" in annotation and "--replay verify-replays/" in annotation
    assert ElementTree.parse(tmp_path / "out.xml").getroot().get("failures") == "1"
    done = verify("softmax", "--candidate", "right.py", "--seed", "1", "--examples", "20")
    assert done.stdout.count("within bounds softmax") == 3


def test_contracts_and_mutants(verify):
    assert " softmax " in verify("--list").stdout
    assert verify("--mutants", "add", "--seed", "0").stderr.endswith("mutants killed\n")
    file = str(REPOSITORY / "docs" / "contracts" / "layernorm.py")
    few = ("--arrays", "numpy", "--examples", "9", "--seed", "1", "--dtype", "float32")
    assert "within bounds layernorm" in verify("--contract", file, "--candidate", f"{file}:right", *few).stdout


def test_a_command_that_needs_more_is_one_line_and_no_fault(installed, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(REPOSITORY)])}
    command = [sys.executable, "-S", "-m", "llamaspec", "story"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    [line] = done.stderr.splitlines()
    assert done.returncode == 1 and "a fault of" not in line
    assert line.startswith("error: No module named ") and line.endswith(": pip install PATH/TO/llamaspec")


def test_what_needs_jax_says_so(verify):
    assert "No module named 'jax'" in verify("softmax", "--seed", "1", status=2).stderr
