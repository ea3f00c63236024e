"""How much memory this process has in use, as Linux counts it."""

import re
from pathlib import Path


def resident_bytes() -> int:
    """Now."""
    return _marked("VmRSS")


def peak_resident_bytes() -> int:
    """At most, since the process began or `forget_peak` was called."""
    return _marked("VmHWM")


def forget_peak() -> None:
    """The most from now on is what is in use now."""
    Path("/proc/self/clear_refs").write_text("5")


def _marked(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10
