"""Computes the embeddings of a request: submits each input to the engine, and pools and shortens the results."""

import asyncio
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic

import msgspec
import numpy as np
from jaxtyping import Float

from llamaspec.serving.answers import expired, refusal_of, submit
from llamaspec.serving.openai import EmbeddingRequest
from llamaspec.serving.openai_answers import EmbeddingEntry, EmbeddingList, EmbeddingUsage
from llamaspec.serving.prompts import Prompt
from llamaspec.serving.request import Embedding, Engine, Finished, QueueFull, Request
from llamaspec.serving.streaming import Inbox

MOST_AT_ONCE = 16  # inputs of one HTTP request that are in the engine at once, so that other clients get their turn
RETRY_SECONDS = 0.05  # pause before we try again to submit an input, while other clients fill the queue


async def embedded(
    engine: Engine,
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    *,
    seconds: float,
    draining: Callable[[], bool],
) -> list[Embedding]:
    """Compute the embeddings of `prompts`, in order, with one engine request for each prompt.

    All requests together have `seconds` of time. If the queue is full before the first input is submitted, raises
    QueueFull. Later inputs wait for room in the queue, unless `draining` returns True: then there will be no room.
    Raises Refusal if the engine refuses one of the requests, if one fails, or if the time is over. If this coroutine is
    cancelled, it cancels its engine requests.
    """
    expires = monotonic() + seconds
    inbox, numbers = Inbox(), dict[int, int]()  # the engine's numbers of open requests, by index
    pending, results = deque(range(len(requests))), dict[int, Embedding]()
    try:
        while pending or numbers:
            while pending and len(numbers) < MOST_AT_ONCE:
                index, remaining = pending[0], expires - monotonic()
                if remaining <= 0:
                    raise expired()
                request, deliver = replace(requests[index], deadline=remaining), partial(inbox.put, index)
                try:
                    numbers[index] = submit(engine, request, deliver, prompts[index])
                except QueueFull:
                    if draining() or not (numbers or results):
                        raise
                    break
                pending.popleft()
            if not numbers:  # no event of our own will announce room in the queue
                await asyncio.sleep(RETRY_SECONDS)
                continue
            for index, event in await inbox.take():
                if isinstance(event, Embedding):
                    results[index] = event
                elif isinstance(event, Finished):
                    del numbers[index]
                    if index not in results:
                        raise refusal_of(event)
    finally:
        for number in numbers.values():
            engine.cancel(number)
    return [results[index] for index in range(len(requests))]


def answer_in_json(
    body: EmbeddingRequest, embeddings: Sequence[Embedding], *, model: str, tokens: int, pooling: str
) -> bytearray:
    """Encode the answer to a request as JSON.

    `tokens` is the number of prompt tokens, and `pooling` is "last" or "mean".

    We encode one entry at a time. An answer may have 2,048 vectors: Python floats for all of them would take hundreds
    of megabytes, and encoding them in one call would block all other threads.
    """
    encoder = msgspec.json.Encoder()
    before, after = encoder.encode(EmbeddingList(model, [], EmbeddingUsage(tokens, tokens))).rsplit(b"[]", 1)
    text = bytearray(before)
    for index, embedding in enumerate(embeddings):
        vector = unit(embedding.mean if pooling == "mean" else embedding.last, body.dimensions)
        is_binary = body.encoding_format == "base64"
        entry = EmbeddingEntry(index, b64encode(vector.tobytes()).decode() if is_binary else vector.tolist())
        text += (b"," if index else b"[") + encoder.encode(entry)
    text += b"]" + after
    return text


def unit(vector: Float[np.ndarray, " dim"], dimensions: int | None) -> Float[np.ndarray, " dimensions"]:
    """Keep the first `dimensions` numbers (None: all), and divide them by their Euclidean norm. Zeros stay zeros.

    >>> unit(np.array([3.0, 4.0, 12.0]), 2).round(4)
    array([0.6, 0.8], dtype=float32)
    """
    beginning = vector[:dimensions].astype(np.float64)
    return (beginning / (np.linalg.norm(beginning) or 1.0)).astype("<f4")
