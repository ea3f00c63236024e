"""`tests.support.bounded` stops a function that exceeds a limit; each test exceeds one limit on purpose."""

import mmap
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from llamaspec.model.checkpoints import CheckpointError
from tests.support import bounded
from tests.support.bounded import BYTES, Bounded


def spin(_: str) -> None:
    while True:
        pass


def spin_in_a_thread(_: str) -> None:
    """Use processor time in a second thread, because the calling thread's clock does not count that time."""
    thread = threading.Thread(target=lambda: [sum(range(10**6)) for _ in range(10**6)], daemon=True)
    thread.start()
    thread.join()


def ask_for(size: str) -> None:
    """Allocate memory without writing to it."""
    np.empty(int(size), np.uint8)


def map_file(path: str) -> None:
    np.memmap(path, np.uint8, mode="r")[:: mmap.PAGESIZE].max()


def abort(_: str) -> None:
    os.abort()


def sleep(_: str) -> None:
    time.sleep(60)


def fail(_: str) -> None:
    raise IndexError("list index out of range")


def refuse(text: str) -> None:
    raise CheckpointError(text)


@pytest.fixture
def process() -> Iterator[Bounded]:
    process = Bounded()
    yield process
    process.close()


@pytest.mark.sampled(1)  # 6 to 8 s each
@pytest.mark.parametrize(
    ("function", "argument", "what"),
    [
        (spin, "", r"took more than 2.0 s of the processor"),
        (spin_in_a_thread, "", r"took more than 2.0 s of the processor"),
        (ask_for, str(BYTES), "MemoryError"),
        (abort, "", "ended its process with exit code -6"),
        (fail, "", r"(?s)Traceback.*IndexError"),
    ],
)
def test_each_limit_stops_a_call(process, function, argument, what):
    with pytest.raises(AssertionError, match=what):
        process.refusal(function, argument)
    assert process.refusal(refuse, "goes on") == "goes on"


def test_earlier_calls_do_not_affect_the_next_limit(process):
    """Memory that earlier calls used does not count against the next call's limit."""
    most = str(BYTES // 2)
    for _ in range(3):
        assert process.refusal(ask_for, most) is None
    with pytest.raises(AssertionError, match="MemoryError"):
        process.refusal(ask_for, str(BYTES))


def test_pages_of_mapped_files_count(process, tmp_path):
    with open(tmp_path / "large", "wb") as file:
        file.truncate(BYTES)
    with open(tmp_path / "large", "rb") as file:  # This fills the page cache, which takes a busy machine seconds.
        while file.read(1 << 22):
            pass
    with pytest.raises(AssertionError, match=r"\d+ MB of memory were in use"):
        process.refusal(map_file, str(tmp_path / "large"))
    assert process.refusal(refuse, "small") == "small"


def test_a_call_that_waits_for_ever(process, monkeypatch):
    monkeypatch.setattr(bounded, "PATIENCE", 1.0)
    with pytest.raises(AssertionError, match="did not end within 1 s"):
        process.refusal(sleep, "")
