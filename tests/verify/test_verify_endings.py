"""Runs that end early: by a signal, by an error in the judge, or by a candidate that changes its results."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamaspec import cli
from llamaspec.commands.interrupt import remove_what_is_unfinished
from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.campaign import Campaign, CandidateJob, _exit_on_sigterm, _run_all
from llamaspec.verify.candidates.candidate import Direct, Failure, Worker
from llamaspec.verify.candidates.worker import load_file
from llamaspec.verify.catalogue import CONTRACTS, IMPLEMENTATIONS
from llamaspec.verify.draws.drawing import uniform
from llamaspec.verify.judging import examination, runner
from llamaspec.verify.judging.examination import Unjudged, takes
from llamaspec.verify.judging.runner import verify
from tests.support.processes import REPOSITORY
from tests.support.waiting import PATIENCE, session_lives, session_seconds, until

CANDIDATES = """
import os, time
import numpy as np

calls = []

def slow(x, y):
    with open("calls", "a") as file:
        file.write(".")
    time.sleep(0.02)
    return x + y

def hangs(x, y):
    with open("process", "w") as file:
        print(os.getpid(), file=file)
    time.sleep(1000)

def garbage(x, y):
    calls.append(1)
    if len(calls) == 5:
        for descriptor in range(3, 20):
            try:
                os.write(descriptor, b"garbage, garbage, garbage")
            except OSError:
                pass
    return x + y
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "candidates.py").write_text(CANDIDATES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(op: str, candidate: Callable[..., Any], **options: Any):
    """Verify `candidate` without laws, so that only expected values can find a fault."""
    options = {"examples": 60, "seed": 0, "precision": precision("float32"), **options}
    return verify(replace(CONTRACTS[op], laws=()), Direct(candidate), **options)


def at_the_fifth(op: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return our own implementation of `op`, but with `change` applied to the result of the fifth call."""
    right, calls = IMPLEMENTATIONS[op].function, []

    def candidate(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        result = right(*arguments, **named)
        return change(result) if len(calls) == 5 else result

    return candidate


def structured(result):
    return np.zeros(result.shape, [("value", np.float32)])


@pytest.mark.parametrize(
    ("op", "change", "kind"),
    [
        ("softmax", structured, "raised: TypeError: expected an array of numbers, got [('value', '<f4')]"),
        ("distribution", lambda p: 3 * p, "value: "),
        ("distribution", lambda p: np.concatenate([p, p, p]), "shape: "),
        ("distribution", lambda p: 3 * p.astype(np.float64), "value: "),
        ("softmax", lambda p: p.astype("datetime64[s]"), "raised: TypeError: "),
        ("softmax", lambda p: p + np.nan, "not finite: "),
        ("softmax", lambda p: None, "raised: TypeError: "),
    ],
)
def test_what_is_wrong_once_is_a_violation_of_its_own_kind(op, change, kind):
    report = run(op, at_the_fifth(op, change))
    assert report.outcome == "violated" and report.worst.finding
    assert report.worst.finding.kind == "not the same twice"
    first = "right in a second call with the same inputs; in the first call: "
    later = "right in the first call; with the same inputs again, after a call with other inputs: "
    assert report.worst.finding.message.startswith((first + kind, later + kind))


def test_garbage_on_the_pipe_is_the_fault_of_the_candidate(folder):
    with Worker("candidates:garbage", arrays="numpy", timeout=PATIENCE) as worker:
        report = verify(CONTRACTS["add"], worker, precision=precision("float32"), examples=60, seed=0)
    assert report.outcome == "violated" and report.worst.finding
    assert report.worst.finding.kind in ("reply", "not the same twice")
    assert "wrote unexpected bytes to the pipe that the judge reads" in report.worst.finding.message


@pytest.mark.parametrize("kind", ["once", "always"])
def test_an_exception_of_the_judge_is_no_pass(monkeypatch, kind):
    calls, right = [], examination.judge

    def judge(*arguments):
        calls.append(1)
        if len(calls) == 5 or (kind == "always" and len(calls) > 5):
            raise KeyError("no such thing")
        return right(*arguments)

    monkeypatch.setattr(examination, "judge", judge)
    if kind == "always":
        with pytest.raises(Unjudged, match=r"add: .*KeyError: 'no such thing'"):
            run("add", lambda x, y: x + y)
        return
    report = run("add", lambda x, y: x + y)
    assert report.outcome == "violated" and report.worst.finding
    assert report.worst.finding == (
        "not the same twice",
        "the first result could not be judged (KeyError: 'no such thing'), "
        "but a second result for the same inputs could",
        "",
    )


@pytest.mark.parametrize("fault", [Unjudged("add"), OSError(28, "No space left on device"), KeyError("x"), None])
def test_an_internal_failure_is_no_violation(monkeypatch, capsys, fault):
    def verify(*_: Any, **__: Any):
        raise fault

    monkeypatch.setattr(import_module("llamaspec.commands.verify"), "_verify", verify)
    monkeypatch.setattr(sys, "argv", ["llamaspec", "verify", "add"])
    if fault is None:
        monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_failure_with_its_traceback_is_no_violation(monkeypatch, capsys):
    monkeypatch.setattr(import_module("llamaspec.commands.verify"), "_verify", lambda *_, **__: {}["x"])
    monkeypatch.setattr(sys, "argv", ["llamaspec", "--debug", "verify", "add"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("KeyError: 'x'\n")


@pytest.mark.parametrize("ending", [SystemExit(143), KeyboardInterrupt(), GeneratorExit()])
def test_exits_pass_through_the_judge(ending):
    def raises(x, y):
        raise ending

    with pytest.raises(type(ending)) as ended:
        run("add", raises)
    assert ended.value is ending


@pytest.mark.parametrize("ending", [SystemExit(143), KeyboardInterrupt()])
def test_exits_pass_through_hypothesis(monkeypatch, ending):
    """SystemExit and KeyboardInterrupt pass through Hypothesis, which might report a different error instead."""
    calls, right = [], runner.strategy

    def strategy(*arguments, **named):
        def draw(drawn):
            calls.append(1)
            if len(calls) == 5:
                raise ending
            return drawn

        return right(*arguments, **named).map(draw)

    monkeypatch.setattr(runner, "strategy", strategy)
    with pytest.raises(type(ending)) as ended:
        run("add", lambda x, y: x + y)
    assert ended.value is ending


@contextmanager
def started(folder: Path, *arguments: str, line: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command; yield its process once it has written `line` to stderr. Kill it and its children at the end."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        # Start with the default handlers, as a shell does; a background job ignores SIGINT, and nohup ignores SIGHUP.
        [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
         "signal.signal(signal.SIGHUP, signal.SIG_DFL);"
         "from llamaspec import cli; cli.main()", "verify", *arguments, "--time-budget=inf"],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        while line not in process.stderr.readline():
            assert process.poll() is None
        yield process
    finally:
        with suppress(ProcessLookupError):  # no process is left
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.sampled(3)  # 6 cases, 5 s
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
@pytest.mark.parametrize("calls", [0, 40])
def test_a_signal_ends_a_run_without_a_verdict(folder, number, status, calls):
    """A signal ends a run without a verdict, both before the first call and between two of 10,000 calls."""
    slow = ("add", "--candidate", "candidates:slow", "--arrays", "numpy", "--examples", "10000")
    with started(folder, *slow, line="seed") as process:
        if calls:
            until(lambda: (folder / "calls").exists() and (folder / "calls").stat().st_size >= calls)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == status
    assert "within bounds" not in out and "violated" not in out
    assert "Traceback" not in err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_mutants_without_a_score(folder, number, status):
    with started(folder, "--mutants", "--seed", "0", line="seed") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == status
    assert "mutants killed" not in err and "| all |" not in out


@pytest.mark.slow  # 35 s
def test_a_signal_ends_what_runs_side_by_side(folder):
    with started(folder, "add", "rmsnorm", "softmax", "--examples", "100000", line="seed") as process:
        until(lambda: session_seconds(process.pid) > 6)  # by then all processes judge
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 143 and "within bounds" not in out
        until(lambda: not session_lives(process.pid))


def test_a_worker_that_ends_at_once_kills_its_candidate(folder):
    """If a signal forces a pool's worker to end at once, the worker first kills its candidate's process."""
    pid_file, pid = folder / "process", None
    campaign = Campaign(seed=1, arrays="numpy", dtypes=("float32",), examples=5, seconds=np.inf, timeout=np.inf)
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_exit_on_sigterm) as pool:
            pool.submit(_run_all, CandidateJob("add", "candidates:hangs"), campaign)
            until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
            pid = int(pid_file.read_text())
            remove_what_is_unfinished()
        until(lambda: not Path("/proc", str(pid)).exists())
        pid = None
    finally:
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_worker_ends_even_if_the_signal_arrives_in_a_callback_of_the_garbage_collector():
    program = (
        "import gc, os, signal; from llamaspec.verify.campaign import _exit_on_sigterm; _exit_on_sigterm();"
        "gc.callbacks.append(lambda *_: os.kill(os.getpid(), signal.SIGTERM)); gc.collect(); print('still runs')"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "", "")


def test_a_candidate_that_hangs_in_a_dtype_is_waited_for_once():
    """A call that hangs in a dtype is made only once, and does not count as refusing that dtype."""

    class Hangs:
        name, layouts, calls = "hangs", (), 0

        def call(self, positional, keyword):
            self.calls += 1
            return Failure("hung", "no answer within 60 s")

    contract, candidate = CONTRACTS["add"], Hangs()
    draws = itertools.islice(uniform(contract, None, {}, seed=0), 16)
    assert takes(contract, candidate, precision("bfloat16"), draws)
    assert candidate.calls == 1


def test_a_file_that_changed_within_a_second_at_the_same_size_is_read_again(tmp_path):
    file = tmp_path / "kernel.py"
    for text, expected in (("def add(a, b): return a - b\n", -1.0), ("def add(a, b): return a + b\n", 3.0)):
        file.write_text(text, encoding="utf-8")
        os.utime(file, (1e9, 1e9))  # both versions have the same mtime in seconds
        assert load_file(str(file)).add(1.0, 2.0) == expected
