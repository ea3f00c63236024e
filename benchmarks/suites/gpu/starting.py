"""Times the start of a process up to the first token, with an empty compile cache and with a filled one."""

import time
from collections.abc import Iterator

import jax

from llamaspec.benchmarks.common.model_speed import first_token_seconds
from llamaspec.benchmarks.common.report import Row
from llamaspec.benchmarks.suites.gpu.clock import Deadline
from llamaspec.benchmarks.suites.gpu.models import by_kernels, params_of, programs_of
from llamaspec.benchmarks.suites.gpu.scale import Scale


def time_start(scale: Scale, _: Deadline, *, label: str, began: float) -> Iterator[Row]:
    """Yield a row with the time from process start to the first token, not counting the time to draw weights.

    `began` is `time.time()` at the start of the process.
    """
    ready = time.time()
    model = scale.launched
    params = jax.block_until_ready(params_of(model, scale))
    drawn = time.time()
    with scale.running():
        programs = programs_of(model, params, by_kernels(model, params, scale), scale)
        compiled = time.time()
        first = first_token_seconds(programs, params)
    yield {
        "case": label,
        "importing": ready - began,  # Python, JAX, the device
        "compiling": compiled - drawn,
        "first": first,
        "in_all": ready - began + compiled - drawn + first,  # without the time to make weights
    }
