"""`llamaspec verify` on the command line."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest

from llamaspec.cli import llamaspec
from llamaspec.verify.catalogue import CONTRACTS
from tests.support.processes import REPOSITORY
from tests.support.refusals import mentions

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

def prints(x):
    print("\\x1b[1mhere")
    return right(x)

def lacks(x):
    import no_such_library_here
"""


# Remove the time limits, which are too short on a busy machine for all examples and the smallest counterexample.
PATIENT = (
    "from llamaspec.verify.judging import runner; runner.SHRINKING = float('inf'); "
    "from llamaspec import cli; cli.main()"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(CANDIDATES)
    (tmp_path / "mine_too.py").write_text("from mine import right as softmax\n")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def verify(tmp_path, folder):
    def run(*arguments: str, status: int = 0, patient: bool = False) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        start = ["-c", PATIENT] if patient else ["-m", "llamaspec.cli"]
        command = [sys.executable, *start, "verify", *arguments, *(["--time-budget=inf"] if patient else [])]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


def test_nothing_is_left_in_the_folder(verify, tmp_path, monkeypatch):
    """`verify` leaves no files in the working folder. Without our settings, Hypothesis would create a folder there."""
    before = sorted(tmp_path.iterdir())
    monkeypatch.delenv("HYPOTHESIS_STORAGE_DIRECTORY", raising=False)
    done = verify("softmax", "--candidate", "mine:right", *NUMPY)
    assert done.stderr == "seed 1\n"
    assert sorted(path for path in tmp_path.iterdir() if path.name != "__pycache__") == before


@pytest.mark.parametrize("has_cache", [True, False])
def test_what_hypothesis_keeps_is_in_the_cache(tmp_path, monkeypatch, has_cache):
    """Hypothesis's tables of characters go to the cache if it can be created.

    Contracts that draw texts need these tables.
    """
    cache = tmp_path / "caches"
    if not has_cache:
        cache.write_text("a file, where no folder can be made")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("HYPOTHESIS_STORAGE_DIRECTORY", "")  # so that monkeypatch restores it
    monkeypatch.delenv("HYPOTHESIS_STORAGE_DIRECTORY")
    import_module("llamaspec.commands.verify")._store_in_the_cache()
    storage = Path(os.environ["HYPOTHESIS_STORAGE_DIRECTORY"])
    assert storage.is_relative_to(cache) == has_cache
    assert storage.parent.is_dir() or not has_cache


NUMPY = ("--arrays", "numpy", "--examples", "40", "--seed", "1", "--dtype", "float32")


def test_arrays_of_another_library_are_thought_of(verify, tmp_path):
    raises = "def softmax(x):\n    raise TypeError({})\n"
    (tmp_path / "typed.py").write_text(raises.format("f'must be Tensor, not {type(x).__name__}'"))
    (tmp_path / "plain.py").write_text(raises.format("'softmax() takes 2 arguments'"))
    hint = "  does it expect arrays of another library? choose with --arrays jax|numpy|torch|cupy"
    lines = verify("softmax", "--candidate", "typed.py:softmax", *NUMPY, status=1).stdout.splitlines()
    assert hint in lines and len(lines) <= 8
    assert hint not in verify("softmax", "--candidate", "plain.py:softmax", *NUMPY, status=1).stdout.splitlines()


def test_a_wrong_softmax(verify, tmp_path):
    done = verify("softmax", "--candidate", "mine:wrong", *NUMPY, status=1)
    assert done.stderr == "seed 1\n"
    lines = done.stdout.splitlines()
    assert lines[0].startswith("violated      softmax float32  mine:wrong")
    assert len(lines) <= 7
    *_, replay = lines[-1].split()
    assert replay.startswith("verify-replays/verify-softmax-") and (tmp_path / replay).exists()
    [line] = verify("--replay", "none.json", status=2).stderr.splitlines()
    assert line.startswith("error: none.json: No such file or directory")

    again = verify("--replay", replay, status=1).stdout.splitlines()
    assert "(1 example, " in again[0] and "seed" not in again[0]  # a replay draws nothing
    assert again[1:] == lines[1:-1]
    verify("--replay", replay, "--candidate", "mine:right")

    file = tmp_path / replay
    file.write_text(json.dumps({**json.loads(file.read_text()), "inputs": "0" * 64}))
    done = verify("--replay", replay, status=2)
    assert mentions(done.stderr, f"{replay}: draw inputs version")


def test_a_right_softmax(verify, tmp_path):
    line, *of_the_bound = verify("softmax", "--candidate", "mine:right", *NUMPY, "--strict").stdout.splitlines()
    assert [text[:14] for text in of_the_bound] == ["  of the bound", "  nearest at ["]
    assert re.match(r"within bounds softmax float32  mine:right  \(40 examples, [\d,]+ numbers compared, seed 1", line)
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == []


def test_a_verdict_outlives_a_folder_that_cannot_be_written(verify, tmp_path):
    (tmp_path / "file").write_text("")
    out = verify("softmax", "--candidate", "mine:wrong", *NUMPY, "--replays", "file/there", status=1).stdout
    assert out.startswith("violated      softmax float32  mine:wrong")
    assert out.splitlines()[-1].endswith("file/there: Not a directory")
    out = verify("softmax", "--candidate", "mine:wrong", *NUMPY, "--replays", "else where", status=1).stdout
    *_, named = out.partition("--replay ")
    assert named.startswith("'else where/verify-softmax-")


def test_an_environment_that_lacks_something_is_no_verdict(verify, tmp_path):
    done = verify("softmax", "--candidate", "mine:right", "--device", "tpu", "--seed", "1", status=2)
    assert done.stdout == ""
    [line] = done.stderr.splitlines()  # no seed is printed, since nothing was drawn
    assert re.match("error: .*tpu.*RuntimeError: ", line)
    verify("softmax", "--candidate", "mine:lacks", *NUMPY, status=2)
    assert not (tmp_path / "verify-replays").exists()


def test_other_dtypes_are_looked_at_without_being_asked_for(verify, tmp_path):
    (tmp_path / "narrow.py").write_text(
        """
import numpy as np
from mine import right

def half(x):
    top = np.maximum(x.max(axis=-1, keepdims=True), np.asarray(-6e4, x.dtype))
    e = np.exp(x - top)
    return e / np.maximum(e.sum(axis=-1, keepdims=True), np.asarray(1e-7, x.dtype))

def only_float32(x):
    if x.dtype != np.float32:
        raise TypeError(f"float32 alone, not {x.dtype}")
    return right(x)
"""
    )
    arguments = (*NUMPY[:-2], "--set", "hidden=none")
    out = verify("softmax", "--candidate", "narrow:half", *arguments, status=1).stdout
    verdicts = [line.split("  ")[0] for line in out.splitlines() if not line.startswith(" ")]
    assert verdicts == ["within bounds softmax float32", "violated", "violated"]
    out = verify("softmax", "--candidate", "narrow:only_float32", *arguments).stdout
    assert (
        "(raised TypeError: float32 alone, not bfloat16 (narrow.py:12); use --dtype bfloat16 to judge it anyway)" in out
    )
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")] == ["within", "not", "not"]
    verify("softmax", "--candidate", "narrow:only_float32", *arguments, "--dtype", "bfloat16", status=1)


def test_a_dtype_that_a_candidate_takes_now_and_then_is_judged(verify, tmp_path):
    """A dtype is judged if the candidate returns a result for at least one draw, even if it refuses others."""
    (tmp_path / "picky.py").write_text(
        """
import numpy as np
from mine import right

CALLS = []

def some_shapes(x):
    if x.dtype != np.float32 and x.shape[-1] % 8:
        raise ValueError("whole blocks alone")
    return right(x)

def wrong_once(x):
    if x.dtype == np.float32:
        return right(x)
    CALLS.append(1)
    if len(CALLS) > 1:
        raise TypeError("float32 alone")
    return right(x) * 2
"""
    )
    for name, message in (("some_shapes", "raised: ValueError: whole"), ("wrong_once", "raised: TypeError: float32")):
        out = verify("softmax", "--candidate", f"picky:{name}", *NUMPY[:-2], "--set", "hidden=none", status=1).stdout
        verdicts = [line.split("  ")[0] for line in out.splitlines() if not line.startswith(" ")]
        assert verdicts[:2] == ["within bounds softmax float32", "violated"] and message in out


def test_verdicts_outlive_a_candidate_that_is_missing(verify):
    done = verify("softmax", "add", "--candidate", "mine_too", *NUMPY, "--json", status=2)
    assert [report["op"] for report in json.loads(done.stdout)["reports"]] == ["softmax"]
    assert "mine_too:add cannot be imported" in done.stderr


def test_a_candidate_in_a_file_that_prints(verify):
    out = verify("softmax", "--candidate", "mine.py:prints", *NUMPY, "--examples", "20").stdout
    assert out.splitlines()[-11:] == ["  the last lines that the candidate printed:", *["    \\x1b[1mhere"] * 10]


@pytest.mark.parametrize("text", ["nan", "0", "-1", "soon"])
@pytest.mark.parametrize("option", ["--timeout", "--time-budget"])
def test_a_time_that_is_none(folder, option, text):
    with pytest.raises(click.UsageError):
        llamaspec.main(["verify", "add", "--candidate", "mine:right", option, text], standalone_mode=False)


def test_times_without_end(verify):
    verify("softmax", "--candidate", "mine:right", *NUMPY, "--timeout", "inf", "--time-budget", "inf")


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (
            {"rows": 10**9, "n": 10**9},
            "softmax: rows: 1, 2, 3, 5, 1 1048576 1000000000",
        ),
        ({"rows": 2**20, "n": 2**20}, "x: 16777216 1048576 x 1048576"),
        ({"hidden": "nonesuch"}, "softmax: hidden: nonesuch"),
        ({"law": "nonesuch"}, "softmax no draw version"),
        ({"other": 1}, "softmax no draw version"),
    ],
)
def test_a_replay_that_asks_for_too_much(folder, tmp_path, draw, words):
    drawn = {"rows": 1, "n": 1, "x": {"values": "normal(1)"}, "around": 0.0, "hidden": "none", **draw}
    names = {"op": "softmax", "candidate": "mine:right", "arrays": "numpy", "dtype": "float32"}
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"format": 1, **names, "inputs": "0" * 64, "finding": "", "draw": drawn}))
    with pytest.raises(click.UsageError) as caught:
        llamaspec.main(["verify", "--replay", str(path)], standalone_mode=False)
    assert mentions(caught.value.message, f"{path}: {words}")


def test_a_replay_file_that_is_too_long(folder, tmp_path):
    path = tmp_path / "r.json"
    path.write_text("[" * 2_000_000)
    with pytest.raises(click.UsageError, match="1048576 characters"):
        llamaspec.main(["verify", "--replay", str(path)], standalone_mode=False)
    path.write_text("[" * 100_000)
    with pytest.raises(click.UsageError, match="is not a replay file"):
        llamaspec.main(["verify", "--replay", str(path)], standalone_mode=False)


def test_results_for_programs(verify, tmp_path):
    text = verify("softmax", "--candidate", "mine:raises", *NUMPY, "--json", "--junit", "out.xml", status=1).stdout
    [report] = json.loads(text)["reports"]
    assert report["finding"]["kind"] == "raised"
    assert report["finding"]["message"] == "NotImplementedError: rows of 128 only (mine.py:14)"
    assert ElementTree.parse(tmp_path / "out.xml").getroot().get("failures") == "1"


MISBEHAVING = """
import os, signal, time

import numpy as np


def add(x, y):
    raise NotImplementedError("rows of 128 only")


def argmax(x):
    time.sleep(1000)


def rmsnorm(x, weight, *, eps):
    os.kill(os.getpid(), signal.SIGSEGV)


def softmax(x):
    return np.zeros((*x.shape, 1), np.float32)


def swiglu(gate, up):
    return (gate / (1 + np.exp(-gate)) * up).astype(np.float16)


def linear(x, weight, bias):
    return np.full((len(x), len(weight)), np.nan, np.float32)


def gemm(x, weight):
    y = x @ weight.T
    x[...] = 0
    return y


def gemv(x, weight):
    return weight @ x
"""
FINDINGS = {
    "add": "raised: NotImplementedError: rows of 128 only (kernels.py:8)",
    "argmax": "hung: no answer within 2 s",
    "rmsnorm": "crashed: killed by SIGSEGV",
    "softmax": "shape: expected (1, 1), got (1, 1, 1)",
    "swiglu": "dtype: expected float32 or wider, got float16",
    "linear": "not finite: at [0, 0]: expected",
    "gemm": "inputs: wrote to its input x",
    "gemv": None,
}


def test_each_way_to_misbehave_is_named_and_the_run_goes_on(verify, tmp_path):
    """Each kind of misbehavior is reported by name, and the run continues with the next op."""
    (tmp_path / "kernels.py").write_text(MISBEHAVING)
    done = verify(*FINDINGS, "--candidate", "kernels", *NUMPY, "--timeout", "2", status=1)
    reports = re.split(r"(?m)^(?=violated|within)", done.stdout)[1:]
    assert [report.split()[1:4:2] for report in reports[:-1]] == [[op, f"kernels:{op}"] for op in list(FINDINGS)[:-1]]
    for report, finding in zip(reports[:-1], list(FINDINGS.values())[:-1], strict=True):
        assert f"\n  {finding}" in report
    assert reports[-1].startswith("within bounds gemv float32  kernels:gemv")


def test_the_list_of_contracts(verify):
    *groups, _, how = verify("--list").stdout.splitlines()
    names = {name: ops.split() for name, _, ops in (line.partition(" ") for line in groups)}
    assert sorted(op for ops in names.values() for op in ops) == sorted(CONTRACTS)
    assert {"layers", "attention", "fused", "quantized", "backward"} == set(names)
    assert "rmsnorm" in names["layers"] and "attention_paged" in names["attention"]
    assert how.startswith("llamaspec verify --list OP prints")
    listed = {entry["op"]: entry for entry in json.loads(verify("--list", "--json").stdout)}
    assert {op: entry["group"] for op, entry in listed.items()} == {
        op: name for name, ops in names.items() for op in ops
    }
    assert listed["add"]["draws"]["rows"] == "1, 2, 3, 5, or any whole number from 1 to 1048576"
    assert "maximum starts at 0" in listed["softmax"]["mutants"]
    text = verify("--list", "rmsnorm", "add").stdout
    assert "rmsnorm(x: Float[*batch dim], weight: Float[dim], *, eps: float) -> Float[*batch dim]" in text
    assert "add(x: Float[*batch dim], y: Float[*batch dim])" in text
    assert "  draws   rows    1, 2, 3, 5, or any whole number from 1 to 1048576\n" in text
    assert "          eps     1e-05, 1e-06, 0.5, or any number from 1e-06 to 0.5\n" in text


def test_a_closed_pipe_is_no_verdict(tmp_path):
    """Writing to a closed pipe does not give exit status 1, which would mean a violated bound."""
    reader, pipe = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "llamaspec.cli", "verify", "--list"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=pipe, stderr=subprocess.PIPE, text=True)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["conv"], "there is no contract conv"),
        (["softmax", "--candidate", "mine:missing"], "mine:missing cannot be imported: AttributeError"),
        (
            ["softmax", "--candidate", "mine:right", "--dtype", "int8"],
            "expected one of the dtypes float32, bfloat16, float16; got int8",
        ),
        (["softmax", "--candidate", "mine:right", "--set", "m=3"], "softmax has no draw m"),
        (["softmax", "add", "--candidate", "mine:right"], "--candidate names one function: name one op"),
        (["--candidate", "mine"], "--candidate mine names a module: also give the ops to verify"),
        (["softmax", "--candidate", "mine"], "mine:softmax cannot be imported: AttributeError"),
        (["--replay", "none.json"], "none.json: No such file or directory"),
        (
            ["--replay", "r.json", "--set", "n=1"],
            "--set narrows the draws of a candidate, so it does not work with --replay",
        ),
        (["pack"], "this package does not implement pack: name your own function with --candidate"),
        (["softmax", "--candidate", "mine:right", "--set", "hidden=All"], "got All: did you mean all?"),
        (["softmax", "--candidate", "mine:right", "--set", "rows=0"], "any whole number from 1 to 1048576; got 0"),
        (["softmax", "add", "--candidate", "mine", "--set", "n=3"], "add has no draw n"),
        (["softmax", "--candidate", ""], "--candidate is empty"),
        (["softmax", "--candidate", "mine:right", "--contract", ""], "--contract is empty"),
        (["softmax", "--candidate", "mine:right", "--loose", ""], "--loose is empty"),
        (["softmax", "--candidate", "mine:right", "--device", ""], "--device is empty"),
        (
            ["softmax", "--candidate", "mine:right", "--device", "gpu"],
            "--device gpu needs arrays of jax or torch, got numpy",
        ),
    ],
)
def test_wrong_usage(folder, arguments, error, capsys):
    with pytest.raises(click.UsageError) as refused:
        llamaspec.main(["verify", *arguments, "--arrays", "numpy", "--examples", "1"], standalone_mode=False)
    assert error in refused.value.format_message()
    assert capsys.readouterr().err == ""  # the error is the only line: without a run, no seed is printed


def test_without_a_candidate_our_own_ops_are_verified(verify):
    """Without a candidate, `verify` judges our own ops in parallel. An op that we do not implement gets no verdict."""
    done = verify("softmax", "draw", "pack", "--examples", "3", "--seed", "1", "--dtype", "float32")
    assert [line.split("  ")[1] for line in done.stdout.splitlines() if not line.startswith(" ")] == [
        "llamaspec.model.candidates.kernels:softmax",
        "llamaspec.model.candidates.plain:draw",
    ]
    assert "pack" in done.stderr and done.stderr.endswith("\nseed 1\n")


def test_mutants_of_an_op(verify):
    done = verify("--mutants", "add", "--seed", "0")
    verdicts, _, table = done.stdout.partition("\n\n")
    count = len(verdicts.splitlines())
    assert done.stderr == f"seed 0\n{count} of {count} mutants killed\n"
    *_, op, total = table.splitlines()
    assert op.startswith(f"| add | {count} | {count} |") and total.startswith(f"| all | {count} | {count} |")


def test_a_model_is_walked_through(verify, data):
    path = data / "stories260K" / "stories260K.bin"
    walked = verify("--model", str(path), "--dtype", "bfloat16", "--seed", "1", patient=True)
    *rows, last = walked.stdout.splitlines()
    assert [row.split()[0] for row in rows[1:]] == [
        *["norm_qkv"] * 3,
        "attend",
        "project_add",
        "norm_gate_up",
        "down_add",
        "norm_logits",
    ]
    assert re.match(
        r"within bounds block bfloat16  auto kernels  \(108 examples, [\d,]+ numbers compared, seed 1", last
    )


GUIDE = (REPOSITORY / "docs" / "verify-your-kernel.md").read_text(encoding="utf-8")
TRANSCRIPTS = re.findall(r"```\n\$ llamaspec verify (.*)\n((?:.+\n)+)```", GUIDE)


@pytest.mark.slow  # 12 s
def test_the_guide_shows_what_is_printed(verify, tmp_path):
    """The guide's commands print what the guide shows, except for seconds and the last digits of shares of a bound."""
    for name in ("mine", "repaired", "blocked", "fixed"):
        (source,) = re.findall(rf"```python\n(# {name}.py\nimport (?:jax|numpy)[^`]*)```", GUIDE)
        (tmp_path / f"{name}.py").write_text(source)
    assert len(TRANSCRIPTS) == 6
    for arguments, transcript in TRANSCRIPTS:
        done = verify(*arguments.split(), status=int(transcript.startswith("violated")), patient=True)
        assert without_times(done.stdout) == without_times(transcript)


def without_times(text: str) -> str:
    return re.sub(r"[\d.]+ s(?=[,)])|at most [\d.]+|times the bound of .*", "", text)


@pytest.mark.slow  # 3 s
def test_the_guide_walks_from_python():
    *_, block = re.findall(r"```python\n([^`]*walk_through[^`]*)```", GUIDE)
    scope: dict[str, Any] = {}
    exec(block, scope)
    assert scope["report"].outcome == "within bounds" and len(scope["steps"]) > 100
