"""A server process with a low limit on open files. It is also killed, and restarted with its log on a full disk."""

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.serving.serving_process import Process, served
from tests.serving.serving_site import Reply, parse_reply, read_reply, request_bytes
from tests.support.waiting import PATIENCE, until

FOX = {"prompt": "the fox", "seed": 1, "max_tokens": 20}
LONG = {"prompt": "the fox", "max_tokens": 90_000, "ignore_eos": True, "stream": True}


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def ask(port: int) -> Reply:
    with connect(port) as connection:
        connection.sendall(request_bytes("/v1/completions", FOX))
        return read_reply(connection)


def answers(port: int) -> bool:
    """Return whether the server has room for a connection.

    Beyond its limit, the server sends an error or closes the connection.
    """
    try:
        return ask(port).status == 200
    except (ConnectionError, IndexError):  # the latter from an empty reply
        return False


def text_of(port: int) -> str:
    reply = ask(port)
    assert reply.status == 200
    return reply.json["choices"][0]["text"]


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Iterator[Process]:
    """Run a server that may open 168 files, 40 of them for connections."""
    with served(files=168, log=tmp_path_factory.mktemp("serving") / "log") as server:
        yield server


def test_connections_never_use_up_the_files_of_a_process(few):
    """A server never runs out of file descriptors.

    The first 64 connections beyond its limit get an error reply. The server closes further connections at once.
    """
    text = text_of(few.port)
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(few.port)) for _ in range(300)]
        replies = []
        for connection in connections[200:]:
            try:
                connection.sendall(request_bytes("/health"))
                replies.append(connection.recv(1 << 16))
            except ConnectionError:
                replies.append(b"")
        assert {parse_reply(reply).status for reply in replies if reply} <= {503}
        # Connections within the limit are served. We ask the first one last, since its end makes room for another.
        connections[0].sendall(request_bytes("/v1/completions", FOX))
        assert read_reply(connections[0]).json["choices"][0]["text"] == text
    until(lambda: answers(few.port))  # once the server has noticed that they are closed
    assert text_of(few.port) == text
    assert "Too many open files" not in few.log.read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_killed_and_started_again_at_the_same_port(few):
    """A server restarts at its port after a kill, even with its log on a full disk.

    This test must run last, because it kills the server that the fixture `few` shares among tests.
    """
    text = text_of(few.port)
    with connect(few.port) as connection:
        connection.sendall(request_bytes("/v1/completions", LONG))
        tail = connection.recv(1 << 16)
        assert tail.startswith(b"HTTP/1.1 200")
        few.process.kill()
        with suppress(ConnectionResetError):
            while received := connection.recv(1 << 16):
                tail += received
        assert b"[DONE]" not in tail and not tail.endswith(b"0\r\n\r\n")  # no client can think it complete
    with served(port=few.port, log=Path("/dev/full")) as second:
        assert text_of(second.port) == text
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(PATIENCE) == 0


def test_a_second_signal_ends_at_once_what_the_first_lets_run(tmp_path):
    with served(log=tmp_path / "log") as server, connect(server.port) as connection:
        connection.sendall(request_bytes("/v1/completions", LONG))
        tail = connection.recv(1 << 16)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "another signal stops them at once" in server.log.read_text())
        with connect(server.port) as probe:
            probe.sendall(request_bytes("/health"))
            assert read_reply(probe).status == 200  # It still serves.
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 128 + signal.SIGTERM
        with suppress(ConnectionResetError):
            while received := connection.recv(1 << 16):
                tail += received
        assert tail.startswith(b"HTTP/1.1 200") and b"[DONE]" not in tail and not tail.endswith(b"0\r\n\r\n")
    assert "Traceback" not in server.log.read_text()
