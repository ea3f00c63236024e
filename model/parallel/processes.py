"""Several processes that run one model together, and that end together.

Every process connects to process 0 and sends its settings. If the settings of a process differ, every process ends with
the same one-line error. Otherwise process 0 sends the port for `jax.distributed`, and the connections stay open.

A collective waits for every device. If one process ended, the others would wait forever, or abort with pages of C++
output. So each process sends a heartbeat twice a second. If a connection closes, or is silent for `timeout` seconds,
every process ends with one line and exit code 1.
"""

import atexit
import json
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

BEAT = 0.5  # seconds between two heartbeats
GRACE = 2.0  # seconds to wait after an error, so that the watch can report a process that has ended


class ProcessGroup(NamedTuple):
    """The processes that run a model together, and the number of this process."""

    coordinator: str  # HOST:PORT of process 0
    processes: int
    process: int
    timeout: float  # seconds of silence after which we treat a process as ended
    settings: Mapping[str, str] = {}  # name: value of each option that must be the same in every process


@contextmanager
def joined(group: ProcessGroup) -> Iterator["Watch"]:
    """Join the processes of `group` while the body runs. In the body, JAX lists the devices of all processes.

    Yields the `Watch`, which has the connections to the other processes. Raises ConnectionError if a process does not
    connect within the group's timeout, and ValueError if the processes have different settings.
    """
    watch = Watch(group)
    jax.distributed.initialize(
        watch.meeting,
        num_processes=group.processes,
        process_id=group.process,
        heartbeat_timeout_seconds=max(100, int(2 * group.timeout)),
    )
    with _silent_stdout():  # Gloo prints a line when devices first communicate
        agreed(0)
    # JAX waits at exit for all processes. After a failure, the other processes will not reach that point. So this
    # handler, which runs before JAX's, ends the process at once.
    atexit.register(watch.end)
    try:
        yield watch
    except Exception:
        time.sleep(GRACE)  # if another process has ended, the watch ends this one during the sleep
        raise
    watch.leave()


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """Discard what C++ code writes to standard output while the body runs."""
    sys.stdout.flush()
    stdout, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(null)


def agreed(number: int) -> int:
    """Return the `number` of process 0, in every process."""
    return int(multihost_utils.broadcast_one_to_all(np.uint32(number)))


def all_min(number: int) -> int:
    """Return the smallest `number` over all processes, in every process."""
    return int(multihost_utils.process_allgather(np.uint32(number)).min())


class Watch:
    """A thread that watches the connections between the processes.

    Process 0 has a connection to every other process; the other processes have a connection only to process 0.
    """

    def __init__(self, group: ProcessGroup):
        """Connect, and start to send heartbeats. Raises the errors of `joined`."""
        self._group = group
        self._finished = False
        self._done: set[int] = set()  # processes that have announced their normal end
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # lines from process 0, then None
        try:
            port, self._connections = self._work() if group.process else self._coordinate()
        except OSError as error:
            what = f"not all of {group.processes} processes connected to {group.coordinator} in {group.timeout:g} s"
            raise ConnectionError(what) from error
        self.meeting = f"{self._host}:{port}"  # address at which `jax.distributed` connects
        self._heard = dict.fromkeys(self._connections, time.monotonic())  # time of the last message of each process
        self._begun = dict.fromkeys(self._connections, b"")  # the beginning of an incomplete message of each process
        threading.Thread(target=self._run, daemon=True).start()

    def leave(self) -> None:
        """Tell the other processes that this one is done, so that they do not treat its end as a failure."""
        self._finished = True
        self._send(b"done\n")

    def shared(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the lines of process 0 in every process, as they arrive. Only process 0 reads its argument `lines`."""
        if not self.first:
            yield from iter(self._lines.get, None)
            return
        for line in lines:
            self._send(bytes(f"line {json.dumps(line)}\n", "ascii"))
            yield line
        self._send(b"line null\n")

    def end(self) -> None:
        """End the process at once, unless it has called `leave`."""
        if not self._finished:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    @property
    def first(self) -> bool:
        """True if this is process 0."""
        return not self._group.process

    @property
    def _host(self) -> str:
        return self._group.coordinator.rpartition(":")[0]

    @property
    def _port(self) -> int:
        return int(self._group.coordinator.rpartition(":")[2])

    def _coordinate(self) -> tuple[int, dict[int, socket.socket]]:
        """Wait until all other processes have connected, and send each of them a free port of this machine.

        If the settings of a process differ, sends an error message instead. Closes connections that do not send
        settings, such as those of a port scan.
        """
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        connections: dict[int, socket.socket] = {}
        settings_of: dict[int, Mapping[str, str]] = {}  # number of a process: the settings that it sent
        until = time.monotonic() + self._group.timeout
        with socket.create_server(("", self._port)) as server:
            while len(connections) < self._group.processes - 1:
                server.settimeout(max(0.001, until - time.monotonic()))
                connection, _ = server.accept()
                connection.settimeout(max(0.001, until - time.monotonic()))
                try:
                    number, settings = json.loads(_line(connection))
                except (ConnectionError, ValueError, TypeError):
                    connection.close()
                    continue
                connection.settimeout(None)
                connections[number] = connection
                settings_of[number] = settings
        differing = (_difference(self._group.settings, number, settings_of[number]) for number in sorted(settings_of))
        answer = next(filter(None, differing), None) or port
        for connection in connections.values():
            connection.sendall(bytes(f"{json.dumps(answer)}\n", "ascii"))
        return _agreed_port(answer, *connections.values()), connections

    def _work(self) -> tuple[int, dict[int, socket.socket]]:
        """Connect to process 0, which may not have started yet, send the settings, and read the port."""
        until = time.monotonic() + self._group.timeout
        while True:
            remaining = max(0.001, until - time.monotonic())
            try:
                connection = socket.create_connection((self._host, self._port), timeout=remaining)
                break
            except ConnectionRefusedError:
                if remaining < 0.1:
                    raise
                time.sleep(0.1)
        connection.sendall(bytes(f"{json.dumps([self._group.process, dict(self._group.settings)])}\n", "ascii"))
        port = _agreed_port(json.loads(_line(connection)), connection)
        connection.settimeout(None)
        return port, {0: connection}

    def _run(self) -> None:
        beaten = 0.0
        while True:
            ready, _, _ = select.select(list(self._connections.values()), [], [], BEAT)
            now = time.monotonic()
            if now - beaten >= BEAT:
                # If this process itself was suspended, the other processes are not to blame for the silence.
                if beaten and now - beaten > self._group.timeout / 2:
                    self._heard = dict.fromkeys(self._connections, now)
                beaten = now
                self._send(b"beat\n")
            for number, connection in list(self._connections.items()):
                if connection in ready:
                    self._hear(number, connection, now)
                elif now - self._heard[number] > self._group.timeout and number not in self._done:
                    self._fail(number, f"has not answered for {self._group.timeout:g} s")
            if not self._connections:
                return

    def _hear(self, number: int, connection: socket.socket, now: float) -> None:
        try:
            message = connection.recv(4096)
        except OSError:
            message = b""
        self._heard[number] = now
        *lines, self._begun[number] = (self._begun[number] + message).split(b"\n")
        for line in lines:
            what, _, detail = line.decode().partition(" ")
            if what == "done":
                self._done.add(number)
            elif what == "line":
                self._lines.put(json.loads(detail))
            elif what == "fail":
                peer, _, why = detail.partition(" ")
                self._fail(int(peer), why)
        if not message:
            if number not in self._done:
                self._fail(number, "has ended")
            del self._connections[number]

    def _fail(self, number: int, what: str) -> NoReturn:
        """Report to the other processes and to the user which process failed and why, and end this process."""
        if self.first:
            self._send(bytes(f"fail {number} {what}\n", "ascii"))
        sys.stdout.flush()
        os.write(2, bytes(f"error: process {number} of {self._group.processes} {what}\n", "ascii"))
        os._exit(1)

    def _send(self, message: bytes) -> None:
        for connection in list(self._connections.values()):
            try:
                connection.sendall(message)
            except OSError:
                pass  # `_hear` will notice the closed connection


def _difference(first: Mapping[str, str], number: int, second: Mapping[str, str]) -> str | None:
    """Describe the first option that differs between process 0 and another process. Returns None if none differs.

    >>> _difference({"--seed": "7"}, 1, {"--seed": "8"})
    'the processes differ: --seed is 7 in process 0 and 8 in process 1'
    """
    for name in dict.fromkeys((*first, *second)):
        if (expected := first.get(name, "not given")) != (its := second.get(name, "not given")):
            return f"the processes differ: {name} is {expected} in process 0 and {its} in process {number}"
    return None


def _agreed_port(answer: int | str, *connections: socket.socket) -> int:
    """Return `answer` if it is a port. If it is an error message, close the connections and raise ValueError."""
    if isinstance(answer, int):
        return answer
    for connection in connections:
        connection.close()
    raise ValueError(answer)


def _line(connection: socket.socket) -> bytes:
    """Read one line, and nothing after it. Raises ConnectionError if the connection closes before the line ends."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := connection.recv(1)):
            raise ConnectionError("the connection was closed before a complete line arrived")
        line += byte
    return line
