"""Gates on a compiled kernel and on a compiled decode step. Each gate that fails gives one line."""

from collections.abc import Iterator, Sequence

from llamaspec.benchmarks.common.kernel_cases.case import Case, KernelLimits
from llamaspec.benchmarks.gates.kernel import Kernel
from llamaspec.benchmarks.gates.program import ProgramFacts
from llamaspec.pallas_kernels.parts.card import Card

LARGE = 1 << 20  # bytes: a copy of this size takes as long as a kernel
STEP_TEMP = 32 << 20  # bytes
STEP_SECONDS = 20.0  # seconds of a processor core to lower and compile 32 layers
KERNELS_A_LAYER = 6
GRAPH = "kCommandBuffer"  # XLA's name of a CUDA graph


def instructions_per_weight(kernel: Kernel, bits: float) -> float | None:
    """Compute how many instructions of the main loop a thread runs per weight; None if no loop reads weights."""
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


def _broken_on_any_card(kernel: Kernel, limits: KernelLimits) -> Iterator[str]:
    if kernel.spilled:
        yield f"expected no register spills, got {kernel.spilled} bytes per thread"
    if kernel.hasty:
        yield "requests a copy into shared memory that threads may still be reading"
    if kernel.unmet:
        yield "reads shared memory after a store of another thread, without a barrier between"
    if kernel.cached_loads and not limits.eager:
        yield f"{kernel.cached_loads} loads before the wait for the previous kernel stay in the first-level cache"


def _broken_by_kernel(kernel: Kernel, limits: KernelLimits, *, bits: float) -> Iterator[str]:
    yield from _broken_on_any_card(kernel, limits)
    # The loop over a short row is unrolled, and has no limit of registers.
    if kernel.loop and kernel.registers > limits.registers:
        yield f"expected at most {limits.registers} registers, got {kernel.registers}"
    per_weight = instructions_per_weight(kernel, bits)
    # The limits are stated to one decimal.
    if limits.instructions is not None and per_weight is not None and round(per_weight, 1) > limits.instructions:
        yield f"expected at most {limits.instructions} instructions per weight, got {per_weight:.2f}"
    if limits.loop is not None and kernel.loop > limits.loop:
        yield f"expected at most {limits.loop} instructions in the main loop, got {kernel.loop}"
    if bits and kernel.narrow:
        yield f"expected global loads of 128 bits in the main loop, got {kernel.narrow} narrower ones"
    if limits.wgmma and not kernel.wgmma:
        yield "expected tensor-core products (wgmma) in a loop, got none"
    if not kernel.waits:
        yield "does not wait for the previous kernel"
    elif bits and limits.eager and not kernel.eager:
        yield "expected loads of weights before the wait for the previous kernel, got none"


def lacks(case: Case, card: Card) -> str | None:
    """Return the property of `Card` that a case needs and the card does not have; None if the card has all."""
    if case.op.startswith(("attention_prefill", "coded_gemm")) and not card.wgmma:
        return "wgmma"
    return None


def least_load(case: Case) -> int:
    """Return the least width in bits of a load of weights, keys or values to registers; 0 for a case without these.

    It is 128 for floats, or 64 if a thread's registers hold the sums of more than four vectors. It is 32 for quantized
    weights: the scales need narrower loads than the codes, and one load of e4m3 floats reads as many floats as one load
    of x reads numbers.
    """
    if case.op.startswith("attention"):
        return 128
    if case.bits in (16, 32):
        return 128 if len(case.arrays[1]) <= 4 else 64
    return 32 if case.bits else 0


def broken_on_card(case: Case, card: Card, program: ProgramFacts, kernels: Sequence[Kernel]) -> Iterator[str]:
    """Yield the broken gates of a case compiled for a card on which we have not measured it.

    There are no limits on registers and instructions: these are measured on an H200.
    """
    compiled = {kernel.name for kernel in kernels}
    if not compiled or not compiled <= case.kernels.keys() | {"attention_combine"}:
        yield f"expected {_listed(case.kernels)} to be compiled, got {_listed(compiled)}"
    for kernel in kernels:
        yield from (f"{kernel.name}: {wrong}" for wrong in _broken_on_card(kernel, card, case))
    yield from _large_copies(program)


def _broken_on_card(kernel: Kernel, card: Card, case: Case) -> Iterator[str]:
    yield from _broken_on_any_card(kernel, case.kernels.get(kernel.name, KernelLimits()))
    if kernel.shared > card.block_shared:
        yield f"expected at most {card.block_shared} bytes of shared memory, got {kernel.shared}"
    for feature in kernel.features:
        if not getattr(card, feature):
            yield f"has instructions that need {feature}, which the card does not have"
    if kernel.waits != card.dependent_launch:
        yield f"expected {'a' if card.dependent_launch else 'no'} wait for the previous kernel"
    if kernel.moved:
        yield f"waits for loads in flight: it moves {kernel.moved} registers that the same turn loads"
    least = least_load(case)
    if least and (narrow := sum(count for bits, count in kernel.streamed.items() if bits < least)):
        yield f"expected loads to registers of {least} bits or more, got {narrow} narrower ones"
    if case.bits and not card.copy_engine and not kernel.streamed:
        yield "expected loads of weights to registers, got none"


def kernels_a_layer(short: ProgramFacts, full: ProgramFacts, layers: tuple[int, int]) -> int:
    """Count the kernel launches per layer, ours and the compiler's, from programs with few and with many layers.

    This is the difference in launches, divided by the difference in layers. The count is rounded, because some launches
    are for all layers together, such as copies of pointers.
    """
    few, many = layers
    return round((len(full.launches) - len(short.launches)) / (many - few))


def broken_by_step(
    short: ProgramFacts, full: ProgramFacts, *, layers: tuple[int, int], cache: int, plain: int = 0
) -> Iterator[str]:
    """Yield the broken gates of a decode step, compiled with few layers and with all of them.

    `cache` is the number of bytes that must be updated in place. `plain` is the number of ops per layer for which
    our kernels refuse this model; each of these ops may take one more launch.
    """
    if (launched := kernels_a_layer(short, full, layers)) > KERNELS_A_LAYER + plain:
        yield f"expected at most {KERNELS_A_LAYER + plain} kernels per layer, got {launched}"
    if not any(launch.by_us for launch in full.launches):
        yield "expected our kernels in the step, got none"
    yield from _large_copies(full)
    # All work outside the CUDA graph waits for the host in every step: a loop needs its condition checked, and a kernel
    # needs a launch.
    if full.issued != (GRAPH,):
        yield f"expected the host to issue one CUDA graph, got {len(full.issued)} items ({_listed({*full.issued})})"
    if full.aliased < cache:
        yield f"expected {cache} bytes of the cache to be updated in place, got {full.aliased}"
    if full.temp >= STEP_TEMP:
        yield f"expected less than {STEP_TEMP} bytes of temporary memory, got {full.temp}"
    if full.seconds > (allowed := STEP_SECONDS * max(1, layers[1] / 32)):
        yield f"expected at most {allowed:.0f} s to compile {layers[1]} layers, got {full.seconds:.0f} s"


def _large_copies(program: ProgramFacts) -> Iterator[str]:
    for launch in program.launches:
        if not launch.by_us and launch.bytes >= LARGE:
            yield f"{launch.kind} of the compiler writes {launch.bytes} bytes; expected less than {LARGE}"


def _listed(names) -> str:
    return ", ".join(sorted(names)) or "nothing"
