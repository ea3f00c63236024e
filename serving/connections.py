"""Limits on HTTP connections, and access control."""

import asyncio
import hashlib
import hmac
import resource
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import msgspec
from aiohttp import web

from llamaspec.serving.metrics import Metrics
from llamaspec.serving.openai import Refusal

RETRY_AFTER = {"Retry-After": "5"}  # seconds until a refused client should try again
LONGEST_LINE = 8190  # bytes of a request line or of a header
MOST_HEADERS = 64
KEPT_OPEN = 75.0  # seconds that a connection may be idle before a request
REFUSED_OPEN = 2.0  # seconds after which we close a connection beyond the limit that sends no request
MOST_REFUSED = 64  # connections beyond the limit that may wait for a 503; we close others at once
OTHER_FILES = 64 + MOST_REFUSED  # open files other than accepted connections
LINGER = 2.0  # seconds to read the rest of a refused body

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class ClientLimits:
    """Limits on what clients may use. Each limit has an option of `llamaspec serve`."""

    body_bytes: int = 4 << 20
    body_seconds: float = 60.0  # time for a client to send its body
    write_seconds: float = 30.0  # time that a client may read nothing
    request_seconds: float = 600.0  # time for a request in the engine, including the queue
    connections: int = 1000
    drain_seconds: float = 30.0  # time for running requests to finish when the server stops


@dataclass(frozen=True)
class Access:
    """The access rules: valid API keys, and allowed values of the headers Origin and Host."""

    keys: tuple[str, ...] = ()  # a request needs one of these keys; empty: no key is needed
    origins: frozenset[str] = frozenset()  # other sites whose pages may send requests (CORS)
    hosts: frozenset[str] | None = None  # names that the Host header may have; None: any

    def tenant(self, header: str) -> str | None:
        """Identify a client by the API key in its Authorization header.

        Returns the key's index among the valid keys, as a string; None for a wrong key; "" if the server needs no key.
        """
        if not self.keys:
            return ""
        scheme, _, token = header.strip().partition(" ")
        key = (token if scheme.lower() == "bearer" else header).strip()  # RFC 9110: the scheme is case-insensitive
        matches = [hmac.compare_digest(_digest(key), _digest(known)) for known in self.keys]
        return str(matches.index(True)) if any(matches) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()  # a header may contain any bytes


def loopback_hosts(host: str) -> frozenset[str] | None:
    """Return the host names of a server that only this machine can reach, or None for other servers.

    This prevents DNS rebinding: another site can point its own name to 127.0.0.1, and then read our answers as if they
    came from that site. The Host header of such a request has the site's name, which is not in the list.
    """
    with suppress(ValueError):
        if ip_address(host).is_loopback:
            return frozenset({host, "localhost", "127.0.0.1", "::1"})
    return frozenset({host, "127.0.0.1", "::1"}) if host == "localhost" else None


class Connections(web.Server):
    """Makes a protocol for each connection, and refuses connections beyond the limit."""

    def __init__(self, handler: Handler, limits: ClientLimits, metrics: Metrics):
        """Answer requests with `handler`, within `limits`."""
        super().__init__(handler, handler_cancellation=True, request_factory=self._request)
        self._limits = limits
        self._metrics = metrics
        self._refused: set[TooMany] = set()

    def __call__(self) -> Any:
        """Make the protocol of a new connection: `Connection`, or `TooMany` beyond the limit."""
        self._metrics.connections.set(len(self.connections))
        if len(self.connections) >= self._limits.connections:
            self._metrics.refused.labels("connections").inc()
            return TooMany(self._refused)
        return Connection(
            self,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=KEPT_OPEN,
            lingering_time=LINGER,
            max_line_size=LONGEST_LINE,
            max_field_size=LONGEST_LINE,
            max_headers=MOST_HEADERS,
        )

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        size = self._limits.body_bytes
        return web.BaseRequest(message, payload, protocol, writer, task, task.get_loop(), client_max_size=size)


class Connection(web.RequestHandler):
    """A connection that answers malformed requests with our JSON error, and does not log them."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return a JSON error for a request that aiohttp cannot parse."""
        message = "the request is not valid HTTP, or its headers are too long, or its Content-Encoding is unknown"
        response = error(Refusal(message, status=status))
        response.force_close()
        return response


class TooMany(asyncio.Protocol):
    """A connection beyond the limit. It answers any request with 503, and then closes."""

    def __init__(self, refused: set["TooMany"]):
        """Store `refused`, the set of open connections beyond the limit, which this connection will join."""
        self._refused = refused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a request. If we closed now, the client would see a broken connection instead of the 503."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._refused) >= MOST_REFUSED:
            transport.abort()
        self._refused.add(self)
        self._timer = asyncio.get_running_loop().call_later(REFUSED_OPEN, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Send the 503 and close the connection."""
        if self._transport.is_closing():
            return
        refusal = Refusal("too many connections", status=503, code="too_many_connections", headers=RETRY_AFTER)
        body = msgspec.json.encode(refusal.body)
        fields = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close", **RETRY_AFTER}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._transport.write(f"HTTP/1.1 503 Service Unavailable\r\n{head}\r\n".encode() + body)
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and leave the set of refused connections."""
        self._timer.cancel()
        self._refused.discard(self)


class DoesNotRead(ConnectionError):
    """Raised after we disconnect a client that has not read its answer for too long."""


@asynccontextmanager
async def reading(request: web.BaseRequest, limits: ClientLimits) -> AsyncIterator[None]:
    """Limit the time that a client may take to read. Disconnects a slower client and raises DoesNotRead."""
    try:
        async with asyncio.timeout(limits.write_seconds):
            yield
    except TimeoutError:
        if transport := request.transport:
            transport.abort()
        raise DoesNotRead from None


def allow_files(connections: int) -> int:
    """Raise this process's limit on open files for `connections`. Returns how many connections the system allows.

    A process at that limit cannot accept a connection, not even to refuse it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    needed = connections + OTHER_FILES
    if soft < needed:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return max(1, min(connections, soft - OTHER_FILES))


def in_json(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Make a JSON response. `value` may be a bytearray that contains JSON already."""
    body = value if isinstance(value, bytearray) else msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def error(refusal: Refusal) -> web.Response:
    """Make the response for an error."""
    response = in_json(refusal.body, status=refusal.status, headers=refusal.headers)
    if refusal.status in (408, 413):  # the client may still be sending the body
        response.force_close()
    return response
