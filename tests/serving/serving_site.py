"""Run a server on a free port in a separate thread, with an engine that needs no model."""

import asyncio
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import llamaspec.model.stories
from llamaspec.model.chat.template import ChatTemplate, template_of
from llamaspec.model.options import SamplingOptions
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.serving.api import Api
from llamaspec.serving.connections import Access, ClientLimits
from llamaspec.serving.http import Site
from llamaspec.serving.metrics import Metrics
from llamaspec.serving.openai_answers import ModelCard
from llamaspec.serving.prompts import Prompts
from llamaspec.serving.request import (
    Deliver,
    Embedding,
    Engine,
    Finished,
    FinishReason,
    PromptLogprobs,
    PromptTooLong,
    QueueFull,
    Request,
    Stats,
    Tokens,
    TopLogprobs,
)
from tests.support.waiting import PATIENCE

STORIES = Path(llamaspec.model.stories.__file__).parent
TOKENIZER = load_tokenizer(STORIES)
EOS = TOKENIZER.special["</s>"]
WORDS = TOKENIZER.encode("the fox and a bird found one red kite in the old tree; they sang, and slept")
Script = Callable[[Request], Sequence[int]]


def words_of(request: Request) -> list[int]:
    """Return 40 random words and EOS, which depend only on the request's prompt and seed."""
    draw = random.Random(repr((request.prompt, request.seed)))
    return [*draw.choices(WORDS, k=40), EOS]


def spelling(text: str) -> Script:
    """Return a script that answers with the tokens of `text` and EOS."""
    return lambda request: [*TOKENIZER.encode(text), EOS]


def obedient(request: Request) -> list[int]:
    """Draw tokens uniformly from the ones that the request's grammar allows, until EOS."""
    draw, drawn = random.Random(request.seed), []
    while not drawn or drawn[-1] != EOS:
        assert request.allowed is not None and len(drawn) < 3000
        allowed = np.flatnonzero(request.allowed(drawn))
        drawn.append(int(draw.choice(allowed)))
    return drawn


class FakeEngine:
    """An engine without a model: `script` returns the tokens of an answer. Each request has its own thread."""

    def __init__(self, script: Script = words_of, *, seconds: float = 0.0, context: int = 128, most: int = 1000):
        self.context = context
        self.vocab = 1024
        self.dim = 3
        self.failed: BaseException | None = None
        self.seconds = seconds  # pause before each token or embedding
        self.pause: int | None = (
            None  # a request waits after this number of tokens, until it is cancelled or this is None
        )
        self.late = -1.0  # paused requests with this deadline expire
        self.requests: list[Request] = []
        self.ends: Counter[FinishReason] = Counter()
        self.poison: int | None = None  # a request with this token fails
        self._script = script
        self._most = most  # most requests at a time
        self._open: set[int] = set()
        self._cancelled: set[int] = set()
        self._draining = False
        self._lock = threading.Lock()

    @property
    def open(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._open)

    def submit(self, request: Request, deliver: Deliver) -> int:
        with self._lock:
            if self._draining or len(self._open) >= self._most:
                raise QueueFull("too many requests wait")
            if len(request.prompt) > self.context:
                raise PromptTooLong("too long")
            number = len(self.requests)
            self.requests.append(request)
            self._open.add(number)
        threading.Thread(target=self._run, args=[number, request, deliver], daemon=True).start()
        return number

    def cancel(self, number: int) -> None:
        self._cancelled.add(number)

    def drain(self, seconds: float) -> bool:
        self._draining = True
        end = time.monotonic() + seconds
        while self._open and time.monotonic() < end:
            time.sleep(0.005)
        clean = not self._open
        self._cancelled |= self._open
        while self._open:
            time.sleep(0.005)
        return clean

    def close(self) -> None:
        self.drain(0)

    def stats(self) -> Stats:
        return Stats(0, self.open, 7, 5, 3, 0, 11, 2, 13, dict(self.ends))

    def _run(self, number: int, request: Request, deliver: Deliver) -> None:
        reason, drawn = self._draw(number, request, deliver)
        with self._lock:
            self.ends[reason] += 1  # before it leaves `_open`: a test then reads the counts
            self._open.discard(number)
        message = "logits are not finite" if reason == "error" else None
        deliver(Finished(reason, len(request.prompt), drawn, 0, message))

    def _draw(self, number: int, request: Request, deliver: Deliver) -> tuple[FinishReason, int]:
        if self.failed or self.poison in request.prompt:
            return "error", 0
        if (top := request.prompt_logprobs) is not None:
            after = request.prompt[1:]
            deliver(
                PromptLogprobs(tuple(-i / 8 for i, _ in enumerate(after)), tuple(_likeliest(t, top) for t in after))
            )
        if request.embeds:
            while self.pause == 0 and number not in self._cancelled:
                time.sleep(0.005)
            if number in self._cancelled:
                return "cancelled", 0
            time.sleep(self.seconds)
            deliver(_embedding(request.prompt))
            return "length", 0
        drawn = 0
        for token in self._script(request):
            if drawn == request.max_tokens:
                return "length", drawn
            if len(request.prompt) + drawn == self.context:
                return "context", drawn
            time.sleep(self.seconds)
            while drawn == self.pause and number not in self._cancelled:
                if self.late == request.deadline:
                    return "expired", drawn
                time.sleep(0.005)
            if number in self._cancelled:
                return "cancelled", drawn
            drawn += 1
            top = request.logprobs
            known = (None, None) if top is None else ((-drawn / 16,), (_likeliest(token, top),))
            deliver(Tokens((token,), *known))
            if token in request.stop_ids:
                return "stop", drawn
        return "length", drawn


def _embedding(prompt: Sequence[int]) -> Embedding:
    """Return an embedding that depends on the last token, and a mean that depends on all tokens."""
    last, mean = ([number, 1.0, -2.0] for number in (prompt[-1], sum(prompt) / len(prompt)))
    return Embedding(np.array(last, np.float32), np.array(mean, np.float32))


def _likeliest(token: int, count: int) -> TopLogprobs:
    """Report the drawn token as the likeliest one, then the tokens with the next ids."""
    ids = tuple((token + i) % 1024 for i in range(count))
    return TopLogprobs(ids, tuple(-0.125 - i for i in range(count)))


class Running(NamedTuple):
    """A running server."""

    port: int
    site: Site
    engine: Any
    stop: Callable[[], None]  # ends the server as SIGTERM would
    ended: Callable[[], bool | None]  # whether it ended cleanly; None: it still runs

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: Any = None, *, raw: bytes | None = None, headers: str = "") -> "Reply":
        """Send one request on a new connection, and read the whole reply."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as connection:
            connection.sendall(request_bytes(path, body, raw=raw, headers=headers))
            return read_reply(connection)


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert list(self.json) == ["error"]
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]


def request_bytes(path: str, body: Any = None, *, raw: bytes | None = None, headers: str = "") -> bytes:
    """Encode an HTTP request that asks the server to close the connection."""
    data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None and raw is None else "POST"
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(data)}\r\n{headers}"
    )
    return head.encode() + b"\r\n" + data


def read_reply(connection: socket.socket) -> Reply:
    """Read a reply up to the end of the connection, and parse it."""
    return parse_reply(received(connection))


def received(connection: socket.socket) -> bytes:
    """Read all bytes up to the end of a connection."""
    raw = b""
    while part := connection.recv(1 << 16):
        raw += part
    return raw


def parse_reply(raw: bytes) -> Reply:
    """Split a reply into status, headers and body."""
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(_chunks(body))
    return Reply(int(first.split()[1]), headers, body)


def _chunks(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, body = body.partition(b"\r\n")
        yield body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


def make_site(
    engine: Engine,
    *,
    limits: ClientLimits | None = None,
    access: Access | None = None,
    template: str | None = None,
    tokenizer: Tokenizer = TOKENIZER,
    sampling: SamplingOptions | None = None,
    pooling: str = "last",
    adapters: Sequence[str] = (),
) -> Site:
    """Create a site for `engine` with the built-in model's tokenizer, and with its template if `template` is None.

    `sampling` has the defaults of requests. If it is None, they are OpenAI's. `pooling` is the default for embeddings.
    """
    chosen = ChatTemplate("t", template) if template else template_of(TOKENIZER, STORIES)
    stops = frozenset({EOS}) if tokenizer is TOKENIZER else frozenset()
    prompts = Prompts(tokenizer, template=chosen, stops=stops, context=engine.context, vocab=engine.vocab)
    model = ModelCard("stories", 0, "llamaspec", engine.context)
    limits = limits or ClientLimits()
    about = {"fingerprint": "fp_test", "request_seconds": limits.request_seconds}
    api = Api(engine, prompts, model, Metrics(engine), **about, adapters=adapters, sampling=sampling, pooling=pooling)
    return Site(api, limits=limits, access=access or Access())


@contextmanager
def running(engine: Any, **options: Any) -> Iterator[Running]:
    """Run a server for the duration of a with block, with the options of `make_site`."""
    bound = socket.create_server(("127.0.0.1", 0))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # small: stalled readers soon show
    ready = threading.Event()
    started: list[Any] = []
    result: list[bool] = []

    async def main() -> None:
        stop = asyncio.Event()
        site = make_site(engine, **options)
        started.extend([site, stop, asyncio.get_running_loop()])
        asyncio.get_running_loop().call_soon(ready.set)
        result.append(await started[0].run(bound, stop))

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE)
    site, event, loop = started

    def stop() -> None:
        if thread.is_alive():
            loop.call_soon_threadsafe(event.set)

    try:
        yield Running(bound.getsockname()[1], site, engine, stop, lambda: result[0] if result else None)
    finally:
        engine.close()
        stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()
