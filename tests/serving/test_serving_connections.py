"""Limits on connections: the server refuses connections beyond its limit, and closes idle connections."""

import socket
from contextlib import ExitStack, suppress

from llamaspec.serving.connections import ClientLimits
from tests.serving.serving_site import FakeEngine, read_reply, request_bytes, running
from tests.serving.test_serving_faults import FOX, connect, text_of
from tests.support.processes import run_python
from tests.support.waiting import until


def test_connections_beyond_the_limit_are_refused():
    with running(FakeEngine(), limits=ClientLimits(connections=3)) as site:
        idle = [connect(site) for _ in range(3)]
        until(lambda: site.ask("/health").status == 503)
        reply = site.ask("/health")
        assert (reply.status, reply.error["code"]) == (503, "too_many_connections")
        for connection in idle:
            connection.close()
        until(lambda: site.ask("/health").status == 200)


def test_beyond_so_many_refused_connections_others_are_closed(monkeypatch):
    monkeypatch.setattr("llamaspec.serving.connections.MOST_REFUSED", 3)
    monkeypatch.setattr("llamaspec.serving.connections.REFUSED_OPEN", 3600.0)
    with running(FakeEngine(), limits=ClientLimits(connections=1)) as site, ExitStack() as stack:
        stack.enter_context(connect(site))
        until(lambda: site.ask("/health").status == 503)
        refused = [stack.enter_context(connect(site)) for _ in range(3)]
        assert stack.enter_context(connect(site)).recv(1) == b""  # closed before it sent a request
        for connection in refused:
            connection.sendall(request_bytes("/health"))
            assert read_reply(connection).error["code"] == "too_many_connections"
        assert site.ask("/health").status == 503  # These are gone, and have made room.


def test_connections_fit_the_files_that_a_process_may_open():
    script = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))
from llamaspec.serving.connections import allow_files
print(allow_files(100), resource.getrlimit(resource.RLIMIT_NOFILE), allow_files(1000))
"""
    assert run_python(script).out == "100 (228, 300) 172\n"


def test_a_connection_whose_request_does_not_come_is_closed(monkeypatch):
    """A connection is closed if its next request does not arrive in time, even if parts of it keep arriving."""
    monkeypatch.setattr("llamaspec.serving.connections.KEPT_OPEN", 0.2)
    with running(FakeEngine()) as site, ExitStack() as stack:

        def begun(sent: bytes) -> socket.socket:
            connection = stack.enter_context(connect(site))
            with suppress(ConnectionError):  # on a busy machine the server may have closed it
                connection.sendall(sent)
            return connection

        silent, half, dripping = map(begun, (b"", b"POST /v1/comple", b""))
        answered: list[socket.socket] = []

        def is_answered() -> bool:
            answered.append(begun(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))
            with suppress(ConnectionError):
                return answered[-1].recv(1 << 16).startswith(b"HTTP/1.1 200")
            return False

        until(is_answered)
        dripping.settimeout(0.01)
        with suppress(ConnectionError):  # from a write after the server closed it
            until(lambda: _ended(dripping) or bool(dripping.sendall(b"G")))
        assert all(map(_ended, (silent, half, answered[-1])))


def _ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:  # its bytes arrived after the server closed it
        return True
    except TimeoutError:
        return False


def test_idle_connections_cost_others_nothing():
    with running(FakeEngine()) as site:
        expected = text_of(site)
        idle = [connect(site) for _ in range(200)]
        readers = [connect(site) for _ in range(20)]
        for reader in readers:
            reader.sendall(request_bytes("/v1/completions", FOX | {"stream": True}))
        assert [text_of(site) for _ in range(5)] == [expected] * 5
        for connection in (*idle, *readers):
            connection.close()
        until(lambda: site.engine.open == 0)
