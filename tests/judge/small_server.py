"""A small server with OpenAI's API that computes with the NumPy definition. It can be wrong in one known way at a time.

`Engine` is right. Each saboteur is a subclass that overrides one method. Everything runs in the process of the test.
"""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from llamaspec.judge.arithmetic import Definition, arithmetic, define
from llamaspec.judge.tokens import ChatReader, Messages
from llamaspec.model.chat.marked_text import MarkedText
from llamaspec.model.chat.template import ChatTemplate
from llamaspec.model.checkpoints.checkpoint import Checkpoint, Tensor
from llamaspec.model.tensors import EMBEDDING, HEAD
from llamaspec.model.tokenizers.tokenizer import decode, encode_text
from llamaspec.reference.config import Config
from llamaspec.reference.llama import empty_cache, hidden_states, unembed
from llamaspec.reference.rope import YarnScaling
from llamaspec.reference.sampling import distribution
from tests.serving.serving_site import EOS, TOKENIZER
from tests.support.random_models import random_checkpoint

CONFIG = Config(
    dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab=1024, context=256, eps=1e-6, theta=100_000.0,
    scaling=YarnScaling(4.0, original_context=64, magnitude=1.0), windows=(None, 48),
)  # fmt: skip
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- message.content + '\n' if message.role == 'system' else '<|' + message.role + '|>' + message.content -}}
    {{- eos_token if message.role == 'assistant' -}}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt -}}
"""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
FLOAT32 = arithmetic("float32")


class RememberedReader(ChatReader):
    """A reader that renders each conversation once, because every rendering of a template starts a process."""

    def text(self, messages: Messages, **variables: Any) -> MarkedText | None:
        return _text(self.template.name, self.template.source, json.dumps([list(messages), variables]))


@cache
def _text(name: str, source: str, request: str) -> MarkedText | None:
    messages, variables = json.loads(request)
    return ChatReader(TOKENIZER, ChatTemplate(name, source, TOKENS)).text(messages, **variables)


READER = RememberedReader(TOKENIZER, ChatTemplate("t", TEMPLATE, TOKENS))


@cache
def checkpoint() -> Checkpoint:
    """Draw a model like a trained model: its embedding is small, so that eps matters, and its head is large."""
    drawn = random_checkpoint(CONFIG, seed=0)
    tensors = dict(drawn.tensors)
    for name, factor in ((EMBEDDING, 1 / 16), (HEAD, 3)):
        array = (tensors[name].read() * factor).astype(np.float32)
        tensors[name] = Tensor(array.shape, array.dtype, lambda array=array: array)
    return replace(drawn, tensors=tensors, stops=frozenset({EOS}))


@cache
def definition() -> Definition:
    return define(checkpoint(), FLOAT32)


class Engine:
    """A right server: greedy or sampled texts with log-probabilities, for completions and conversations."""

    def __init__(self) -> None:
        self.definition = definition()
        self.lock = threading.Lock()

    def text_ids(self, text: str) -> list[int]:
        return encode_text(TOKENIZER, text)

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        ids = READER.read(messages)
        assert ids is not None
        return ids

    def start(self, ids: Sequence[int]) -> tuple[np.ndarray, Any]:
        """Read a prompt. Returns the logits after it, and the cache."""
        return self.extend(empty_cache(self.definition.config), ids)

    def extend(self, cache: Any, ids: Sequence[int]) -> tuple[np.ndarray, Any]:
        params, config = self.definition.params, self.definition.config
        x, cache = hidden_states(params, np.array(ids), cache, config=config)
        return self.rounded(unembed(params, x[-1], config=config)), cache

    def rounded(self, logits: np.ndarray) -> np.ndarray:
        return logits.astype(np.float32).astype(np.float64)

    def chances(self, logits: np.ndarray, body: Mapping[str, Any]) -> np.ndarray:
        """Return the distribution to draw from, before logit_bias."""
        options = {"top_k": body.get("top_k", 0), "top_p": body.get("top_p", 1.0), "min_p": body.get("min_p", 0.0)}
        seen = np.zeros(len(logits), bool)
        return distribution(
            logits, seen, temperature=float(body.get("temperature", 1)), repetition_penalty=1.0, **options
        )

    def biased(self, logits: np.ndarray, body: Mapping[str, Any]) -> np.ndarray:
        logits = logits.copy()
        for token, bias in (body.get("logit_bias") or {}).items():
            logits[int(token)] += bias
        return logits

    def reported(self, logits: np.ndarray, body: Mapping[str, Any]) -> np.ndarray:
        """Return the log-probabilities to report."""
        return logits - np.logaddexp.reduce(logits)

    def seed_of(self, body: Mapping[str, Any], index: int) -> Any:
        seed = body.get("seed")
        return None if seed is None else [seed, index]

    def count_of(self, body: Mapping[str, Any]) -> int:
        return body.get("n") or 1

    def length_of(self, body: Mapping[str, Any]) -> int:
        return body.get("max_tokens", 16)

    def usage(self, prompt: int, completion: int) -> dict[str, int]:
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def cut(self, text: str, stop: str) -> str:
        return text[: text.index(stop)]

    def chunks(self, text: str) -> list[str]:
        return [text[i : i + 3] for i in range(0, len(text), 3)]

    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        chat = "messages" in body
        ids = self.chat_ids(body["messages"]) if chat else self.text_ids(body["prompt"])
        choices, drawn_tokens = [], 0
        for index in range(self.count_of(body)):
            rng = np.random.default_rng(self.seed_of(body, index))
            text, reason, steps = self.write(ids, body, rng)
            drawn_tokens += len(steps)
            choices.append({"index": index, "finish_reason": reason, **_in_form(text, steps, body, chat=chat)})
        return {"choices": choices, "usage": self.usage(len(ids), drawn_tokens)}

    def write(
        self, ids: Sequence[int], body: Mapping[str, Any], rng: np.random.Generator
    ) -> tuple[str, str, list[tuple[int, np.ndarray]]]:
        """Write an answer. Returns its text, the reason why it ended, and each token with all log-probabilities."""
        stops = body.get("stop") or []
        logits, cache = self.start(ids)
        steps, drawn = [], []
        while len(drawn) < self.length_of(body):
            p = self.chances(self.biased(logits, body), body)
            token = int(np.searchsorted(np.cumsum(p), rng.random() * np.sum(p), side="right"))
            steps.append((token, self.reported(logits, body)))
            drawn.append(token)
            text = decode(TOKENIZER, drawn, start=False)
            if token == EOS:
                return text, "stop", steps
            for stop in [stops] if isinstance(stops, str) else stops:
                if stop in text:
                    return self.cut(text, stop), "stop", steps
            if len(drawn) < self.length_of(body):
                logits, cache = self.extend(cache, [token])
        return decode(TOKENIZER, drawn, start=False), "length", steps


def _in_form(text: str, steps: list[tuple[int, np.ndarray]], body: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    top = (body.get("top_logprobs") if chat else body.get("logprobs")) or 0
    entries = [
        (
            TOKENIZER.piece(token),
            float(row[token]),
            [(TOKENIZER.piece(i), float(row[i])) for i in np.argsort(-row)[:top].tolist()],
        )
        for token, row in steps
    ]
    if chat:
        content = [
            {
                "token": name,
                "logprob": lp,
                "top_logprobs": [{"token": text, "logprob": logprob} for text, logprob in likeliest],
            }
            for name, lp, likeliest in entries
        ]
        known = {"content": content} if body.get("logprobs") else None
        return {"message": {"role": "assistant", "content": text}, "logprobs": known}
    known = {
        "tokens": [name for name, _, _ in entries],
        "token_logprobs": [lp for _, lp, _ in entries],
        "top_logprobs": [dict(likeliest) for _, _, likeliest in entries],
    }
    return {"text": text, "logprobs": known if top else None}


class _Handler(BaseHTTPRequestHandler):
    engine: Engine

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "small"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            self.send_error(404)
            return
        with self.engine.lock:
            answer = self.engine.answer(self.path, body)
        if not body.get("stream"):
            self._send(json.dumps(answer).encode())
            return
        [choice] = answer["choices"]
        parts = [{"text": part} for part in self.engine.chunks(choice["text"])]
        parts.append({"text": "", "finish_reason": choice["finish_reason"]})
        events = [f"data: {json.dumps({'choices': [part]})}\n\n" for part in parts]
        self._send("".join([*events, "data: [DONE]\n\n"]).encode())

    def _send(self, raw: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """Serve `engine` on a free port for the duration of a with block, and yield the address."""
    handler = type("Handler", (_Handler,), {"engine": engine})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
