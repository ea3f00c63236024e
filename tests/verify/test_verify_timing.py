"""`verify --time` times a candidate that is within its bounds, in turn with a second one. No test checks a speed."""

import itertools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np
import pytest

from llamaspec.cli import llamaspec
from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import NoVerdict, Worker
from llamaspec.verify.candidates.clock import FEWEST, Clock, varied
from llamaspec.verify.candidates.worker import to_bytes, to_numpy
from llamaspec.verify.catalogue import CONTRACTS
from llamaspec.verify.judging.timing import Timing, timed

SOURCE = """
import threading
import time

import numpy as np


def add(x, y):
    return x + y


def other(x, y):
    return y + x


def wrong(x, y):
    return x - y


def right_if_small(x, y):
    return x + y if x.size < 10_000 else x


def counted(x, y):
    with open("calls", "a") as file:
        file.write("x")
    return x + y


KEPT = {}


def kept_where_timed(x, y):
    return KEPT.setdefault(x.shape, x + y) if x.size >= 10_000 else x + y


def other_bits(x, y):
    KEPT["calls"] = KEPT.get("calls", 0) + 1
    return (x.astype(np.float64) + y) * (1 + 1e-12 * KEPT["calls"])


class Later:
    def __init__(self, compute):
        self.compute = compute

    def __array__(self, dtype=None, copy=None):
        return self.compute()


def computes_when_it_is_read(x, y):
    return Later(lambda: x + y)


class Subclass(np.ndarray):
    pass


def subclass(x, y):
    return (x + y).view(Subclass)


class Named(np.ndarray):
    __module__ = "numpy"


def subclass_that_says_numpy(x, y):
    return (x + y).view(Named)


def cached_by_all_numbers(x, y):
    key = x.tobytes() + y.tobytes()
    if key not in KEPT:
        with open("computed", "a") as file:
            file.write("x")
        KEPT[key] = x + y
    return KEPT[key]


def cached_by_a_fingerprint(x, y):
    return KEPT.setdefault((x.shape, x[0, 0].tobytes()), x + y) if x.size >= 10_000 else x + y


def half_a_batch(x, y):
    # computes two calls in one launch, and leaves out every second call
    KEPT["calls"] = KEPT.get("calls", 0) + 1
    return x + y if x.size < 10_000 or KEPT["calls"] % 2 else KEPT.setdefault("out", np.zeros_like(x))


def patched_clock(x, y):
    time.perf_counter = lambda: 0.0
    time.sleep(0.002)
    return x + y


def left_to_a_thread(x, y):
    if x.size < 10_000:
        return x + y
    out = np.zeros_like(x)
    read = KEPT.setdefault("read", threading.Event())  # never set: the thread is too late on any machine
    threading.Thread(target=lambda: read.wait() and np.add(x, y, out=out), daemon=True).start()
    return out


def raises_if_large(x, y):
    if x.size >= 10_000:
        raise MemoryError("too much")
    return x + y
"""
LARGE = {"rows": [9], "dim": [4000]}
FEW = ("add", "--arrays", "numpy", "--examples", "5", "--seed", "1", "--dtype", "float32", "--time")


def run(*arguments: str) -> None:
    llamaspec.main(["verify", *arguments], standalone_mode=False)


@pytest.fixture(autouse=True)
def candidate_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("llamaspec.verify.judging.timing.ROUNDS", 3)
    monkeypatch.setattr("llamaspec.verify.judging.timing.SECONDS", 0.001)


def test_two_are_timed_for_the_sizes_that_were_asked_for(capsys):
    run(*FEW, "--candidate", "mine.py", "--against", "mine.py:other", "--at", "rows=3", "--at", "dim=64", "--json")
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    timing = report["timing"]
    assert report["outcome"] == "within bounds" and report["narrowed"] == {}  # the sizes narrow no draws
    assert timing["draw"] == {"rows": "3", "dim": "64", "x": "normal(0)", "y": "normal(0)"}
    assert list(timing["seconds"]) == ["mine.py:add", "mine.py:other"]
    assert all(len(rounds) == 3 and min(rounds) > 0 for rounds in timing["seconds"].values())


def test_the_largest_sizes_are_timed(capsys):
    run(*FEW, "--candidate", "mine.py")
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith("time          add float32  mine.py:add  ")
    assert line.endswith(", 3 rounds)  for rows=5 dim=513 x=normal(0) y=normal(0)")


def test_a_terminal_cuts_no_word(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        run(*FEW, "--candidate", "mine.py:wrong")
    *lines, replay = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 60 for line in lines) and any(line.startswith("    ") for line in lines)
    assert replay.strip().startswith("llamaspec verify --replay ")


@pytest.fixture
def evaluated(monkeypatch) -> list[int]:
    """Return a list that gets an entry for each computation of the exact sum.

    This computation is the slowest step for large arrays.
    """
    contract, did = CONTRACTS["add"], []
    monkeypatch.setitem(CONTRACTS, "add", replace(contract, expect=lambda x, y: did.append(1) or contract.expect(x, y)))
    return did


@pytest.mark.parametrize(("function", "times"), [("counted", 2), ("other_bits", 3)])
def test_exact_results_are_computed_once_for_each_set_of_inputs(evaluated, function, times):
    with Worker(f"mine.py:{function}", arrays="numpy") as worker:
        timing = timed(CONTRACTS["add"], [worker], precision("float32"), only=LARGE, seed=0)
    assert len(timing.seconds[worker.name]) == 3
    assert len(evaluated) == times  # results with other bits are judged again


DECODE = """
import numpy as np


def decode(q, k, v, lengths):
    out = np.zeros_like(q)
    for row, length in enumerate(lengths):
        keys, values = (np.repeat(cache[row, :length], q.shape[1] // k.shape[2], 1) for cache in (k, v))
        scores = np.einsum("hd,jhd->jh", q[row], keys) / np.float32(np.sqrt(q.shape[-1]))
        weights = np.exp(scores - scores.max(0))
        out[row] = np.einsum("jh,jhd->hd", weights / weights.sum(0), values)
    return out
"""


def test_a_candidate_without_an_optional_keyword_is_timed():
    Path("older.py").write_text(DECODE)
    contract, only = CONTRACTS["attention_decode"], {"lengths": [(5,)], "head_dim": [8]}
    with Worker("older.py:decode", arrays="numpy") as worker:
        timing = timed(contract, [worker], precision("float32"), only=only, seed=0)
        assert len(timing.seconds[worker.name]) == 3
        with pytest.raises(NoVerdict, match=r"older\.py:decode: not timed, because the candidate does not take window"):
            timed(contract, [worker], precision("float32"), only={**only, "window": [3]}, seed=0)


def test_a_round_calls_no_more_than_it_times(monkeypatch):
    """A round with no time left makes one untimed call and the minimum number of timed calls."""
    monkeypatch.setattr("llamaspec.verify.judging.timing.SECONDS", 0.0)
    with Worker("mine.py:counted", arrays="numpy") as worker:
        timing = timed(CONTRACTS["add"], [worker], precision("float32"), only=LARGE, seed=0)
    assert Path("calls").stat().st_size == 3 * (1 + FEWEST)
    assert timing.rounds == 3 and "3 rounds)" in timing.lines()[0]


def test_no_round_starts_when_the_time_is_up(monkeypatch):
    """No round starts after the limit of 10 s; each reading of the fake clock advances it by 4 s."""
    monkeypatch.setattr("llamaspec.verify.judging.timing.ROUNDS", 11)
    monkeypatch.setattr("llamaspec.verify.judging.timing.monotonic", itertools.count(0, 4).__next__)
    rounds = []
    with Worker("mine.py:counted", arrays="numpy") as worker:
        timing = timed(
            CONTRACTS["add"], [worker], precision("float32"), only=LARGE, seed=0, limit=10.0, progress=rounds.append
        )
    assert rounds == [1, 2, 3, 4] and len(timing.seconds[worker.name]) == 4
    assert "4 of 11 rounds" in timing.lines()[0]


def test_the_limit_is_the_time_budget(capsys):
    run(*FEW, "--candidate", "mine.py", "--time-budget", "0.000001")
    *_, line = capsys.readouterr().out.splitlines()
    assert "2 of 3 rounds" in line  # at least two, with different numbers


def test_what_is_wrong_is_not_timed(capsys):
    with pytest.raises(SystemExit):
        run(*FEW, "--candidate", "mine.py:wrong")
    assert "\ntime " not in capsys.readouterr().out


UNTIMED = [
    ("right_if_small", "not timed, because a timed call returned a wrong result: value: at ["),
    ("raises_if_large", "not timed, because a timed call raised: MemoryError: too much"),
    ("kept_where_timed", "not timed, because a timed call returned a wrong result: value: at ["),
    (
        "computes_when_it_is_read",
        "not timed, because a timed call raised: TypeError: returned Later: reading it may compute it",
    ),
    ("subclass", "not timed, because a timed call raised: TypeError: returned Subclass: reading it may"),
    ("subclass_that_says_numpy", "not timed, because a timed call raised: TypeError: returned Named: reading it may"),
    ("left_to_a_thread", "not timed, because a timed call returned a wrong result: "),
    ("cached_by_a_fingerprint", "not timed, because a timed call returned a wrong result: "),
    ("half_a_batch", "not timed, because a timed call returned a wrong result: "),
]


@pytest.mark.parametrize(("name", "why"), UNTIMED)
def test_results_of_timed_calls_are_judged(capsys, name, why):
    small = ("--set", "rows=1,2", "--set", "dim=8,16")
    run(*FEW, *small, "--candidate", f"mine.py:{name}", "--at", "rows=9", "--at", "dim=4000")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("within bounds add") and lines[-1].startswith(f"  mine.py:{name}: {why}")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("add", "--time"), "--time needs your own function"),
        (("add", "--candidate", "mine.py", "--at", "rows=3"), "--against and --at need --time"),
        ((*FEW, "--candidate", "mine.py", "--at", "row=3"), r"add .*row: .*rows, dim.*did you mean rows"),
        ((*FEW, "--candidate", "mine.py", "--against", "mine.py:nothing"), "mine.py:nothing cannot be imported"),
        (
            (*FEW, "--candidate", "mine.py", "--against", "mine.py:add"),
            "is the candidate itself",
        ),
    ],
)
def test_what_cannot_be_timed_is_refused(arguments, error):
    with pytest.raises(click.UsageError, match=error):
        run(*arguments)


def test_a_ratio_is_taken_within_a_round():
    timing = Timing("add", "float32", {"rows": 3}, {"a": [1.0, 2.0, 4.0], "b": [2.0, 4.0, 8.0]}, 3)
    first, second = timing.lines()
    assert first == "time          add float32  a  2 s (1 s to 4 s, 3 rounds)  for rows=3"
    assert second.endswith("4 s (2 s to 8 s, 3 rounds): the first is 2 times as fast (2 to 2)")


def test_a_call_that_hangs_gives_no_time(tmp_path):
    (tmp_path / "slow.py").write_text("import time\n\n\ndef add(x, y):\n    time.sleep(60)\n")
    with Worker("slow.py:add", arrays="numpy", timeout=0.05) as worker, pytest.raises(NoVerdict, match="call hung: no"):
        timed(CONTRACTS["add"], [worker], precision("float32"), only={}, seed=0)


def test_results_cached_by_all_numbers_are_computed_in_each_timed_call():
    """A candidate that caches results by all input numbers still computes in at least `FEWEST` calls of a round.

    The first call of a round never has the numbers of the last call, so only the last call may find its result cached.
    """
    with Worker("mine.py:cached_by_all_numbers", arrays="numpy") as worker:
        timing = timed(CONTRACTS["add"], [worker], precision("float32"), only=LARGE, seed=0)
    calls = sum(map(len, timing.seconds.values()))
    assert calls == 3 and Path("computed").stat().st_size >= 3 * FEWEST


def test_a_clock_that_a_candidate_patches_still_runs():
    with Worker("mine.py:patched_clock", arrays="numpy") as worker:
        timing = timed(CONTRACTS["add"], [worker], precision("float32"), only=LARGE, seed=0)
    assert min(timing.seconds[worker.name]) >= 0.002


def test_the_numbers_of_timed_calls_depend_on_the_seed():
    """With a different seed, the timed calls get different numbers, so results of an earlier run are of no use."""
    seen = []
    contract = replace(CONTRACTS["add"], expect=lambda x, y: seen.append(x.tobytes()) or CONTRACTS["add"].expect(x, y))
    for seed in (0, 1):
        with Worker("mine.py:add", arrays="numpy") as worker:
            timed(contract, [worker], precision("float32"), only=LARGE, seed=seed)
    assert len(set(seen)) == 4


def test_only_two_elements_of_floating_arrays_change_places():
    x = np.arange(6, dtype=np.float32)
    array = to_bytes(x)
    y = to_numpy(varied(array))
    assert sorted(y) == sorted(x) and np.count_nonzero(y != x) == 2
    mask = to_bytes(np.where(np.arange(6) < 3, 0.0, -np.inf).astype(np.float32))
    for same in (to_bytes(np.arange(6)), to_bytes(x[:1]), mask, 3, None):
        assert varied(same) == same


@pytest.fixture
def torch_on_a_gpu(monkeypatch):
    """Replace torch with a fake that records calls.

    This does not show that the real torch behaves the same on a GPU.
    """
    did = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            did.append("record")

        def synchronize(self):
            did.append("event")

        def elapsed_time(self, end):
            return 2.0

    def empty(size, *, dtype, device):
        assert size >= 2**27
        return SimpleNamespace(zero_=lambda: did.append("flush"))

    cuda = SimpleNamespace(Event=Event, synchronize=lambda: did.append("wait"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, empty=empty, int8="int8"))
    driver = SimpleNamespace(cuCtxResetPersistingL2Cache=lambda: did.append("no persistence"))
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver if name == "libcuda.so.1" else None)
    return did


def test_gpu_events_time_the_whole_call_after_the_cache_is_cleared(torch_on_a_gpu):
    clock = Clock("torch")
    argument = SimpleNamespace(is_cuda=True, device="cuda:0")
    result = clock.measure(lambda x: torch_on_a_gpu.append("call") or x, [argument], {})
    assert result is argument and clock.times[0] >= 0.002
    assert torch_on_a_gpu == ["no persistence", "flush", "wait", "record", "call", "record", "event", "wait", "wait"]


def test_patched_gpu_events_are_noticed(torch_on_a_gpu):
    """A measurement is refused if the GPU's events report less time than the function needed to return.

    The fake's events report 2 ms, and the function returns after 20 ms.
    """
    argument = SimpleNamespace(is_cuda=True, device="cuda:0")
    with pytest.raises(RuntimeError, match=r"GPU events measured 0\.002 s, but the function returned after 0\.0"):
        Clock("torch").measure(lambda x: time.sleep(0.02), [argument], {})


def test_without_the_driver_of_nvidia_the_cache_is_cleared_all_the_same(torch_on_a_gpu, monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    Clock("torch").measure(lambda x: x, [SimpleNamespace(is_cuda=True, device="cuda:0")], {})
    assert torch_on_a_gpu[0] == "flush"


def test_a_clock_wants_a_few_calls():
    clock = Clock("numpy")
    for _ in range(FEWEST - 1):
        assert not clock.enough(0.0)
        clock.measure(np.add, [np.ones(3), np.ones(3)], {})
    assert clock.enough(0.0)  # the next call is the last
