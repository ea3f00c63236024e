"""Reads the memory of this process from Linux."""

import re
from pathlib import Path


def resident_bytes() -> int:
    """Read the memory in use now, in bytes."""
    return _marked("VmRSS")


def peak_resident_bytes() -> int:
    """Read the peak of the memory in use since the start, or since `forget_peak` was called, in bytes."""
    return _marked("VmHWM")


def forget_peak() -> None:
    """Reset the peak to the memory in use now."""
    Path("/proc/self/clear_refs").write_text("5")


def _marked(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) << 10
