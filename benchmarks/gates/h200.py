"""Describes an H200 for the compiler, and computes the bandwidth that a compiled kernel can reach.

The bandwidth is an upper bound from the kernel's machine code. Nothing is measured here.
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
  driver_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "NVIDIA H200"
"""


class Roofline(NamedTuple):
    """Upper bounds for a kernel that streams bytes."""

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

    A warp gets registers in units of 256. Each block takes a kilobyte of shared memory more than it requests.
    """
    warps = -(-kernel.threads // 32)
    by_registers = SCHEDULERS * (REGISTERS // SCHEDULERS // (-(-kernel.registers * 32 // 256) * 256)) // warps
    by_shared = SHARED // (-(-kernel.shared // 128) * 128 + 1024)
    return min(by_registers, by_shared, THREADS // kernel.threads, BLOCKS)
