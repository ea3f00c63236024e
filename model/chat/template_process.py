"""Starts, keeps and stops the processes that render chat templates. They run `model.chat.template_worker`."""

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

CPU_SECONDS = 2  # CPU time of a rendering; usually it takes a hundredth of this
SECONDS = 20.0  # real time of a rendering, even on a busy machine
SECONDS_TO_START = 30.0  # time for Python and Jinja to start, perhaps from a slow disk
LONGEST_ANSWER = 70_000_000  # bytes: 4 million characters of up to 12 bytes each, and up to 3 each for marks
IDLE_WORKERS = 2  # largest number of idle workers per template
# The worker's Python ignores PYTHONPATH and the user's site-packages (-I), so we pass it the folders of packages. It
# imports llamaspec from the same folder as this process, even if another llamaspec is installed.
START = (
    "import sys; sys.path.insert(0, sys.argv[2]); import llamaspec; del sys.path[0]; sys.path += sys.argv[3:];"
    "from llamaspec.model.chat.template_worker import main; main(int(sys.argv[1]))"
)


class WorkerEnd(Exception):
    """Raised when a worker ends instead of answering. Contains the exit status of the worker."""

    def __init__(self, status: int):
        super().__init__(f"exit status {status}")
        self.status = status


class TemplateWorker:
    """A process that renders one template.

    Starting it takes a tenth of a second, and a rendering takes a millisecond.
    """

    def __init__(self, source: str):
        """Start the process. Raises OSError if the system cannot start it, or cannot start it in time."""
        specs = [find_spec(name) for name in ("llamaspec", "jinja2", "markupsafe")]
        own, *packages = [str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin]
        environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", START, str(CPU_SECONDS), own, *packages],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C does not reach the worker, and one kill also ends its children
        )
        assert self._process.stdin and self._process.stdout
        self._requests, self._answers = self._process.stdin, self._process.stdout
        try:
            self._before_timeout(SECONDS_TO_START, "start", lambda: self._read(1))
            self._before_timeout(SECONDS, "end", lambda: self._send(source.encode(errors="surrogatepass")))
        except (OSError, WorkerEnd):
            self.stop()
            raise

    def ask(self, variables: bytes) -> tuple[bytes, int]:
        """Ask for a rendering. Returns the answer, which may be cut short, and the child's exit status.

        The child is the process that the worker forked for this rendering. Raises WorkerEnd if the worker itself has
        ended, and TimeoutError if the worker took too long and was killed.
        """

        def exchange() -> tuple[bytes, int]:
            self._send(variables)
            status = int.from_bytes(self._read(8), signed=True)
            length = int.from_bytes(self._read(8))
            if length > LONGEST_ANSWER:
                raise WorkerEnd(self.stop())
            return self._read(length), status

        return self._before_timeout(SECONDS, "end", exchange)

    def stop(self) -> int:
        """Kill the worker and its children. Returns the worker's exit status. Calling this again changes nothing."""
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
        with suppress(BrokenPipeError):  # the worker has ended, so the next read raises WorkerEnd
            self._requests.write(len(message).to_bytes(8) + message)
            self._requests.flush()

    def _read(self, size: int) -> bytes:
        read = self._answers.read(size)
        if len(read) < size:
            raise WorkerEnd(self.stop())
        return read

    def _before_timeout[T](self, seconds: float, what: str, action: Callable[[], T]) -> T:
        """Return the result of `action`, which reads from the worker.

        If this takes more than `seconds`, we kill the worker, so that the read ends, and raise TimeoutError. The
        message says that the worker did not do `what` (a verb) in time.
        """
        late = Event()

        def give_up() -> None:
            late.set()
            self._kill()

        timer = Timer(seconds, give_up)
        timer.start()
        try:
            return action()
        except WorkerEnd:
            if late.is_set():
                message = (
                    f"the machine is busy: the process for this template did not {what} within {seconds:g} seconds"
                )
                raise TimeoutError(message) from None
            raise
        finally:
            timer.cancel()


class Workers:
    """Keeps workers between renderings, until `close`. Threads may render in parallel, each with its own worker."""

    def __init__(self):
        """Begin without processes. The first rendering of each template starts one."""
        self._idle: defaultdict[str, list[TemplateWorker]] = defaultdict(list)  # source of a template: its idle workers
        self._closed = False
        self._lock = Lock()

    def render(self, source: str, variables: bytes) -> tuple[bytes, int]:
        """Render a template. Returns the answer, which may be cut short, and the exit status of the child that rendered
        it.

        Raises OSError if the machine lacks memory or time.
        """
        with self._lock:
            waiting = self._idle[source]
            worker = waiting.pop() if waiting else None
        if worker:
            with suppress(WorkerEnd):  # if an idle worker was killed in the meantime, we start another one
                return self._ask(worker, source, variables)
        try:
            return self._ask(TemplateWorker(source), source, variables)
        except WorkerEnd as ended:
            if ended.status == os.EX_TEMPFAIL:
                raise OSError("the system cannot start more processes") from None
            return b"", ended.status

    def close(self) -> None:
        """End all idle workers. A worker that is rendering ends when it has finished."""
        with self._lock:
            self._closed = True
            workers = [worker for of_one in self._idle.values() for worker in of_one]
            self._idle.clear()
        for worker in workers:
            worker.stop()

    def _ask(self, worker: TemplateWorker, source: str, variables: bytes) -> tuple[bytes, int]:
        try:
            answer = worker.ask(variables)
        except BaseException:
            worker.stop()
            raise
        with self._lock:
            keeps = not self._closed and len(self._idle[source]) < IDLE_WORKERS
            if keeps:
                self._idle[source].append(worker)
        if not keeps:
            worker.stop()
        return answer
