"""Several stores to shared memory at once, written in Mosaic's terms: Pallas has threads meet before and after each.

No load moves across where threads meet, so loads whose results are stored one by one wait for one another.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import Target


class Store(NamedTuple):
    """`ref[at] = x` in shared memory, where `at` is where x begins, and known when the kernel is made."""

    ref: Any
    at: tuple[int, ...]
    x: Any
    layout: Any


def store_all(stores: Sequence[Store], target: Target) -> None:
    """All of them; threads meet at the end, and then all see what is stored.

    They do not meet before: nobody may still be reading what is stored over. Where two overlap they must store the
    same.
    """
    if target.interpret:  # which has none of Mosaic's operations
        for ref, (*outer, first), x, _ in stores:
            ref[(*outer, pl.ds(first, len(x)))] = x
        return

    def run(_, refs, arrays):
        for ref, (_, (*outer, first), _, _), x in zip(refs, stores, arrays, strict=True):
            x.store_untiled(utils.memref_slice(ref, (*outer, slice(first, first + x.shape[0]))), optimized=False)
        utils.warpgroup_barrier()

    inlined: Any = plgpu.inline_mgpu(arg_types=([plgpu.RefType() for _ in stores], [store.layout for store in stores]))
    inlined(run)([store.ref for store in stores], [store.x for store in stores])
