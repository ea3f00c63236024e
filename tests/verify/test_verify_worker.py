"""Candidates that misbehave in every possible way run in a separate process."""

import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llamaspec.commands.interrupt import remove_what_is_unfinished
from llamaspec.verify.candidates.candidate import Direct, Failure, NoVerdict, Outputs, Worker, check_library
from tests.support.waiting import PATIENCE, until
from tests.verify.bad_candidates import CANDIDATES, daemons

X = np.array([[1, -2]], np.float32)


@pytest.fixture
def worker(tmp_path, monkeypatch):
    (tmp_path / "candidates.py").write_text(CANDIDATES)
    monkeypatch.chdir(tmp_path)
    workers = []

    def start(function, *, arrays="numpy", timeout=60.0, **options):
        workers.append(Worker(f"candidates:{function}", arrays=arrays, timeout=timeout, **options))
        return workers[-1]

    yield start
    for started_worker in workers:
        started_worker.stop()
    for pid in daemons(tmp_path):
        os.kill(pid, signal.SIGKILL)


def call(worker, x: Any = X, factor=2.0) -> Any:
    return worker.call({"x": x}, {"factor": factor})


@pytest.mark.parametrize("name", ["right", "Namespace.right", "prints", "two", "reads_stdin"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_results_come_back(worker, name, dtype):
    candidate = worker(name)
    for _ in range(2):
        outcome = call(candidate, X.astype(dtype), factor=1)
        assert isinstance(outcome, Outputs)
        np.testing.assert_array_equal(outcome.arrays[0], X.astype(dtype), strict=True)
        assert outcome.changed == ()


def test_bfloat16_and_jax(worker):
    outcome = call(worker("right", arrays="jax"), X.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(outcome.arrays[0], (2 * X).astype(ml_dtypes.bfloat16), strict=True)


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("raises", Failure("raised", "RuntimeError: no such kernel (candidates.py:9)")),
        ("crashes", Failure("crashed", "killed by SIGABRT: out of registers")),
        ("leaves", Failure("crashed", "exit status 3")),
        ("daemon", Failure("crashed", "exit status 5")),
        ("garbage", Failure("reply", "wrote unexpected bytes to the pipe that the judge reads")),
        ("forged", Failure("reply", "wrote unexpected bytes to the pipe that the judge reads")),
        ("forged_header", Failure("reply", "wrote unexpected bytes to the pipe that the judge reads")),
        ("forged_nest", Failure("reply", "wrote unexpected bytes to the pipe that the judge reads")),
        ("forged_dtype", Failure("dtype", "returned an array of \\x1b[2Jfoo, which is not a dtype of numbers")),
        ("escapes", Failure("raised", "RuntimeError: \\x1b[31mred\\x1b]0;title\\x07 (candidates.py:101)")),
        ("escapes_and_dies", Failure("crashed", "exit status 4: \\x1b[2Jgone")),
        ("nothing", Failure("raised", "TypeError: expected an array, got NoneType")),
    ],
)
def test_a_failure_is_told_as_it_is_and_the_next_call_works(worker, name, failure):
    candidate = worker(name)
    assert call(candidate) == failure
    assert call(candidate) == failure


def test_what_hangs_is_killed(worker):
    candidate = worker("hangs", timeout=0.5)
    candidate.start()
    process = candidate._process._popen
    assert call(candidate) == Failure("hung", "no answer within 0.5 s")
    assert process.returncode == -signal.SIGKILL
    assert candidate._process is None  # the next call starts another process


def test_a_judge_that_ends_at_once_leaves_no_process(worker):
    """A judge that ends at once first kills its candidate's process.

    A hanging candidate would not notice that the judge ended.
    """
    candidate = worker("hangs")
    candidate.start()
    remove_what_is_unfinished()
    assert candidate._process._popen.wait(PATIENCE) == -signal.SIGKILL


def test_a_signal_during_the_import_of_the_cleanup_module_is_handled(monkeypatch):
    for name in ("llamaspec.verify.candidates.process", "multiprocessing", "llamaspec.model.checkpoints.staging"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    remove_what_is_unfinished()


def test_a_daemon_that_is_left_behind_delays_nothing(worker, tmp_path):
    """A daemon that a candidate leaves behind delays nothing, although it keeps the pipes open."""
    candidate = worker("leaves_a_daemon")
    assert isinstance(call(candidate), Outputs)
    candidate.stop()
    assert call(worker("daemon")).kind == "crashed"
    pids = daemons(tmp_path)
    assert len(pids) == 2 and all(Path("/proc", str(pid)).exists() for pid in pids)


def test_a_candidate_that_answers_and_reads_no_more(worker):
    candidate = worker("answers_first_and_hangs")
    large = np.zeros((1000, 1000), np.float32)
    assert isinstance(call(candidate, large), Outputs)
    candidate.timeout = 0.5  # from here on it reads nothing, whatever the timeout
    assert call(candidate, large) == Failure("hung", "no answer within 0.5 s")


def test_a_second_reply_is_not_taken_for_that_of_the_next_call(worker):
    candidate = worker("forges_and_answers")
    assert isinstance(call(candidate), Outputs)
    until(candidate._process.has_extra_reply)
    assert call(candidate) == Failure("reply", "wrote unexpected bytes to the pipe that the judge reads")


def test_numbers_of_the_other_byte_order_are_read(worker):
    for candidate in (worker("swapped"), Direct(lambda x, *, factor: (x * factor).astype(">f4"))):
        np.testing.assert_array_equal(call(candidate).arrays[0], 2 * X, strict=True)


def test_prints_are_kept_and_cannot_command_a_terminal(worker):
    candidate = worker("prints_escapes")
    call(candidate)
    call(candidate)
    assert candidate.output_lines == ["\\x1b[31mfirst", "second\\ttab"] * 2
    candidate.stop()
    assert len(candidate.output_lines) == 4


def test_a_library_that_the_candidate_lacks_is_no_verdict(worker):
    for candidate in (worker("imports"), Direct(lambda x, *, factor: __import__("no_such_library_here"))):
        with pytest.raises(NoVerdict, match="ModuleNotFoundError: No module named 'no_such_library_here'"):
            call(candidate)


def test_a_device_that_is_not_here_is_no_verdict(worker):
    with pytest.raises(NoVerdict, match=r"jax.*tpu.*RuntimeError"):
        worker("right", arrays="jax", device="tpu").start()


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_timeout_that_is_no_time(timeout):
    with pytest.raises(ValueError, match="expected a number of seconds above 0, got"):
        Worker("m:f", timeout=timeout)


def test_a_timeout_without_end(worker):
    assert isinstance(call(worker("right", timeout=float("inf"))), Outputs)


def test_a_candidate_in_a_file(tmp_path, monkeypatch):
    folder = tmp_path / "some kernels"
    folder.mkdir()
    (folder / "neighbor.py").write_text("factor = 3\n")
    (folder / "mine.py").write_text("import neighbor\ndef f(x, *, factor):\n    return x * neighbor.factor\n")
    monkeypatch.chdir(tmp_path)
    for name in ("some kernels/mine.py:f", f"{folder}/mine.py:f"):
        with Worker(name, arrays="numpy") as candidate:
            np.testing.assert_array_equal(call(candidate).arrays[0], 3 * X)
    with pytest.raises(ImportError, match=r"none\.py:f.*FileNotFoundError"):
        Worker("none.py:f", arrays="numpy").start()


def test_a_candidate_that_writes_to_its_inputs(worker):
    assert call(worker("writes")).changed == ("x",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("candidates:missing", "candidates:missing cannot be imported: AttributeError"),
        ("nowhere:right", "nowhere:right cannot be imported: ModuleNotFoundError: No module named 'nowhere'$"),
        ("candidates", "expected package.module:function or file.py:function, got candidates"),
        ("candidates:number", "candidates:number: expected a function, got int"),
    ],
)
def test_what_cannot_be_imported(worker, name, message):
    worker("right")
    with pytest.raises(ImportError, match=message):
        Worker(name, arrays="numpy").start()


def test_a_module_that_ends_the_process(worker, tmp_path):
    worker("right")
    (tmp_path / "ends.py").write_text("import os\nos._exit(7)")
    with pytest.raises(ImportError, match=r"ends:right.*exit status 7"):
        Worker("ends:right", arrays="numpy").start()


def test_another_python_that_is_none(worker):
    with pytest.raises(ImportError, match=r"/nowhere/python.*No such file or directory"):
        worker("right", python="/nowhere/python").start()


def test_a_library_that_is_unknown():
    with pytest.raises(ValueError, match=r"jax, numpy, torch, cupy.*tensorflow"):
        check_library("tensorflow")


def test_a_worker_needs_nothing_of_this_project(worker, tmp_path):
    """A worker process imports only NumPy and the candidate, not this project, so that other Pythons can run it."""
    (tmp_path / "spies.py").write_text(
        "import sys\nimport numpy as np\n"
        "def spy(x, *, factor):\n"
        "    ours = {'llamaspec', 'hypothesis', 'jax', 'ml_dtypes'}\n"
        "    return np.array(len(ours & set(sys.modules)))\n"
    )
    worker("right")
    candidate = Worker("spies:spy", arrays="numpy")
    assert call(candidate).arrays[0] == 0
    candidate.stop()


def test_a_function_of_this_process():
    def halves(x, *, factor):
        return x / factor

    def writes(x, *, factor):
        x[0, 0] = 5
        return x

    np.testing.assert_array_equal(call(Direct(halves)).arrays[0], X / 2)
    assert call(Direct(writes)).changed == ("x",)
    assert X[0, 0] == 1  # the candidate wrote to a copy
    assert call(Direct(lambda x, *, factor: 1 / 0)).kind == "raised"


@pytest.mark.skipif("TORCH_PYTHON" not in os.environ, reason="needs a Python with torch, named by TORCH_PYTHON")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_in_a_python_of_its_own(worker, dtype):
    candidate = worker("right", arrays="torch", python=os.environ["TORCH_PYTHON"])
    assert os.environ["TORCH_PYTHON"] != sys.executable
    outcome = call(candidate, X.astype(getattr(ml_dtypes, dtype, dtype)))
    np.testing.assert_array_equal(outcome.arrays[0].astype(np.float32), 2 * X)
    assert outcome.arrays[0].dtype.name == dtype
