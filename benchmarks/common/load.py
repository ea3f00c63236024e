"""Sends requests with prompts of random lengths to a server at random times, and measures the delays.

Requests come as a Poisson process: at a rate of r, the times between two requests are exponential with mean 1 / r. No
client waits for an earlier answer (an open loop), so the delays grow if a server is too slow. A delay counts from the
planned time of a request.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from jaxtyping import Float

PERCENTILES = (50, 95, 99)
HOPELESS = 600.0  # seconds without a byte, after which a request has failed


@dataclass(frozen=True)
class Workload:
    """Distribution of requests. Lengths are in tokens."""

    requests: int = 64
    prompt: int = 64  # median number of the tokens that only this prompt has; the distribution is log-normal
    spread: float = 0.7  # standard deviation of the logarithm of this number
    shared: float = 0.5  # share of the prompts that begin with a prefix of other prompts
    prefix: int = 128  # length of a shared prefix
    prefixes: int = 4  # number of different shared prefixes
    answer: int = 32  # mean length of an answer; the distribution is geometric
    seed: int = 0


class Ask(NamedTuple):
    """A request: the ids of its prompt, the number of tokens of its answer, and the seed of the answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int


class Answered(NamedTuple):
    """An answer, with times in seconds since the planned time of the first request."""

    planned: float
    pieces: tuple[float, ...]  # when each piece of text arrived
    ended: float
    text: str
    prompt_tokens: int
    tokens: int
    cached: int  # prompt tokens that the server reports as cached; 0 without a report
    error: str | None


def draw_requests(work: Workload, *, vocab: int, context: int) -> list[Ask]:
    """Draw requests with ids below `vocab`. Prompt and answer have at most `context` / 2 tokens each."""
    rng = np.random.default_rng(work.seed)
    most = context // 2
    heads = rng.integers(0, vocab, (work.prefixes, min(work.prefix, most // 2)))
    requests = []
    for number in range(work.requests):
        head = heads[rng.integers(work.prefixes)] if rng.random() < work.shared else heads[0][:0]
        own = min(max(1, round(work.prompt * np.exp(work.spread * rng.standard_normal()))), most - len(head))
        ids = (*head.tolist(), *rng.integers(0, vocab, own).tolist())
        requests.append(Ask(ids, min(int(rng.geometric(1 / work.answer)), most), number))
    return requests


def arrivals(count: int, rate: float | None, *, seed: int) -> Float[np.ndarray, " count"]:
    """Draw the planned times of `count` requests, `rate` per second on average. If `rate` is None, all are 0."""
    if rate is None:
        return np.zeros(count)
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return np.cumsum(gaps) - gaps[0]


def send(
    url: str,
    asks: Sequence[Ask],
    times: Sequence[float],
    *,
    extra: Mapping[str, Any],
    done: Callable[[int], object] = lambda count: None,
) -> list[Answered]:
    """Send each request to the server at `url` at its planned time, and wait for all answers.

    Requests also have the fields `extra`. After every answer, we call `done` with the number of answers so far. A
    request that fails has an error in place of its text.
    """

    async def all_of_them() -> list[Answered]:
        patience = aiohttp.ClientTimeout(total=None, sock_read=HOPELESS)
        ended = 0

        async def send_request(ask: Ask, when: float) -> Answered:
            nonlocal ended
            await asyncio.sleep(began + when - perf_counter())
            answer = await _answered(session, url, ask, when, began, extra)
            ended += 1
            done(ended)
            return answer

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=patience) as session:
            began = perf_counter()
            return await asyncio.gather(
                *(send_request(ask, float(when)) for ask, when in zip(asks, times, strict=True))
            )

    return asyncio.run(all_of_them())


async def _answered(
    session: aiohttp.ClientSession, url: str, ask: Ask, planned: float, began: float, extra: Mapping[str, Any]
) -> Answered:
    body = {"prompt": list(ask.prompt), "max_tokens": ask.max_tokens, "seed": ask.seed, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, **extra}
    texts, pieces, usage, error = [], [], {}, None
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                error = f"{response.status} {(await response.text())[:200]}"
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    error = str(event["error"])
                if text := "".join(choice["text"] for choice in event.get("choices", [])):
                    texts.append(text)
                    pieces.append(perf_counter() - began)
                usage = event.get("usage") or usage
    except (aiohttp.ClientError, TimeoutError, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    if not usage:
        error = error or "the answer has no field `usage`"
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    counted = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return Answered(planned, tuple(pieces), perf_counter() - began, "".join(texts), *counted, cached, error)


def summarize(answers: Sequence[Answered], texts: Sequence[str] | None = None) -> dict[str, Any]:
    """Compute throughput, and percentiles of the delays of requests, in seconds.

    - `first_token`: from the planned time of a request to its first piece of text
    - `between_tokens`: the mean time between two tokens of a text. If pieces have several tokens, we assume that the
      first piece has the average number of them. A text of one piece has no such time.
    - `longest_pause`: the longest time between two pieces of a text
    - `whole`: from the planned time of a request to the end of its answer

    If `texts` has an expected text for each answer, `different` counts the answers that differ from it.
    """
    good = [answer for answer in answers if answer.error is None]
    several = [answer for answer in good if len(answer.pieces) > 1]
    seconds = max((answer.ended for answer in answers), default=0.0)
    report: dict[str, Any] = {
        "requests": len(answers),
        "errors": [answer.error for answer in answers if answer.error is not None],
        "seconds": seconds,
        "requests_a_second": len(good) / seconds if seconds else 0.0,
        "tokens_a_second": sum(answer.tokens for answer in good) / seconds if seconds else 0.0,
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "cached_tokens": sum(answer.cached for answer in good),
        "tokens": sum(answer.tokens for answer in good),
        "first_token": percentiles([(answer.pieces or (answer.ended,))[0] - answer.planned for answer in good]),
        "between_tokens": percentiles([between_tokens(answer.pieces, answer.tokens) for answer in several]),
        "longest_pause": percentiles([float(np.diff(answer.pieces).max()) for answer in several]),
        "whole": percentiles([answer.ended - answer.planned for answer in good]),
    }
    if texts is not None:
        pairs = zip(answers, texts, strict=True)
        report["different"] = sum(answer.error is None and answer.text != text for answer, text in pairs)
    return report


def between_tokens(pieces: Sequence[float], tokens: int) -> float:
    """Compute the mean time between tokens from the arrival times of two or more pieces of text of equal length.

    >>> between_tokens([1.0, 2.0, 3.0], 3), between_tokens([1.0, 2.0, 3.0], 12)
    (1.0, 0.25)
    """
    return (pieces[-1] - pieces[0]) / (tokens * (1 - 1 / len(pieces)))


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Compute percentiles, with linear interpolation between two values.

    >>> percentiles([0.0, 1.0, 2.0])["p50"], percentiles([])["p99"]
    (1.0, None)
    """
    return {f"p{p}": float(np.percentile(values, p)) if values else None for p in PERCENTILES}
