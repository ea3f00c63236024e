"""Computes the embeddings of a request: submits each input to the engine, and pools and shortens the results."""

from base64 import b64encode
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np
from jaxtyping import Float

from llamaspec.serving.answers import refusal_of, submit
from llamaspec.serving.metrics import Metrics
from llamaspec.serving.openai import EmbeddingRequest
from llamaspec.serving.openai_answers import EmbeddingEntry, EmbeddingList, EmbeddingUsage
from llamaspec.serving.prompts import Prompt
from llamaspec.serving.request import Embedding, Engine, Finished, Request
from llamaspec.serving.streaming import Inbox

MOST_AT_ONCE = 16  # inputs of one HTTP request that are in the engine at once, so that other clients get their turn


async def embedded(
    engine: Engine, prompts: Sequence[Prompt], requests: Sequence[Request], metrics: Metrics
) -> list[Embedding]:
    """Compute the embeddings of `prompts`, in order, with one engine request for each prompt.

    Raises Refusal if the engine refuses one of the requests, or if one fails. If this coroutine is cancelled, it
    cancels its engine requests.
    """
    inbox, numbers = Inbox(), dict[int, int]()  # the engine's numbers of open requests, by index
    pending, results = deque(range(len(requests))), dict[int, Embedding]()
    try:
        while pending or numbers:
            while pending and len(numbers) < MOST_AT_ONCE:
                index = pending.popleft()
                deliver = partial(inbox.put, index)
                numbers[index] = submit(engine, requests[index], deliver, prompts[index], metrics)
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


def answer_of(
    body: EmbeddingRequest, embeddings: Sequence[Embedding], *, model: str, tokens: int, pooling: str
) -> EmbeddingList:
    """Write the answer to a request. `tokens` is the number of prompt tokens, and `pooling` is "last" or "mean"."""
    entries = []
    for index, embedding in enumerate(embeddings):
        vector = unit(embedding.mean if pooling == "mean" else embedding.last, body.dimensions)
        is_binary = body.encoding_format == "base64"
        entries.append(EmbeddingEntry(index, b64encode(vector.tobytes()).decode() if is_binary else vector.tolist()))
    return EmbeddingList(model, entries, EmbeddingUsage(tokens, tokens))


def unit(vector: Float[np.ndarray, " dim"], dimensions: int | None) -> Float[np.ndarray, " dimensions"]:
    """Keep the first `dimensions` numbers (None: all), and divide them by their Euclidean norm. Zeros stay zeros.

    >>> unit(np.array([3.0, 4.0, 12.0]), 2).round(4)
    array([0.6, 0.8], dtype=float32)
    """
    beginning = vector[:dimensions].astype(np.float64)
    return (beginning / (np.linalg.norm(beginning) or 1.0)).astype("<f4")
