"""The engine dies: what clients, probes and whoever started the server learn of it."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import click.testing
import pytest

from commands.serve import serve
from serving.engine import FAILED, BatchingEngine
from serving.executor import Outcome
from serving.scheduler import Draws, Limits
from tests.serving_site import EOS, WORDS, Running, read_reply, request_bytes, running, until

LIMITS = Limits(pages=100, page=8, rows=1, chunk=64, burst=2, context=128, waiting=20)
FOX = {"prompt": "The fox", "max_tokens": 50}


class Dying:
    """An executor that gives a row its first words, then waits, and fails for good."""

    def __init__(self):
        self.waits, self.dies = threading.Event(), threading.Event()

    def run(self, plan, requests, masks) -> Outcome:
        if any(row.start >= len(requests[row.number].prompt) for row in plan.rows):
            self.waits.set()
            assert self.dies.wait(60)
            raise MemoryError("no room\nfor 5 GB")
        return Outcome({row.number: Draws(WORDS[: row.steps], None) for row in plan.rows}, {}, None)


@pytest.fixture
def site() -> Iterator[Running]:
    engine = BatchingEngine(Dying(), LIMITS, vocab=1024, eos=frozenset([EOS]))
    with running(engine) as site:
        yield site


def asked(site: Running, **options: Any) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", site.port), timeout=60)
    connection.sendall(request_bytes("/v1/completions", FOX | options))
    return connection


def test_everybody_is_told_and_the_server_ends(site):
    """A stream that has begun ends with an event; whoever has nothing yet gets a 500, and nobody is to ask again."""
    began = asked(site, stream=True)
    first = began.recv(1 << 16)
    others = [asked(site, stream=stream) for stream in (True, False) for _ in range(3)]
    until(lambda: site.engine.stats().waiting == len(others))
    site.engine._executor.dies.set()
    assert b"200 OK" in first
    rest = b""
    while received := began.recv(1 << 16):
        rest += received
    assert b"event: error\ndata: " in rest and b"[DONE]" not in rest
    error = json.loads(rest.split(b"event: error\ndata: ")[1].split(b"\n")[0])["error"]
    assert (error["code"], error["message"]) == ("engine_error", FAILED)
    for connection in others:
        reply = read_reply(connection)
        assert (reply.status, reply.error["code"], reply.error["message"]) == (500, "engine_error", FAILED)
        assert reply.headers["x-should-retry"] == "false"
    for connection in (began, *others):
        connection.close()
    until(lambda: site.ended() is False)
    assert not site.engine._open


@pytest.fixture
def staying(monkeypatch, request) -> Running:
    """A site that stays when its engine dies, so that it can be asked."""

    async def until_told(site, stop) -> None:
        await stop.wait()

    monkeypatch.setattr("serving.http.Site._until", until_told)  # before the server waits there
    return request.getfixturevalue("site")


def test_probes_and_later_requests_learn_of_it(staying):
    for path in ("/health", "/ready"):
        assert staying.ask(path).status == 200
    with asked(staying) as connection:
        staying.engine._executor.dies.set()
        assert read_reply(connection).status == 500
    for path, body in (("/health", None), ("/ready", None), ("/v1/completions", FOX)):
        reply = staying.ask(path, body)
        assert (reply.status, reply.error["code"]) == (503, "engine_failed")


def test_the_command_ends_with_one_line_and_1(monkeypatch, caplog):
    dying = Dying()
    engine = BatchingEngine(dying, LIMITS, vocab=1024, eos=frozenset([EOS]))
    replies = []

    def ask(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(request_bytes("/v1/completions", FOX))
            replies.append(read_reply(connection))

    def said(line: str) -> None:
        dying.dies.set()
        threads.append(threading.Thread(target=ask, args=[int(line.rpartition(":")[2])]))
        threads[0].start()

    threads: list[threading.Thread] = []
    monkeypatch.setattr("commands.serve.say", said)
    monkeypatch.setattr("serving.loading.load_engine", lambda *_, **__: engine)
    ended = click.testing.CliRunner().invoke(serve, ["stories", "--port", "0"])
    threads[0].join(60)
    assert [reply.status for reply in replies] == [500]
    assert ended.exit_code == 1 and ended.stdout == ""
    assert ended.stderr == "error: the engine failed: MemoryError('no room\\nfor 5 GB')\n"
    assert "for 5 GB" in caplog.text  # the log has all of it


def test_a_device_that_hangs_does_not_hold_the_command_for_ever(monkeypatch):
    hanging, said, statuses = Dying(), [], []
    engine = BatchingEngine(hanging, LIMITS, vocab=1024, eos=frozenset([EOS]))

    def hang(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(request_bytes("/v1/completions", FOX))
            assert hanging.waits.wait(60)
            os.kill(os.getpid(), signal.SIGTERM)
            read_reply(connection)

    def say(line: str) -> None:
        said.append(line)
        if " is at " in line:
            threading.Thread(target=hang, args=[int(line.rpartition(":")[2])]).start()

    def end(status: int) -> None:
        statuses.append((status, engine.failed))
        hanging.dies.set()  # since this process goes on

    monkeypatch.setattr("commands.serve.say", say)
    monkeypatch.setattr("commands.serve.LAST_STEP", 0.1)
    monkeypatch.setattr("commands.serve.os._exit", end)
    monkeypatch.setattr("serving.loading.load_engine", lambda *_, **__: engine)
    click.testing.CliRunner().invoke(serve, ["stories", "--port", "0", "--drain-seconds", "0.01"])
    assert statuses == [(1, None)]
    assert said[1:] == [
        "ending: requests that run come to their end; once more ends them at once",
        "error: requests were cancelled 0.1 s ago, and the device has not answered",
    ]
