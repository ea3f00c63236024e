"""Computes the bandwidth that a compiled kernel can reach on an H200.

It is an upper bound from the kernel's machine code. Nothing is measured here.
"""

from typing import NamedTuple

from llamaspec.benchmarks.gates.kernel import Kernel

MULTIPROCESSORS = 132
REGISTERS = 65_536  # per multiprocessor, a quarter for each scheduler
SHARED = 233_472  # bytes of shared memory per multiprocessor
THREADS = 2048  # per multiprocessor
BLOCKS = 32
BANDWIDTH = 4.3e12  # bytes per second that a copy reads and writes; nominally 4.8e12
LATENCY = 0.75e-6  # seconds from the request of an asynchronous copy (TMA) to its bytes, under load
CLOCK = 1.755e9  # Hz, sustained; the boost is 1.98e9
SCHEDULERS = 4  # per multiprocessor; each issues one instruction per clock


class Roofline(NamedTuple):
    """Upper bounds on the bandwidth and the parallelism of a kernel that streams bytes from memory."""

    resident: int  # thread blocks at once on a multiprocessor
    in_flight: int  # bytes on their way to a multiprocessor
    slots: float | None  # warp instructions per clock, of at most 4, that the kernel needs to keep up with memory
    bandwidth: float  # bytes per second: the smallest of the bounds by memory, by latency and by instructions


def roofline(kernel: Kernel) -> Roofline | None:
    """Compute the bounds of `kernel`; None if it does not request asynchronous copies (TMA) before its main loop."""
    if not kernel.prefetched:
        return None
    resident = resident_blocks(kernel)
    # A small grid leaves multiprocessors with fewer blocks.
    at_once = min(resident, kernel.blocks / MULTIPROCESSORS)
    in_flight = at_once * kernel.prefetched
    bounds = [BANDWIDTH, in_flight * MULTIPROCESSORS / LATENCY]
    slots = None
    if kernel.refills:
        clocks = kernel.refilled / (BANDWIDTH / MULTIPROCESSORS / CLOCK)  # clocks for the bytes of a turn
        slots = kernel.loop * (kernel.threads / 32) / clocks
        bounds.append(BANDWIDTH * SCHEDULERS / slots)
    return Roofline(resident, round(in_flight), slots, min(bounds))


def resident_blocks(kernel: Kernel) -> int:
    """Compute how many thread blocks of `kernel` fit on a multiprocessor.

    A warp gets registers in units of 256. Each block takes one kilobyte more shared memory than it requests.
    """
    warps = -(-kernel.threads // 32)
    by_registers = SCHEDULERS * (REGISTERS // SCHEDULERS // (-(-kernel.registers * 32 // 256) * 256)) // warps
    by_shared = SHARED // (-(-kernel.shared // 128) * 128 + 1024)
    return min(by_registers, by_shared, THREADS // kernel.threads, BLOCKS)
