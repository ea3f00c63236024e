"""Run commands in separate processes, and measure their peak memory."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

REPOSITORY = Path(__file__).parents[2]

# Write the kernel's high-water mark of memory, in KB, to the file that the first argument names. Unlike getrusage's
# maximum, VmHWM does not include memory that the parent held at the fork.
MEASURED = """
import atexit, re, sys
def report(path=sys.argv.pop(1)):
    status = open("/proc/self/status").read()
    open(path, "w").write(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])
atexit.register(report)
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str
    peak: int  # bytes of memory


def run_python(script: str, *arguments: str, stdin: str = "") -> Done:
    """Run the Python source `script` in a folder outside the repository, with the repository importable.

    The process runs without NPROC, so XLA starts one thread per core. conftest.py sets NPROC to more threads, for
    interpreted kernels, but these threads would add to the measured memory.
    """
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
    with tempfile.TemporaryDirectory() as folder:
        peak = Path(folder) / "peak"
        done = subprocess.run(
            [sys.executable, "-c", MEASURED + script, str(peak), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment | {"PYTHONPATH": str(REPOSITORY)},
        )
        return Done(done.returncode, done.stdout, done.stderr, int(peak.read_text()) * 1024)


def interrupt_within(path: Path, text: str, **_: Any) -> NoReturn:
    """Stand in for `Path.write_text`: write half of `text`, then raise KeyboardInterrupt, as Ctrl-C does."""
    with path.open("w") as file:
        file.write(text[: len(text) // 2])
    raise KeyboardInterrupt


def run_llamaspec(*arguments: str, stdin: str = "") -> Done:
    """Run a `llamaspec` command in its own process."""
    return run_python("from llamaspec import cli; cli.main()", *arguments, stdin=stdin)
