"""The GPU: what the compiler is told of it, and what a kernel's facts mean for the speed of its memory.

The second half is arithmetic, not measurement: the fastest that a kernel could stream its bytes, given what the
compiler made of it.
"""

from typing import NamedTuple

from benchmarks.gpu_compile.kernel import Kernel

MULTIPROCESSORS = 132
REGISTERS = 65_536  # of a multiprocessor, in four equal parts, one for each of its schedulers
SHARED = 233_472  # bytes of a multiprocessor
THREADS = 2048  # that a multiprocessor holds
BLOCKS = 32
BANDWIDTH = 4.3e12  # bytes a second, read and written, as a copy reaches it; the memory's own figure is 4.8e12
LATENCY = 0.75e-6  # seconds from a copy engine's request to its bytes, under load
CLOCK = 1.755e9  # Hz, sustained; it boosts to 1.98e9
SCHEDULERS = 4  # of a multiprocessor, an instruction of one warp each and clock

TARGET = f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {SHARED}
  threads_per_core_limit: {THREADS}
  core_count: {MULTIPROCESSORS}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4814752000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150121545728
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: {REGISTERS}
  registers_per_block_limit: {REGISTERS}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "NVIDIA H200"
"""


class Roofline(NamedTuple):
    """What bounds a kernel that streams bytes."""

    resident: int  # thread blocks at once on a multiprocessor
    in_flight: int  # bytes on their way to a multiprocessor
    slots: float | None  # instructions of a warp that its four schedulers must issue each clock, to keep up with memory
    bandwidth: float  # bytes a second: the least of what memory, latency and issue allow


def roofline(kernel: Kernel) -> Roofline | None:
    """What `kernel` can reach, where it streams through the copy engine; None where it does not."""
    if not kernel.prefetched:
        return None
    resident = resident_blocks(kernel)
    # A grid too small to fill the GPU leaves multiprocessors with fewer.
    at_once = min(resident, kernel.blocks / MULTIPROCESSORS)
    in_flight = at_once * kernel.prefetched
    bounds = [BANDWIDTH, in_flight * MULTIPROCESSORS / LATENCY]
    slots = None
    if kernel.refills:
        clocks = kernel.refilled / (BANDWIDTH / MULTIPROCESSORS / CLOCK)  # in which memory brings the bytes of a turn
        slots = kernel.loop * (kernel.threads / 32) / clocks
        bounds.append(BANDWIDTH * SCHEDULERS / slots)
    return Roofline(resident, round(in_flight), slots, min(bounds))


def resident_blocks(kernel: Kernel) -> int:
    """Thread blocks of `kernel` that fit on a multiprocessor.

    Registers come in units of 256 to a warp, shared memory with a kilobyte on top of what a block asks for.
    """
    warps = -(-kernel.threads // 32)
    by_registers = SCHEDULERS * (REGISTERS // SCHEDULERS // (-(-kernel.registers * 32 // 256) * 256)) // warps
    by_shared = SHARED // (-(-kernel.shared // 128) * 128 + 1024)
    return min(by_registers, by_shared, THREADS // kernel.threads, BLOCKS)
