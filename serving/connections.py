"""Limits of HTTP connections, and access control."""

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

RETRY_AFTER = {"Retry-After": "5"}  # seconds, for a client that connects while the server drains
LONGEST_LINE = 8190  # bytes of a request's first line, and of a header
MOST_HEADERS = 64
KEPT_OPEN = 75.0  # seconds that a connection may be silent between two requests, or before the first
REFUSED_OPEN = 2.0  # seconds that a connection beyond the limit has to send its request
MOST_REFUSED = 64  # connections beyond the limit that get an answer at the same time; more are closed without one
OTHER_FILES = 64 + MOST_REFUSED  # files that are not connections
LINGER = 2.0  # seconds for the rest of a body that was refused

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class ClientLimits:
    """Limits on what clients may use. Each has a flag of `llamaspec serve`."""

    body_bytes: int = 4 << 20
    body_seconds: float = 60.0  # for a client to send its body
    write_seconds: float = 30.0  # for a client that stops reading to continue
    request_seconds: float = 600.0  # for a request, from its arrival at the engine to its end
    connections: int = 1000
    drain_seconds: float = 30.0  # for requests that run when the server is told to stop


@dataclass(frozen=True)
class Access:
    """Keys, origins and host names that may use the server."""

    keys: tuple[str, ...] = ()  # a request needs one of these; empty: no key is needed
    origins: frozenset[str] = frozenset()  # origins of other sites that may send requests, by CORS
    hosts: frozenset[str] | None = None  # names that the Host header may have; None: any

    def tenant(self, header: str) -> str | None:
        """Return the number of the key in an Authorization header; None for an unknown key."""
        if not self.keys:
            return ""
        scheme, _, token = header.strip().partition(" ")
        key = (token if scheme.lower() == "bearer" else header).strip()  # RFC 9110: a scheme has any case
        matches = [hmac.compare_digest(_digest(key), _digest(known)) for known in self.keys]
        return str(matches.index(True)) if any(matches) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()  # a header may hold any bytes


def loopback_hosts(host: str) -> frozenset[str] | None:
    """List the host names of a server that only this machine can reach; None for other servers.

    This stops DNS rebinding: another site can point its own name to 127.0.0.1, and then read our answers as if they
    came from that site. The Host header of its requests has the site's name, which is not in the list.
    """
    with suppress(ValueError):
        if ip_address(host).is_loopback:
            return frozenset({host, "localhost", "127.0.0.1", "::1"})
    return frozenset({host, "127.0.0.1", "::1"}) if host == "localhost" else None


class Connections(web.Server):
    """Makes a protocol for each connection, and refuses connections beyond a limit."""

    def __init__(self, handler: Handler, limits: ClientLimits, metrics: Metrics):
        """Answer requests with `handler`, within `limits`."""
        super().__init__(handler, handler_cancellation=True, request_factory=self._request)
        self._limits = limits
        self._metrics = metrics
        self._refused: set[TooMany] = set()

    def __call__(self) -> Any:
        """Make the protocol of a new connection."""
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
        """Answer a request that aiohttp cannot parse."""
        message = "not a valid HTTP request, or its headers are too long, or its body has an unknown encoding"
        response = error(Refusal(message, status=status))
        response.force_close()
        return response


class TooMany(asyncio.Protocol):
    """A connection beyond the limit: answers any request with 503, then closes."""

    def __init__(self, refused: set["TooMany"]):
        """Prepare to join `refused`, the set of connections beyond the limit that are still open."""
        self._refused = refused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the request. If we closed at once, the client would see a broken connection instead of an answer."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._refused) >= MOST_REFUSED:
            transport.abort()
        self._refused.add(self)
        self._timer = asyncio.get_running_loop().call_later(REFUSED_OPEN, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Send 503 and close."""
        if self._transport.is_closing():
            return
        refusal = Refusal("too many connections", status=503, code="too_many_connections", headers=RETRY_AFTER)
        body = msgspec.json.encode(refusal.body)
        fields = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close", **RETRY_AFTER}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._transport.write(f"HTTP/1.1 503 Service Unavailable\r\n{head}\r\n".encode() + body)
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and make room for another connection."""
        self._timer.cancel()
        self._refused.discard(self)


class DoesNotRead(ConnectionError):
    """Raised when a client has not read for too long and is disconnected."""


@asynccontextmanager
async def reading(request: web.BaseRequest, limits: ClientLimits) -> AsyncIterator[None]:
    """Limit the time that a client may take to read. A slower client is disconnected: raises DoesNotRead."""
    try:
        async with asyncio.timeout(limits.write_seconds):
            yield
    except TimeoutError:
        if transport := request.transport:
            transport.abort()
        raise DoesNotRead from None


def allow_files(connections: int) -> int:
    """Raise this process's limit of open files so that all connections fit. Returns the number that the system allows.

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
    """Answer with JSON."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def error(refusal: Refusal) -> web.Response:
    """Answer with an error."""
    response = in_json(refusal.body, status=refusal.status, headers=refusal.headers)
    if refusal.status in (408, 413):  # the client may still be sending the body
        response.force_close()
    return response
