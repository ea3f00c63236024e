"""Describes NVIDIA cards for the compiler. Figures are from NVIDIA's data sheets, limits from its programming guide."""

from typing import NamedTuple

from llamaspec.model.insight.plan import DEVICES
from llamaspec.pallas_kernels.parts.card import CARDS, Card


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


# Threads per SM, megabytes of the second-level cache, and GHz.
FIGURES = {
    "a100": (2048, 40, 1.41),
    "rtx-3060": (1536, 3, 1.78),
    "rtx-4090": (1536, 72, 2.52),
    "l4": (1536, 48, 2.04),
    "h200": (2048, 60, 1.98),  # CUDA reports a larger cache than the 50 MB of an H100
    "b200": (2048, 126, 1.97),
    "rtx-5090": (1536, 96, 2.41),
    "gb10": (1536, 24, 2.42),
}


def _sheet(name: str) -> DataSheet:
    (threads, cache, clock), device = FIGURES[name], DEVICES[name]
    return DataSheet(device.name, CARDS[name], threads, int(device.bandwidth), cache << 20, clock, int(device.memory))


SHEETS = {name: _sheet(name) for name in CARDS}
# What JAX reports on an H200.
SHEETS["h200"] = SHEETS["h200"]._replace(name="NVIDIA H200", bandwidth=4814752000000, memory=150121545728)
