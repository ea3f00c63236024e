"""Starts and stops the process that renders a chat template, `model.chat.template_worker`."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Timer

SECONDS = 2.0  # for a rendering; a good one takes a hundredth of this
SECONDS_TO_START = 30.0  # for Python and Jinja, from a disk that may be slow
LONGEST_ANSWER = 50_000_000  # bytes; the worker allows 4 million characters, of at most 12 bytes each
WORKER = Path(__file__).with_name("template_worker.py")
# Python runs isolated, without PYTHONPATH and the user's site-packages, so we pass the place of Jinja.
START = "import runpy, sys; sys.path += sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"


def run_worker(request: bytes) -> tuple[bytes, int]:
    """Run the worker. Returns its answer, whole or cut short, and its exit status; the process has ended by then."""
    specs = [find_spec(name) for name in ("jinja2", "markupsafe")]
    packages = {str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin}
    environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in os.environ}
    with subprocess.Popen(
        [sys.executable, "-I", "-c", START, WORKER, *packages],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # A person's Ctrl-C is meant for this process.
    ) as worker:
        assert worker.stdin and worker.stdout
        try:
            _within(SECONDS_TO_START, worker, worker.stdout.readline)
            return _within(SECONDS, worker, lambda: _exchange(worker, request))
        finally:
            worker.kill()


def _within[T](seconds: float, worker: subprocess.Popen, action: Callable[[], T]) -> T:
    """The result of `action`, which reads from the worker. A worker that takes too long is killed: the stream ends."""
    timer = Timer(seconds, worker.kill)
    timer.start()
    try:
        return action()
    finally:
        timer.cancel()


def _exchange(worker: subprocess.Popen, request: bytes) -> tuple[bytes, int]:
    assert worker.stdin and worker.stdout
    with suppress(BrokenPipeError):  # The worker has ended, and its status says how.
        worker.stdin.write(request)
    with suppress(BrokenPipeError):
        worker.stdin.close()
    return worker.stdout.read(LONGEST_ANSWER), worker.wait()
