"""GPUs as data: what kernels need to know about a card. Kernels never ask for its name.

Compute capability decides what the hardware can do (CUDA programming guide, tables of compute capabilities):

    capability   cards                          copies to shared memory    products of shared memory    next kernel
    8.0 to 8.9   A100, RTX 30 and 40, A10, L4   none that we use           none                         waits
    9.0          H100, H200                     TMA                        wgmma                        starts early
    10.x         B200                           TMA                        others                       starts early
    12.x         RTX 50, GB10                   TMA                        none                         starts early
"""

from typing import Any, NamedTuple

SHARED = {(8, 0): 164, (8, 7): 164, (9, 0): 228, (10, 0): 228, (10, 3): 228}  # kilobytes per SM; 100 on other cards


class Card(NamedTuple):
    """A GPU: its compute capability, and its number of streaming multiprocessors (SMs)."""

    capability: tuple[int, int]
    processors: int

    @property
    def shared(self) -> int:
        """The bytes of shared memory of an SM."""
        return SHARED.get(self.capability, 100) * 1024

    @property
    def block_shared(self) -> int:
        """The maximum bytes of shared memory of a thread block. The system needs a kilobyte of each SM."""
        return self.shared - 1024

    @property
    def copy_engine(self) -> bool:
        """Tell whether the card has TMA: asynchronous copies, and barriers that count the copied bytes."""
        return self.capability >= (9, 0)

    @property
    def wgmma(self) -> bool:
        """Tell whether a warpgroup can multiply matrices in shared memory with the instruction wgmma."""
        return self.capability == (9, 0)

    @property
    def converts_e4m3(self) -> bool:
        """Tell whether the card has an instruction that converts e4m3 floats."""
        return self.capability >= (8, 9)

    @property
    def dependent_launch(self) -> bool:
        """Tell whether a kernel can start before the previous kernel ends (programmatic dependent launch)."""
        return self.capability >= (9, 0)

    def __str__(self) -> str:
        """
        >>> print(CARDS["rtx-3060"])
        compute capability 8.6
        """
        return f"compute capability {'.'.join(map(str, self.capability))}"


CARDS = {
    "a100": Card((8, 0), 108),
    "rtx-3060": Card((8, 6), 28),
    "rtx-4090": Card((8, 9), 128),
    "l4": Card((8, 9), 58),
    "h200": Card((9, 0), 132),
    "b200": Card((10, 0), 148),
    "rtx-5090": Card((12, 0), 170),
    "gb10": Card((12, 1), 48),
}
H200 = CARDS["h200"]


def card_of(device: Any) -> Card:
    """Describe a device of JAX. Returns `H200` for a CPU: the interpreter there runs kernels that are made for an H200.

    >>> card_of(object()) == H200
    True
    """
    major, _, minor = (getattr(device, "compute_capability", None) or "").partition(".")
    if not (major.isdigit() and minor.isdigit()):
        return H200
    return Card((int(major), int(minor)), getattr(device, "core_count", H200.processors))
