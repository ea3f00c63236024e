"""Starts, keeps and stops the processes that render chat templates: `model.chat.template_worker`."""

import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Lock, Timer

CPU_SECONDS = 2  # of the processor, for a rendering; a good one takes a hundredth of this
SECONDS = 20.0  # for a rendering on a machine that does much else
SECONDS_TO_START = 30.0  # for Python and Jinja, from a disk that may be slow
LONGEST_ANSWER = 70_000_000  # bytes; the worker allows 4 million characters, of at most 12 bytes, with marks of 3
KEPT = 2  # workers of one template that wait for more to render
# Python runs isolated, without PYTHONPATH and the user's site-packages, so we pass the places of packages. It takes
# llamaspec from where this process has it, although another one may be installed.
START = (
    "import sys; sys.path.insert(0, sys.argv[2]); import llamaspec; del sys.path[0]; sys.path += sys.argv[3:];"
    "from llamaspec.model.chat.template_worker import main; main(int(sys.argv[1]))"
)


class Ended(Exception):
    """A worker that ended where it should have answered, with this exit status."""

    def __init__(self, status: int):
        super().__init__(f"exit status {status}")
        self.status = status


class Worker:
    """A process for one template. It starts in a tenth of a second, and renders in a hundredth of this."""

    def __init__(self, source: str):
        """Start the process. Raises OSError where the system gives it no place or no time."""
        specs = [find_spec(name) for name in ("llamaspec", "jinja2", "markupsafe")]
        own, *packages = [str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin]
        environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", START, str(CPU_SECONDS), own, *packages],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # A person's Ctrl-C is meant for this process, and a kill for all that it forks.
        )
        assert self._process.stdin and self._process.stdout
        self._requests, self._answers = self._process.stdin, self._process.stdout
        try:
            self._within(SECONDS_TO_START, "start", lambda: self._read(1))
            self._within(SECONDS, "end", lambda: self._send(source.encode(errors="surrogatepass")))
        except (OSError, Ended):
            self.stop()
            raise

    def ask(self, variables: bytes) -> tuple[bytes, int]:
        """Render; returns the answer, whole or cut short, and the exit status of the process that gave it.

        Raises Ended where the worker itself has ended, and TimeoutError where it was ended for taking too long.
        """

        def exchange() -> tuple[bytes, int]:
            self._send(variables)
            status = int.from_bytes(self._read(8), signed=True)
            length = int.from_bytes(self._read(8))
            if length > LONGEST_ANSWER:
                raise Ended(self.stop())
            return self._read(length), status

        return self._within(SECONDS, "end", exchange)

    def stop(self) -> int:
        """End the process, and what it has forked; returns its exit status. Does nothing the second time."""
        self._kill()
        with suppress(BrokenPipeError):
            self._requests.close()
        self._answers.close()
        return self._process.wait()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _send(self, message: bytes) -> None:
        with suppress(BrokenPipeError):  # The worker has ended, which reading tells.
            self._requests.write(len(message).to_bytes(8) + message)
            self._requests.flush()

    def _read(self, size: int) -> bytes:
        read = self._answers.read(size)
        if len(read) < size:
            raise Ended(self.stop())
        return read

    def _within[T](self, seconds: float, what: str, action: Callable[[], T]) -> T:
        """Give the result of `action`, which reads from the worker.

        A worker that takes too long is killed, so that the stream ends. Raises TimeoutError then, which says `what` it
        did not do in time.
        """
        late = Event()

        def give_up() -> None:
            late.set()
            self._kill()

        timer = Timer(seconds, give_up)
        timer.start()
        try:
            return action()
        except Ended:
            if late.is_set():
                message = f"the machine is busy: the process did not {what} within {seconds:g} seconds"
                raise TimeoutError(message) from None
            raise
        finally:
            timer.cancel()


class Workers:
    """Workers that are kept between renderings, until `close`. Any thread may use them, each a worker of its own."""

    def __init__(self):
        """Start nothing: the first rendering of each template does."""
        self._idle: defaultdict[str, list[Worker]] = defaultdict(list)  # by template
        self._closed = False
        self._lock = Lock()

    def render(self, source: str, variables: bytes) -> tuple[bytes, int]:
        """Render a template; returns the answer, whole or cut short, and the exit status of the process that gave it.

        Raises OSError if the system gives the process no memory or no time, for any request.
        """
        with self._lock:
            waiting = self._idle[source]
            worker = waiting.pop() if waiting else None
        if worker:
            with suppress(Ended):  # It has died since it was used, which is not the template's fault.
                return self._asked(worker, source, variables)
        try:
            return self._asked(Worker(source), source, variables)
        except Ended as ended:
            if ended.status == os.EX_TEMPFAIL:
                raise OSError("the system starts no more processes") from None
            return b"", ended.status

    def close(self) -> None:
        """End all workers. A worker that is rendering ends afterwards."""
        with self._lock:
            self._closed = True
            workers = [worker for of_one in self._idle.values() for worker in of_one]
            self._idle.clear()
        for worker in workers:
            worker.stop()

    def _asked(self, worker: Worker, source: str, variables: bytes) -> tuple[bytes, int]:
        try:
            answer = worker.ask(variables)
        except BaseException:
            worker.stop()
            raise
        with self._lock:
            keeps = not self._closed and len(self._idle[source]) < KEPT
            if keeps:
                self._idle[source].append(worker)
        if not keeps:
            worker.stop()
        return answer
