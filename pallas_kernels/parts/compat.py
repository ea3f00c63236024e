"""Where a kernel runs, and all that touches jax's internals or differs between its versions (0.11.2 to 0.12), but for
what is written in Mosaic's own terms (`staging.py`, and `inline.py` with what uses it).

Two things are not the same on a GPU and in the interpreter, and `Target` holds them: programmatic dependent launch,
which the interpreter does not have, and how a kernel is launched.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

MAX_SHARED_MEMORY = 227 * 1024  # bytes that a thread block may have on sm_90
PROCESSORS = 132  # of an H200
LANES = 32  # threads in a warp
WARPS = 4  # warps in a warpgroup
THREADS = WARPS * LANES  # a thread block is one warpgroup, unless a kernel says otherwise


@dataclass(frozen=True)
class Target:
    """What a kernel is built for."""

    interpret: bool = False
    pdl: bool = True  # programmatic dependent launch: start while the kernel before is still running

    def kernel(self, body: Callable[..., None], **shapes: Any) -> Callable[..., Any]:
        """`plgpu.kernel`, interpreted where the target says so."""
        interpret = plgpu.InterpretGPUParams(detect_races=True) if self.interpret else None
        return plgpu.kernel(body, interpret=interpret, **shapes)

    @property
    def overlaps(self) -> bool:
        """Whether kernels start before the one before has ended."""
        return self.pdl and not self.interpret

    def wait_for_previous(self) -> None:
        """Until everything that the kernels before this one wrote can be read.

        Weights may be read before, unless a kernel that still runs wrote them, and several before this one may.
        Activations may not be (but for `read_past_first_cache`, which may give an old one), and nothing may be written
        to global memory.
        """
        if self.overlaps:
            plgpu.griddepcontrol_wait()

    def let_next_start(self) -> None:
        """The next kernel may begin with what does not depend on this one. Its own wait keeps it from the rest."""
        if self.overlaps:
            plgpu.griddepcontrol_launch_dependents()


_target = jax.make_user_context(Target())  # whatever jit keeps is kept for one value of it


def current_target() -> Target:
    """What kernels are built for now."""
    return _target.value


def use_target(target: Target) -> AbstractContextManager[None]:
    """What is traced inside is built for `target`, and kept apart from what was built for another."""
    return _target(target)


@contextmanager
def interpreter() -> Iterator[None]:
    """Run kernels on a CPU, one simulated thread after another. Raises RuntimeError for a race, at the end at the
    latest (0.12 raises where it is).

    Set JAX_CPU_ENABLE_ASYNC_DISPATCH=0 and NPROC=16, the number of XLA's threads, before jax starts, or a larger
    program around a kernel may wait for ever.
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
    """A layout of an array over the registers of a warpgroup, in the canonical form that layout inference wants.

    `tiling` cuts the array into tiles, tiles of tiles, and so on; `warps` and `lanes` name, from the end, the
    dimensions of the result that are spread over the 4 warps and over the 32 lanes of each; the last dimension is the
    vector that a thread holds.
    """
    lanes = (lanes,) if isinstance(lanes, int) else lanes
    layout = fragmented_array.TiledLayout(plgpu.Tiling(tiling), (warps,), lanes, -1, _check_canonical=False)
    layout = layout.canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def store_in_pieces(ref: Any, values: Any) -> None:
    """`ref[...] = values` in global memory where rows are shorter than a cache line: 0.12 wants to be told."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values
