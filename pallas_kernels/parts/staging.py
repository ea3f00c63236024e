"""Barriers between a kernel's threads, placed through Mosaic, and only where necessary.

By default, Pallas inserts a barrier before and after each store, and before each copy. A barrier takes tens of cycles,
and loads cannot move across it, so loads that are each followed by a store would wait for each other.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import llvm

from llamaspec.pallas_kernels.parts.compat import Target


class Store(NamedTuple):
    """The store `ref[at] = x` in shared memory. `at` is the start of x, known when the kernel is built."""

    ref: Any
    at: tuple[int, ...]
    x: Any
    layout: Any


def store_all(stores: Sequence[Store], target: Target) -> None:
    """Do all stores, followed by a barrier, so that all threads see them.

    There is no barrier before the stores, so no thread may still read the data that they overwrite. Stores that overlap
    must store the same numbers.
    """
    if target.interpret:  # the interpreter does not have Mosaic's operations
        for ref, (*outer, first), x, _ in stores:
            ref[(*outer, pl.ds(first, len(x)))] = x
        return

    def run(_, refs, arrays):
        for ref, (_, (*outer, first), _, _), x in zip(refs, stores, arrays, strict=True):
            x.store_untiled(utils.memref_slice(ref, (*outer, slice(first, first + x.shape[0]))), optimized=False)
        utils.warpgroup_barrier()

    inlined: Any = plgpu.inline_mgpu(arg_types=([plgpu.RefType() for _ in stores], [store.layout for store in stores]))
    inlined(run)([store.ref for store in stores], [store.x for store in stores])


def finish_reads(target: Target) -> None:
    """Wait until all threads have finished their reads of shared memory, so that a copy may overwrite it.

    A thread's reads may still be in a queue when the thread reaches a barrier, and an asynchronous copy (TMA) may
    overtake them. A barrier does not wait for these reads. A fence of the thread's own reads and writes does.
    `plgpu.commit_smem` would also work, but it takes longer, because it also makes our writes visible to TMA
    (docs/lessons-gpu.md).
    """
    if target.interpret:
        plgpu.commit_smem()
        return

    def run(_):
        llvm.inline_asm(None, [], "membar.cta;", "~{memory}", has_side_effects=True)
        utils.warpgroup_barrier()

    plgpu.inline_mgpu()(run)()


def own_meetings(**params: Any) -> plgpu.CompilerParams:
    """Return the parameters of a kernel that places its barriers itself.

    Barriers are in `store_all`, `finish_reads`, `plgpu.commit_smem`, `plgpu.wait_smem_to_gmem` and sums over warps. One
    is necessary between a store and another thread's read, and between a read and overwriting the data. The interpreter
    cannot check that, because it runs a block as one thread. `make test-gpu-compile` checks reads and copies in the
    machine code. Nothing checks for a store over data that other threads still read.
    """
    return plgpu.CompilerParams(unsafe_no_auto_barriers=True, **params)
