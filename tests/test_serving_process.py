"""A server as a process: killed and started again, with a log on a full disk, and with few files to open."""

import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.serving_process import served
from tests.serving_site import parse_reply, read_reply, request_bytes

FOX = {"prompt": "the fox", "seed": 1, "max_tokens": 20}
LONG = {"prompt": "the fox", "max_tokens": 90_000, "ignore_eos": True, "stream": True}


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def text_of(port: int) -> str:
    with connect(port) as connection:
        connection.sendall(request_bytes("/v1/completions", FOX))
        reply = read_reply(connection)
    assert reply.status == 200
    return reply.json["choices"][0]["text"]


def test_killed_and_started_again_at_the_same_port():
    with served() as first:
        text = text_of(first.port)
        with connect(first.port) as connection:
            connection.sendall(request_bytes("/v1/completions", LONG))
            rest = connection.recv(1 << 16)
            assert rest.startswith(b"HTTP/1.1 200")
            first.kill()
            try:
                while received := connection.recv(1 << 16):
                    rest += received
            except ConnectionResetError:
                pass
            assert b"[DONE]" not in rest and not rest.endswith(b"0\r\n\r\n")  # nobody takes it for whole
    with served(port=first.port) as second:
        assert text_of(second.port) == text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_for_the_log_changes_nothing():
    with served(log=Path("/dev/full")) as server:
        assert text_of(server.port)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_connections_never_use_up_the_files_of_a_process(tmp_path):
    """Of 168 files 40 are for connections; up to 64 more get an answer, the others are closed."""
    with served(files=168, log=tmp_path / "log") as server, ExitStack() as stack:
        text = text_of(server.port)
        connections = [stack.enter_context(connect(server.port)) for _ in range(300)]
        connections[0].sendall(request_bytes("/v1/completions", FOX))
        assert read_reply(connections[0]).json["choices"][0]["text"] == text
        replies = []
        for connection in connections[200:]:
            try:
                connection.sendall(request_bytes("/health"))
                replies.append(connection.recv(1 << 16))
            except ConnectionError:
                replies.append(b"")
        assert {parse_reply(reply).status for reply in replies if reply} <= {503}
        stack.close()
        assert text_of(server.port) == text
        assert "Too many open files" not in (tmp_path / "log").read_text()
