"""`llamaspec verify` as a person runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

CANDIDATES = """
import numpy as np

def wrong(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / (e.sum(axis=-1, keepdims=True) + np.float32(1e-6))

def right(x):
    top = np.maximum(x.max(axis=-1, keepdims=True), np.float32(-3e38))
    e = np.exp(x - top)
    return e / np.maximum(e.sum(axis=-1, keepdims=True), np.float32(1e-30))

def raises(x):
    raise NotImplementedError("rows of 128 only")
"""


@pytest.fixture
def verify(tmp_path):
    (tmp_path / "mine.py").write_text(CANDIDATES)

    def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-m", "cli", "verify", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


NUMPY = ("--arrays", "numpy", "--examples", "40", "--seed", "1")


def test_a_wrong_softmax(verify, tmp_path):
    done = verify("softmax", "--candidate", "mine:wrong", *NUMPY, status=1)
    assert done.stderr == "seed 1\n"
    lines = done.stdout.splitlines()
    assert lines[0].startswith("violated      softmax float32  mine:wrong")
    assert len(lines) <= 6
    *_, replay = lines[-1].split()
    assert (tmp_path / replay).exists()

    again = verify("--replay", replay, "--arrays", "numpy", status=1).stdout.splitlines()
    assert again[1:] == lines[1:-1]
    verify("--replay", replay, "--arrays", "numpy", "--candidate", "mine:right")

    file = tmp_path / replay
    file.write_text(json.dumps({**json.loads(file.read_text()), "inputs": "0" * 64}))
    done = verify("--replay", replay, "--arrays", "numpy", status=2)
    assert "its draw no longer stands for the same inputs" in done.stderr


def test_a_right_softmax(verify, tmp_path):
    [line] = verify("softmax", "--candidate", "mine:right", *NUMPY, "--strict").stdout.splitlines()
    assert line.startswith("within bounds softmax float32  mine:right  (40 examples, seed 1")
    assert sorted(path.name for path in tmp_path.glob("*.json")) == []


def test_results_for_programs(verify, tmp_path):
    text = verify("softmax", "--candidate", "mine:raises", *NUMPY, "--json", "--junit", "out.xml", status=1).stdout
    [report] = json.loads(text)["reports"]
    assert report["finding"]["kind"] == "raised"
    assert report["finding"]["message"] == "NotImplementedError: rows of 128 only (mine.py:14)"
    assert ElementTree.parse(tmp_path / "out.xml").getroot().get("failures") == "1"


def test_the_list_of_contracts(verify):
    text = verify("--list", "rmsnorm", "add").stdout
    assert "rmsnorm(x: Float[*batch dim], weight: Float[dim], *, eps: float) -> Float[*batch dim]" in text
    assert "add(x: Float[*batch dim], y: Float[*batch dim])" in text
    assert "rows, dim, x, weight, eps" in text


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["conv"], "no contract is called conv"),
        (["softmax", "--candidate", "mine:missing"], "mine:missing cannot be imported: AttributeError"),
        (
            ["softmax", "--candidate", "mine:right", "--dtype", "int8"],
            "arrays are float32, bfloat16, float16; got int8",
        ),
        (["softmax", "--candidate", "mine:right", "--set", "m=3"], "softmax draws rows, n, x, around, hidden; got m"),
        (["softmax", "add", "--candidate", "mine:right"], "--candidate is one function: name the op that it is"),
        (["draw"], "no function here is called as draw is: name one with --candidate"),
        (["--replay", "none.json"], "none.json: No such file or directory"),
    ],
)
def test_wrong_usage_is_one_line(verify, arguments, error):
    done = verify(*arguments, "--arrays", "numpy", "--examples", "1", status=2)
    [line] = [line for line in done.stderr.splitlines() if not line.startswith("seed")]
    assert line.startswith("error: ") and error in line


def test_a_model_is_walked_through(verify, data):
    path = data / "stories260K" / "stories260K.bin"
    *rows, last = verify("--model", str(path), "--dtype", "bfloat16", "--seed", "1").stdout.splitlines()
    assert [row.split()[0] for row in rows[1:]] == [
        *["norm_qkv"] * 3,
        "attend",
        "project_add",
        "norm_gate_up",
        "down_add",
        "norm_logits",
    ]
    assert last.startswith("within bounds block bfloat16  auto kernels  (108 examples, seed 1")
