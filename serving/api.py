"""Endpoints that answer with JSON: OpenAI's endpoints and the tokenizer's endpoints."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from llamaspec.model.chat.channels import Channels, channels_of
from llamaspec.model.options import MAX_SEED, SAMPLING, SamplingOptions, check_seed
from llamaspec.model.tokenizers.tokenizer import named_tokens
from llamaspec.serving.answers import Answering, Choice, queue_full, shutting_down
from llamaspec.serving.embeddings import answer_in_json, embedded
from llamaspec.serving.forms import ChatForm, CompletionForm, Head, WireFormat, spell
from llamaspec.serving.grammar import Grammars, Rules
from llamaspec.serving.metrics import Metrics
from llamaspec.serving.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Refusal,
    SampledRequest,
    TextFormat,
    TokenizeRequest,
    Tool,
)
from llamaspec.serving.openai_answers import ModelCard
from llamaspec.serving.prompts import EFFORT, Prompt, Prompts
from llamaspec.serving.request import Engine, QueueFull, Request
from llamaspec.serving.streaming import TextReader
from llamaspec.serving.tools import CallForm, CallReader, offered_tools

DEFAULT_COMPLETION = 16  # tokens, OpenAI's default
MOST_PROMPTS = 32  # prompts in one request
MOST_INPUTS = 2048  # inputs in one request for embeddings, OpenAI's limit
THREADS = 2  # threads that encode prompts
MOST_PREPARED = 256  # prompts that are being encoded or wait to be encoded


@dataclass(frozen=True)
class Answer:
    """An accepted request: its engine requests, its wire format, and whether the answer is streamed."""

    answering: Answering
    form: WireFormat
    stream: bool
    usage: bool  # whether a stream ends with token counts


class Api:
    """The endpoints of one model and its adapters."""

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        model: ModelCard,
        metrics: Metrics,
        *,
        fingerprint: str,
        request_seconds: float,
        adapters: Sequence[str] = (),
        sampling: SamplingOptions | None = None,
        pooling: str = "last",
    ):
        """Serve `engine`. `fingerprint` identifies the weights and programs that produce the texts.

        `adapters` are the names of the engine's adapters. Clients request them as if they were models.

        A request expires after `request_seconds`, or earlier if it sets `max_seconds`. `sampling` has the defaults for
        the fields that choose the next token; None means OpenAI's defaults. `pooling` is the default for embeddings.
        """
        self.engine = engine
        self.model = model
        about = {"created": model.created, "owned_by": model.owned_by, "context": model.context, "parent": model.id}
        # the model and its adapters, by the names under which clients request them
        self.models = {model.id: model} | {name: ModelCard(name, **about) for name in adapters}
        self.metrics = metrics
        self.draining = False  # whether the server is shutting down
        self._prompts = prompts
        self._fingerprint = fingerprint
        self._request_seconds = request_seconds
        self._pooling = pooling
        self._sampling = {} if sampling is None else {name: getattr(sampling, name) for name in SAMPLING}
        vocab, tokenizer = engine.vocab, prompts.tokenizer
        self._for_texts = Grammars(tokenizer, vocab=vocab, stops=prompts.stops)
        self._for_turns = Grammars(tokenizer, vocab=vocab, stops=prompts.turn_stops)
        self._preparing = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prompts")

    def close(self) -> None:
        """Stop the threads that encode prompts and the processes that render templates."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._prompts.close()

    async def complete(self, body: CompletionRequest, *, tenant: str) -> Answer:
        """Start to answer a completion request. Raises Refusal for an invalid request."""
        self.check_model(body.model)
        if body.best_of not in (None, body.n or 1):
            raise Refusal(
                f"best_of: expected the same number as n ({body.n or 1}), got {body.best_of}", param="best_of"
            )
        logprobs = body.logprobs
        prompts = await self._prompts_of(body.prompt or "", param="prompt", most=MOST_PROMPTS)
        rules = await self._rules(self._for_texts, body)
        most = DEFAULT_COMPLETION if body.max_tokens is None else body.max_tokens
        about = {"tenant": tenant, "echo": bool(body.echo), "shows_end": logprobs is not None}
        answering = self._answering(body, prompts, most, logprobs, rules, **about)
        usage = _wants_usage(body)
        form = CompletionForm(self._head("cmpl", body), self._prompts.tokenizer, logprobs=logprobs, usage=usage)
        return Answer(answering, form, bool(body.stream), usage)

    async def chat(self, body: ChatRequest, *, tenant: str) -> Answer:
        """Start to answer a chat request. Raises Refusal for an invalid request."""
        self.check_model(body.model)
        top = body.top_logprobs
        if top and not body.logprobs:
            raise Refusal("top_logprobs needs logprobs: true", param="top_logprobs")
        if None not in (body.max_tokens, body.max_completion_tokens):
            raise Refusal("give either max_tokens or max_completion_tokens, not both", param="max_tokens")
        tools, forced, most_calls = offered_tools(body)
        formatted = not isinstance(body.response_format, TextFormat | None)
        if formatted and body.answer_ids:  # a grammar needs the answer from its beginning
            raise Refusal("answer_ids cannot be combined with response_format", param="answer_ids")
        read = partial(self._prompts.from_messages, body.messages, tools=tools, forced=forced, formatted=formatted)
        prompt = await self._in_thread(partial(read, begun=body.answer_ids or (), options=_template_options(body)))
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (top or 0) if body.logprobs else None
        if prompt.calls and forced:
            _check_ends(body, "tool_choice")
            rules = await self._in_thread(partial(self._rules_of_calls, prompt.calls, tools, most_calls or 1))
        else:
            rules = await self._rules(self._for_turns, body)
        most = self.engine.context if most is None else most
        names = frozenset(tool.function.name for tool in tools)
        rendered = prompt.ids[: len(prompt.ids) - len(prompt.begun)]
        channels = partial(channels_of, self._prompts.tokenizer, rendered, tools=names)
        answering = self._answering(body, [prompt], most, logprobs, rules, tenant=tenant, channels=channels)
        usage = _wants_usage(body)
        reader = None
        if prompt.calls and not prompt.calls.on_channel:
            reader = partial(CallReader, prompt.calls, names, begun=forced, most=most_calls)
        head, logs = self._head("chatcmpl", body), bool(body.logprobs)
        form = ChatForm(head, self._prompts.tokenizer, logprobs=logs, usage=usage, count=body.n or 1, reader=reader)
        return Answer(answering, form, bool(body.stream), usage)

    async def embed(self, body: EmbeddingRequest) -> bytearray:
        """Compute embeddings, and return the answer as JSON. Raises Refusal for an invalid request."""
        self.check_model(body.model)
        dim, pooling = self.engine.dim, body.pooling or self._pooling
        if body.dimensions is not None and body.dimensions > dim:
            message = f"dimensions: expected at most {dim}, the width of this model, got {body.dimensions}"
            raise Refusal(message, param="dimensions", code="out_of_range")
        if pooling not in ("last", "mean"):
            message = f"pooling: this model's files state {pooling}, which is not supported: set it to last or mean"
            raise Refusal(message, param="pooling", code="missing_required_parameter")
        prompts = await self._prompts_of(body.input, param="input", most=MOST_INPUTS, is_complete=True)
        if not all(prompt.ids for prompt in prompts):
            raise Refusal("input: expected at least one token, got an empty input", param="input")
        options = {"priority": body.priority or 0, "adapter": self._adapter_of(body)}
        requests = [Request(tuple(prompt.ids), 0, embeds=True, **options) for prompt in prompts]
        limits = {"seconds": self._deadline_of(body), "draining": lambda: self.draining}
        try:
            embeddings = await embedded(self.engine, prompts, requests, **limits)
        except QueueFull as error:
            raise self._no_room(error) from None
        tokens = sum(len(prompt.ids) for prompt in prompts)
        about = {"model": body.model or self.model.id, "tokens": tokens, "pooling": pooling}
        # `_in_thread` might refuse this last step, although the work is done.
        write = partial(answer_in_json, body, embeddings, **about)
        return await asyncio.get_running_loop().run_in_executor(self._threads, write)

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Encode a text or a conversation as token ids. Raises Refusal for an invalid request."""
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refusal("give either prompt or messages, not both", param="prompt")
        for name in ("tools", EFFORT, "chat_template_kwargs") if body.prompt is not None else ():
            if getattr(body, name) is not None:
                raise Refusal(f"{name} needs messages, and this request has none", param=name)
        if body.messages is not None:
            read = partial(self._prompts.from_messages, body.messages, tools=body.tools or ())
            encoded = await self._in_thread(partial(read, options=_template_options(body)))
        else:
            encode = partial(self._prompts.from_text, body.prompt or "", bos=body.add_special_tokens)
            encoded = await self._in_thread(encode)
        pieces = [spell(self._prompts.tokenizer, token) for token in encoded.ids]
        length = self.engine.context
        return {"count": len(encoded.ids), "max_model_len": length, "tokens": encoded.ids, "token_strs": pieces}

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        """Decode token ids. Raises Refusal for an invalid request."""
        self.check_model(body.model)
        ids = self._prompts.from_ids(body.tokens, param="tokens").ids
        return {"prompt": await self._in_thread(partial(self._prompts.text_of, ids))}

    def tokenizer_info(self) -> dict[str, Any]:
        """Describe the tokenizer, for clients that call the tokenizer endpoints."""
        tokenizer, template = self._prompts.tokenizer, self._prompts.template
        return {
            "vocab_size": tokenizer.vocab,
            "bos_token": None if tokenizer.bos is None else tokenizer.piece(tokenizer.bos),
            "eos_token": next((tokenizer.piece(token) for token in sorted(self._prompts.stops)), None),
            "chat_template": template.source if template else None,
        }

    def check_model(self, name: str | None) -> None:
        """Raise Refusal if a request names a model or adapter that this server does not have."""
        if name is not None and name not in self.models:
            message = f"no model named {name[:100]}: this server has {', '.join(self.models)}"
            raise Refusal(message, status=404, param="model", code="model_not_found")

    async def _prompts_of(
        self, value: str | Sequence[Any], *, param: str, most: int, is_complete: bool = False
    ) -> list[Prompt]:
        """Encode one or several texts, or check one or several lists of token ids.

        `param` is the field of the request that has them, and `most` is the largest number of prompts. If
        `is_complete`, we append to each text the ids that the tokenizer puts at the end of a text.
        """
        encode = partial(self._prompts.from_text, param=param, is_complete=is_complete)
        if isinstance(value, str):
            return [await self._in_thread(partial(encode, value))]
        if ids := [token for token in value if isinstance(token, int)]:
            if len(ids) < len(value):
                raise Refusal(f"{param}: a list must contain only strings or only token ids", param=param)
            return [self._prompts.from_ids(ids, param=param)]
        if len(value) > most:
            raise Refusal(f"{param}: expected at most {most} texts, got {len(value)}", param=param)
        prompts = []
        for item in value:
            if isinstance(item, str):
                prompts.append(await self._in_thread(partial(encode, item)))
            elif isinstance(item, list):
                prompts.append(self._prompts.from_ids(item, param=param))
        return prompts

    async def _rules(self, grammars: Grammars, body: SampledRequest) -> Rules:
        """Compile the grammar that `response_format` asks for. This may take a second."""
        if isinstance(body.response_format, TextFormat | None):
            return lambda: None
        _check_ends(body, "response_format")
        return await self._in_thread(partial(grammars.allowed_by, body.response_format))

    def _rules_of_calls(self, form: CallForm, tools: Sequence[Tool], most: int) -> Rules:
        """Compile the grammar of answers that contain from one to `most` calls of `tools`."""
        schema = form.schema(tools, most=most)
        if form.listed or form.on_channel:
            return self._for_turns.of_schema(schema, param="tools")
        return self._for_turns.of_schema(schema, param="tools", most=most, separator=form.separator())

    async def _in_thread[T](self, work: partial[T]) -> T:
        """Run slow work in a thread, for example render a template, so that the event loop can serve other requests.

        Raises Refusal if `MOST_PREPARED` calls of this method have not returned yet.
        """
        if self._preparing >= MOST_PREPARED:
            self.metrics.refused.labels("queue").inc()
            raise queue_full(f"{self._preparing} requests are already waiting for their prompts to be encoded")
        self._preparing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._preparing -= 1

    def _answering(
        self,
        body: SampledRequest,
        prompts: Sequence[Prompt],
        most: int,
        logprobs: int | None,
        rules: Rules,
        *,
        tenant: str,
        echo: bool = False,
        shows_end: bool = False,
        channels: Callable[[], Channels | None] = lambda: None,
    ) -> Answering:
        """Submit `body.n` engine requests for each prompt, with consecutive seeds.

        An answer has up to `most` tokens, and reports the `logprobs` likeliest tokens per position. `rules` makes the
        grammar of an answer. If `echo`, the text of a choice begins with the prompt. If `shows_end`, the tokens of a
        choice include its end token. `channels` makes the parser that separates the reasoning of an answer from its
        text.
        """
        if body.stream_options is not None and not body.stream:
            raise Refusal("stream_options needs stream: true", param="stream_options")
        texts = _stop_texts(body)
        tokenizer = self._prompts.tokenizer
        choices: list[Choice] = []
        for prompt in prompts:
            if not prompt.ids:
                raise Refusal(
                    "prompt: the prompt is empty, and this model has no BOS token to start from", param="prompt"
                )
            requests = self._requests(body, prompt, most, logprobs, rules, tenant, echo=echo)
            for request in requests:
                ends = {"stop_texts": texts, "stops": request.stop_ids, "shows_end": shows_end}
                spelled = prompt.calls.spelled(tokenizer.special) if prompt.calls else None
                apart = {"spelled": spelled, "channels": channels()}
                reader = TextReader(tokenizer, begins=prompt.begins, begun=prompt.begun, **apart, **ends)
                before = TextReader(tokenizer, begins=True) if echo else None
                choices.append(Choice(len(choices), request, prompt, reader, echo=before))
        answering = Answering(self.engine, choices, self.metrics)
        try:
            answering.start()
        except QueueFull as error:
            raise self._no_room(error) from None
        return answering

    def _no_room(self, error: QueueFull) -> Refusal:
        """Make the error response for a request that the engine's queue did not accept, and count it."""
        self.metrics.refused.labels("queue").inc()
        return shutting_down() if self.draining else queue_full(str(error))

    def _requests(
        self,
        body: SampledRequest,
        prompt: Prompt,
        most: int,
        logprobs: int | None,
        rules: Rules,
        tenant: str,
        *,
        echo: bool,
    ) -> list[Request]:
        names = (*SAMPLING, "presence_penalty", "frequency_penalty", "priority")
        stated = {name: value for name in names if (value := getattr(body, name)) is not None}
        options = self._sampling | stated
        try:
            named = named_tokens(self._prompts.tokenizer, _stop_texts(body))
            seed = check_seed(body.seed if body.seed is None or body.seed >= 0 else body.seed & MAX_SEED)
            if options.get("top_k", 0) < 0:
                options["top_k"] = 0
            if options.get("top_p") == 0:  # top_p 0 keeps only the likeliest token
                options |= {"top_p": 1.0, "temperature": 0.0}
            return [
                Request(
                    prompt=tuple(prompt.ids),
                    max_tokens=min(most, self.engine.context),
                    seed=(seed + i) & MAX_SEED,
                    stop_ids=named if body.ignore_eos else prompt.stops | named,
                    ignore_eos=bool(body.ignore_eos),
                    logit_bias=self._biases(body.logit_bias or {}),
                    logprobs=logprobs,
                    # The first token of a prompt has no log-probability, so a prompt of one token has none.
                    prompt_logprobs=logprobs if echo and len(prompt.ids) > 1 else None,
                    allowed=rules(),
                    tenant=f"{tenant}/{body.cache_salt or ''}",
                    adapter=self._adapter_of(body),
                    deadline=self._deadline_of(body),
                    **options,
                )
                for i in range(body.n or 1)
            ]
        except ValueError as error:
            raise _out_of_range(str(error)) from None

    def _adapter_of(self, body: SampledRequest | EmbeddingRequest) -> str:
        """Return the name of the adapter that a request asks for, or "" for the model without an adapter."""
        return "" if body.model in (None, self.model.id) else body.model

    def _deadline_of(self, body: SampledRequest | EmbeddingRequest) -> float:
        """Return the seconds until a request expires: its own limit, but at most the server's."""
        return min(body.max_seconds or self._request_seconds, self._request_seconds)

    def _biases(self, by_token: dict[str, float]) -> dict[int, float]:
        biases = {}
        for token, bias in by_token.items():
            if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < self.engine.vocab):
                raise Refusal(
                    f"logit_bias: expected token ids below {self.engine.vocab} as keys, got {token[:20]!r}",
                    param="logit_bias",
                )
            biases[int(token)] = bias
        return biases

    def _head(self, prefix: str, body: SampledRequest) -> Head:
        name = f"{prefix}-{uuid.uuid4().hex}"
        return Head(name, int(time.time()), body.model or self.model.id, self._fingerprint)


def _stop_texts(body: SampledRequest) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else body.stop or []


def _check_ends(body: SampledRequest, param: str) -> None:
    """Raise Refusal if `ignore_eos` is combined with `param`, because a grammar then decides where the answer ends."""
    if body.ignore_eos:
        raise Refusal(f"ignore_eos cannot be combined with {param}", param="ignore_eos")


def _template_options(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Collect the variables that a request passes to the chat template, except messages and tools."""
    effort = {} if body.reasoning_effort is None else {EFFORT: body.reasoning_effort}
    return (body.chat_template_kwargs or {}) | effort


def _wants_usage(body: SampledRequest) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def _out_of_range(message: str) -> Refusal:
    """Turn a ValueError about an option into a Refusal. The first word of its message names the field."""
    name = message.split(" ", 1)[0].replace("-", "_")
    param = {"max_new_tokens": "max_tokens"}.get(name, name)
    known = {*chain.from_iterable(kind.__struct_fields__ for kind in (CompletionRequest, ChatRequest))}
    if param not in known:
        return Refusal(message, code="out_of_range")
    return Refusal(f"{param}{message[len(name) :]}", param=param, code="out_of_range")
