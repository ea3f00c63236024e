"""The script that looks for numbers which differ between processes: it sees one bit, and names whose it is."""

import threading
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from llamaspec.benchmarks import determinism
from llamaspec.benchmarks.determinism import checksum, digests, found_by, report


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
def test_a_checksum_sees_one_bit_and_the_order(dtype):
    array = np.arange(1, 7).astype(dtype).reshape(2, 3)
    changed = array.copy()
    changed.view(np.uint8)[-1, -1] ^= 1
    sums = {int(checksum(jnp.asarray(each))) for each in (array, changed, array[::-1])}
    assert len(sums) == 3
    assert int(checksum(jnp.asarray(array))) in sums


def test_the_process_and_the_array_that_differ_are_named():
    usual = digests({"k": jnp.ones(3), "v": jnp.zeros(3)})
    other = digests({"k": jnp.ones(3), "v": jnp.full(3, -0.0)})
    lines = []
    found = [(0, "cache", usual), (1, "cache", other), (2, "cache", usual), (0, "weights", usual)]
    rows = report(found, lines.append)
    assert [row["differing"] for row in rows] == [[(1, ["['v']"])], []]
    assert lines == [
        "cache: 3 times 2 arrays, 1 times different",
        "  process 1: 1 arrays, ['v']",
        "weights: 1 times 2 arrays, 0 times different",
    ]


WORKER = """import pathlib, sys, time
print('["weights", {"a": 1}]', flush=True)
if "hang" in sys.argv:
    print('["cut', end="", flush=True)
    pathlib.Path("hangs").touch()
    time.sleep(600)
sys.exit("fail" in sys.argv)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "llamaspec/benchmarks").mkdir(parents=True)
    for package in ("llamaspec", "llamaspec/benchmarks"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "llamaspec/benchmarks/determinism.py").write_text(WORKER)
    hangs = tmp_path / "hangs"

    class OnceItHangs(Timer):
        """A timer that is over when a worker hangs, however slow the machine is."""

        def run(self):
            while not (hangs.exists() or self.finished.wait(0.01)):
                pass
            if hangs.exists():
                self.function()

    monkeypatch.setattr(determinism, "ROOT", tmp_path)
    monkeypatch.setattr(determinism, "Timer", OnceItHangs)
    monkeypatch.setattr(determinism, "time", SimpleNamespace(monotonic=lambda: 4.0 if hangs.exists() else 0.0))
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.mark.usefixtures("worker")
def test_of_processes_that_are_ended_what_they_found_is_kept():
    one = ("weights", {"a": 1})
    assert sorted(found_by(2, 2, [])) == [(0, *one), (1, *one)]
    with pytest.raises(RuntimeError, match="process 0 ended with 1"):
        found_by(1, 1, ["fail"])
    assert found_by(1, 1, ["hang"], seconds=3.0) == [(0, *one)]


@pytest.mark.usefixtures("worker")
def test_a_line_that_is_no_stage_leaves_no_timer_behind(monkeypatch):
    before = {*threading.enumerate()}
    monkeypatch.setattr(determinism.json, "loads", lambda line: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        found_by(1, 1, [])
    timers = [thread for thread in {*threading.enumerate()} - before if isinstance(thread, Timer)]
    assert all(timer.finished.is_set() for timer in timers)


def test_where_nothing_was_found_nothing_is_the_same(monkeypatch):
    monkeypatch.setattr(determinism, "found_by", lambda *_, **__: [])
    done = CliRunner().invoke(determinism.main, ["--seconds", "1"])
    assert done.exit_code == 1 and "nothing was compared" in done.output
