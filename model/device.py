"""Describes the device that programs run on. We ask JAX once, and pass the description on."""

import os
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax

from llamaspec.model.system import available_bytes, cuda_memory, nvidia_memory
from llamaspec.pallas_kernels.parts.card import Card, card_of

# Phrases in JAX's error messages for a GPU without free memory.
FULL = ("RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
HOPPER = "9.0"  # the compute capability on which we have measured the kernels
CHOSEN = ("9",)  # major compute capabilities of the GPUs on which models run with kernels


class Device(NamedTuple):
    """The properties of a device that decide how a model runs on it."""

    platform: str  # cpu, gpu, tpu
    kind: str  # JAX's name for the device, such as "NVIDIA H200"
    capability: str | None = None  # the compute capability of an NVIDIA GPU, such as 9.0
    processors: int = 132  # streaming multiprocessors of a GPU
    others: tuple[str, ...] = ()  # other compute capabilities of this process's GPUs

    @property
    def has_kernels(self) -> bool:
        """True if models run on this device with the kernels of `pallas_kernels`."""
        return (self.capability or "").partition(".")[0] in CHOSEN

    @property
    def kernels(self) -> str:
        """Say whether models use kernels on this device ("none" if not), and whether we have measured their speed.

        >>> Device("gpu", "NVIDIA H200", "9.0").kernels, Device("gpu", "NVIDIA T4", "7.5").kernels
        ('measured', 'none')
        """
        if not self.has_kernels:
            return "none"
        measured = self.capability == HOPPER
        return "measured" if measured else "compiled and verified, speed not measured on this card"

    @property
    def card(self) -> Card:
        """This device as a `Card`, the description from which kernels are built."""
        return card_of(SimpleNamespace(compute_capability=self.capability, core_count=self.processors))

    def __str__(self) -> str:
        """
        >>> print(Device("gpu", "NVIDIA H200", "9.0"), Device("cpu", "cpu"), sep=", ")
        NVIDIA H200, CPU
        """
        return "CPU" if self.platform == "cpu" else self.kind


def devices() -> list[Any]:
    """Return JAX's devices. The first call initializes them.

    Raises MemoryError if other processes hold the GPU's memory, and ValueError if JAX has no device of the platform
    that JAX_PLATFORMS names.
    """
    try:
        return jax.devices()
    # With JAX_PLATFORMS=cuda and no NVIDIA GPU, JAX skips the platform and then asserts, without a message, that it has
    # found a backend. For every other platform that is missing it raises RuntimeError.
    except (RuntimeError, AssertionError) as error:
        if is_full(str(error)):
            raise MemoryError(no_room_to_start()) from error
        if platforms := os.environ.get("JAX_PLATFORMS"):
            reason = (str(error).split(" (set JAX_PLATFORMS")[0] or "JAX finds no such device").split("\n")[0][:300]
            raise ValueError(
                f"JAX_PLATFORMS is {platforms}: {reason}; unset the variable to let JAX choose a device"
            ) from error
        raise


def is_full(message: str) -> bool:
    """Return whether a message of JAX says that a GPU has no free memory."""
    return any(words in message for words in FULL)


def no_room_to_start() -> str:
    """Return the error message to show if other processes have filled the GPU's memory before this process starts."""
    memory = nvidia_memory()
    holders = "" if memory is None else f": other processes hold {(memory[1] - memory[0]) / 2**30:.1f} GiB"
    return f"the GPU has too little free memory to start{holders}"


def default_device() -> Device:
    """Describe the device that JAX computes on by default."""
    device, *more = devices()
    capability = getattr(device, "compute_capability", None)
    others = {getattr(other, "compute_capability", None) for other in more}
    return Device(
        device.platform,
        device.device_kind,
        capability,
        card_of(device).processors,
        tuple(sorted(other for other in others if other not in (None, capability))),
    )


class Room(NamedTuple):
    """The free memory of the default device, in bytes."""

    free: int
    other_programs: int = 0  # bytes that other programs hold; 0 if unknown


def room() -> Room:
    """Return the free memory of this process's first device: GPU memory, or main memory for a CPU.

    JAX's limit for a GPU includes memory that other programs hold, so we also ask CUDA how much is free.
    """
    device = jax.local_devices()[0]  # JAX has memory statistics only for this process's devices
    stats = None if device.platform == "cpu" else device.memory_stats()
    memory = cuda_memory() if device.platform == "gpu" else None
    if not stats:  # a CPU, or a GPU with XLA_PYTHON_CLIENT_ALLOCATOR=platform
        return Room(memory[0] if memory else available_bytes())
    allowed = stats["bytes_limit"] - stats["bytes_in_use"]
    if not memory:
        return Room(allowed)
    free, total = memory
    pool = stats.get("pool_bytes", stats["bytes_in_use"])
    return Room(min(allowed, free + pool - stats["bytes_in_use"]), max(0, total - free - pool))


def free_bytes() -> int:
    """Return how many bytes are free now on this process's first device."""
    return room().free
