"""The HTTP server of one model: routes, access, limits, and shutdown.

Every error is JSON in one format. If a client disconnects, we cancel its request, whether the answer is streamed or
not. We limit the memory and time that a client can use, even if it sends too much or reads too slowly.
"""

import asyncio
import logging
import re
import socket
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import HttpVersion11, web

from llamaspec.serving.answers import shutting_down
from llamaspec.serving.api import Answer, Api
from llamaspec.serving.connections import (
    Access,
    ClientLimits,
    Connections,
    DoesNotRead,
    Handler,
    error,
    in_json,
    reading,
)
from llamaspec.serving.document import openapi
from llamaspec.serving.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Refusal,
    TokenizeRequest,
    read_json,
)
from llamaspec.serving.streaming import server_sent

PAGE = Path(__file__).with_name("page")
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFETY = {"Server": "llamaspec", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
MODELS = "/v1/models/"  # followed by a model's name
A_MODEL = "/v1/models/{model}"  # the route of all these paths
OTHER_APIS = {  # paths of other APIs, and our most similar path
    "/v1/responses": "/v1/chat/completions",
    "/v1/messages": "/v1/chat/completions",
    "/v1/chat": "/v1/chat/completions",
    "/v1/generate": "/v1/completions",
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/completions",
    "/api/tags": "/v1/models",
    "/api/v0/models": "/v1/models",
    "/generate": "/v1/completions",
    "/completion": "/v1/completions",
    "/api/embed": "/v1/embeddings",
    "/api/embeddings": "/v1/embeddings",
    "/embed": "/v1/embeddings",
    "/embedding": "/v1/embeddings",
}
SCRIPTS = ("page.js", "markdown.js", "marked.js")
OPEN = {"/health", "/ready", "/", "/page.css", *(f"/{name}" for name in SCRIPTS)}  # paths that need no key
BACKLOG = 1024  # connections that the operating system queues until we accept them
IN_A_ROW = 8  # connections that asyncio accepts before our code can refuse one
FLUSH = 5.0  # seconds for sending the last answers, after the engine has ended all requests

log = logging.getLogger("llamaspec.serving")


class Site:
    """The server at one address. `handle` answers one request. `run` serves until its event `stop` is set."""

    def __init__(self, api: Api, *, limits: ClientLimits, access: Access):
        """Serve `api` within `limits` to the clients that `access` allows."""
        self.api = api
        self.limits = limits
        self.access = access
        self.metrics = api.metrics
        self._routes: dict[str, dict[str, Handler]] = {
            "/": {"GET": self._file("index.html", "text/html")},
            "/page.css": {"GET": self._file("page.css", "text/css")},
            **{f"/{name}": {"GET": self._file(name, "text/javascript")} for name in SCRIPTS},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics},
            "/openapi.json": {"GET": self._openapi},
            "/tokenizer_info": {"GET": self._tokenizer_info},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/v1/models": {"GET": self._models},
            A_MODEL: {"GET": self._model},
            "/v1/completions": {"POST": self._complete},
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/embeddings": {"POST": self._embed},
        }

    async def run(
        self, bound: socket.socket, stop: asyncio.Event, *, ready: Callable[[], object] = lambda: None
    ) -> bool:
        """Serve on a bound socket. Returns True when `stop` is set, and False when the engine fails.

        We call `ready` once the socket listens. When `stop` is set, running requests get `drain_seconds` to finish.
        """
        server = Connections(self.handle, self.limits, self.metrics)
        runner = web.ServerRunner(server, shutdown_timeout=FLUSH)
        await runner.setup()
        # asyncio accepts `backlog` connections in a row before our code can refuse the first of them.
        listening = await asyncio.get_running_loop().create_server(server, sock=bound, backlog=IN_A_ROW)
        bound.listen(BACKLOG)
        ready()
        try:
            await self._until(stop)
            self.api.draining = True
            if self.api.engine.failed is None:
                await asyncio.to_thread(self.api.engine.drain, self.limits.drain_seconds)
            return self.api.engine.failed is None
        finally:
            self.api.draining = True
            listening.close()
            await runner.cleanup()
            self.api.close()

    async def _until(self, stop: asyncio.Event) -> None:
        """Wait until `stop` is set or the engine has failed."""
        while self.api.engine.failed is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await stop.wait()
                return

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. Every failure becomes an error response."""
        path = _route(request.path) if _route(request.path) in self._routes else "other"
        try:
            response = await self._outcome(request, path)
            self.metrics.answered.labels(path, str(response.status)).inc()
            if not response.prepared:
                response.headers.update(SAFETY | self._cross_origin(request))
                await self._send(request, response)
            return response
        except (asyncio.CancelledError, ConnectionError) as error:
            self.metrics.abandoned.labels("does_not_read" if isinstance(error, DoesNotRead) else "gone").inc()
            raise

    async def _outcome(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """Answer a request, and turn exceptions into error responses.

        Raises ConnectionError if the client has disconnected.
        """
        try:
            return await self._answer(request)
        except Refusal as refusal:
            return error(refusal)
        except ConnectionError:
            raise
        except Exception:
            log.exception("%s %s failed", request.method, path)
            return error(Refusal("internal error; see the server's log for the cause", status=500))

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self._check_host(request)
        routes = self._routes.get(_route(request.path))
        if routes is None:
            hint = hint_of(request.path, self._routes)
            raise Refusal(f"unknown path {request.path[:100]}{hint}", status=404, code="not_found")
        allowed = ", ".join([*routes, "OPTIONS"])
        if request.method == "OPTIONS":
            return web.Response(status=204, headers={"Allow": allowed, "Access-Control-Allow-Methods": allowed})
        handler = routes.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            message, headers = (
                f"{request.path}: expected one of the methods {allowed}, got {request.method}",
                {"Allow": allowed},
            )
            raise Refusal(message, status=405, code="method_not_allowed", headers=headers)
        if request.path not in OPEN:
            self._tenant(request)
        return await handler(request)

    def _check_host(self, request: web.BaseRequest) -> None:
        """Refuse requests that pages of other sites send. We recognize them by the Host and Origin headers."""
        host = request.headers.get("Host", "").lower()
        if self.access.hosts is not None and not self.access.keys and _name_of(host) not in self.access.hosts:
            raise Refusal(
                f"Host {host[:100]!r} is not a name of this machine, and this server accepts only local requests",
                status=403,
                code="wrong_host",
            )
        origin = request.headers.get("Origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}", *self.access.origins):
            raise Refusal(
                f"web pages of {origin[:100]} may not use this server: its --cors does not name them",
                status=403,
                code="wrong_origin",
            )

    def _cross_origin(self, request: web.BaseRequest) -> dict[str, str]:
        origin = request.headers.get("Origin")
        if origin is None or origin not in self.access.origins:
            return {}
        # A page of an allowed origin may send any headers, because OpenAI's client for JavaScript sends a dozen unusual
        # ones.
        requested = request.headers.get("Access-Control-Request-Headers", "Authorization, Content-Type")
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Headers": requested,
            "Access-Control-Expose-Headers": "Retry-After, X-Should-Retry",
            "Vary": "Origin, Access-Control-Request-Headers",
        }

    def _tenant(self, request: web.BaseRequest) -> str:
        """Identify the client by its API key. Raises Refusal if the key is missing or wrong."""
        tenant = self.access.tenant(request.headers.get("Authorization", ""))
        if tenant is None:
            self.metrics.refused.labels("key").inc()
            needed = {"WWW-Authenticate": "Bearer"}
            raise Refusal(
                "the API key in the Authorization header is missing or wrong",
                status=401,
                code="invalid_api_key",
                headers=needed,
            )
        return tenant

    async def _body[Body](self, request: web.BaseRequest, kind: type[Body]) -> Body:
        """Read and parse a JSON body. Raises Refusal if that fails."""
        if self.api.draining:
            self.metrics.refused.labels("draining").inc()
            raise shutting_down()
        limit = self.limits.body_bytes
        try:
            if (request.content_length or 0) > limit:
                raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
            self._invite_body(request)
            async with asyncio.timeout(self.limits.body_seconds):
                raw = await request.read()
        except web.HTTPRequestEntityTooLarge:
            self.metrics.refused.labels("body").inc()
            raise Refusal(
                f"the body is too large: expected at most {limit} bytes", status=413, code="body_too_large"
            ) from None
        except TimeoutError:
            self.metrics.refused.labels("body_time").inc()
            message = f"the body did not arrive within {self.limits.body_seconds:g} seconds"
            raise Refusal(message, status=408, code="body_too_slow") from None
        except web.RequestPayloadError as wrong:
            raise Refusal(f"the body of the request cannot be read: {wrong}"[:200]) from None
        return read_json(raw, kind)

    def _invite_body(self, request: web.BaseRequest) -> None:
        """Send `100 Continue` to a client that waits for it before it sends its body (RFC 9110, 10.1.1)."""
        expected = request.headers.get("Expect", "").strip()
        if not expected or request.version < HttpVersion11:
            return
        if expected.lower() != "100-continue":
            raise Refusal(f"Expect: expected 100-continue, got {expected[:100]}", status=417, code="expectation_failed")
        if request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await self._body(request, CompletionRequest)
        return await self._texts(request, await self.api.complete(body, tenant=self._tenant(request)))

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await self._body(request, ChatRequest)
        return await self._texts(request, await self.api.chat(body, tenant=self._tenant(request)))

    async def _embed(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await self._body(request, EmbeddingRequest)
        return in_json(await self.api.embed(body))

    async def _texts(self, request: web.BaseRequest, answer: Answer) -> web.StreamResponse:
        """Answer with generated texts, complete or streamed. After an error, cancels the requests that still run."""
        try:
            return await (self._stream(request, answer) if answer.stream else self._complete_answer(answer))
        finally:
            answer.answering.cancel()

    async def _complete_answer(self, answer: Answer) -> web.Response:
        while answer.answering.open:
            for choice in await answer.answering.news():
                if choice.refusal:
                    raise choice.refusal
        texts = [(choice, choice.piece()) for choice in answer.answering.choices]
        return in_json(answer.form.answer(texts, answer.answering.usage))

    async def _stream(self, request: web.BaseRequest, answer: Answer) -> web.StreamResponse:
        """Stream pieces as they arrive. An error before the first piece still decides the HTTP status."""
        response = web.StreamResponse(headers=SAFETY | self._cross_origin(request))
        response.content_type, response.charset = "text/event-stream", "utf-8"
        if request.version < HttpVersion11:
            response.force_close()  # HTTP/1.0 has no chunks, so closing the connection ends the stream
        response.headers["Cache-Control"] = "no-store"
        response.headers["X-Accel-Buffering"] = "no"  # otherwise nginx would delay the pieces
        while answer.answering.open:
            written = b""
            for choice in await answer.answering.news():
                if choice.refusal and not response.prepared:
                    raise choice.refusal
                written += b"".join(map(server_sent, answer.form.chunks(choice, choice.piece())))
                if choice.refusal:
                    written += server_sent(choice.refusal.body, event="error")
                    await self._write(request, response, written)
                    response.force_close()
                    return response
            if written:
                await self._write(request, response, written)
        last = server_sent(answer.form.last(answer.answering.usage)) if answer.usage else b""
        await self._write(request, response, last + server_sent("[DONE]"))
        return response

    async def _write(self, request: web.BaseRequest, response: web.StreamResponse, data: bytes) -> None:
        """Send bytes of a stream. A client that does not read them in time is disconnected."""
        async with self._reading(request):
            if not response.prepared:
                await response.prepare(request)
            await response.write(data)

    async def _send(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Send a complete response. A client that does not read it in time is disconnected."""
        async with self._reading(request):
            await response.prepare(request)
            await response.write_eof()

    def _reading(self, request: web.BaseRequest) -> AbstractAsyncContextManager[None]:
        return reading(request, self.limits)

    def _file(self, name: str, kind: str) -> Handler:
        body = (PAGE / name).read_bytes()
        headers = {"Content-Security-Policy": CONTENT_POLICY, "Cache-Control": "no-cache"}

        async def answer(request: web.BaseRequest) -> web.Response:
            return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

        return answer

    async def _health(self, request: web.BaseRequest) -> web.Response:
        """Answer 200 if the process and its engine are running."""
        self._check_engine()
        return in_json({"status": "ok"})

    async def _ready(self, request: web.BaseRequest) -> web.Response:
        """Answer 200 if the server accepts requests."""
        self._check_engine()
        if self.api.draining:
            raise shutting_down()
        return in_json({"status": "ready"})

    def _check_engine(self) -> None:
        if self.api.engine.failed is not None:
            raise Refusal("the engine has failed; see the server's log for the cause", status=503, code="engine_failed")

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _openapi(self, request: web.BaseRequest) -> web.Response:
        return in_json(openapi(self.api.model.id))

    async def _tokenizer_info(self, request: web.BaseRequest) -> web.Response:
        return in_json(self.api.tokenizer_info())

    async def _tokenize(self, request: web.BaseRequest) -> web.Response:
        return in_json(await self.api.tokenize(await self._body(request, TokenizeRequest)))

    async def _detokenize(self, request: web.BaseRequest) -> web.Response:
        return in_json(await self.api.detokenize(await self._body(request, DetokenizeRequest)))

    async def _models(self, request: web.BaseRequest) -> web.Response:
        return in_json({"object": "list", "data": [*self.api.models.values()]})

    async def _model(self, request: web.BaseRequest) -> web.Response:
        name = request.path.removeprefix(MODELS)
        self.api.check_model(name)
        return in_json(self.api.models[name])


def hint_of(path: str, routes: Iterable[str]) -> str:
    """Return a hint with the path that a client probably meant, as the end of an error message, or "".

    >>> hint_of("//v1/chat/completions/", ["/v1/chat/completions"])
    ': use /v1/chat/completions'
    >>> hint_of("/v1/responses", ["/v1/chat/completions"]), hint_of("/nonsense", ["/v1/chat/completions"])
    (': this server does not have that API; use /v1/chat/completions', '')
    """
    plain = re.sub(r"/{2,}", "/", path).rstrip("/") or "/"
    exact = [route for route in routes if route not in ("/", A_MODEL)]
    for candidate in (plain, f"/v1{plain}", *(plain[at.start() :] for at in re.finditer("/", plain))):
        if candidate.lower() in exact:
            return f": use {candidate.lower()}"
        if candidate.startswith(MODELS) and candidate != MODELS:
            return f": use {candidate[:100]}"
    near = get_close_matches(plain[:100].lower(), exact, n=1, cutoff=0.85)
    if near and plain.lower() not in OTHER_APIS:
        return f": do you mean {near[0]}?"
    api = next((api for api in OTHER_APIS if f"{plain.lower()}/".startswith(f"{api}/")), None)
    return f": this server does not have that API; use {OTHER_APIS[api]}" if api else ""


def _route(path: str) -> str:
    """Map a path to its route. The paths of all models share one route."""
    return A_MODEL if path.startswith(MODELS) and path != MODELS else path


def _name_of(host: str) -> str | None:
    """Remove the port from a Host header. Returns None for an invalid host."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
