"""Meetings of a kernel's threads, in Mosaic's terms: only where they must.

By default Pallas makes threads meet before and after each store, and before each copy. A meeting takes tens of cycles,
and no load moves across it, so loads whose results are stored one by one would wait for one another.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import llvm

from llamaspec.pallas_kernels.parts.compat import Target


class Store(NamedTuple):
    """The store `ref[at] = x` in shared memory; `at` is where x begins, and is known when the kernel is made."""

    ref: Any
    at: tuple[int, ...]
    x: Any
    layout: Any


def store_all(stores: Sequence[Store], target: Target) -> None:
    """Do all stores, and let the threads meet at the end, so that all see them.

    Threads do not meet before, so none may still read what is overwritten. Stores that overlap must store the same.
    """
    if target.interpret:  # the interpreter has none of Mosaic's operations
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
    """Let all threads finish their reads of shared memory and meet, so that a copy may overwrite it.

    Reads wait in a queue that the copy engine does not share, and a meeting does not wait for them; a fence of the
    thread's own reads and writes does. `plgpu.commit_smem` would do so too, but it also orders writes before the copy
    engine's reads, which takes longer (docs/lessons-gpu.md).
    """
    if target.interpret:
        plgpu.commit_smem()
        return

    def run(_):
        llvm.inline_asm(None, [], "membar.cta;", "~{memory}", has_side_effects=True)
        utils.warpgroup_barrier()

    plgpu.inline_mgpu()(run)()


def own_meetings(**params: Any) -> plgpu.CompilerParams:
    """Give the parameters of a kernel that says itself where its threads meet.

    They meet in `store_all`, `finish_reads`, `plgpu.commit_smem`, `plgpu.wait_smem_to_gmem` and sums over warps. One of
    these must stand between a store and another thread's read, and between a read and its overwriting. The interpreter
    cannot check that, because a block is one thread there. `make test-gpu-compile` checks reads and copies in the
    machine code; nothing checks a store over what others still read.
    """
    return plgpu.CompilerParams(unsafe_no_auto_barriers=True, **params)
