"""A candidate that uses resources without limit gets an error, and harms neither the machine nor the judge.

Before the judge reads a result on a GPU, it waits until all work on this GPU has ended.
"""

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from llamaspec.verify.candidates.candidate import Failure, Worker
from llamaspec.verify.candidates.worker import GPUS, read_back
from tests.support.processes import run_python

no_limit_of_memory = pytest.mark.skipif(
    sys.platform != "linux" or any(map(os.path.exists, GPUS)), reason="needs Linux, and no GPU"
)
CANDIDATES = """
import os
import numpy as np

def prints(x):
    os.lseek(1, 2**33 - 100, os.SEEK_SET)  # as if so much had been printed
    for _ in range(100):
        print(x, flush=True)
    return x

def opens(x):
    files = []
    while len(files) < 20000:
        files.append(open(os.devnull))
    return x

def allocates(x):
    arrays = []
    while len(arrays) < 4096:
        arrays.append(np.empty(2**30, np.uint8))  # is given addresses, and no memory as long as nothing is written
    return x
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("prints", "OSError: [Errno 27] File too large"),
        ("opens", "OSError: [Errno 24] Too many open files"),
        pytest.param("allocates", "MemoryError", marks=no_limit_of_memory),
    ],
)
def test_a_candidate_out_of_hand_gets_an_error(tmp_path, monkeypatch, function, message):
    (tmp_path / "candidates.py").write_text(CANDIDATES)
    monkeypatch.chdir(tmp_path)
    with Worker(f"candidates:{function}", arrays="numpy") as worker:
        outcome = worker.call({"x": np.ones(2, np.float32)}, {})
    assert isinstance(outcome, Failure) and outcome.kind == "raised" and message in outcome.message


def test_a_lower_limit_is_kept_and_refused_limits_are_skipped():
    script = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
right = resource.setrlimit

def refuse(kind, limits):
    if kind == resource.RLIMIT_CORE:
        raise ValueError("current limit exceeds maximum limit")
    right(kind, limits)

resource.setrlimit = refuse
from llamaspec.verify.candidates.worker import limit_resources
limit_resources()
print(*(resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)))
"""
    assert run_python(script).out == f"(100, 200) ({2**20}, {2**33})\n"


@pytest.fixture
def did(monkeypatch):
    """Replace torch by a fake that records calls, and return the list of calls.

    This does not show that the real library behaves the same.
    """
    notes = []
    cuda = SimpleNamespace(synchronize=lambda device: notes.append(f"wait for {device}"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return notes


def test_what_other_streams_do_ends_before_a_result_is_read(did):
    numbers = np.ones(2, np.float32)

    def read():
        did.append("read")
        return SimpleNamespace(contiguous=lambda: SimpleNamespace(dtype="torch.float32", numpy=lambda: numbers))

    class Tensor:
        __module__, is_cuda, device = "torch", True, "cuda:0"

        def detach(self):
            return SimpleNamespace(cpu=read)

    device = SimpleNamespace(synchronize=lambda: did.append("wait"))
    array = SimpleNamespace(device=device, __cuda_array_interface__={}, get=lambda: did.append("get") or numbers)
    assert read_back(Tensor()).bytes == read_back(array).bytes == numbers.tobytes()
    assert did == ["wait for cuda:0", "read", "wait", "get"]
