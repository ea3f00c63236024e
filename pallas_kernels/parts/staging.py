"""Where the threads of a kernel meet, written in Mosaic's terms: where they must, and nowhere else.

By itself Pallas has them meet before and after each store, and before each copy. Each meeting takes tens of cycles, and
no load moves across one, so loads whose results are stored one by one would wait for one another.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import llvm

from pallas_kernels.parts.compat import Target


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


def finish_reads(target: Target) -> None:
    """All threads have what they read of shared memory, and meet: something may be copied over it.

    A read waits in a queue in which the copy engine does not stand, and threads that meet do not wait for it. What
    orders a thread's own reads and writes does. So does `plgpu.commit_smem`, and more: it is for writes that the copy
    engine is to read, and takes longer (docs/performance-gpu.md).
    """
    if target.interpret:
        plgpu.commit_smem()
        return

    def run(_):
        llvm.inline_asm(None, [], "membar.cta;", "~{memory}", has_side_effects=True)
        utils.warpgroup_barrier()

    plgpu.inline_mgpu()(run)()


def own_meetings(**params: Any) -> plgpu.CompilerParams:
    """Of a kernel that says itself where its threads meet.

    They do in `store_all`, `finish_reads`, `plgpu.commit_smem`, `plgpu.wait_smem_to_gmem` and sums over warps. One of
    these must be between a store and another thread's read, and between a read and what goes over it: the interpreter,
    where the threads of a block are one, does not see it. `make test-gpu-compile` looks for it in the machine code, for
    reads and for copies; for a store over what others read nothing does.
    """
    return plgpu.CompilerParams(unsafe_no_auto_barriers=True, **params)
