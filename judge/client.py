"""Talks to a server that speaks OpenAI's API, with requests that mean the same to every engine.

Engines have different defaults. For example, llama.cpp's server draws with top_k 40 and min_p 0.05 unless a request
says otherwise. So a request names `NEUTRAL` values for the fields that most engines know. A server that refuses one of
these fields gets the request again without it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from time import monotonic, sleep
from typing import Any, NamedTuple
from urllib.parse import urlsplit

NEUTRAL: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,  # vLLM, SGLang and ours
    "repeat_penalty": 1.0,  # llama.cpp
}
SLOWEST = 300.0  # seconds that we wait for one answer
NO_ACCESS, BUSY = (401, 403), (429, 503)  # statuses
PAUSE, PAUSES = 1.0, 5  # seconds before we repeat a request to a busy server, and the largest number of tries


class NoServerError(Exception):
    """There is no server at the address, or the server stopped answering."""


class TimeIsUpError(Exception):
    """The time limit of the whole examination is over."""


class RefusedError(Exception):
    """The server does not support a request."""


class Choice(NamedTuple):
    """One text of an answer."""

    text: str
    finish_reason: str | None
    steps: list["Step"]  # empty if the server reports no log-probabilities


class Named(NamedTuple):
    """A token as a server names it."""

    text: str
    id: int | None
    bytes: bytes | None


class Step(NamedTuple):
    """A token of an answer with its log-probability, and the likeliest tokens at its position."""

    token: Named
    logprob: float
    top: list[tuple[Named, float]]


class Answer(NamedTuple):
    """An answer to a completion or chat request."""

    choices: list[Choice]
    prompt_tokens: int | None
    completion_tokens: int | None
    total_tokens: int | None

    @property
    def first(self) -> Choice:
        return self.choices[0]


class Server:
    """A server at an address, and the name of its model."""

    def __init__(self, url: str, *, model: str = "", api_key: str = "", seconds: float = 600.0):
        """Talk to the server at `url`, such as http://127.0.0.1:8000 (with /v1 at the end or without).

        `model` is the name to send. If it is empty, we send the first name in the answer of /v1/models. All requests
        together take at most `seconds`. Raises ValueError if `url` is not the address of a server.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url}: expected the address of a server, such as http://127.0.0.1:8000")
        self.url = url
        self._connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._end = monotonic() + seconds
        self._refused: set[str] = set()  # fields of `NEUTRAL` that this server does not know
        self.requests = 0
        self.model = model or self._first_model()

    def complete(self, prompt: str | Sequence[int], **fields: Any) -> Answer:
        """Send a completion request. Raises RefusedError if the server does not support it."""
        body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), **fields}
        return _read(_completion, self._sampled("/v1/completions", body))

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Answer:
        """Send a chat request. Raises RefusedError if the server does not support it."""
        return _read(_chat, self._sampled("/v1/chat/completions", {"messages": list(messages), **fields}))

    def stream(self, prompt: str, **fields: Any) -> tuple[str, str | None]:
        """Send a completion request with a streamed answer. Returns the text, and the reason why it ended."""
        text, reason = "", None
        for event in self._events("/v1/completions", self._body({"prompt": prompt, "stream": True, **fields})):
            for choice in event.get("choices") or []:
                text += choice.get("text") or ""
                reason = choice.get("finish_reason") or reason
        return text, reason

    def at_once(self, prompts: Sequence[str], *, most: int, **fields: Any) -> list[Answer]:
        """Send one completion request for each prompt, at most `most` at a time."""
        with ThreadPoolExecutor(most) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, **fields), prompts))

    def tokenize(self, text: str) -> list[int] | None:
        """Ask for the ids of a prompt, by the endpoint of vLLM or llama.cpp. Returns None if the server has neither."""
        for body in ({"model": self.model, "prompt": text}, {"content": text, "add_special": True}):
            try:
                answer = self._ask("POST", "/tokenize", body)
            except RefusedError:
                continue
            tokens = answer.get("tokens") if isinstance(answer, dict) else None
            if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens):
                return tokens
        return None

    def _first_model(self) -> str:
        try:
            answer = self._ask("GET", "/v1/models", None)
            return str(answer["data"][0]["id"])
        except (RefusedError, KeyError, IndexError, TypeError):
            raise NoServerError(f"{self.url}: /v1/models lists no model; is this a server of OpenAI's API?") from None

    def _body(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        neutral = {name: value for name, value in NEUTRAL.items() if name not in self._refused}
        return {"model": self.model, **neutral, **fields}

    def _sampled(self, path: str, fields: Mapping[str, Any]) -> Any:
        """Send a request with `NEUTRAL` fields, and leave out the ones that the server refuses."""
        while True:
            try:
                return self._ask("POST", path, self._body(fields))
            except RefusedError as refusal:
                sent = [name for name in NEUTRAL if name not in self._refused and name not in fields]
                named = [name for name in sent if name in str(refusal)]
                if not named:
                    raise
                self._refused.update(named)

    def _ask(self, method: str, path: str, body: Any) -> Any:
        connection, response = self._send(method, path, body)
        try:
            raw = response.read()
        except (OSError, HTTPException) as error:
            raise NoServerError(f"{self.url}{path}: {error or type(error).__name__}") from None
        finally:
            connection.close()
        return self._parsed(raw, path)

    def _events(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        connection, response = self._send("POST", path, body)
        try:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    yield self._parsed(data, path)
        except (OSError, HTTPException) as error:
            raise NoServerError(f"{self.url}{path}: {error or type(error).__name__}") from None
        finally:
            connection.close()

    def _send(self, method: str, path: str, body: Any) -> tuple[HTTPConnection, HTTPResponse]:
        data, reason = None if body is None else json.dumps(body).encode(), ""
        for _ in range(PAUSES):
            seconds = self._end - monotonic()
            if seconds <= 0:
                raise TimeIsUpError
            self.requests += 1
            connection = self._connect(self._host, self._port, timeout=min(seconds, SLOWEST))
            try:
                connection.request(method, self._path + path, data, self._headers)
                response = connection.getresponse()
                if response.status == 200:
                    return connection, response
                reason = " ".join(response.read(2000).decode(errors="replace").split())[:300]
            except (OSError, HTTPException) as error:
                connection.close()
                if isinstance(error, TimeoutError) and monotonic() >= self._end:
                    raise TimeIsUpError from None
                raise NoServerError(f"{self.url}{path}: {error or type(error).__name__}") from None
            connection.close()
            if response.status in NO_ACCESS:
                raise NoServerError(f"{self.url}{path} answers {response.status}: {reason}")
            if response.status not in BUSY:
                raise RefusedError(f"{path} answers {response.status}: {reason}")
            sleep(PAUSE)
        raise NoServerError(f"{self.url}{path} stays busy: {reason}")

    def _parsed(self, raw: bytes, path: str) -> Any:
        try:
            return json.loads(raw)
        except ValueError:
            raise NoServerError(f"{self.url}{path}: the answer is not JSON: {raw[:80]!r}") from None


def _read(read: Callable[[Any], Answer], answer: Any) -> Answer:
    try:
        return read(answer)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RefusedError(f"an answer lacks a field of OpenAI's API: {error}") from None


def _completion(answer: Any) -> Answer:
    choices = []
    for choice in answer["choices"]:
        known = choice.get("logprobs") or {}
        tops = known.get("top_logprobs") or []
        steps = [
            Step(Named(text, None, None), logprob, [(Named(name, None, None), lp) for name, lp in (top or {}).items()])
            for text, logprob, top in zip(
                known.get("tokens") or [], known.get("token_logprobs") or [], tops, strict=False
            )
            if logprob is not None
        ]
        choices.append(Choice(choice.get("text") or "", choice.get("finish_reason"), steps))
    return _with_usage(choices, answer)


def _chat(answer: Any) -> Answer:
    choices = []
    for choice in answer["choices"]:
        message = choice.get("message") or {}
        content = (choice.get("logprobs") or {}).get("content") or []
        steps = [
            Step(
                _named(entry), entry["logprob"], [(_named(top), top["logprob"]) for top in entry["top_logprobs"] or []]
            )
            for entry in content
        ]
        choices.append(Choice(message.get("content") or "", choice.get("finish_reason"), steps))
    return _with_usage(choices, answer)


def _named(entry: Mapping[str, Any]) -> Named:
    spelling = entry.get("bytes")
    return Named(entry["token"], entry.get("id"), bytes(spelling) if spelling else None)


def _with_usage(choices: list[Choice], answer: Any) -> Answer:
    usage = answer.get("usage") or {}
    return Answer(choices, usage.get("prompt_tokens"), usage.get("completion_tokens"), usage.get("total_tokens"))
