"""A failed engine or a hanging device gives clients, health probes and the parent process an error."""

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import click.testing
import pytest

from llamaspec.commands.serve import _run, serve
from llamaspec.serving.engine import FAILED, BatchingEngine
from llamaspec.serving.executor import PlanResult
from llamaspec.serving.http import Site
from llamaspec.serving.request import Finished, Request
from llamaspec.serving.scheduler import Draws, Limits
from llamaspec.serving.watchdog import DeviceHangs, Watchdog
from tests.serving.serving_site import (
    EOS,
    WORDS,
    FakeEngine,
    Running,
    make_site,
    read_reply,
    received,
    request_bytes,
    running,
)
from tests.support.waiting import PATIENCE, until

LIMITS = Limits(pages=100, page=8, rows=1, chunk=64, burst=2, context=128, waiting=20)
FOX = {"prompt": "The fox", "max_tokens": 50}


class Dying:
    """An executor that draws the first tokens of a row, then waits for the test, and then raises an exception."""

    def __init__(self):
        self.waits, self.dies = threading.Event(), threading.Event()
        self.goes_on = False  # True: the step ends normally after hanging

    def run(self, plan, requests, masks) -> PlanResult:
        if any(row.start >= len(requests[row.number].prompt) for row in plan.rows):
            self.waits.set()
            assert self.dies.wait(PATIENCE)
            if not self.goes_on:
                raise MemoryError("no room\nfor 5 GB")
        return PlanResult({row.number: Draws(WORDS[: row.steps], None) for row in plan.rows}, {}, None)


@pytest.fixture
def site() -> Iterator[Running]:
    engine = BatchingEngine(Dying(), LIMITS, vocab=1024, dim=8, eos=frozenset([EOS]))
    with running(engine) as site:
        yield site


def send_request(site: Running, **options: Any) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE)
    connection.sendall(request_bytes("/v1/completions", FOX | options))
    return connection


def test_a_failed_engine_sends_errors_and_ends_the_server(site):
    """When the engine fails, a begun stream ends with an error event, other requests get a 500, and the server ends."""
    began = send_request(site, stream=True)
    first = began.recv(1 << 16)
    connections = [send_request(site, stream=stream) for stream in (True, False) for _ in range(3)]
    until(lambda: site.engine.stats().waiting == len(connections))
    site.engine._executor.dies.set()
    assert b"200 OK" in first
    tail = received(began)
    assert b"event: error\ndata: " in tail and b"[DONE]" not in tail
    error = json.loads(tail.split(b"event: error\ndata: ")[1].split(b"\n")[0])["error"]
    assert (error["code"], error["message"]) == ("engine_error", FAILED)
    for connection in connections:
        reply = read_reply(connection)
        assert (reply.status, reply.error["code"], reply.error["message"]) == (500, "engine_error", FAILED)
        assert reply.headers["x-should-retry"] == "false"
    for connection in (began, *connections):
        connection.close()
    until(lambda: site.ended() is False)
    assert not site.engine._open


@pytest.fixture
def staying(monkeypatch, request) -> Running:
    """A site that keeps running after its engine fails, so that tests can still send requests."""

    async def until_told(site, stop) -> None:
        await stop.wait()

    monkeypatch.setattr("llamaspec.serving.http.Site._until", until_told)  # set before the server waits in `_until`
    return request.getfixturevalue("site")


def test_probes_and_later_requests_learn_of_it(staying):
    for path in ("/health", "/ready"):
        assert staying.ask(path).status == 200
    with send_request(staying) as connection:
        staying.engine._executor.dies.set()
        assert read_reply(connection).status == 500
    for path, body in (("/health", None), ("/ready", None), ("/v1/completions", FOX)):
        reply = staying.ask(path, body)
        assert (reply.status, reply.error["code"]) == (503, "engine_failed")


def test_the_command_ends_with_one_line_and_1(monkeypatch, caplog):
    dying = Dying()
    engine = BatchingEngine(dying, LIMITS, vocab=1024, dim=8, eos=frozenset([EOS]))
    replies = []

    def ask(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
            connection.sendall(request_bytes("/v1/completions", FOX))
            replies.append(read_reply(connection))

    def say(line: str) -> None:
        dying.dies.set()
        threads.append(threading.Thread(target=ask, args=[int(line.rpartition(":")[2])]))
        threads[0].start()

    threads: list[threading.Thread] = []
    monkeypatch.setattr("llamaspec.commands.serve.say", say)
    monkeypatch.setattr("llamaspec.serving.loading.load_engine", lambda *_, **__: engine)
    ended = click.testing.CliRunner().invoke(serve, ["stories", "--port", "0"])
    threads[0].join(PATIENCE)
    assert [reply.status for reply in replies] == [500]
    assert ended.exit_code == 1 and ended.stdout == ""
    assert re.fullmatch(r"error: .*MemoryError\('no room\\nfor 5 GB'\)\n", ended.stderr)
    assert "for 5 GB" in caplog.text  # the log has the whole message


def test_sigterm_does_not_wait_forever_for_a_device(monkeypatch):
    hanging, lines, statuses = Dying(), [], []
    engine = BatchingEngine(hanging, LIMITS, vocab=1024, dim=8, eos=frozenset([EOS]))

    def hang(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
            connection.sendall(request_bytes("/v1/completions", FOX))
            assert hanging.waits.wait(PATIENCE)
            os.kill(os.getpid(), signal.SIGTERM)
            read_reply(connection)

    def say(line: str) -> None:
        lines.append(line)
        if "http://" in line:
            threading.Thread(target=hang, args=[int(line.rpartition(":")[2])]).start()

    def end(status: int) -> None:
        statuses.append((status, engine.failed))
        hanging.dies.set()  # ends the hanging thread, since `_exit` is replaced

    monkeypatch.setattr("llamaspec.commands.serve.say", say)
    monkeypatch.setattr("llamaspec.commands.serve.LAST_STEP", 0.1)
    monkeypatch.setattr("llamaspec.commands.serve.os._exit", end)
    monkeypatch.setattr("llamaspec.serving.loading.load_engine", lambda *_, **__: engine)
    click.testing.CliRunner().invoke(serve, ["stories", "--port", "0", "--drain-seconds", "0.01"])
    assert statuses == [(1, None)]
    assert lines[1:] == [
        "stopping after the running requests; another signal stops them at once",
        "error: the device has not finished its last step 0.1 s after all requests were cancelled",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_only_sigint_prints_a_newline(number, monkeypatch):
    """After SIGINT the server prints a newline, because a terminal has printed ^C. Other signals need no newline."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if "http://" in line:
            os.kill(os.getpid(), number)

    monkeypatch.setattr("llamaspec.commands.serve.say", say)
    monkeypatch.setattr("llamaspec.commands.serve.sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: True)))
    with socket.create_server(("127.0.0.1", 0)) as bound:
        assert _run(make_site(FakeEngine()), bound, "fake")
    after = ["stopping after the running requests; another signal stops them at once"]
    assert lines[1:] == ([""] if number == signal.SIGINT else []) + after


@pytest.fixture
def hung(monkeypatch) -> Iterator[Any]:
    """An engine that hangs in its second step until the end of the test."""
    monkeypatch.setattr("llamaspec.serving.engine.LOOK", 0.01)
    hanging = Dying()
    yield BatchingEngine(hanging, LIMITS, vocab=1024, dim=8, eos=frozenset([EOS]))
    hanging.dies.set()


def take_too_long(hung: Any) -> None:
    """Wait until a step hangs, and only then shorten the watchdog's limit, so that no earlier step exceeds it."""
    assert hung._executor.waits.wait(PATIENCE)
    hung._watchdog.seconds = 0.25


def test_a_device_that_hangs_is_noticed(hung, monkeypatch, caplog):
    """A hanging device gives waiting clients an error and makes health probes fail; then the server ends."""
    stays = threading.Event()
    until_failed = Site._until

    async def until_asked(site, stop) -> None:
        await until_failed(site, stop)
        while not stays.is_set():
            await asyncio.sleep(0.01)

    monkeypatch.setattr("llamaspec.serving.http.Site._until", until_asked)
    with running(hung) as site:
        began = send_request(site, stream=True)
        waiting = send_request(site)
        until(lambda: hung.stats().waiting == 1)
        take_too_long(hung)
        reply = read_reply(waiting)
        assert (reply.status, reply.error["code"], reply.error["message"]) == (500, "engine_error", FAILED)
        tail = received(began)
        assert b"200 OK" in tail and b"event: error\ndata: " in tail and b"[DONE]" not in tail
        for path, body in (("/health", None), ("/ready", None), ("/v1/completions", FOX)):
            reply = site.ask(path, body)
            assert (reply.status, reply.error["code"]) == (503, "engine_failed")
        stays.set()
        until(lambda: site.ended() is False)
        waiting.close()
        began.close()
        assert re.search("device hangs.*0.25 s", caplog.text)
        hung.close()  # close does not wait for the step


def test_a_command_whose_device_hangs_ends_with_one_line_and_1(hung, monkeypatch):
    lines, statuses, replies = [], [], []

    def ask(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
            connection.sendall(request_bytes("/v1/completions", FOX))
            take_too_long(hung)
            replies.append(read_reply(connection).status)

    def say(line: str) -> None:
        lines.append(line)
        if "http://" in line:
            threads.append(threading.Thread(target=ask, args=[int(line.rpartition(":")[2])]))
            threads[0].start()

    def end(status: int) -> None:
        statuses.append(status)
        raise SystemExit(status)

    threads: list[threading.Thread] = []
    asked_for: dict[str, Any] = {}
    monkeypatch.setattr("llamaspec.commands.serve.say", say)
    monkeypatch.setattr("llamaspec.commands.serve.os._exit", end)
    monkeypatch.setattr(
        "llamaspec.serving.loading.load_engine", lambda *_, **options: asked_for.update(options) or hung
    )
    click.testing.CliRunner().invoke(serve, ["stories", "--port", "0", "--step-seconds", "7"])
    threads[0].join(PATIENCE)
    assert (statuses, replies) == ([1], [500])
    assert len(lines) == 2 and re.match("error: .*device hangs.*0.25 s", lines[1])
    assert asked_for["step_seconds"] == 7


def test_a_late_step_delivers_no_token(hung):
    """A step that ends after its engine failed delivers no token, and the engine stays failed."""
    events = []
    hung.submit(Request((1, 2), 50), events.append)
    take_too_long(hung)
    until(lambda: not hung._open)  # every client has got its error
    before = [*events]
    hung._executor.goes_on = True
    hung._executor.dies.set()
    hung._thread.join(PATIENCE)
    assert not hung._thread.is_alive()
    assert isinstance(hung.failed, DeviceHangs) and events == before and events[-1].reason == "error"


def test_a_step_does_not_end_while_it_is_judged(hung, monkeypatch):
    """While the watchdog fails a hanging step, the step cannot finish; otherwise tokens would follow the error."""
    events = []
    judged = threading.Event()

    def look(*, step: int | None, now: float) -> bool:
        if step is None or not hung._executor.waits.is_set() or judged.is_set():
            return False
        hung._executor.goes_on = True
        hung._executor.dies.set()
        until_then = time.monotonic() + 0.2
        while hung._step == step and time.monotonic() < until_then:
            time.sleep(0.001)
        judged.set()
        return True

    monkeypatch.setattr(hung._watchdog, "look", look)
    hung.submit(Request((1, 2), 50), events.append)
    assert judged.wait(PATIENCE)
    hung._thread.join(PATIENCE)
    until(lambda: not hung._open)  # every client has got its error
    assert isinstance(hung.failed, DeviceHangs) and not hung._thread.is_alive()
    assert [event.reason for event in events if isinstance(event, Finished)] == ["error"]
    assert isinstance(events[-1], Finished)


def test_clients_get_one_error_if_the_hanging_step_fails(hung):
    events = []

    def deliver(event) -> None:
        events.append(event)
        if isinstance(event, Finished) and threading.current_thread() is not hung._thread:
            hung._executor.dies.set()  # The step raises while clients are told that it hangs.
            hung._thread.join(PATIENCE)

    hung.submit(Request((1, 2), 50), deliver)
    take_too_long(hung)
    hung._thread.join(PATIENCE)
    until(lambda: not hung._open)
    assert [event.reason for event in events if isinstance(event, Finished)] == ["error"]
    assert isinstance(hung.failed, DeviceHangs) and hung.stats().finished["error"] == 1


def test_time_counts_for_one_step_alone():
    dog = Watchdog(seconds=2.5)
    looks = [(0, 0.0), (0, 1.0), (0, 2.0), (1, 3.0), (1, 4.0), (None, 5.0), (None, 99.0), (2, 100.0), (2, 101.0)]
    assert not any(dog.look(step=step, now=now) for step, now in looks)
    assert [dog.look(step=2, now=now) for now in (102.0, 103.0)] == [False, True]
