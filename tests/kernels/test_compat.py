"""The target GPU of the kernels, and XLA's GPU options, for every supported jax version."""

import jax
import numpy as np
import pytest

from llamaspec.model.running.compile import UNTUNED, compiler_options
from llamaspec.pallas_kernels.parts.compat import Target, current_target, use_target


def test_programs_are_traced_per_target():
    traced = []
    step = jax.jit(lambda x: (traced.append(current_target()), x)[1])
    without = Target(pdl=False)
    step(1.0)
    with use_target(without):
        step(1.0)
    step(1.0)
    assert traced == [Target(), without]
    assert current_target() == Target()


def test_xla_knows_the_options_of_a_gpu():
    """XLA accepts our GPU options, even on a CPU, but rejects an unknown option."""
    x = np.ones((4, 4), np.float32)
    lowered = jax.jit(lambda x: x @ x).lower(x)
    assert (np.asarray(lowered.compile(compiler_options("gpu") | UNTUNED)(x)) == 4).all()
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile({"xla_gpu_autotune_levels": 0})
