"""The target of a kernel, and all code that uses jax's internals or differs between jax 0.11.2 and 0.12.

Code that uses Mosaic directly is not here. It is in `staging.py`, in `inline.py`, and in modules that import
`inline.py`.

`Target` covers the differences between a GPU and the interpreter: how a kernel is launched, and programmatic dependent
launch, which the interpreter does not have.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from llamaspec.pallas_kernels.parts.card import H200, Card, card_of
from llamaspec.pallas_kernels.unsupported import Unsupported

LANES = 32  # threads in a warp
QUAD = 4  # lanes that share a row of a tensor core's matrix
WARPS = 4  # warps in a warpgroup
THREADS = WARPS * LANES  # threads in a warpgroup, and in a thread block unless a kernel says otherwise


@dataclass(frozen=True)
class Target:
    """The card for which a kernel is built, and whether the interpreter runs it."""

    interpret: bool = False
    pdl: bool = True  # programmatic dependent launch: a kernel starts while the previous one still runs
    card: Card = H200

    def kernel(self, body: Callable[..., None], **shapes: Any) -> Callable[..., Any]:
        """Make a kernel with `plgpu.kernel`. If the target is the interpreter, the kernel is interpreted."""
        interpret = plgpu.InterpretGPUParams(detect_races=True) if self.interpret else None
        return plgpu.kernel(body, interpret=interpret, **shapes)

    @property
    def overlaps(self) -> bool:
        """Tell whether a kernel starts before the previous kernel ends."""
        return self.pdl and self.card.dependent_launch and not self.interpret

    def require_wgmma(self, op: str) -> None:
        """Raise Unsupported if the card lacks the instruction wgmma, which the kernel `op` uses."""
        if not self.card.wgmma:
            raise Unsupported(f"{op} needs a GPU with wgmma (compute capability 9.0), got {self.card}")

    def wait_for_previous(self) -> None:
        """Wait until all results of earlier kernels are readable.

        A kernel can start while one or more earlier kernels still run. Before it makes this call, it may read weights,
        because no earlier kernel writes them, but may not write to global memory. It may read activations only with
        `read_past_first_cache`, and may then get an old value.
        """
        if self.overlaps:
            plgpu.griddepcontrol_wait()

    def let_next_start(self) -> None:
        """Let the next kernel start.

        The next kernel may do independent work. It must call `wait_for_previous` before it reads our results.
        """
        if self.overlaps:
            plgpu.griddepcontrol_launch_dependents()


_target = jax.make_user_context(None)  # part of jit's cache key


def current_target() -> Target:
    """Return the current target for building kernels: by default, the first device of this process."""
    return _target.value or _first_device()


@cache
def _first_device() -> Target:
    return Target(card=card_of(jax.local_devices()[0]))


def use_target(target: Target) -> AbstractContextManager[None]:
    """Build kernels for `target` inside this context. jit caches them separately for each target."""
    return _target(target)


@contextmanager
def interpreter() -> Iterator[None]:
    """Run the kernels in this context on a CPU, one simulated thread after the other.

    The kernels are built for the card of the current target.

    Raises RuntimeError for a race. jax 0.12 raises it at the access, and jax 0.11 at the end of the program. Set
    NPROC=16 (the number of XLA's threads) and JAX_CPU_ENABLE_ASYNC_DISPATCH=0 before jax starts; otherwise a larger
    program around a kernel may deadlock.
    """
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as state

    state.reset_gpu_interpret_mode_state()
    try:
        with use_target(replace(current_target(), interpret=True)):
            yield
        try:
            found = state.get_races().races_found
        except AssertionError:  # no kernel ran, for example because an array is empty
            found = False
        if found:
            raise RuntimeError("the interpreter found a race")
    finally:
        state.reset_gpu_interpret_mode_state()


def tiled_layout(tiling: tuple[tuple[int, ...], ...], *, warps: int | None, lanes: tuple[int | None, ...] | int) -> Any:
    """Make a layout of an array over the registers of a warpgroup, in the canonical form for layout inference.

    `tiling` divides the array into tiles, tiles of tiles, and so on. The result has more dimensions. `warps` is the
    index of the dimension that is distributed over the 4 warps. `lanes` has the indices of the dimensions that are
    distributed over the 32 lanes of a warp. Indices are negative: they count from the end. If `warps` is None, all
    warps have the same numbers. If an index in `lanes` is None, the four lanes of a quad do. The last dimension is the
    vector in a thread.
    """
    lanes = (lanes,) if isinstance(lanes, int) else lanes
    of_warps = plgpu.Replicated(WARPS) if warps is None else warps
    of_lanes = tuple(plgpu.Replicated(QUAD) if lane is None else lane for lane in lanes)
    layout = fragmented_array.TiledLayout(plgpu.Tiling(tiling), (of_warps,), of_lanes, -1, _check_canonical=False)
    layout = layout.canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def store_in_pieces(ref: Any, values: Any) -> None:
    """Store values in global memory, in rows shorter than a cache line.

    jax 0.12 needs an option for such short rows.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values
