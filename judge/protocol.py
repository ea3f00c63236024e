"""Checks that a server follows OpenAI's API: sampling, ends of texts, counts, streams, and simultaneous requests."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from llamaspec.judge.arithmetic import Definition
from llamaspec.judge.client import Answer, RefusedError, Server
from llamaspec.judge.findings import Finding, Verdict
from llamaspec.judge.numbers import EXPLAINED, Spellings, Trace, compare, explained_by, trace_of, worst
from llamaspec.model.insight.trials import TEXT
from llamaspec.reference.sampling import distribution

PART = "protocol"
PROMPT = "Once upon a time"
LENGTH = 16  # tokens of an answer
BIAS = -100.0  # the strongest that OpenAI's API allows
TEMPERATURE = 2.0  # of draws: high, so that filters remove many tokens
DRAWS, DRAWN = 8, 40  # requests, and tokens of each: enough to find top-p 0.95
ODDS = 1e6  # another distribution must make the draws this many times as likely before we call the server wrong
ROUNDED = 1e-4  # error of a sum of probabilities


class Sampling(NamedTuple):
    """A way to choose tokens. A server may use it although no request asked for it."""

    what: str
    temperature: float = TEMPERATURE
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def chances(self, logits: Float[np.ndarray, " vocab"]) -> Float[np.ndarray, " vocab"]:
        """Return the distribution to draw from."""
        options = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        seen = np.zeros(len(logits), bool)
        return distribution(logits, seen, temperature=self.temperature, repetition_penalty=1.0, **options)


ASKED = Sampling("as asked")
SILENT = (
    Sampling("the temperature is ignored, and the likeliest token is chosen", temperature=0.0),
    *(Sampling(f"the temperature is ignored, and {t:g} is used", temperature=t) for t in (0.6, 0.7, 0.8, 1.0)),
    *(Sampling(f"only the {k} likeliest tokens are drawn (top-k)", top_k=k) for k in (5, 10, 20, 40, 50, 64, 100)),
    *(Sampling(f"unlikely tokens are never drawn (top-p {p:g})", top_p=p) for p in (0.8, 0.9, 0.95)),
    *(Sampling(f"unlikely tokens are never drawn (min-p {p:g})", min_p=p) for p in (0.02, 0.05, 0.1)),
)


class Protocol(NamedTuple):
    """The data that all checks use."""

    server: Server
    definition: Definition
    spellings: Spellings
    ids: list[int]  # of `PROMPT`
    at_once: int
    base: Answer  # how the server continues `PROMPT` at temperature 0

    def trace(self, name: str, answer: Answer) -> Trace:
        """Read an answer to `PROMPT`."""
        return trace_of(name, self.ids, answer.first, self.spellings, self.definition)


def greedy(server: Server, **fields: Any) -> Answer:
    """Ask how `PROMPT` continues at temperature 0, with the two likeliest tokens of each position."""
    return server.complete(PROMPT, **{"max_tokens": LENGTH, "temperature": 0, "logprobs": 2, **fields})


def check_protocol(
    server: Server, definition: Definition, spellings: Spellings, ids: list[int], *, at_once: int,
    before: Callable[[str], object] = lambda check: None,
) -> Iterator[Finding]:  # fmt: skip
    """Run all checks. `before` is called with the name of each check before it runs."""
    try:
        base = greedy(server)
    except RefusedError as refusal:
        yield Finding(PART, "completions", "unclear", str(refusal))
        return
    protocol = Protocol(server, definition, spellings, ids, at_once, base)
    for name, check in CHECKS.items():
        before(name)
        try:
            yield from (Finding(PART, name, verdict, message) for verdict, message in check(protocol))
        except RefusedError as refusal:
            yield Finding(PART, name, "unclear", f"not supported: {refusal}")


Outcomes = Iterator[tuple[Verdict, str]]


def _repeats(protocol: Protocol) -> Outcomes:
    yield from _same(protocol, greedy(protocol.server), "a repeated request at temperature 0")


def _in_company(protocol: Protocol) -> Outcomes:
    """Send the request at the same time as other requests."""
    company = [TEXT[start : start + 60] for start in range(0, 60 * (protocol.at_once - 1), 60)]
    prompts = [*company[::2], PROMPT, *company[1::2]]
    fields = {"max_tokens": LENGTH, "temperature": 0, "logprobs": 2}
    answers = protocol.server.at_once(prompts, most=protocol.at_once, **fields)
    yield from _same(
        protocol, answers[prompts.index(PROMPT)], f"the request sent at the same time as {len(company)} more"
    )


def _same(protocol: Protocol, answer: Answer, what: str) -> Outcomes:
    """Compare a text with the first answer. The texts may differ after two tokens that are about equally likely."""
    expected, actual = protocol.base.first.text, answer.first.text
    if actual == expected:
        yield "right", f"{what} gives the same text"
        return
    trace = protocol.trace(what, answer)
    if trace.entries and all(
        p.is_greedy for p in compare(explained_by(trace, protocol.definition), protocol.definition)
    ):
        yield "note", f"{what} gives another text, after a near tie that rounding decides"
        return
    yield "wrong", f"{what} gives another text: {_short(actual)}, expected {_short(expected)}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


def _length(protocol: Protocol) -> Outcomes:
    for most in (1, 5):
        answer = greedy(protocol.server, max_tokens=most)
        count = answer.completion_tokens
        if answer.first.finish_reason == "stop":
            continue
        if answer.first.finish_reason != "length":
            yield "wrong", f"finish_reason is {answer.first.finish_reason!r} after max_tokens, expected 'length'"
            return
        drawn = len(answer.first.steps) or count
        if drawn is not None and drawn != most:
            yield "wrong", f"max_tokens is {most}, but the answer has {drawn} tokens"
            return
    yield "right", "answers end after max_tokens"


def _usage(protocol: Protocol) -> Outcomes:
    base, steps = protocol.base, len(protocol.base.first.steps)
    if base.prompt_tokens is None or base.completion_tokens is None or base.total_tokens is None:
        yield "unclear", "the answer has no usage"
    elif base.total_tokens != base.prompt_tokens + base.completion_tokens:
        yield "wrong", f"total_tokens is {base.total_tokens}, not {base.prompt_tokens} + {base.completion_tokens}"
    elif steps and not 0 <= base.completion_tokens - steps <= 1:  # the token that ends a text may not be shown
        yield "wrong", f"completion_tokens is {base.completion_tokens}, but the answer has {steps} tokens"
    else:
        yield "right", "the counts of tokens add up"


def _stop(protocol: Protocol) -> Outcomes:
    text = protocol.base.first.text
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    if len(stop) < 3:
        yield "unclear", "the answer is too short for a stop string"
        return
    answer, expected = greedy(protocol.server, stop=[stop]).first, text[: text.index(stop)]
    if answer.text == expected and answer.finish_reason == "stop":
        yield "right", "an answer ends before a stop string"
    elif stop in answer.text:
        leaked = answer.text == expected + stop
        yield "wrong", f"the stop string is {'part of the answer' if leaked else 'ignored'}: {_short(answer.text)}"
    else:
        what = f"the answer is {_short(answer.text)} with finish_reason {answer.finish_reason!r}"
        yield "wrong", f"with the stop string {stop!r}, {what}, expected {_short(expected)} with 'stop'"


def _stream(protocol: Protocol) -> Outcomes:
    text, reason = protocol.server.stream(PROMPT, max_tokens=LENGTH, temperature=0)
    expected = protocol.base.first
    if text != expected.text:
        yield "wrong", f"a streamed answer is another text: {_short(text)}, expected {_short(expected.text)}"
    elif reason != expected.finish_reason:
        yield "wrong", f"finish_reason of a stream is {reason!r}, expected {expected.finish_reason!r}"
    else:
        yield "right", "a streamed answer is the same text"


def _choices(protocol: Protocol) -> Outcomes:
    answer = protocol.server.complete(PROMPT, max_tokens=LENGTH, temperature=1.5, n=3, seed=3)
    texts = {choice.text for choice in answer.choices}
    if len(answer.choices) != 3:
        yield "wrong", f"n is ignored: expected 3 choices, got {len(answer.choices)}"
    elif len(texts) == 1:
        yield "wrong", "all 3 choices are the same text, at temperature 1.5"
    else:
        yield "right", "n choices are different texts"


def _seed(protocol: Protocol) -> Outcomes:
    def text(seed: int) -> str:
        return protocol.server.complete(PROMPT, max_tokens=LENGTH, temperature=1.5, seed=seed).first.text

    first = text(5)
    if text(5) != first:
        yield "wrong", "the seed is ignored: the same seed gives different texts"
    elif text(6) == first and text(7) == first:
        yield "wrong", "the seed is ignored: different seeds give the same text, at temperature 1.5"
    else:
        yield "right", "the same seed gives the same text, and another seed another"


def _logprobs(protocol: Protocol) -> Outcomes:
    steps = protocol.base.first.steps
    if not steps:
        yield "unclear", "the server reports no log-probabilities"
        return
    for step in steps:
        numbers = [logprob for _, logprob in step.top] or [step.logprob]
        total = sum(map(math.exp, numbers))
        if max(*numbers, step.logprob) > ROUNDED or total > 1 + ROUNDED:
            yield "wrong", f"the probabilities of {len(numbers)} tokens at one position add up to {total:.4g}"
            return
    yield "right", "log-probabilities are at most 0, and their probabilities add up to at most 1"


def _bias(protocol: Protocol) -> Outcomes:
    trace = protocol.trace("bias", protocol.base)
    if not trace.entries:
        yield "unclear", "the server does not report its tokens"
        return
    first = trace.ids[trace.start]
    answer = greedy(protocol.server, max_tokens=1, logit_bias={str(first): BIAS})
    biased = protocol.trace("bias", answer)
    if biased.entries and biased.ids[biased.start] == first:
        yield "wrong", f"logit_bias is ignored: a token with {BIAS:g} is drawn"
    else:
        yield "right", f"a token with {BIAS:g} is not drawn"


def _draws(protocol: Protocol) -> Outcomes:
    """Compare draws at a high temperature with the definition, and with other ways to choose tokens.

    Suppose that the server draws as asked. Then the probability is at most 1 / ODDS that the draws are `ODDS` times as
    likely under some different distribution (Markov's inequality).
    """
    fields = {"max_tokens": DRAWN, "temperature": TEMPERATURE, "logprobs": 5}
    answers = [protocol.server.complete(PROMPT, seed=100 + i, **fields) for i in range(DRAWS)]
    traces = [trace for answer in answers if (trace := protocol.trace("draws", answer)).entries]
    if not traces:
        yield "unclear", "the server does not report its tokens"
        return
    rows = [row for trace in traces for row in protocol.definition.log_probabilities(trace.ids, trace.start)]
    drawn = [token for trace in traces for token in trace.ids[trace.start :]]
    odds = {sampling: _likelihood(sampling, rows, drawn) for sampling in (ASKED, *SILENT)}
    best = max(odds, key=lambda sampling: odds[sampling])
    if odds[best] > odds[ASKED] + math.log(ODDS):
        yield "wrong", f"{best.what}: {len(drawn)} draws at temperature {TEMPERATURE:g} show it"
    elif odds[ASKED] == -math.inf:
        yield "wrong", f"at temperature {TEMPERATURE:g}, a token is drawn that the model gives no chance"
    else:
        yield "right", f"{len(drawn)} draws at temperature {TEMPERATURE:g} fit the model's distribution"
    yield from _after_temperature(protocol, traces)


def _likelihood(sampling: Sampling, rows: Sequence[Float[np.ndarray, " vocab"]], drawn: Sequence[int]) -> float:
    total = 0.0
    for row, token in zip(rows, drawn, strict=True):
        if (p := sampling.chances(row)[token]) <= 0:
            return -math.inf
        total += math.log(p)
    return total


def _after_temperature(protocol: Protocol, traces: Sequence[Trace]) -> Outcomes:
    """Check whether a request at a high temperature gets the log-probabilities of temperature 1."""
    trace = explained_by(traces[0], protocol.definition)
    if worst(compare(trace, protocol.definition)) <= EXPLAINED:
        yield "right", "log-probabilities do not depend on the temperature"
    elif worst(compare(trace, protocol.definition, temperature=TEMPERATURE)) <= EXPLAINED:
        yield "wrong", f"log-probabilities at temperature {TEMPERATURE:g} are those after the temperature"


CHECKS: dict[str, Callable[[Protocol], Outcomes]] = {
    "temperature 0": _repeats,
    "company": _in_company,
    "max_tokens": _length,
    "usage": _usage,
    "stop": _stop,
    "stream": _stream,
    "n": _choices,
    "seed": _seed,
    "logprobs": _logprobs,
    "logit_bias": _bias,
    "sampling": _draws,
}
