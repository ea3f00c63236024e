"""Describes NVIDIA cards for the compiler. Figures are from NVIDIA's data sheets, limits from its programming guide."""

from typing import NamedTuple

from llamaspec.pallas_kernels.parts.card import CARDS, Card

GB = 1 << 30


class DataSheet(NamedTuple):
    """The figures of a card that XLA asks for, in addition to `Card`."""

    name: str
    card: Card
    threads: int  # maximum per SM
    bandwidth: int  # bytes per second
    cache: int  # bytes of the second-level cache
    clock: float  # GHz
    memory: int  # bytes

    def __str__(self) -> str:
        return f"{self.name}, {self.card}"

    @property
    def target(self) -> str:
        """The card as a text protobuf, XLA's GpuTargetConfigProto."""
        major, minor = self.card.capability
        version = f"major: {major}" + (f" minor: {minor}" if minor else "")
        if major >= 12:  # Mosaic compiles for sm_120a, and XLA would call the assembler with sm_120
            version += " feature_extension: ACCELERATED_FEATURES"
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.card.shared}
  threads_per_core_limit: {self.threads}
  core_count: {self.card.processors}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.cache}
  clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory}
  shared_memory_per_block_optin: {self.card.block_shared}
  cuda_compute_capability {{ {version} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{self.name}"
"""


def _sheet(name: str, card: str, *, threads: int, gigabytes: int, cache: int, clock: float, memory: int) -> DataSheet:
    """Make a data sheet from gigabytes per second, megabytes of cache, and gigabytes of memory."""
    return DataSheet(name, CARDS[card], threads, gigabytes * 10**9, cache << 20, clock, memory * GB)


SHEETS = {
    "a100": _sheet("NVIDIA A100 80GB", "a100", threads=2048, gigabytes=2039, cache=40, clock=1.41, memory=80),
    "rtx-3060": _sheet("RTX 3060", "rtx-3060", threads=1536, gigabytes=360, cache=3, clock=1.78, memory=12),
    "rtx-4090": _sheet("RTX 4090", "rtx-4090", threads=1536, gigabytes=1008, cache=72, clock=2.52, memory=24),
    "l4": _sheet("NVIDIA L4", "l4", threads=1536, gigabytes=300, cache=48, clock=2.04, memory=24),
    "h200": DataSheet("NVIDIA H200", CARDS["h200"], 2048, 4814752000000, 60 << 20, 1.98, 150121545728),
    "b200": _sheet("NVIDIA B200", "b200", threads=2048, gigabytes=8000, cache=126, clock=1.97, memory=180),
    "rtx-5090": _sheet("RTX 5090", "rtx-5090", threads=1536, gigabytes=1792, cache=96, clock=2.41, memory=32),
    "gb10": _sheet("NVIDIA GB10", "gb10", threads=1536, gigabytes=273, cache=24, clock=2.42, memory=128),
}
