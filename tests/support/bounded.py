"""Call functions in a separate process, each call limited to two processor seconds and 500 MB of memory.

The kernel enforces both limits, so no call escapes them. ITIMER_PROF counts the processor seconds of all threads, even
on a busy machine, and ends the process. RLIMIT_DATA refuses memory, touched or not. VmHWM, reset before each call, is
the peak of resident memory, including mapped files and Python itself.

One process serves many calls, because a start takes half a second. Each function takes one string. The process imports
the function's module. A new process starts for a function of a different module, and when earlier calls have left too
much memory behind. Otherwise the import or the leftover memory would count against the next call.
"""

import atexit
import functools
import importlib
import json
import re
import resource
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamaspec.model.checkpoints import CheckpointError
from tests.support.processes import REPOSITORY

SECONDS = 2.0
BYTES = 500_000_000
LEFTOVER = 30_000_000  # bytes that earlier calls may leave behind before a new process starts
PATIENCE = 300.0  # seconds by the clock for a call that waits without using the processor

STATUS = Path("/proc/self/status")


class Bounded:
    """A handle of the process. The process starts at the first call, and again after a call that ended it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.module = ""  # module that the process has imported

    def refusal(self, function: Callable[[str], object], argument: str) -> str | None:
        """Return the message of the CheckpointError that `function(argument)` raises, or None if it returns.

        Raises AssertionError for any other exception, and for a call that takes too much time or memory.
        """
        if function.__module__ != self.module:
            self.close()
            self.module = function.__module__
        answer = self._ask({"module": function.__module__, "name": function.__name__, "argument": argument})
        if answer["left"] > LEFTOVER:
            self.close()
        assert "crash" not in answer, answer["crash"]
        assert answer["bytes"] < BYTES, f"{answer['bytes'] / 1e6:.0f} MB of memory were in use"
        return answer["refusal"]

    def _ask(self, request: dict[str, str]) -> dict[str, Any]:
        self.process = self.process or subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.support.bounded"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        if ready and (line := self.process.stdout.readline()):
            return json.loads(line)
        code = self.close()
        if not ready:
            what = f"did not end within {PATIENCE:.0f} s"
        elif code == -signal.SIGPROF:
            what = f"took more than {SECONDS} s of the processor"
        else:
            what = f"ended its process with exit code {code}"
        raise AssertionError(f"{request['name']}({request['argument']!r}) {what}")

    def close(self) -> int | None:
        """End the process if it runs, and return its exit code."""
        if self.process is None:
            return None
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            code = self.process.wait(timeout=1)  # the process exits when its input closes, unless it hangs
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.process = None
        return code


@functools.cache
def process() -> Bounded:
    """Return the process that all tests of a pytest session share."""
    shared = Bounded()
    atexit.register(shared.close)
    return shared


def serve() -> None:
    """Read calls from stdin, one per line, and write each answer to stdout."""
    _set_limits()
    leftover = 0
    for line in sys.stdin:
        request = json.loads(line)
        function = getattr(importlib.import_module(request["module"]), request["name"])
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        answer: dict[str, Any] = {"refusal": None}
        try:
            function(request["argument"])
        except CheckpointError as error:
            answer["refusal"] = str(error)
        except BaseException:
            answer["crash"] = traceback.format_exc()
        signal.setitimer(signal.ITIMER_PROF, 0)
        leftover += max(_status("VmRSS") - before, 0)
        print(json.dumps(answer | {"bytes": _status("VmHWM"), "left": leftover}), flush=True)


def _set_limits() -> None:
    most = _status("VmData") + BYTES - _status("VmHWM")
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _status(key: str) -> int:
    match = re.search(rf"{key}:\s+(\d+) kB", STATUS.read_text())
    assert match, f"{STATUS} has no {key}"
    return int(match[1]) * 1024


if __name__ == "__main__":
    serve()
