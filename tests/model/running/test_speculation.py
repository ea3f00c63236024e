"""Speculation: drafts change how long a text takes, and never the text."""

import io
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.llama import load_backend
from llamaspec.model.ops.cpu import CPU
from llamaspec.model.options import RunOptions, SamplingOptions
from llamaspec.model.running.jax_backend import NOT_EXACT, JaxBackend
from llamaspec.model.running.session import Session
from llamaspec.model.running.speculation import (
    DRAFTS,
    DRAFTS_OF_CODES,
    LONGEST,
    SHARE,
    SHORTEST,
    Lookup,
    Speculation,
    speculation_for,
)
from llamaspec.reference.config import Config
from llamaspec.serving.loading import load_engine
from llamaspec.verify.mutant import Implementation, Mutant
from tests.model.running.speculation_laws import ScriptedSpeculation, cached, check
from tests.model.running.speculation_mutants import GENERATION, SESSION, VERIFY
from tests.model.test_generation import Script
from tests.support.random_models import CONFIGS, random_checkpoint

MUTANTS = [(table, mutant) for table in (VERIFY, SESSION, GENERATION) for mutant in table.mutants]
CASES = 60  # conversations that a mutant must survive


@given(st.integers(0, 2**32))
def test_a_text_is_the_same_with_drafts(seed):
    check(seed)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("right", "mutant"), MUTANTS, ids=lambda value: getattr(value, "name", ""))
def test_every_mutant_is_found_out(right: Implementation, mutant: Mutant):
    wrong: dict[str, Any] = {right.function.__name__.lower(): right.mutated(mutant)}
    with pytest.raises((AssertionError, ZeroDivisionError)):  # a burst without tokens has no time per token
        for seed in range(CASES):
            check(seed, **wrong)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 9))
def test_a_draft_follows_the_longest_suffix_that_occurred_before(ids, most):
    best, expected = 0, []
    for end in range(SHORTEST, len(ids)):  # the latest of the longest wins
        length = 0
        while length < min(end, LONGEST) and ids[end - 1 - length] == ids[-1 - length]:
            length += 1
        if length >= max(best, SHORTEST):
            best, expected = length, (ids[end:] * most)[:most]
    assert Lookup(ids).draft(most) == expected
    grown = Lookup(ids[:7])
    grown.extend(ids[7:])
    assert grown.draft(most) == expected


class FakeVerifier:
    def drafts(self, *, greedy):
        return DRAFTS

    def verify(self, cache, drawing, draft):
        raise AssertionError("this test draws by itself")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def play(*, verify_seconds: float, right: float, tokens: int = 2000) -> tuple[float, Speculation]:
    """Draw a text that repeats itself, and return the time per token. The share `right` of each draft is right."""
    clock, text = Clock(), [i % 50 for i in range(60)]
    speculation = Speculation(FakeVerifier(), text, most=DRAFTS, clock=clock)
    drawn_tokens = 0
    while drawn_tokens < tokens:
        draft = speculation.draft(100)
        if draft:
            clock.now += verify_seconds
            accepted = int(right * len(draft))
        else:
            clock.now += 4.0  # four steps of a second each
            accepted = 3
        drawn = [(60 + drawn_tokens + i) % 50 for i in range(accepted + 1)]
        speculation.drew(drawn, draft)
        drawn_tokens += len(drawn)
    return clock.now / drawn_tokens, speculation


@pytest.mark.parametrize("verify_seconds", [1.5, 3.0, 7.0, 20.0])
def test_drafts_that_are_rejected_cost_a_few_percent(verify_seconds):
    seconds, speculation = play(verify_seconds=verify_seconds, right=0.0)
    assert speculation.accepted == 0 < speculation.drafted
    assert 1 < seconds < (1 + verify_seconds / 2000) / (1 - SHARE)


def test_drafts_that_are_accepted_pay():
    seconds, speculation = play(verify_seconds=3.0, right=1.0)
    assert speculation.accepted == speculation.drafted > 1700
    assert seconds < 1.1 * 3 / (DRAFTS + 1)


def test_a_verification_that_takes_as_long_as_its_tokens_stops_drafting():
    seconds, speculation = play(verify_seconds=10.0, right=1.0)
    assert seconds < (1 + 10 / 2000) / (1 - SHARE) and speculation.drafted < 400


WIDE = replace(CONFIGS["2 to 1, wide, tied"], layers=1, ffn=128, context=160)
RUNS: list[tuple[Config, dict[str, Any]]] = [
    (WIDE, {}),
    (WIDE, {"dtype": "bfloat16"}),
    (WIDE, {"quantize": "q4", "cache": "int8"}),
    (replace(WIDE, windows=(3,), experts=4, experts_per_token=2, context=64), {}),
]


@pytest.mark.sampled(1)  # 6 s each
@pytest.mark.parametrize(("config", "options"), RUNS)
def test_a_model_s_text_and_cache_have_the_same_bits_with_drafts(config, options):
    """The text of the wide model is long enough that attention reads two of its spans."""
    backend = load_backend(random_checkpoint(config, seed=1), RunOptions(speculate=True, **options))
    assert isinstance(backend, JaxBackend)
    tokens, most = config.context - 40, backend.drafts(greedy=False)
    assert most == (DRAFTS_OF_CODES if "quantize" in options else DRAFTS)
    prompt = [3, 1, 4, 1, 5]
    sampling = SamplingOptions(temperature=0.8, top_p=0.9, repetition_penalty=1.1)

    def draws(session: Session, speculation: Speculation | None) -> list[int]:
        request = {"max_new_tokens": tokens, "options": sampling, "seed": 7, "stops": frozenset[int]()}
        bursts = session.bursts(prompt, **request, speculation=speculation)
        return [token for drawn, _ in bursts for token in drawn]

    plain, drafted = (Session(backend, vocab=config.vocab) for _ in range(2))
    expected = draws(plain, None)
    script = ScriptedSpeculation(backend, prompt, future=expected, draw=random.Random(0), most=most, vocab=config.vocab)
    assert draws(drafted, script) == expected
    for before, after in zip(cached(plain, tokens + 4), cached(drafted, tokens + 4), strict=True):
        assert before.tobytes() == after.tobytes()


def test_there_are_no_drafts_if_verifying_them_rounds_in_another_way(monkeypatch):
    monkeypatch.setattr("llamaspec.model.running.programs.BY_TOKEN", CPU)  # CPU adds in another order for many tokens
    backend = load_backend(random_checkpoint(WIDE, seed=1), RunOptions(speculate=True))
    assert speculation_for(backend, [0], greedy=False) is None
    assert backend.describe().endswith(NOT_EXACT)


def test_a_server_does_not_speculate():
    with pytest.raises(ValueError, match="an engine does not speculate"):
        load_engine(random_checkpoint(WIDE, seed=1), RunOptions(speculate=True))


@pytest.mark.parametrize(
    "options", [{"backend": "reference"}, {"devices": 2}, {"emulate_activations": "int8"}], ids=str
)
def test_speculation_needs_one_cpu(options):
    with pytest.raises(ValueError, match="speculate needs the jax backend, one device"):
        RunOptions(speculate=True, **options)


def test_speculation_needs_the_ops_of_a_cpu():
    with pytest.raises(ValueError, match="speculate: only a CPU's ops verify"):
        load_backend(random_checkpoint(WIDE, seed=1), RunOptions(speculate=True, kernels="xla"))


class DraftingScript(Script):
    """A backend that draws scripted tokens and verifies drafts."""

    def drafts(self, *, greedy):
        return DRAFTS

    def verify(self, cache, drawing, draft):
        drawn = []
        for expected in (*draft, None):
            read, drawing, cache = self.decode(cache, drawing, steps=1)
            drawn += read()
            if drawn[-1] != expected or drawing[-1]:
                break
        return lambda: drawn, drawing, cache


@pytest.mark.parametrize("command", ["generate", "story", "chat"])
def test_commands_draft_if_asked_to_and_say_how_many_drafts_were_right(run, monkeypatch, command):
    options: list[RunOptions] = []
    text = [*range(300, 310)] * 12

    def load_script(checkpoint, run_options, **_):
        options.append(run_options)
        return DraftingScript(text)

    monkeypatch.setattr("llamaspec.model.llama.load_backend", load_script)
    monkeypatch.setattr("sys.stdin", io.StringIO("Once\n"))
    arguments = ["--speculate", "--seed", "1", "--max-new-tokens", "100"]
    if command == "chat":
        code, out, err = run(command, *arguments)
        assert (code, [option.speculate for option in options]) == (0, [True]) and out, err
        return
    code, out, err = run(command, "Once", "--json", *arguments)
    counts = json.loads(out)["speculation"]
    assert (code, [option.speculate for option in options], json.loads(out)["tokens"]) == (0, [True], 100)
    assert 0 < counts["accepted"] <= counts["drafted"] < 100
    assert err.rstrip().endswith(f"{counts['accepted']} of {counts['drafted']} drafted tokens accepted")
