"""The target that a kernel is built for."""

import jax

from pallas_kernels.parts.compat import Target, current_target, use_target


def test_what_was_traced_for_one_target_is_not_run_for_another():
    traced = []
    step = jax.jit(lambda x: (traced.append(current_target()), x)[1])
    without = Target(pdl=False)
    step(1.0)
    with use_target(without):
        step(1.0)
    step(1.0)
    assert traced == [Target(), without]
    assert current_target() == Target()
