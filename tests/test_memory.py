"""What is freed goes back to the machine."""

import jax
import pytest

from model import jax_backend
from model.memory import LARGE_BLOCK
from model.shapes import SHAPES
from tests.processes import run_python

# Every other block, after a larger one, from which on glibc keeps what is smaller.
BLOCKS = """
import numpy as np
from benchmarks.resident import resident_bytes
from model.memory import return_blocks_when_freed
np.ones(1 << 21)
if int(sys.argv[1]):
    return_blocks_when_freed()
blocks = [np.ones(int(sys.argv[2]) // 8) for _ in range(200)]
before = resident_bytes()
del blocks[::2]
print(before - resident_bytes())
"""


@pytest.mark.parametrize("returned", [True, False])
def test_large_blocks_are_given_back_when_they_are_freed(returned):
    done = run_python(BLOCKS, str(int(returned)), str(2 * LARGE_BLOCK))
    freed = int(done.out)
    most = 100 * 2 * LARGE_BLOCK
    assert (freed > 0.95 * most) if returned else (freed < 0.05 * most), done


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(("shape", "large"), [("stories-110m", False), ("tinyllama-1.1b", True)])
def test_only_large_models_on_a_cpu_pay_for_it(monkeypatch, shape, large, platform):
    called = []
    monkeypatch.setattr(jax_backend, "return_blocks_when_freed", lambda: called.append(shape))
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    jax_backend.keep_heaps_small(SHAPES[shape])
    assert bool(called) == (large and platform == "cpu")
