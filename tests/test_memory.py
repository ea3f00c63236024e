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


# A program, and what it gives, before and after the library is forgotten; and one that is compiled after that.
CODE = """
import jax, jax.numpy as jnp
from benchmarks.resident import resident_bytes
from model.memory import forget_code
compiled = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.eye(8)).compile()
first, before = compiled(jnp.eye(8)), resident_bytes()
forget_code()
print(before - resident_bytes())
print(bool(jnp.all(compiled(jnp.eye(8)) == first)), float(jax.jit(lambda x: jnp.cos(x) + x)(0.0)))
"""


def test_a_compilers_code_is_forgotten_and_comes_back():
    done = run_python(CODE)
    forgotten, *after = done.out.split()
    assert int(forgotten) > 30_000_000, done
    assert after == ["True", "1.0"], done


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(("shape", "large"), [("stories-110m", False), ("tinyllama-1.1b", True)])
def test_only_large_models_on_a_cpu_pay_for_it(monkeypatch, shape, large, platform):
    called = []
    monkeypatch.setattr(jax_backend, "return_blocks_when_freed", lambda: called.append("blocks"))
    monkeypatch.setattr(jax_backend, "forget_code", lambda: called.append("code"))
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    jax_backend.keep_heaps_small(SHAPES[shape])
    jax_backend.give_back_compilers_memory(SHAPES[shape])
    assert called == (["blocks", "code"] if large and platform == "cpu" else [])
