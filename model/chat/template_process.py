"""Starts and stops the process that renders a chat template, `model.chat.template_worker`."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Timer

CPU_SECONDS = 2  # of the processor, for a rendering; a good one takes a hundredth of this
SECONDS = 20.0  # for a rendering on a machine that does much else
SECONDS_TO_START = 30.0  # for Python and Jinja, from a disk that may be slow
LONGEST_ANSWER = 50_000_000  # bytes; the worker allows 4 million characters, of at most 12 bytes each
WORKER = Path(__file__).with_name("template_worker.py")
# Python runs isolated, without PYTHONPATH and the user's site-packages, so we pass the place of Jinja.
START = "import runpy, sys; sys.path += sys.argv[3:]; runpy.run_path(sys.argv[1], run_name='__main__')"


def run_worker(request: bytes) -> tuple[bytes, int]:
    """Run the worker. Returns its answer, whole or cut short, and its exit status; the process has ended by then.

    Raises OSError where the system gives the process no place or no time, whatever the request is.
    """
    specs = [find_spec(name) for name in ("jinja2", "markupsafe")]
    packages = {str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin}
    environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in os.environ}
    with subprocess.Popen(
        [sys.executable, "-I", "-c", START, WORKER, str(CPU_SECONDS), *packages],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # A person's Ctrl-C is meant for this process.
    ) as worker:
        assert worker.stdin and worker.stdout
        try:
            _within(SECONDS_TO_START, "start", worker, worker.stdout.readline)
            return _within(SECONDS, "end", worker, lambda: _exchange(worker, request))
        finally:
            worker.kill()


def _within[T](seconds: float, what: str, worker: subprocess.Popen, action: Callable[[], T]) -> T:
    """The result of `action`, which reads from the worker.

    A worker that takes too long is killed, so that the stream ends. Raises TimeoutError then, which says `what` it did
    not do in time.
    """
    late = Event()

    def give_up() -> None:
        late.set()
        worker.kill()

    timer = Timer(seconds, give_up)
    timer.start()
    try:
        result = action()
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError(f"the machine is busy: the process did not {what} within {seconds:g} seconds")
    return result


def _exchange(worker: subprocess.Popen, request: bytes) -> tuple[bytes, int]:
    assert worker.stdin and worker.stdout
    with suppress(BrokenPipeError):  # The worker has ended, and its status says how.
        worker.stdin.write(request)
    with suppress(BrokenPipeError):
        worker.stdin.close()
    return worker.stdout.read(LONGEST_ANSWER), worker.wait()
