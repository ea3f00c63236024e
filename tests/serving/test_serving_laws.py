"""A law of the engine: a request gets the same answer, bit for bit, with and without other requests.

A state machine sends requests of every kind to a small model, and cancels some. There are so few pages that requests
are preempted. Every answer must equal the answer that a fresh executor gives to this request without other requests.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from llamaspec.model.checkpoints.adapter import adapted
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.llama import load_backend
from llamaspec.model.options import RunOptions, SamplingOptions
from llamaspec.model.running.session import Session
from llamaspec.serving.engine import BatchingEngine
from llamaspec.serving.loading import load_engine
from llamaspec.serving.request import MOST_LOGPROBS, Event, Finished, PromptLogprobs, Request, Tokens
from tests.serving.served_models import ADAPTERS, EOS, FLOAT32, LIMITS, OWN_KEYS, POISON, Answer, Server, served
from tests.support.random_models import random_checkpoint
from tests.support.strategies import share_of
from tests.support.waiting import PATIENCE

MODELS = (OWN_KEYS, "3 to 1, q/k norms, window")
BFLOAT16, INT8 = np.dtype(jnp.bfloat16), np.dtype(np.int8)
BEGINNINGS = ((1, 2, 5, 6, 7, 8, 9, 10, 11), (1, 2, 5, 6, 9, 9, 9, 9))  # prompts with the same beginning
VOCAB = 50


def even_only(drawn: Sequence[int]) -> np.ndarray:
    """Return the mask of allowed tokens: all even token ids, and EOS from the fourth token on."""
    ids = np.arange(VOCAB)
    return (ids % 2 == 0) & (ids != POISON) | ((ids == EOS) & (len(drawn) > 2))


prompts = st.builds(
    lambda beginning, length, later: (*beginning[:length], *later),
    st.sampled_from(BEGINNINGS),
    st.integers(0, 9),
    st.lists(st.sampled_from([1, 5, 12, 13]), min_size=1, max_size=10),
)
requests = st.builds(
    Request,
    prompt=prompts | st.just((1, POISON, 5)),
    max_tokens=st.integers(0, 12),
    temperature=st.sampled_from([0.0, 0.0, 0.8, 1.5]),
    top_k=st.sampled_from([0, 0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5]),
    logit_bias=st.sampled_from([{}, {}, {7: 5.0, 8: -100.0}]),
    seed=st.integers(0, 3),
    stop_ids=st.sampled_from([frozenset(), frozenset([7, 8, 9])]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 3]),
    prompt_logprobs=st.sampled_from([None, None, None, 2]),
    priority=st.integers(-1, 1),
    tenant=st.sampled_from(["", "", "b"]),
    adapter=st.sampled_from(["", *ADAPTERS]),
    allowed=st.sampled_from([None, None, None, even_only]),
) | st.builds(
    Request,
    prompt=prompts | st.just((1, POISON, 5)),
    max_tokens=st.just(0),
    priority=st.integers(-1, 1),
    tenant=st.sampled_from(["", "b"]),
    embeds=st.just(True),
)


class LawMachine(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(MODELS), dtype=st.sampled_from([np.dtype(np.float32), BFLOAT16]))
    def begin(self, name, dtype):
        self.model = served(name, dtype)
        self.server = Server(self.model)
        self.judged = set()

    @precondition(lambda self: len(self.server.scheduler.waiting) < LIMITS.waiting)
    @rule(request=requests)
    def submit(self, request):
        self.server.submit(request if self.model.adapters else replace(request, adapter=""))

    @rule(data=st.data(), burst=st.none() | st.integers(1, 3))
    def turn(self, data, burst):
        running = sorted(self.server.scheduler.running)
        cancelled = data.draw(st.sampled_from([None, None, None, *running]))
        self.server.turn(cancelled, burst)
        self.judge()

    def judge(self):
        for number, answer in self.server.answers.items():
            if answer.reason and answer.reason != "cancelled" and number not in self.judged:
                self.judged.add(number)
                assert repr(answer) == repr(self.single_answer(number))  # NaN is not equal to itself

    def single_answer(self, number: int) -> Answer:
        server = Server(self.model)
        server.submit(replace(self.server.requests[number], priority=0))
        return server.finish()[0]

    def teardown(self):
        if hasattr(self, "server"):
            self.server.finish()
            self.judge()


@pytest.mark.slow  # 50 s: four models are compiled
@pytest.mark.timeout(7200)  # enough for the profile `thorough`
def test_answers_are_the_same_alone_and_among_others():
    examples = share_of(12, part=1, thorough=334)  # 10,000 steps
    run_state_machine_as_test(
        LawMachine,
        settings=settings(max_examples=examples, stateful_step_count=30, phases=[Phase.generate], deadline=None),
    )


def company(server: Server, request: Request) -> Answer:
    """Compute a request's answer on a server that also gets other requests, before and after this one.

    The other requests use each of the server's adapters, or no adapter.
    """
    adapters = ("", *server.adapters)
    neighbors = [
        Request(
            (*BEGINNINGS[i % 2][: 2 + i], 5), 14, temperature=1.0, seed=i, logprobs=1, ignore_eos=True,
            adapter=adapters[i % len(adapters)],
        )
        for i in range(7)
    ]  # fmt: skip
    for neighbor in neighbors[:3]:
        server.submit(neighbor)
    server.turn()
    number = server.submit(request)
    for neighbor in neighbors[3:]:
        server.submit(neighbor)
        server.turn()
    return server.finish()[number]


@pytest.mark.sampled(1)  # 4 s each
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", [FLOAT32, BFLOAT16, INT8], ids=str)
def test_an_answer_is_the_same_among_preempting_requests(name, cache):
    """A request gets the same answer with and without other requests, even if they preempt it."""
    model = served(name, BFLOAT16 if cache == BFLOAT16 else FLOAT32, cache=cache)
    preempted = 0
    for seed in range(6):
        options = {"temperature": 0.9 * (seed % 2), "seed": seed, "logprobs": 2, "priority": seed % 3}
        adapter = ("", *model.adapters)[seed % (1 + len(model.adapters))]
        request = Request((*BEGINNINGS[0], 13, 5), 12, **options, adapter=adapter)
        single, together = Server(model), Server(model)
        single.submit(request)
        assert company(together, request) == single.finish()[0]
        preempted += together.scheduler.preemptions
    assert preempted >= 6


def test_masks_are_not_recomputed_for_refed_tokens():
    """After a preemption, the mask function `allowed` is not called for tokens that are fed again."""
    model, preempted = served(MODELS[0]), 0
    for seed in range(12):
        request = Request(
            (1, 2, 5, 6, 9, 9, 9, 9, 5), 9, temperature=0.8, seed=seed, repetition_penalty=1.3, priority=2,
            **{"presence_penalty": 0.5, "ignore_eos": True, "allowed": even_only},
        )  # fmt: skip
        single, together = Server(model), Server(model)
        single.submit(request)
        together.submit(request)
        for _ in range(7):
            together.turn()
        assert len(together.answers[0].tokens) > 3
        assert company(together, request) == single.finish()[0] == together.answers[0]
        preempted += together.scheduler.preemptions
    assert preempted >= 12


@pytest.mark.sampled(1, first=True)  # 8 s each
@pytest.mark.parametrize("cache", [FLOAT32, INT8], ids=str)
def test_a_prompt_that_is_found_gives_the_same_answer(cache):
    """A request with a partly cached prompt gets the same answer bit for bit, for every length of the prompt."""
    model = served(MODELS[0], cache=cache)
    text = (1, 2, 5, 6, 7, 8, 9, 10, 11, 12, 13, 5, 7, 9, 20, 21, 22)
    for length in range(2, len(text)):
        request = Request(text[:length], 5, logprobs=3, temperature=0.0)
        cold, warm = Server(model), Server(model)
        cold.submit(request)
        warm.submit(Request(text, 1, temperature=0.0))
        warm.finish()
        number = warm.submit(request)
        assert warm.finish()[number] == cold.finish()[0]
        assert warm.scheduler.cached_tokens == (length - 1) // 4 * 4


def test_a_prompt_is_not_found_by_a_request_with_another_adapter():
    """Requests with different adapters have different answers, and find only pages of their own adapter."""
    model = served(OWN_KEYS)
    server, found, answers = Server(model), [], []
    for adapter in ("", *ADAPTERS, "", *ADAPTERS):
        before = server.scheduler.cached_tokens
        number = server.submit(Request((*BEGINNINGS[0], 13, 5), 3, logprobs=3, temperature=0.0, adapter=adapter))
        answers.append(server.finish()[number])
        found.append(server.scheduler.cached_tokens - before)
    assert found == [0, 0, 0, 8, 8, 8]
    assert answers[:3] == answers[3:] and len({answer.reports[0] for answer in answers}) == 3


@pytest.mark.parametrize("adapter", ["", *ADAPTERS])
def test_an_answer_is_the_answer_of_the_model_with_only_this_adapter(adapter):
    model = served(OWN_KEYS)
    request = Request((*BEGINNINGS[0], 13, 5), 4, temperature=0.0, logprobs=3, ignore_eos=True, adapter=adapter)
    server = Server(model)
    server.submit(request)
    answer = server.finish()[0]
    checkpoint = random_checkpoint(model.config, seed=0)
    if adapter:
        checkpoint = adapted(checkpoint, model.adapters[adapter])
    logits = load_backend(checkpoint, RunOptions(backend="reference")).logits([*request.prompt, *answer.tokens])
    for (logprob, _), token, row in zip(answer.reports, answer.tokens, logits[len(request.prompt) - 1 :], strict=False):
        expected = row - np.logaddexp.reduce(row)
        assert token == expected.argmax() and abs(logprob - expected[token]) < 1e-4


def test_a_poisoned_request_fails_alone():
    """Only a request with a NaN embedding fails. Its pages later serve other requests correctly."""
    model = served(MODELS[0])
    request = Request((1, 5, 6), 6, temperature=0.0, logprobs=2)
    single, together = Server(model), Server(model)
    single.submit(request)
    number = together.submit(request)
    poisoned = [together.submit(Request((POISON, 5, 6, 7, 8, 9, *range(10, 10 + i)), 6)) for i in range(3)]
    for _ in range(4):
        together.turn()
    again = together.submit(request)
    answers = together.finish()
    assert [answers[number].reason for number in poisoned] == ["error"] * 3
    assert answers[number] == answers[again] == single.finish()[0]


@pytest.fixture(scope="module")
def stories() -> Iterator[BatchingEngine]:
    """Run the built-in model with three rows, and with pages for less than two contexts."""
    engine = load_engine(open_checkpoint("stories"), RunOptions(context=128), width=3, cached_tokens=200)
    yield engine
    engine.close()


def answers(engine: BatchingEngine, requests: Sequence[Request]) -> list[list[Event]]:
    """Submit requests together, and return the events that each request gets."""
    events: list[list[Event]] = [[] for _ in requests]
    ends = [threading.Event() for _ in requests]
    for request, received, end in zip(requests, events, ends, strict=True):

        def take(event: Event, received: list[Event] = received, end: threading.Event = end) -> None:
            received.append(event)
            if isinstance(event, Finished):
                end.set()

        engine.submit(request, take)
    assert all(end.wait(PATIENCE) for end in ends) and engine.failed is None
    return events


@pytest.mark.slow  # 13 s
def test_a_text_is_that_of_one_sequence(stories):
    """The server's texts equal those of `Session`.

    Batches round differently, but here no two logits are close enough for this to change a token.
    """
    checkpoint = open_checkpoint("stories")
    backend: Any = load_backend(checkpoint, RunOptions(context=128))
    session = Session(backend, vocab=checkpoint.config.vocab)
    prompts = ((1, 400, 500), (1, 300), (1, 854, 469, 385, 291))
    options_by_request = [
        {"temperature": 0.9 * (i % 2), "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}
        for i in range(len(prompts))
    ]
    events = answers(
        stories,
        [Request(prompts[i], 30, **options_of_one, seed=i) for i, options_of_one in enumerate(options_by_request)],
    )
    for i, prompt in enumerate(prompts):
        options = SamplingOptions(**options_by_request[i])
        bursts = session.bursts(prompt, max_new_tokens=30, options=options, seed=i, stops=checkpoint.stops)
        expected = [token for tokens, _ in bursts for token in tokens]
        assert [token for event in events[i] if isinstance(event, Tokens) for token in event.ids] == expected
        end = events[i][-1]
        assert isinstance(end, Finished) and end.completion_tokens == len(expected)


OPTIONS = {
    "prompt": st.lists(st.integers(0, 1023), min_size=1, max_size=70).map(tuple),
    "max_tokens": st.integers(0, 9),
    "temperature": st.sampled_from([0.0, 0.0, 0.0, 0.8]),
    "top_k": st.sampled_from([0, 1, 1024, 5000]),
    "seed": st.integers(0, 2**64 - 1),
    "stop_ids": st.frozensets(st.integers(0, 1023), max_size=3),
    "ignore_eos": st.booleans(),
    "logprobs": st.none() | st.integers(0, MOST_LOGPROBS),
    "prompt_logprobs": st.none() | st.integers(0, MOST_LOGPROBS),
    "logit_bias": st.dictionaries(st.integers(0, 1023), st.sampled_from([-100.0, 100.0, 0.5]), max_size=3),
}


@pytest.mark.slow  # 7 s
@given(options=st.lists(st.fixed_dictionaries(OPTIONS), min_size=1, max_size=4))
def test_log_probabilities_of_any_requests_add_up(stories, options):
    """For any options, the engine reports log-probabilities that agree with each other.

    Each token comes with the requested number of likeliest tokens, the likeliest first.
    """
    requests = [Request(**fields) for fields in options]
    for request, events in zip(requests, answers(stories, requests), strict=True):
        end = events[-1]
        assert isinstance(end, Finished) and end.reason in ("stop", "length", "context")
        tokens = [event for event in events if isinstance(event, Tokens)]
        assert end.completion_tokens == sum(len(event.ids) for event in tokens) <= request.max_tokens
        for event in tokens:
            assert (event.logprobs is None) == (request.logprobs is None) == (event.top_logprobs is None)
            for token, logprob, top in zip(event.ids, event.logprobs or (), event.top_logprobs or (), strict=False):
                assert len(top.ids) == len({*top.ids}) == len(top.logprobs) == request.logprobs
                assert list(top.logprobs) == sorted(top.logprobs, reverse=True)
                assert max(top.logprobs, default=logprob) >= logprob
                known = dict(zip(*top, strict=True))
                assert known.get(token, logprob) == logprob
                if request.temperature == 0 and not request.logit_bias and request.logprobs:
                    assert logprob == top.logprobs[0]
        read = [event for event in events if isinstance(event, PromptLogprobs)]
        assert len(read) == (request.prompt_logprobs is not None and len(request.prompt) > 1)
        assert all(len(event.logprobs) == len(request.prompt) - 1 == len(event.top_logprobs) for event in read)


def first_token(request: Request) -> Answer:
    server = Server(served(MODELS[0]))
    server.submit(replace(request, max_tokens=1, temperature=0.0))
    return server.finish()[0]


def test_bias_penalties_and_masks():
    """Bias, penalties and masks each change the likeliest token as expected."""
    prompt = (1, 5, 6, 7)
    unrestricted = first_token(Request(prompt, 1, logprobs=20))
    ids, values = unrestricted.reports[0][1]
    best, second = ids[:2]
    gap = values[0] - values[1]
    assert unrestricted.tokens == [best] and unrestricted.reports[0][0] == values[0]
    assert first_token(Request(prompt, 1, logit_bias={second: gap * 0.99})).tokens == [best]
    assert first_token(Request(prompt, 1, logit_bias={second: gap * 1.01})).tokens == [second]
    even = next(token for token in ids if token % 2 == 0 and token != POISON)
    assert first_token(Request(prompt, 1, allowed=even_only)).tokens == [even]

    # The presence penalty counts each token of the answer once, the frequency penalty every time; neither counts the
    # prompt.
    for request in (Request(prompt, 4, presence_penalty=2.0), Request(prompt, 4, frequency_penalty=2.0)):
        server = Server(served(MODELS[0]))
        server.submit(replace(request, temperature=0.0, ignore_eos=True, logit_bias={best: 3.0 + gap}))
        assert server.finish()[0].tokens[0] == best
    repeated = Server(served(MODELS[0]))
    repeated.submit(Request(prompt, 6, temperature=0.0, ignore_eos=True, logit_bias={9: 100.0}, frequency_penalty=2.0))
    assert repeated.finish()[0].tokens == [9] * 6
