"""Access control: API keys, web pages of other origins, and the host names in requests."""

import socket

from llamaspec.serving.connections import Access, loopback_hosts
from tests.serving.serving_site import FakeEngine, read_reply, running
from tests.support.waiting import PATIENCE


def test_a_key_is_needed_where_there_is_one():
    with running(FakeEngine(), access=Access(keys=("secret", "other"))) as site:
        assert [site.ask(path).status for path in ("/health", "/ready", "/v1/models", "/metrics")] == [
            200,
            200,
            401,
            401,
        ]
        assert site.ask("/v1/completions", {"prompt": "a"}).error["code"] == "invalid_api_key"
        right = "Authorization: Bearer other\r\n"
        assert site.ask("/v1/completions", {"prompt": "a"}, headers=right).status == 200
        assert site.engine.requests[-1].tenant == "1/"
        wrong = site.ask("/v1/completions", {"prompt": "a"}, headers="Authorization: Bearer secre\r\n")
        assert (wrong.status, wrong.headers["www-authenticate"]) == (401, "Bearer")


def test_pages_elsewhere_are_refused():
    access = Access(origins=frozenset({"https://good.example"}), hosts=frozenset({"127.0.0.1", "localhost"}))
    with running(FakeEngine(), access=access) as site:
        own_origin = "Origin: http://127.0.0.1\r\n"
        assert site.ask("/v1/models", headers=own_origin).status == 200
        bad = site.ask("/v1/models", headers="Origin: https://bad.example\r\n")
        assert (bad.status, bad.error["code"]) == (403, "wrong_origin")
        good = site.ask("/v1/models", headers="Origin: https://good.example\r\n")
        assert (good.status, good.headers["access-control-allow-origin"]) == (200, "https://good.example")
        for host in ("evil.example", "evil.example:80", "[::1", ""):
            raw = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
            with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) as connection:
                connection.sendall(raw)
                reply = read_reply(connection)
            assert reply.status in (400, 403)
            assert reply.status == 400 or f"Host {host!r} is not a name of this machine" in reply.error["message"]


def test_an_address_of_this_machine_alone_is_known():
    assert loopback_hosts("127.0.0.1") == {"127.0.0.1", "localhost", "::1"} == loopback_hosts("::1")
    assert loopback_hosts("localhost") == {"127.0.0.1", "localhost", "::1"}
    assert loopback_hosts("0.0.0.0") is None and loopback_hosts("example.org") is None
