"""Sessions, stop strings and streaming: the code between a model and the text that a user sees."""

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.model.generation import Generation, StopTexts
from llamaspec.model.options import SamplingOptions
from llamaspec.model.running.session import Session

VOCAB = 300
GREEDY = SamplingOptions(temperature=0.0)


class Alphabet:
    """A tokenizer with bytes as ids; 256 begins a text and 257 ends it."""

    vocab, bos, eos, special = VOCAB, 256, 257, {"<s>": 256, "</s>": 257}
    dummy_prefix, absorbs, appended = False, {}, ()

    def trimmed(self, text: str, *, after: str | None, before: str | None) -> str:
        return text

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        return list(text.encode())

    encode_after_special = encode

    def bytes_of(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    first_bytes_of = bytes_of

    def piece(self, token: int) -> str:
        return str(token)


class Script:
    """A backend that draws scripted tokens and records how it is called."""

    burst, chunk = 4, 3

    def __init__(self, says: bytes | list[int], capacity: int = 1000, ahead: int = 0):
        self.says, self.capacity, self.ahead = list(says), capacity, ahead
        self.extended: list[list[int]] = []
        self.rewound: list[int] = []
        self.steps: list[int] = []

    def start(self):
        return []

    def bytes_read(self, position):
        return None

    def describe(self):
        return "by a script"

    def rewind(self, cache, length):
        self.rewound.append(length)
        return cache[:length]

    def extend(self, cache, ids):
        assert 0 < len(ids) <= self.chunk
        self.extended.append(list(ids))
        return cache + list(ids)

    def begin(self, token, *, seen, seed, options, stops):
        return token, stops, False

    def decode(self, cache, drawing, *, steps):
        token, stops, ended = drawing
        assert 0 < steps <= self.burst
        assert len(cache) + steps <= self.capacity or ended
        self.steps.append(steps)
        drawn = []
        while len(drawn) < steps and not ended:
            cache = [*cache, token]
            token = self.says.pop(0)
            drawn.append(token)
            ended = token in stops
        return lambda: drawn, (token, stops, ended), cache

    def logits(self, ids):
        return np.zeros((len(ids), VOCAB))


def generate(
    backend, prompt=(256,), *, session=None, stops=frozenset({257}), stop=(), n=1000, interrupted=lambda: False
):
    session = session or Session(backend, vocab=VOCAB)
    bursts = session.bursts(prompt, max_new_tokens=n, options=GREEDY, seed=0, stops=stops, interrupted=interrupted)
    return Generation(bursts, Alphabet(), prompt="", prompt_ids=prompt, stop_texts=stop, stops=stops, seed=0)


def test_a_stopping_token_ends_the_text_and_is_not_in_it():
    generation = generate(Script([*b"abc", 257, *b"never"]))
    assert "".join(token.text for token in generation) == "abc" == generation.completion
    assert generation.finish_reason == "stop"
    assert generation.ids == [*b"abc", 257]


def test_length_and_context_end_it_too():
    generation = generate(Script(b"abcdefgh"), n=5)
    assert ("".join(t.text for t in generation), generation.finish_reason) == ("abcde", "length")
    # BOS and five letters fill the 6 positions, so six letters can be drawn.
    generation = generate(Script(b"abcdefgh", capacity=6))
    assert ("".join(t.text for t in generation), generation.finish_reason) == ("abcdef", "context")
    generation = generate(Script(b"abc"), n=0)
    assert ("".join(t.text for t in generation), generation.finish_reason) == ("", "length")


@given(
    text=st.text("ab", max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_text_cuts_at_its_first_appearance(text, stop):
    generation = generate(Script([*text.encode(), 257]), stop=stop)
    pieces = [token.text for token in generation]
    cut = min((i for s in stop if (i := text.find(s)) >= 0), default=len(text))
    assert "".join(pieces) == generation.completion
    # The stream gives text once no stop string can begin in it, so it is cut where the first complete stop string
    # begins.
    ends = min((text.find(s) + len(s) for s in stop if s in text), default=None)
    if ends is None:
        assert generation.completion == text
    else:
        begins = min(ends - len(s) for s in stop if text[:ends].endswith(s))
        assert generation.completion == text[:begins]
        assert len(generation.completion) >= cut
    assert generation.finish_reason == "stop"


@given(st.text(max_size=8))
def test_streaming_never_breaks_a_character(text):
    generation = generate(Script([*text.encode(), 257]))
    pieces = [token.text for token in generation]
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces) or "�" in text


def test_a_character_cut_off_at_the_end_is_shown_as_unreadable():
    generation = generate(Script("a👋".encode()[:-1]), n=4)
    assert "".join(token.text for token in generation) == "a�"


class Timed(Script):
    """A `Script` with its own clock: a call takes 1 ms plus 0.5 ms for each token."""

    burst = 128
    seconds = 0.0

    def decode(self, cache, drawing, *, steps):
        self.seconds += 0.001 + 0.0005 * steps
        return super().decode(cache, drawing, steps=steps)


def test_burst_sizes_fit_the_time_limit_and_texts_begin_with_one_token(monkeypatch):
    backend = Timed(b"a" * 800, capacity=400)
    monkeypatch.setattr("llamaspec.model.running.session.perf_counter", lambda: backend.seconds)
    session = Session(backend, vocab=VOCAB)
    list(generate(backend, session=session, n=300))
    list(generate(backend, session=session, prompt=(256, *b"aaa"), n=3))
    # One token takes 1.5 ms. 53 x 1.5 ms fit into 80 ms; after that a token takes 0.52 ms, and 128 is the most per
    # call.
    assert backend.steps == [1, 53, 128, 118, 1, 2]
    list(generate(backend, session=session, n=1000))
    assert backend.steps[6:] == [1, 53, 128, 128, 90]  # until the context is full


class Overlapping(Script):
    """A `Script` on a device that takes 3.9 ms per token; its clock also advances while the host waits."""

    burst = 128
    seconds, done = 0.0, 0.0

    def decode(self, cache, drawing, *, steps):
        read, drawing, cache = super().decode(cache, drawing, steps=steps)
        done = self.done = max(self.done, self.seconds) + 0.0039 * steps

        def wait():
            self.seconds = max(self.seconds, done)
            return read()

        return wait, drawing, cache


def test_queued_bursts_are_sized_by_the_time_between_two(monkeypatch):
    backend = Overlapping(b"a" * 800, ahead=1)
    monkeypatch.setattr("llamaspec.model.running.session.perf_counter", lambda: backend.seconds)
    session = Session(backend, vocab=VOCAB)
    for _ in session.bursts([256], max_new_tokens=110, options=GREEDY, seed=0, stops=frozenset({257})):
        backend.seconds += 0.01  # time before the next burst is read, while the device computes
    # Twenty tokens fit into 80 ms. Only the second token is ready before it is read, 10 ms after the first.
    assert backend.steps == [1, 1, 20, 8, 20, 20, 20, 20]


def test_a_burst_is_asked_for_before_the_one_before_it_is_read():
    backend, read = Script(b"abcdefghijkl", ahead=1), []
    for token in generate(backend, n=12):
        read.append((token.text, sum(backend.steps)))
    assert backend.steps == [1, 1, 4, 4, 2]
    assert read[:4] == [("a", 2), ("b", 6), ("c", 10), ("d", 10)]
    assert [limit for _, limit in read] == [2, 6, *4 * [10], *6 * [12]]


@given(
    ahead=st.integers(0, 2),
    capacity=st.integers(3, 20),
    texts=st.lists(
        st.tuples(
            st.lists(st.sampled_from([97, 98, 257]), min_size=1, max_size=16),  # the drawn tokens; 257 ends a text
            st.integers(1, 3),  # new tokens in the prompt
            st.integers(0, 8),  # earlier tokens that the prompt repeats
            st.integers(0, 12),  # tokens to draw at most
            st.integers(0, 6),  # bursts before an interrupt, or before the reader leaves
            st.booleans(),
        ),
        max_size=4,
    ),
)
@example(ahead=1, capacity=20, texts=[([97] * 9, 1, 0, 9, 2, True), ([98] * 5, 1, 8, 3, 6, False)])
def test_the_cache_holds_the_drawn_tokens_however_a_text_ends(ahead, capacity, texts):
    """The cache holds exactly the drawn tokens, however a text ends.

    A decode call draws a burst of several tokens. The text stays the same if the next burst starts before this one is
    read.
    """
    backend = Script([], capacity, ahead)
    session = Session(backend, vocab=VOCAB)
    for says, new, shared, n, bursts, leaves in texts:
        prompt = [*session.ids[:shared], *[99] * new][:capacity]
        backend.says = [*says, *[100] * 100]
        text, reason, full_length = [], None, next((i for i, id in enumerate(backend.says) if id == 257), 100) + 1
        pressed = itertools.chain([False] * bursts, itertools.repeat(not leaves))
        options: dict[str, Any] = {"max_new_tokens": n, "options": GREEDY, "seed": 0, "stops": frozenset({257})}
        bursts_read = session.bursts(prompt, **options, interrupted=partial(next, pressed))
        for drawn, why in itertools.islice(bursts_read, bursts if leaves else None):
            text, reason = [*text, *drawn], why
            cached: Any = session._cache
            assert not drawn or len(session.ids) == len(prompt) + len(text) - 1
            assert cached[: len(session.ids)] == session.ids == [*prompt, *text[:-1]][: len(session.ids)]
        room = capacity - len(prompt) + 1
        assert text == [*says, *[100] * 100][: len(text)] and len(text) <= min(n, full_length, room)
        if reason in ("stop", "length", "context"):
            assert len(text) == min(n, full_length, room)
            assert reason == ("stop" if text[-1:] == [257] else "length" if len(text) == n else "context")


def test_a_new_prompt_computes_only_what_is_new():
    backend = Script([*b"xyz", 257, *b"uvw", 257])
    session = Session(backend, vocab=VOCAB)
    for _ in generate(backend, [256, *b"abcde"], session=session):
        pass
    assert list(itertools.chain(*backend.extended)) == [256, *b"abcd"]
    assert session.ids == [256, *b"abcdexyz"]

    backend.extended.clear()
    for _ in generate(backend, [256, *b"abcdexyz", 257, *b"more"], session=session):
        pass
    assert list(itertools.chain(*backend.extended)) == [257, *b"mor"]
    assert backend.rewound == []

    backend.extended.clear()
    backend.says = [257]
    for _ in generate(backend, [256, *b"abXYZ"], session=session):
        pass
    assert backend.rewound == [3]
    assert list(itertools.chain(*backend.extended)) == [*b"XY"]


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_interruption_keeps_what_was_drawn(ahead):
    backend = Script(b"abcdefghij", ahead=ahead)
    pressed = iter([False, False, True])
    generation = generate(backend, interrupted=lambda: next(pressed, True))
    assert "".join(token.text for token in generation) in ("a", "abcde"[: len(generation.completion)])
    assert generation.finish_reason == "interrupted"


def test_a_failed_burst_drops_the_cache():
    """A session drops its cache if reading the tokens of a decode call fails.

    On a GPU, the next decode call has already started with this cache.
    """

    class Failing(Script):
        def decode(self, cache, drawing, *, steps):
            read, drawing, cache = super().decode(cache, drawing, steps=steps)
            return (fail if len(self.steps) == 2 else read), drawing, cache

    def fail():
        raise RuntimeError("the device fell over")

    backend = Failing(b"abcdefgh", ahead=1)
    session = Session(backend, vocab=VOCAB)
    tokens = generate(backend, session=session)
    assert next(tokens).text == "a"
    with pytest.raises(RuntimeError, match="fell over"):
        list(tokens)
    assert len(backend.steps) == 3 and session.ids == []
    list(generate(backend, [256, *b"abc"], session=session, n=1))
    assert list(itertools.chain(*backend.extended)) == [256, *b"ab"]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_failing_step_leaves_no_stale_cache_behind(ahead):
    backend = Script([], ahead=ahead)
    session = Session(backend, vocab=VOCAB)
    with pytest.raises(IndexError):
        list(generate(backend, [256, *b"abc"], session=session))
    assert session.ids == []
    backend.says = [257]
    backend.extended.clear()
    list(generate(backend, [256, *b"abc"], session=session))
    assert list(itertools.chain(*backend.extended)) == [256, *b"ab"]


def test_two_generations_do_not_mix_on_one_session():
    backend = Script(b"abcdefgh")
    session = Session(backend, vocab=VOCAB)
    first = generate(backend, session=session)
    assert next(first).text == "a"
    next(generate(backend, session=session))
    with pytest.raises(RuntimeError, match="another generation"):
        list(first)


@pytest.mark.parametrize("pieces", [["baa"], ["b", "a", "a"], ["ba", "a"]])
def test_the_stop_text_that_is_complete_first_counts(pieces):
    texts = StopTexts(["baa", "a"])
    assert "".join(map(texts.feed, pieces)) + texts.finish() == "b"


def test_the_first_token_comes_alone_and_bursts_stay_short():
    backend = Script(b"abcdefghijklmnopqrstuvwxyz")
    list(generate(backend, n=20))
    assert backend.steps[0] == 1
    assert max(backend.steps) <= Script.burst
    assert sum(backend.steps) == 20


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -1.0), ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", -1),
        ("top_p", 0.0), ("top_p", 1.5), ("top_p", float("nan")), ("min_p", -0.1), ("min_p", 1.1),
        ("repetition_penalty", 0.0), ("repetition_penalty", 1e-300),
        ("repetition_penalty", float("inf")),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(option, value):
    with pytest.raises(ValueError, match=option.replace("_", "-")):
        SamplingOptions(**{option: value})


def test_subnormal_temperatures_are_greedy():
    """A subnormal temperature counts as greedy, because a device would flush it to 0."""
    smallest = float(np.finfo(np.float32).tiny)
    assert all(SamplingOptions(temperature=t).greedy for t in (0.0, 1e-300, 1e-45, smallest * (1 - 2**-24)))
    assert not any(SamplingOptions(temperature=t).greedy for t in (smallest, 0.8))
