"""The output in docs/verify-triton.md is up to date. Triton's interpreter runs if LLAMASPEC_OTHER_PYTHON has Triton.

Without Triton, NumPy kernels with the same mistakes run on the same draws, so that outdated output is noticed anyway.
"""

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.catalogue import contract_for
from llamaspec.verify.judging.runner import verify
from llamaspec.verify.reports.report import counterexample
from tests.support.processes import REPOSITORY
from tests.verify.other_pythons import python_with

GUIDE = (REPOSITORY / "docs" / "verify-triton.md").read_text(encoding="utf-8")
BROKEN, USUAL, _ = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
REPAIRED = BROKEN.replace("/ BLOCK", "/ dim")
KERNELS = {"mine": BROKEN, "repaired": REPAIRED, "right": REPAIRED.replace("other=0.0)", "other=0.0).to(tl.float32)")}
TRANSCRIPTS = re.findall(r"^\$ llamaspec (verify .*)\n((?:.+\n)+?)```", GUIDE, re.M)
VERDICT = re.compile(r"^(?=violated|within bounds)", re.M)


def test_the_guide_has_a_verdict_for_each_kernel_and_dtype():
    assert [re.findall(r"--candidate (\w+).py", line) for line, _ in TRANSCRIPTS] == [[name] for name in KERNELS]
    for name, source in KERNELS.items():
        ast.parse(source)
        assert (source == BROKEN) == (name == "mine")
    assert KERNELS["right"].count(".to(tl.float32)") == 2


def in_numpy(name: str):
    """Return the NumPy version of a kernel. As in Triton, a quotient of float16 numbers is float32."""

    def rmsnorm(x, weight, *, eps):
        features, dim = x.astype(np.float32) if name == "right" else x, x.shape[-1]
        over = 1 << (dim - 1).bit_length() if name == "mine" else dim
        squares = np.sum(features * features, axis=-1, keepdims=True, dtype=features.dtype)
        y = features / np.sqrt(squares / np.float32(over) + np.float32(eps)) * weight.astype(np.float32)
        return y.astype(x.dtype)

    return rmsnorm


@pytest.mark.sampled(1)  # 2 s each
@pytest.mark.parametrize(("line", "transcript"), TRANSCRIPTS, ids=KERNELS)
def test_what_is_drawn_and_found_is_what_the_guide_shows(line: str, transcript: str):
    (name,) = re.findall(r"--candidate (\w+).py", line)
    contract = contract_for("rmsnorm")
    for dtype, verdict in zip(re.findall(r"--dtype (\w+)", line), VERDICT.split(transcript)[1:], strict=True):
        candidate = Direct(in_numpy(name), arrays="numpy", contiguous=True)
        report = verify(contract, candidate, precision=precision(dtype), examples=200, seed=1, only={"rows": (1, 2, 3)})
        report = replace(report, contiguous=True)  # as the command does for --contiguous
        lines = verdict.splitlines()
        assert lines[0].startswith(report.outcome) and f" {dtype} " in lines[0]
        assert what_stays(verdict) == what_stays("\n".join(counterexample(report, contract)))
        if report.outcome == "within bounds":
            assert f"({report.examples} examples, {report.compared:,} numbers compared, " in lines[0]


def what_stays(verdict: str) -> list[str]:
    """Return the parts of a verdict that do not depend on the order of sums.

    A different order changes the used share of a bound, and the size of the error in a counterexample.
    """
    lines = verdict.splitlines()
    return [re.sub(r": off by .*", "", line) for line in lines[1 : 5 if lines[0].startswith("violated") else 3]]


def on_triton(python: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    for name, source in KERNELS.items():
        (folder / f"{name}.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TRITON_INTERPRET": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def triton() -> str:
    if not (python := python_with("triton", "torch")):
        pytest.skip("needs a Python with torch and triton: set LLAMASPEC_OTHER_PYTHON")
    return python


@pytest.mark.parametrize(("line", "transcript"), TRANSCRIPTS, ids=KERNELS)
def test_the_guide_shows_what_triton_gives(line: str, transcript: str, triton: str, tmp_path: Path):
    done = on_triton(triton, tmp_path, sys.executable, "-m", "llamaspec.cli", *line.split(), "--python", triton)
    assert done.returncode == int("violated" in transcript), done.stderr
    for actual, expected in zip(VERDICT.split(done.stdout)[1:], VERDICT.split(transcript)[1:], strict=True):
        assert actual.split("  ")[0] == expected.split("  ")[0]  # the verdict, the op and the dtype
        assert what_stays(actual) == what_stays(expected)


def test_the_usual_test_passes(triton: str, tmp_path: Path):
    source = f"import torch\nfrom mine import rmsnorm\n{USUAL}"
    assert on_triton(triton, tmp_path, triton, "-c", source).returncode == 0
