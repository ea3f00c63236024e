"""The target of a kernel, and all code that touches jax's internals or differs between its versions (0.11.2 to 0.12).

Code in Mosaic's own terms is apart: `staging.py`, and `inline.py` with the modules that use it.

`Target` holds what differs between a GPU and the interpreter: programmatic dependent launch, which the interpreter does
not have, and how a kernel is launched.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

MAX_SHARED_MEMORY = 227 * 1024  # bytes that a thread block may have on sm_90
PROCESSORS = 132  # streaming multiprocessors of an H200
LANES = 32  # threads in a warp
WARPS = 4  # warps in a warpgroup
THREADS = WARPS * LANES  # a thread block is one warpgroup, unless a kernel says otherwise


@dataclass(frozen=True)
class Target:
    """Device or interpreter that a kernel is built for."""

    interpret: bool = False
    pdl: bool = True  # programmatic dependent launch: start while the previous kernel still runs

    def kernel(self, body: Callable[..., None], **shapes: Any) -> Callable[..., Any]:
        """Make a kernel by `plgpu.kernel`, interpreted where the target says so."""
        interpret = plgpu.InterpretGPUParams(detect_races=True) if self.interpret else None
        return plgpu.kernel(body, interpret=interpret, **shapes)

    @property
    def overlaps(self) -> bool:
        """Whether a kernel starts before the previous one ends."""
        return self.pdl and not self.interpret

    def wait_for_previous(self) -> None:
        """Wait until everything that earlier kernels wrote can be read.

        Before this call a kernel may read weights, unless a kernel that still runs wrote them, and several earlier ones
        may still run. It may not read activations, except by `read_past_first_cache`, which may give an old value. It
        may not write to global memory.
        """
        if self.overlaps:
            plgpu.griddepcontrol_wait()

    def let_next_start(self) -> None:
        """Let the next kernel begin with work that does not depend on this one; its own wait holds back the rest."""
        if self.overlaps:
            plgpu.griddepcontrol_launch_dependents()


_target = jax.make_user_context(Target())  # jit caches programs for each value of it


def current_target() -> Target:
    """Give the target that kernels are built for now."""
    return _target.value


def use_target(target: Target) -> AbstractContextManager[None]:
    """Build the kernels that are traced inside for `target`; jit keeps them apart from those for other targets."""
    return _target(target)


@contextmanager
def interpreter() -> Iterator[None]:
    """Run kernels on a CPU, one simulated thread after another.

    Raises RuntimeError for a race: jax 0.12 where it is, 0.11 at the end. Set JAX_CPU_ENABLE_ASYNC_DISPATCH=0 and
    NPROC=16, the number of XLA's threads, before jax starts, or a larger program around a kernel may wait forever.
    """
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as state

    state.reset_gpu_interpret_mode_state()
    try:
        with use_target(Target(interpret=True)):
            yield
        if state.get_races().races_found:
            raise RuntimeError("the interpreter found a race")
    finally:
        state.reset_gpu_interpret_mode_state()


def tiled_layout(tiling: tuple[tuple[int, ...], ...], *, warps: int, lanes: tuple[int, ...] | int) -> Any:
    """Make a layout of an array over the registers of a warpgroup, in the canonical form for layout inference.

    `tiling` cuts the array into tiles, tiles of tiles, and so on. `warps` and `lanes` name, from the end, the
    dimensions of the result that are spread over the 4 warps and over the 32 lanes of each. The last dimension is the
    vector that a thread holds.
    """
    lanes = (lanes,) if isinstance(lanes, int) else lanes
    layout = fragmented_array.TiledLayout(plgpu.Tiling(tiling), (warps,), lanes, -1, _check_canonical=False)
    layout = layout.canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def store_in_pieces(ref: Any, values: Any) -> None:
    """Store values in global memory in rows shorter than a cache line, which jax 0.12 must be told."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values
