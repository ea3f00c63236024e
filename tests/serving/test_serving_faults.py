"""Clients are not affected if other clients leave, stall or send garbage, or if the engine fails or shuts down."""

import asyncio
import json
import socket
import struct
import threading

import pytest
from aiohttp.test_utils import make_mocked_request

from llamaspec.serving.connections import ClientLimits
from llamaspec.serving.openai import Refusal
from tests.serving.serving_site import (
    TOKENIZER,
    FakeEngine,
    Running,
    parse_reply,
    read_reply,
    received,
    request_bytes,
    running,
)
from tests.support.waiting import PATIENCE, until

FOX = {"prompt": "the fox", "seed": 1, "max_tokens": 20}


def connect(site: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE)


def endless(request):
    return TOKENIZER.encode(" fox") * 100_000


def text_of(site: Running) -> str:
    reply = site.ask("/v1/completions", FOX)
    assert reply.status == 200
    return reply.json["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(stream):
    engine = FakeEngine(endless, seconds=0.005, context=100_000)
    with running(engine) as site:
        with connect(site) as connection:
            connection.sendall(
                request_bytes("/v1/completions", {"prompt": "a", "max_tokens": 90_000, "stream": stream})
            )
            until(lambda: engine.open == 1)
            if stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: engine.open == 0)
        assert engine.ends == {"cancelled": 1}
        until(lambda: 'left_total{reason="gone"} 1.0' in site.ask("/metrics").body.decode())


def test_a_client_that_resets_its_connection_ends_its_request():
    engine = FakeEngine(endless, seconds=0.005, context=100_000)
    with running(engine) as site:
        connection = connect(site)
        connection.sendall(request_bytes("/v1/completions", {"prompt": "a", "max_tokens": 90_000, "stream": True}))
        until(lambda: engine.open == 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        until(lambda: engine.open == 0)


@pytest.mark.slow  # 3 s
def test_a_reader_that_stops_reading_is_dropped_and_nobody_else_waits():
    engine = FakeEngine(endless, seconds=0.0003, context=200_000)
    with running(engine, limits=ClientLimits(write_seconds=0.5)) as site:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", site.port))
        body = {"prompt": "a", "max_tokens": 190_000, "stream": True, "logprobs": 20}
        connection.sendall(request_bytes("/v1/completions", body))
        until(lambda: engine.open == 1)
        assert site.ask("/health").status == 200
        until(lambda: 'left_total{reason="does_not_read"} 1.0' in site.ask("/metrics").body.decode())
        until(lambda: engine.open == 0)
        connection.close()


def test_half_a_request_waits_for_nobody():
    with running(FakeEngine(), limits=ClientLimits(body_seconds=0.3)) as site:
        with connect(site) as half, connect(site) as silent, connect(site) as cut:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            cut.sendall(b"POST /v1/comple")
            assert text_of(site)
            reply = read_reply(half)
            assert (reply.status, reply.error["code"]) == (408, "body_too_slow")
            silent.settimeout(0.1)
            with pytest.raises(TimeoutError):
                silent.recv(1)  # A silent connection may stay for a while and costs nothing.


@pytest.mark.parametrize("announced", [True, False])
def test_a_huge_body_is_refused(announced):
    with running(FakeEngine(), limits=ClientLimits(body_bytes=1000)) as site:
        if announced:
            reply = site.ask("/v1/completions", {"prompt": "a" * 1000})
        else:
            with connect(site) as connection:
                head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
                connection.sendall(head + b"400\r\n" + b"a" * 1024 + b"\r\n0\r\n\r\n")
                reply = read_reply(connection)
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")
        assert text_of(site)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"null", 400),
        (b'{"prompt": "\xff"}', 400),
        (b'{"prompt": "\\ud83d"}', 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'{"prompt": "a", "temperature": 1e999}', 400),
        (b"[" * 100_000, 400),
        (b'{"metadata": ' + b"[" * 100_000, 400),
        (b'{"prompt": "a", "max_tokens": 99999999999999999999999}', 200),
    ],
)
def test_nonsense_gets_an_error_of_the_one_shape(raw, status):
    with running(FakeEngine()) as site:
        reply = site.ask("/v1/completions", raw=raw)
        assert reply.status == status
        if status != 200:
            assert reply.error["type"] == "invalid_request_error"
        assert text_of(site)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 200 + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Encoding: br\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_an_error_of_the_one_shape(raw):
    with running(FakeEngine()) as site:
        with connect(site) as connection:
            connection.sendall(raw)
            reply = read_reply(connection)
        assert reply.status == 400 and reply.error["message"]
        assert text_of(site)


def test_a_full_queue_is_429_with_a_time_to_come_back():
    engine = FakeEngine(endless, seconds=0.005, context=100_000, most=2)
    with running(engine) as site:
        with connect(site) as first, connect(site) as second:
            for connection in (first, second):
                body = {"prompt": "a", "max_tokens": 90_000, "stream": True}
                connection.sendall(request_bytes("/v1/completions", body))
            until(lambda: engine.open == 2)
            reply = site.ask("/v1/completions", FOX)
            assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (429, "queue_full", "1")
            assert reply.error["type"] == "rate_limit_error"
        until(lambda: engine.open == 0)
        # If one of several texts of a request is refused, all are, and those that have begun are cancelled.
        assert site.ask("/v1/completions", FOX | {"n": 3}).status == 429
        until(lambda: engine.open == 0)
        assert text_of(site)


def test_prompts_that_wait_to_be_read_have_a_limit_too(monkeypatch):
    monkeypatch.setattr("llamaspec.serving.api.MOST_PREPARED", 3)
    with running(FakeEngine()) as site:
        go, read = threading.Event(), site.site.api._prompts.from_text
        monkeypatch.setattr(
            site.site.api._prompts, "from_text", lambda text, **options: go.wait(PATIENCE) and read(text)
        )
        waiting = [connect(site) for _ in range(3)]
        for connection in waiting:
            connection.sendall(request_bytes("/v1/completions", FOX))
        until(lambda: site.site.api._preparing == 3)
        reply = site.ask("/v1/completions", FOX)
        assert (reply.status, reply.error["code"]) == (429, "queue_full")
        go.set()
        assert [read_reply(connection).status for connection in waiting] == [200] * 3
        for connection in waiting:
            connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_poisoned_request_fails_alone(stream):
    engine = FakeEngine(seconds=0.005)
    with running(engine) as site:
        expected = text_of(site)
        engine.poison = TOKENIZER.encode("kite")[0]
        texts: list[str] = []
        threads = [threading.Thread(target=lambda: texts.append(text_of(site))) for _ in range(4)]
        for thread in threads:
            thread.start()
        reply = site.ask("/v1/completions", {"prompt": "a kite", "stream": stream})
        for thread in threads:
            thread.join()
        assert (reply.status, reply.error["type"]) == (500, "server_error")
        assert "not finite" in reply.error["message"] and reply.headers["x-should-retry"] == "false"
        assert texts == [expected] * 4


def test_a_greedy_template_is_refused_and_other_chats_continue():
    greedy = "{{ messages[0].content * (10**10 if messages[0].content == 'eat' else 1) }}"
    with running(FakeEngine(), template=greedy) as site:
        for text, status in (("eat", 400), ("fox", 200)) * 2:
            reply = site.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})
            assert reply.status == status
            assert status == 200 or "512 MB" in reply.error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends_alone(stream):
    """A request that exceeds the server's time limit, or its own smaller limit, ends and does not affect others."""
    engine = FakeEngine()
    with running(engine, limits=ClientLimits(request_seconds=60.0)) as site:
        expected = text_of(site)
        assert engine.requests[-1].deadline == 60
        site.ask("/v1/completions", FOX | {"max_seconds": 90})
        assert engine.requests[-1].deadline == 60
        engine.pause = 4
        with connect(site) as neighbor:
            neighbor.sendall(request_bytes("/v1/completions", FOX))
            with connect(site) as connection:
                connection.sendall(request_bytes("/v1/completions", FOX | {"max_seconds": 5, "stream": stream}))
                until(lambda: engine.open == 2)
                first = connection.recv(1) if stream else b""
                engine.late = 5.0
                tail = first + received(connection)
            assert engine.ends["expired"] == 1
            if stream:
                assert b"[DONE]" not in tail
                error = json.loads(tail.rpartition(b"event: error\ndata: ")[2].splitlines()[0])["error"]
            else:
                reply = parse_reply(tail)
                assert (reply.status, reply.headers["retry-after"]) == (503, "5")
                assert reply.headers["x-should-retry"] == "false"
                error = reply.error
            assert (error["code"], error["type"]) == ("expired", "server_error")
            engine.pause = None
            assert read_reply(neighbor).json["choices"][0]["text"] == expected


def test_an_error_after_the_first_piece_is_an_event():
    openai = pytest.importorskip("openai", reason="needs OpenAI's client, of the extra dev")
    engine = FakeEngine()
    engine.pause = 3
    with running(engine, limits=ClientLimits(drain_seconds=0.05)) as site:
        with connect(site) as connection:
            connection.sendall(request_bytes("/v1/completions", FOX | {"stream": True}))
            assert connection.recv(1)
            site.stop()
            tail = received(connection)
        events = tail.split(b"\n\n")
        assert b"[DONE]" not in tail
        last = next(event for event in reversed(events) if b"error" in event)
        error = json.loads(last.partition(b"data: ")[2])["error"]
        assert (error["code"], error["type"]) == ("shutting_down", "server_error")
        until(lambda: site.ended() is True)
    engine = FakeEngine()
    engine.pause = 3
    with running(engine, limits=ClientLimits(drain_seconds=0.05)) as site:
        with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.APIError, match="shutting down"):
                for _ in client.completions.create(model="stories", prompt="a", max_tokens=500, stream=True):
                    site.stop()


def test_told_to_stop_it_finishes_what_runs_and_takes_nothing_new():
    engine = FakeEngine()
    engine.pause = 3
    with running(engine) as site:
        with connect(site) as connection, connect(site) as later, connect(site) as probe:
            connection.sendall(request_bytes("/v1/completions", FOX))
            until(lambda: engine.open == 1)
            site.stop()
            until(lambda: site.site.api.draining)
            later.sendall(request_bytes("/v1/completions", FOX))
            reply = read_reply(later)
            assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "shutting_down", "5")
            probe.sendall(request_bytes("/ready"))
            assert read_reply(probe).status == 503
            assert site.ended() is None
            engine.pause = None
            finished = read_reply(connection)
            assert finished.status == 200 and finished.json["usage"]["completion_tokens"] == 20
        until(lambda: site.ended() is True)


def test_a_failed_engine_ends_the_server():
    engine = FakeEngine(seconds=0.005)
    with running(engine) as site:
        assert site.ask("/ready").json == {"status": "ready"}
        engine.failed = RuntimeError("out of memory")
        until(lambda: site.ended() is False)
        with pytest.raises(Refusal, match=r"^the engine has failed; see the server's log for the cause$"):
            asyncio.run(site.site._ready(make_mocked_request("GET", "/ready")))
