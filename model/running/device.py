"""The device that programs run on: JAX is asked once, and the answer is passed down."""

from typing import NamedTuple

import jax

from model.system import available_bytes, processor


class Device(NamedTuple):
    """A device as far as this package tells devices apart."""

    platform: str  # "cpu" or "gpu"
    kind: str  # the maker's name
    compute_capability: str | None  # of an NVIDIA GPU, as "9.0"

    @property
    def has_kernels(self) -> bool:
        """Whether the kernels of `pallas_kernels` are made for it: a Hopper GPU."""
        return self.compute_capability == "9.0"

    def __str__(self) -> str:
        """
        >>> print(Device("gpu", "NVIDIA H200", "9.0"), Device("cpu", "AMD EPYC", None), sep=", ")
        NVIDIA H200, CPU (AMD EPYC)
        """
        return f"CPU ({self.kind})" if self.platform == "cpu" else self.kind


def default_device() -> Device:
    """Ask JAX for the device that it uses by default."""
    device = jax.devices()[0]
    kind = processor() if device.platform == "cpu" else device.device_kind
    return Device(device.platform, kind, getattr(device, "compute_capability", None))


def free_bytes() -> int:
    """Give the memory that is free now on JAX's default device: a GPU's own, or the machine's."""
    device = jax.devices()[0]
    if device.platform == "cpu" or not (stats := device.memory_stats()):
        return available_bytes()
    return stats["bytes_limit"] - stats["bytes_in_use"]
