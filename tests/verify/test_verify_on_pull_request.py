"""Steps of docs/verify-on-pull-request.yml: a wrong kernel makes the workflow fail, with annotation and reports."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.processes import REPOSITORY

WORKFLOW = REPOSITORY / "docs" / "verify-on-pull-request.yml"
KERNEL = """
import numpy as np


def softmax(x):
    wide = x.astype(np.float32)
    top = wide.max(axis=-1, keepdims=True)
    e = np.exp(wide - np.where(np.isinf(top), 0, top))
    total = e[..., :LAST].sum(axis=-1, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0).astype(x.dtype)
"""


def steps() -> dict[str, str]:
    """Return the shell script of each step that has one, by name."""
    text = WORKFLOW.read_text(encoding="utf-8")
    scripts = re.findall(r"- name: (.+)\n +run: \|\n((?: {10}.+\n)+)", text)
    assert text.count("run:") == len(scripts)
    return {name: textwrap.dedent(script) for name, script in scripts}


def run_step(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a step with `bash -e`, as GitHub does. The command `llamaspec` runs this package with this Python."""
    command = f'llamaspec() {{ "{sys.executable}" -m llamaspec.cli "$@"; }}\n{steps()[name]}'
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        ["bash", "-e", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("last", "status"), [("None", 0), ("-1", 1)])
def test_the_step_verifies_the_kernel_of_a_pull_request(tmp_path: Path, last: str, status: int):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/softmax.py").write_text(KERNEL.replace("LAST", last))
    done = run_step("Verify", tmp_path)
    assert done.returncode == status, done.stderr
    suite = ElementTree.parse(tmp_path / "verify.xml").getroot()
    assert suite.get("tests") == "3" if status == 0 else int(suite.get("failures", 0)) >= 1
    assert (tmp_path / "verify.html").read_text().startswith("<!doctype html>")
    errors = re.findall(r"^::error title=[^,]*,file=kernels/softmax.py,line=5::.*", done.stderr, re.MULTILINE)
    assert bool(errors) == (tmp_path / "verify-replays").exists() == bool(status)


def test_the_step_installs_as_the_guide_does():
    guide = (REPOSITORY / "docs" / "verify-your-kernel.md").read_text(encoding="utf-8")
    for line in steps()["Install"].splitlines():
        assert re.sub(r"(\./)?llamaspec(?=/|$)", "PATH/TO/llamaspec", line, count=1) in guide
    assert WORKFLOW.name in guide
