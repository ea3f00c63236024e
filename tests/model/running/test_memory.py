"""Freed memory returns to the operating system."""

import jax
import numpy as np
import pytest

from llamaspec.benchmarks.common.random_model import random_shapes
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.llama import load_backend
from llamaspec.model.ops.cpu import CPU
from llamaspec.model.options import RunOptions
from llamaspec.model.running import process
from llamaspec.model.running.memory import shortage_named
from llamaspec.model.running.programs import Layout, compile_programs
from llamaspec.model.system import LARGE_BLOCK
from llamaspec.reference.config import Config
from tests.support.processes import run_python
from tests.support.random_models import SMALL, random_checkpoint

# We free every other block after a larger one, so that glibc keeps the smaller blocks.
BLOCKS = """
import numpy as np
from llamaspec.benchmarks.common.resident import resident_bytes
from llamaspec.model.system import return_blocks_when_freed
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


# A program and its result before and after the library is released, and another program compiled afterwards. Files with
# names that are not UTF-8 are mapped too, as checkpoints may be.
CODE = """
import mmap, os, tempfile
import jax, jax.numpy as jnp, jaxlib
from llamaspec.benchmarks.common.resident import resident_bytes
from pathlib import Path
from llamaspec.model.system import forget_code
compiled = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.eye(8)).compile()
first, before = compiled(jnp.eye(8)), resident_bytes()
maps = []
with tempfile.TemporaryDirectory() as folder:
    for name in (b"caf\\xe9", "line\\u2028separator".encode(), b"some words"):
        with open(os.path.join(os.fsencode(folder), name), "wb+") as file:
            file.write(bytes(4096))
            file.flush()
            maps.append(mmap.mmap(file.fileno(), 0))
    forget_code(Path(jaxlib.__file__).parent)
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
def test_only_large_models_on_a_cpu_release_compiled_code(monkeypatch, shape, large, platform):
    called = []
    monkeypatch.setattr(process, "return_blocks_when_freed", lambda: called.append("blocks"))
    monkeypatch.setattr(process, "forget_code", lambda folder: called.append("code"))
    monkeypatch.setattr(process, "return_freed_memory", lambda: called.append("freed"))
    process.keep_heaps_small(SHAPES[shape], platform=platform)
    process.give_back_compilers_memory(SHAPES[shape], platform=platform)
    assert called == (["blocks", "freed", "code"] if large and platform == "cpu" else ["freed"])


def test_a_callback_runs_after_each_compilation():
    """`compile_programs` calls the callback `compiled` after it has compiled a model's first programs.

    It calls the callback again when the second decode program has been compiled.
    """
    calls = []
    config = Config(32, 1, 2, 1, 16, 64, vocab=64, context=32, eps=1e-5, theta=1e4)
    params = random_shapes(config, dtype=np.dtype(np.float32), positions=64)
    layout = Layout(batch=1, capacity=32, chunk=32, burst=16, cache_dtype=np.dtype(np.float32))
    fixed = {"ops": CPU, "layout": layout, "platform": "cpu", "greedy": True}
    programs = compile_programs(params, config, **fixed, compiled=lambda: calls.append("compiled"))
    assert calls == ["compiled"]
    programs.decode(False)
    assert calls == ["compiled", "compiled"]


@pytest.mark.sampled(1)  # 2 s each
@pytest.mark.parametrize("own", [False, True])
def test_only_a_process_of_the_models_own_is_changed(monkeypatch, own):
    called = []
    for effect in ("return_blocks_when_freed", "forget_code", "return_freed_memory"):
        monkeypatch.setattr(process, effect, lambda *arguments, effect=effect: called.append(effect))
    monkeypatch.setattr(process, "SMALL", 0)
    load_backend(random_checkpoint(SMALL, seed=0), RunOptions(context=16, own_process=own))
    assert called == (["return_blocks_when_freed", "return_freed_memory", "forget_code"] if own else [])


FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16106127360 bytes."


def test_a_device_that_another_program_fills_is_one_line(monkeypatch):
    """The error is one line if another program has filled the device.

    No plan can know this; only the device reports it.
    """
    checkpoint = random_checkpoint(SMALL, seed=0)
    backend = load_backend(checkpoint, RunOptions(context=16))

    def fail(*arguments, **named):
        raise jax.errors.JaxRuntimeError(FULL)

    monkeypatch.setattr("llamaspec.model.running.load.load_params", fail)
    with pytest.raises(MemoryError, match=r"^the device.*0\.00 GB of weights"):
        load_backend(checkpoint, RunOptions(context=16))
    monkeypatch.setattr("llamaspec.model.running.programs.empty_cache", fail)
    with pytest.raises(MemoryError, match=r"^the device.*0\.00 GB of cache"):
        backend.start()


def test_other_errors_of_jax_stay_what_they_are():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), shortage_named("weights"):
        raise jax.errors.JaxRuntimeError("INTERNAL: a kernel is wrong")
