"""The engine's thread, with an executor that needs no model: which events each client gets, in which order."""

import threading
from time import sleep
from typing import Any

import numpy as np
import pytest

from llamaspec.serving.engine import FAILED, NO_RULE, NOT_NUMBERS, BatchingEngine
from llamaspec.serving.executor import PlanResult, Reports
from llamaspec.serving.programs import Pooled
from llamaspec.serving.request import (
    Embedding,
    Engine,
    Event,
    Finished,
    PromptLogprobs,
    PromptTooLong,
    QueueFull,
    Request,
    Tokens,
    TopLogprobs,
)
from llamaspec.serving.scheduler import Draws, Limits
from tests.serving.scheduler_machine import EOS, next_token, single_answer
from tests.support.waiting import PATIENCE, until

VOCAB, CONTEXT = 9, 40
LIMITS = Limits(pages=40, page=2, rows=3, chunk=4, burst=4, context=CONTEXT, waiting=20)


class Fake:
    """An executor that draws `next_token` or an allowed token, and waits or fails on request."""

    def __init__(self):
        self.goes_on, self.error = threading.Event(), None
        self.texts: dict[int, list[int]] = {}
        self.goes_on.set()

    def run(self, plan, requests, masks) -> PlanResult:
        self.goes_on.wait(PATIENCE)
        if self.error:
            raise self.error
        draws, reports = {}, {}
        for row in plan.rows:
            request = requests[row.number]
            text = [*self.texts.setdefault(row.number, [*request.prompt])][: row.start]
            tokens, reason = [], None
            for step in range(row.steps):
                text.append(row.fed[step] if step < len(row.fed) else tokens[-1])
                token = next_token(text, request.seed)
                if row.number in masks:
                    token = int(np.flatnonzero(masks[row.number])[0])
                tokens.append(token)
                if step >= len(row.fed) - 1 and token == EOS:
                    reason = "stop"
                    break
            self.texts[row.number] = [*text, tokens[-1]]
            draws[row.number] = Draws(tokens, reason)
            if request.logprobs is not None:
                reports[row.number] = report(tokens)
        prompt = None
        if plan.chunk and requests[plan.chunk.number].prompt_logprobs is not None:
            prompt = report(plan.chunk.tokens)
        pooled = None
        if plan.chunk and requests[plan.chunk.number].embeds:
            states: Any = np.array([[token, 1.0 if token < 8 else np.nan] for token in plan.chunk.tokens])
            pooled = Pooled(states[-1], states.sum(axis=0))
        return PlanResult(draws, reports, prompt, pooled)


def report(tokens) -> Reports:
    return Reports(tuple(-float(token) for token in tokens), tuple(TopLogprobs((), ()) for _ in tokens))


class Client:
    """All events that a request received."""

    def __init__(self):
        self.events: list[Event] = []
        self.ended = threading.Event()

    def __call__(self, event: Event) -> None:
        assert not self.ended.is_set(), "told after the end"
        self.events.append(event)
        if isinstance(event, Finished):
            self.ended.set()

    def wait(self) -> Finished:
        assert self.ended.wait(PATIENCE)
        end = self.events[-1]
        assert isinstance(end, Finished) and end.completion_tokens == len(self.ids)
        return end

    @property
    def ids(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Tokens) for token in event.ids]


@pytest.fixture
def fake():
    return Fake()


@pytest.fixture
def engine(fake):
    engine = BatchingEngine(fake, LIMITS, vocab=VOCAB, dim=2, eos=frozenset([EOS]))
    assert isinstance(engine, Engine)
    yield engine
    fake.goes_on.set()
    engine.close()
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]


def endless(prompt=(1, 1), **options) -> Request:
    """Return a request that runs until its context is full."""
    seed = next(
        seed for seed in range(10_000) if single_answer(Request(prompt, 99, seed=seed), CONTEXT)[1] == "context"
    )
    return Request(prompt, 99, seed=seed, **options)


def test_answers_are_those_of_each_request_alone(engine):
    requests = [Request((1, 2, i % 3, 2), 10, seed=i, logprobs=0) for i in range(20)]
    clients = [Client() for _ in requests]
    numbers = [engine.submit(request, client) for request, client in zip(requests, clients, strict=True)]
    assert len({*numbers}) == 20
    for request, client in zip(requests, clients, strict=True):
        end = client.wait()
        assert (client.ids, end.reason) == single_answer(request, CONTEXT)
        tokens = [event for event in client.events if isinstance(event, Tokens)]
        logprobs = [value for event in tokens for value in event.logprobs or ()]
        assert logprobs == [-float(token) for token in client.ids]
    stats = engine.stats()
    assert stats.completion_tokens == sum(len(client.ids) for client in clients)
    assert sum(stats.finished.values()) == 20 and stats.pages_held == stats.running == stats.waiting == 0
    assert stats.pages_free + stats.pages_cached == LIMITS.pages - 1


def test_a_prompt_without_an_answer(engine):
    client = Client()
    engine.submit(Request((1, 2, 0, 4, 5, 6), 0, prompt_logprobs=0), client)
    client.wait()
    assert client.events == [
        PromptLogprobs((-1.0, -2.0, 0.0, -4.0, -5.0), (TopLogprobs((), ()),) * 5),
        Finished("length", 6, 0, 0, None),
    ]


def test_what_cannot_be_served_is_refused(engine, fake):
    fake.goes_on.clear()
    with pytest.raises(PromptTooLong, match="41 tokens, but the context has 40"):
        engine.submit(Request((1,) * 41, 1), Client())
    for wrong in (Request((9,), 1), Request((1,), 1, stop_ids=frozenset([9])), Request((1,), 1, logit_bias={-1: 1.0})):
        with pytest.raises(ValueError, match=r"token id.*\b0\b.*\b8\b"):
            engine.submit(wrong, Client())
    clients = [Client() for _ in range(40)]
    with pytest.raises(QueueFull, match="20 requests are already waiting"):
        for client in clients:
            engine.submit(endless(), client)
    fake.goes_on.set()


@pytest.mark.parametrize("waits", [False, True])
def test_a_cancelled_request_ends_and_others_do_not_notice(engine, fake, waits):
    fake.goes_on.clear()
    neighbors, client = [Client() for _ in range(3 if waits else 2)], Client()
    for i, neighbor in enumerate(neighbors):
        engine.submit(endless((1, i)), neighbor)

    def deliver(event: Event) -> None:
        client(event)
        engine.cancel(number)

    number = engine.submit(endless(), deliver)
    if waits:
        engine.cancel(number)
        engine.cancel(number)
        engine.cancel(99)
    fake.goes_on.set()
    assert client.wait().reason == "cancelled" and bool(client.ids) != waits
    for i, neighbor in enumerate(neighbors):
        assert neighbor.wait().reason == "context" and neighbor.ids == single_answer(endless((1, i)), CONTEXT)[0]
    engine.cancel(number)


def test_an_embedding_covers_all_chunks_of_its_prompt(engine):
    texts, clients = [Client() for _ in range(3)], [Client() for _ in range(6)]
    prompts = [tuple(1 + (i + j) % 7 for j in range(length)) for i, length in enumerate((1, 3, 4, 5, 11, CONTEXT))]
    for i, client in enumerate(texts):
        engine.submit(endless((1, i)), client)
    for prompt, client in zip(prompts, clients, strict=True):
        engine.submit(Request(prompt, 0, embeds=True), client)
    for prompt, client in zip(prompts, clients, strict=True):
        assert client.wait()[:3] == ("length", len(prompt), 0)
        embedding, _ = client.events
        assert isinstance(embedding, Embedding)
        assert embedding.last.tolist() == [prompt[-1], 1]
        assert embedding.mean.tolist() == [np.float32(np.mean(prompt)), 1]
    broken = Client()
    engine.submit(Request((1, 2, 8, 1, 1, 1), 0, embeds=True), broken)
    assert (broken.wait().reason, broken.wait().message) == ("error", NOT_NUMBERS)
    assert len(broken.events) == 1
    with pytest.raises(ValueError, match="embeds must have max_tokens 0"):
        Request((1,), 1, embeds=True)


def test_a_deadline_passes(engine, fake):
    fake.goes_on.clear()
    client, neighbor = Client(), Client()
    engine.submit(endless(deadline=0.01), client)
    engine.submit(endless((1, 2), deadline=PATIENCE), neighbor)
    sleep(0.02)
    fake.goes_on.set()
    assert client.wait().reason == "expired"
    assert neighbor.wait().reason == "context"


def test_a_mask_is_asked_for_every_token(engine):
    seen = []

    def allowed(drawn):
        seen.append(list(drawn))
        mask = np.zeros(VOCAB, bool)
        mask[5 if len(drawn) < 3 else EOS] = True
        return mask

    client = Client()
    engine.submit(Request((1, 2), 10, allowed=allowed), client)
    assert client.wait().reason == "stop" and client.ids == [5, 5, 5, EOS]
    assert seen == [[5] * i for i in range(4)]


@pytest.mark.parametrize("wrong", ["raises", "allows nothing", "has another vocabulary"])
def test_a_mask_that_is_wrong_fails_its_request_alone(engine, wrong, caplog):
    def allowed(drawn):
        if wrong == "raises":
            raise RuntimeError("no such rule")
        return np.zeros(VOCAB if wrong == "allows nothing" else VOCAB + 1, bool)

    client, neighbor = Client(), Client()
    engine.submit(Request((1, 2), 10, allowed=allowed), client)
    engine.submit(endless(), neighbor)
    end = client.wait()
    assert end[0::4] == ("error", NO_RULE)
    assert ("RuntimeError: no such rule" if wrong == "raises" else "ValueError: expected a mask [9]") in caplog.text
    assert neighbor.wait().reason == "context"


def test_a_client_that_raises_is_dropped_alone(engine):
    def broken(event):
        raise RuntimeError("gone")

    neighbor = Client()
    engine.submit(endless(), broken)
    engine.submit(endless((1, 2)), neighbor)
    assert neighbor.wait().reason == "context"
    until(lambda: engine.stats().running == 0)
    assert engine.failed is None


def test_draining_lets_texts_end_and_accepts_none(engine, fake):
    client = Client()
    engine.submit(endless(), client)
    assert engine.drain(PATIENCE)
    assert client.wait().reason == "context"
    with pytest.raises(QueueFull, match="accepts no new"):
        engine.submit(endless(), Client())


def test_draining_cancels_what_takes_too_long(engine, fake, monkeypatch):
    fake.goes_on.clear()
    cancel_all = engine._cancel_all

    def cancel_and_go_on() -> None:
        cancel_all()
        fake.goes_on.set()

    monkeypatch.setattr(engine, "_cancel_all", cancel_and_go_on)
    client = Client()
    engine.submit(endless(), client)
    assert not engine.drain(0.01)
    assert client.wait().reason == "cancelled"


def test_a_failure_is_told_to_all_and_its_reason_to_the_log(engine, fake, caplog):
    fake.goes_on.clear()
    clients = [Client() for _ in range(6)]
    for client in clients:
        engine.submit(endless(), client)
    fake.error = MemoryError("no room")
    fake.goes_on.set()
    for client in clients:
        assert client.wait()[0::4] == ("error", FAILED) and "no room" not in FAILED
    assert "MemoryError: no room" in caplog.text
    assert isinstance(engine.failed, MemoryError)
    with pytest.raises(QueueFull, match="failed"):
        engine.submit(endless(), Client())
    assert engine.drain(PATIENCE)


@pytest.mark.parametrize("what", ["plan", "done", "ended"])
def test_a_scheduler_that_fails_keeps_nobody_waiting(engine, fake, what, monkeypatch):
    """After an exception in the scheduler, every client gets an error, even if the scheduler has lost its request."""
    fake.goes_on.clear()
    clients = [Client() for _ in range(6)]
    with engine._changed:  # the first plan is made after all requests are submitted
        for i, client in enumerate(clients):
            engine.submit(Request((1, 2), 1, seed=i), client)
    until(lambda: engine.stats().running == 3)
    right = getattr(engine._scheduler, what)

    def fails(*arguments, **options):
        right(*arguments, **options)
        raise KeyError("what it should not")

    monkeypatch.setattr(engine._scheduler, what, fails)
    fake.goes_on.set()
    ends = [client.wait() for client in clients]
    assert all(end[0::4] == ("error", FAILED) or end.reason == "length" for end in ends)  # ended before the failure
    assert isinstance(engine.failed, KeyError) and ends[-1].reason == "error"
    assert engine.drain(PATIENCE)


def test_a_log_that_fails_keeps_nobody_waiting(engine, fake, monkeypatch):
    fake.goes_on.clear()
    client = Client()
    engine.submit(endless(), client)
    monkeypatch.setattr("llamaspec.serving.engine.log.exception", lambda *_: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    fake.error = MemoryError("no room")
    fake.goes_on.set()
    assert client.wait()[0::4] == ("error", FAILED)


def test_memory_is_flat(engine):
    """After many requests, an engine keeps no data about them."""
    for i in range(1000):
        client = Client()
        engine.submit(Request((1, i % 5, i % 7), 2, seed=i), client)
        if i % 10 == 9:
            client.wait()
    assert engine.drain(PATIENCE)
    assert not engine._open and not engine._scheduler.waiting and len(engine._scheduler.pool.nodes) < LIMITS.pages
