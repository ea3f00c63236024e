"""Gates on a compiled kernel and on a compiled decode step. A gate that fails yields one line."""

from collections.abc import Iterator, Sequence

from llamaspec.benchmarks.common.kernel_cases.case import Case, KernelLimits
from llamaspec.benchmarks.gates.kernel import Kernel
from llamaspec.benchmarks.gates.program import ProgramFacts

LARGE = 1 << 20  # bytes: a copy of this size takes as long as a kernel
STEP_TEMP = 32 << 20  # bytes
STEP_SECONDS = 20.0  # seconds of a processor core to lower and compile 32 layers
KERNELS_A_LAYER = 6
GRAPH = "kCommandBuffer"  # XLA's name of a CUDA graph


def instructions_per_weight(kernel: Kernel, bits: float) -> float | None:
    """Count the instructions of a thread per weight in the main loop. None: no loop reads weights."""
    if not (bits and kernel.refilled and kernel.loop):
        return None
    return kernel.loop * kernel.threads / (kernel.refilled * 8 / bits)


def broken_by(case: Case, program: ProgramFacts, kernels: Sequence[Kernel]) -> Iterator[str]:
    """Yield the broken gates of a case of the kernel table."""
    compiled = {kernel.name for kernel in kernels}
    if compiled != case.kernels.keys():
        yield f"expected {_listed(case.kernels)} to be compiled, got {_listed(compiled)}"
    for kernel in kernels:
        limits = case.kernels.get(kernel.name, KernelLimits())
        yield from (f"{kernel.name}: {wrong}" for wrong in _broken_by_kernel(kernel, limits, bits=case.bits))
    yield from _large_copies(program)


def _broken_by_kernel(kernel: Kernel, limits: KernelLimits, *, bits: float) -> Iterator[str]:
    if kernel.spilled:
        yield f"spills {kernel.spilled} bytes a thread"
    # The loop over a short row is unrolled, and has no limit of registers.
    if kernel.loop and kernel.registers > limits.registers:
        yield f"{kernel.registers} registers where {limits.registers} are allowed"
    per_weight = instructions_per_weight(kernel, bits)
    # The limits are stated to one decimal.
    if limits.instructions is not None and per_weight is not None and round(per_weight, 1) > limits.instructions:
        yield f"{per_weight:.2f} instructions a weight where {limits.instructions} are allowed"
    if limits.loop is not None and kernel.loop > limits.loop:
        yield f"{kernel.loop} instructions in the main loop where {limits.loop} are allowed"
    if bits and kernel.narrow:
        yield f"{kernel.narrow} loads of less than 128 bits from global memory in the main loop"
    if kernel.hasty:
        yield "asks for a copy into shared memory that may still be read"
    if kernel.unmet:
        yield "reads from shared memory what another thread may not have stored yet"
    if limits.wgmma and not kernel.wgmma:
        yield "no wgmma in a loop"
    if not kernel.waits:
        yield "does not wait for the kernel before it"
    elif bits and limits.eager and not kernel.eager:
        yield "loads nothing before it waits for the kernel before it"
    if kernel.cached_loads and not limits.eager:
        count = kernel.cached_loads
        yield f"{count} loads before it waits for the kernel before it, whose results the first cache keeps"


def kernels_a_layer(short: ProgramFacts, full: ProgramFacts, layers: tuple[int, int]) -> int:
    """Count the launches of a layer, of our kernels and the compiler's, from programs with few and with many layers.

    The count is rounded, because some launches are for all layers together, such as copies of pointers.
    """
    few, many = layers
    return round((len(full.launches) - len(short.launches)) / (many - few))


def broken_by_step(
    short: ProgramFacts, full: ProgramFacts, *, layers: tuple[int, int], cache: int, plain: int = 0
) -> Iterator[str]:
    """Yield the broken gates of a decode step, compiled with few layers and with all of them.

    `cache` is the number of bytes that must be updated in place. `plain` is the number of ops of a layer without a
    kernel for this model; each of these takes one more launch.
    """
    if (launched := kernels_a_layer(short, full, layers)) > KERNELS_A_LAYER + plain:
        yield f"{launched} kernels a layer where {KERNELS_A_LAYER + plain} are allowed"
    if not any(launch.by_us for launch in full.launches):
        yield "none of our kernels"
    yield from _large_copies(full)
    # All work outside the CUDA graph waits for the host in every step: a loop needs its condition checked, and a kernel
    # needs a launch.
    if full.issued != (GRAPH,):
        yield f"the host issues {len(full.issued)} times ({_listed({*full.issued})}) where a burst is one CUDA graph"
    if full.aliased < cache:
        yield f"{full.aliased} of {cache} bytes of the cache are updated in place"
    if full.temp >= STEP_TEMP:
        yield f"{full.temp} bytes of temporary memory where less than {STEP_TEMP} are allowed"
    if full.seconds > (allowed := STEP_SECONDS * max(1, layers[1] / 32)):
        yield f"{full.seconds:.0f} s to lower and compile {layers[1]} layers where {allowed:.0f} s are allowed"


def _large_copies(program: ProgramFacts) -> Iterator[str]:
    for launch in program.launches:
        if not launch.by_us and launch.bytes >= LARGE:
            yield f"{launch.kind} writes {launch.bytes} bytes beside our kernels"


def _listed(names) -> str:
    return ", ".join(sorted(names)) or "nothing"
