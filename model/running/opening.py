"""Opens the GPU while modules are imported. Each of these two takes about a second."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import jax
import numpy as np

from llamaspec.model.system import nvidia_driver


@contextmanager
def opening_device() -> Iterator[None]:
    """Open an NVIDIA GPU in another thread while the body of the block imports modules.

    Without an NVIDIA driver, we only run the body. If the GPU cannot be opened, this function raises nothing; the next
    use of JAX's devices raises the error.
    """
    if not nvidia_driver():
        yield
        return
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: jax.block_until_ready(jax.device_put(np.zeros(1, np.float32))))
        import llamaspec.model.ops.gpu  # noqa: F401

        yield
