"""Connections, what they may take, and who may use them."""

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

RETRY_AFTER = {"Retry-After": "5"}  # seconds, for a client that comes while the server drains
LONGEST_LINE = 8190  # bytes of a request's first line, and of a header
MOST_HEADERS = 64
KEPT_OPEN = 75.0  # seconds that a connection may be silent between two requests, or before the first
REFUSED_OPEN = 2.0  # seconds that a connection beyond the limit has to send its request
MOST_REFUSED = 64  # connections beyond the limit that get an answer at one time; the others are just closed
OTHER_FILES = 64 + MOST_REFUSED  # besides connections
LINGER = 2.0  # seconds for the rest of a body that was refused

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class ClientLimits:
    """Limits on what clients take. Each has a flag of `llamaspec serve`."""

    body_bytes: int = 4 << 20
    body_seconds: float = 60.0  # for a client to send its body
    write_seconds: float = 30.0  # for a client that does not read to read on
    request_seconds: float = 600.0  # for a request, from its arrival at the engine to its end
    connections: int = 1000
    drain_seconds: float = 30.0  # for requests that run when the server is told to stop


@dataclass(frozen=True)
class Access:
    """Who may ask."""

    keys: tuple[str, ...] = ()  # any of which a request must have; empty: none is needed
    origins: frozenset[str] = frozenset()  # of pages elsewhere that may ask, by CORS
    hosts: frozenset[str] | None = None  # names that a request may call this server; None: any

    def tenant(self, header: str) -> str | None:
        """Find whose key an Authorization header has; None for nobody's."""
        if not self.keys:
            return ""
        scheme, _, rest = header.strip().partition(" ")
        given = (rest if scheme.lower() == "bearer" else header).strip().encode()  # RFC 9110: a scheme has any case
        found = [hmac.compare_digest(hashlib.sha256(given).digest(), _digest(key)) for key in self.keys]
        return str(found.index(True)) if any(found) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def loopback_hosts(host: str) -> frozenset[str] | None:
    """List the names of a server that only this machine reaches; None where others do.

    A page elsewhere could give its own name the address 127.0.0.1, and then read answers as its own. The browser then
    sends that name as the host, which is not in the list.
    """
    with suppress(ValueError):
        if ip_address(host).is_loopback:
            return frozenset({host, "localhost", "127.0.0.1", "::1"})
    return frozenset({host, "127.0.0.1", "::1"}) if host == "localhost" else None


class Connections(web.Server):
    """The factory of connections, which refuses those beyond a limit."""

    def __init__(self, handler: Handler, limits: ClientLimits, metrics: Metrics):
        """Answer by `handler`, within `limits`."""
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
    """A connection whose malformed requests get an error of our shape, and no line in a log."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is not HTTP."""
        message = "this is not HTTP, its headers are too long, or its body's encoding is unknown"
        response = error(Refusal(message, status=status))
        response.force_close()
        return response


class TooMany(asyncio.Protocol):
    """A connection beyond the limit: one answer, whatever is asked."""

    def __init__(self, others: set["TooMany"]):
        """Join `others`, those that are open."""
        self._others = others

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the request: a connection that is closed before it is read looks broken to its client."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._others) >= MOST_REFUSED:
            transport.abort()
        self._others.add(self)
        self._timer = asyncio.get_running_loop().call_later(REFUSED_OPEN, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Refuse and close."""
        if self._transport.is_closing():
            return
        refusal = Refusal("too many connections", status=503, code="too_many_connections", headers=RETRY_AFTER)
        body = msgspec.json.encode(refusal.body)
        fields = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close", **RETRY_AFTER}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._transport.write(f"HTTP/1.1 503 Service Unavailable\r\n{head}\r\n".encode() + body)
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the timer, and make room for another."""
        self._timer.cancel()
        self._others.discard(self)


class DoesNotRead(ConnectionError):
    """A client that has not read for too long, and is disconnected."""


@asynccontextmanager
async def reading(request: web.BaseRequest, limits: ClientLimits) -> AsyncIterator[None]:
    """Give a client time to read. A client that takes longer is disconnected. Raises DoesNotRead."""
    try:
        async with asyncio.timeout(limits.write_seconds):
            yield
    except TimeoutError:
        if transport := request.transport:
            transport.abort()
        raise DoesNotRead from None


def allow_files(connections: int) -> int:
    """Raise this process's limit of open files, so that all connections fit; returns how many the system allows.

    Beyond that limit nothing could be accepted, and nobody would get an answer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    wanted = connections + OTHER_FILES
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return max(1, min(connections, soft - OTHER_FILES))


def in_json(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Answer with JSON."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def error(refusal: Refusal) -> web.Response:
    """Answer with an error."""
    response = in_json(refusal.body, status=refusal.status, headers=refusal.headers)
    if refusal.status in (408, 413):  # The rest of the body may be on its way.
        response.force_close()
    return response
