"""Proofs of texts: intervals contain the exact logits, and a token is decided if its interval overlaps no other."""

import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from flint import arb, ctx
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.reference.llama import Params, empty_cache, forward
from llamaspec.reference.rope import LinearScaling, Llama3Scaling, YarnScaling
from llamaspec.verify import proof
from llamaspec.verify.bounds.balls import Balls, UndecidedError
from llamaspec.verify.proof import ProvenToken, UnsupportedError, prove
from tests.support.processes import REPOSITORY
from tests.support.random_models import CONFIGS, random_checkpoint

PLAIN = CONFIGS["2 to 1, wide, tied"]
SUPPORTED = {
    **{name: config for name, config in CONFIGS.items() if not config.experts},
    "Llama 3 scaling": replace(PLAIN, scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
    "linear scaling": replace(PLAIN, scaling=LinearScaling(4.0)),
    "windows": replace(PLAIN, windows=(3,) * PLAIN.layers),
    "norms of heads": replace(PLAIN, qk_norm=True),
    "caps and scales": replace(
        PLAIN, attention_cap=2.0, logit_cap=3.0, embedding_scale=2.5, residual_scale=0.5, attention_scale=0.2
    ),
    "norms after each half (OLMo 2)": replace(PLAIN, pre_norms=False, post_norms=True, wide_qk_norm=True),
    "a layer without RoPE (SmolLM3)": replace(PLAIN, rotary_layers=(True, False)),
}
PROMPT = [1, 5, 2, 8, 3]
PROVEN = REPOSITORY / "tests/goldens/proven_stories.json"  # written by `llamaspec prove "Once upon a time"`

pytestmark = pytest.mark.usefixtures("unchecked")  # balls take the place of the arrays that annotations name


def tokens_of(params: Params, config, *, count: int = 1) -> list[ProvenToken]:
    return list(prove(params, PROMPT, config=config, stops=frozenset(), max_new_tokens=count))


@pytest.mark.parametrize("name", SUPPORTED)
def test_intervals_contain_the_logits_of_the_definition(name):
    """The float64 logits of the definition lie in the intervals, except for float64's own roundings."""
    config = SUPPORTED[name]
    params = load_reference_params(random_checkpoint(config, seed=3))
    [token] = tokens_of(params, config)
    logits, _ = forward(params, np.array(PROMPT), empty_cache(config), config=config)
    off = 1e-12 * np.abs(logits).max()
    assert token.decided and token.id == logits[-1].argmax() and token.radius < 1e-50
    for logit in token.logits:
        assert float(logit.low) - off <= logits[-1, logit.id] <= float(logit.high) + off


def test_the_text_of_the_built_in_model_is_proven(run, tmp_path):
    """The command repeats the first tokens of the stored vectors, and --out writes the same as --json."""
    out, stored = tmp_path / "vectors.json", json.loads(PROVEN.read_text("utf-8"))
    code, printed, log = run("prove", stored["prompt"], "--max-new-tokens", "3", "--json", "--out", str(out))
    vectors = json.loads(printed)
    assert code == 0 and "3 of 3 tokens are proven" in log and json.loads(out.read_text()) == vectors
    for name in ("tokens", "decided", "logits"):
        assert vectors[name] == stored[name][:3]
    for name in ("format", "checkpoint", "prompt", "prompt_ids", "bits"):
        assert vectors[name] == stored[name]
    assert stored["text"].startswith(vectors["text"]) and stored["decided"] == [True] * 25


def test_the_backends_draw_the_proven_tokens():
    """Greedy tokens of the float64 reference are the proven ones, and each logit is near its interval."""
    stored, checkpoint = json.loads(PROVEN.read_text("utf-8")), open_checkpoint("stories")
    sequence = np.array(stored["prompt_ids"] + stored["tokens"][:-1])
    logits, _ = forward(
        load_reference_params(checkpoint), sequence, empty_cache(checkpoint.config), config=checkpoint.config
    )
    rows = logits[len(stored["prompt_ids"]) - 1 :]
    assert rows.argmax(axis=-1).tolist() == stored["tokens"]
    for row, intervals in zip(rows, stored["logits"], strict=True):
        for logit in intervals:
            middle = (Fraction(logit["low"]) + Fraction(logit["high"])) / 2
            assert abs(Fraction(float(row[logit["id"]])) - middle) < 2e-15 * abs(row).max()


def test_more_bits_give_smaller_intervals_within_the_larger_ones(monkeypatch):
    params = load_reference_params(random_checkpoint(PLAIN, seed=3))
    ends, radii = [], []
    for bits in (80, 512):
        monkeypatch.setattr(proof, "BITS", bits)
        monkeypatch.setattr(proof, "MOST_BITS", bits)
        [token] = tokens_of(params, PLAIN)
        ends.append({logit.id: (Fraction(logit.low), Fraction(logit.high)) for logit in token.logits})
        radii.append(token.radius)
    assert radii[1] < 1e-100 < 1e-30 < radii[0] < 1e-8
    for id, (low, high) in ends[1].items():
        assert ends[0][id][0] <= low <= high <= ends[0][id][1]


def with_rows(params: Params, config, *, difference: float) -> Params:
    """Make the likeliest row of the head appear twice. The second copy differs in one number by `difference`."""
    [token] = tokens_of(params, config)
    head = params.head.copy()
    copy = (token.id + 1) % len(head)
    head[copy] = head[token.id]
    if difference:
        head[[copy, token.id], 0] = 0.0, difference
    return params._replace(head=head)


def test_equal_logits_are_never_decided(monkeypatch):
    """Two equal rows of the head have equal logits. No precision decides between them, so the text ends there."""
    monkeypatch.setattr(proof, "MOST_BITS", 512)
    config = replace(PLAIN, tied=False)
    params = with_rows(load_reference_params(random_checkpoint(config, seed=3)), config, difference=0.0)
    [token] = tokens_of(params, config, count=3)
    assert not token.decided and token.bits == 512


def test_a_near_tie_is_decided_with_more_bits():
    """Two logits that differ by less than 1e-100 are decided with more bits than usual."""
    config = replace(PLAIN, tied=False)
    params = with_rows(load_reference_params(random_checkpoint(config, seed=3)), config, difference=1e-120)
    [token] = tokens_of(params, config)
    assert token.decided and token.bits > proof.BITS


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation": "gelu_tanh"}, "gelu_tanh"),
        ({"layer_norm": True}, "LayerNorm"),
        ({"scaling": YarnScaling(4.0, 64, 1.0)}, "YarnScaling"),
        ({"experts": 4, "experts_per_token": 2}, "experts"),
        ({"sinks": True}, "sinks"),
    ],
)
def test_unsupported_switches_are_named(change, words):
    with pytest.raises(UnsupportedError, match=words):
        proof.check_supported(replace(PLAIN, **change))


def test_a_model_that_is_too_large_is_refused(run, monkeypatch):
    monkeypatch.setattr("llamaspec.model.system.available_bytes", lambda: 1 << 20)
    code, _, log = run("prove", "Once")
    assert code == 1 and "GiB are free" in log


def test_an_existing_file_is_kept(run, tmp_path):
    (tmp_path / "vectors.json").write_text("mine")
    code, _, log = run("prove", "Once", "--out", str(tmp_path / "vectors.json"))
    assert code == 1 and "exists" in log and (tmp_path / "vectors.json").read_text() == "mine"


@given(st.fractions(), st.integers(2, 200))
def test_decimal_ends_are_rounded_outwards(number, bits):
    """The interval of a rounded quotient contains the exact quotient, and so do its decimal ends."""
    before, ctx.prec = ctx.prec, bits
    try:
        low, high = proof._decimal(arb(number.numerator) / number.denominator)
    finally:
        ctx.prec = before
    assert Fraction(low) <= number <= Fraction(high)


def test_balls_that_overlap_cannot_be_compared():
    """Comparing two different balls that overlap raises UndecidedError; NumPy's functions do not hide the error."""
    third = Balls(np.array([1.0])) / 3
    for compare in (np.less, np.equal):
        with pytest.raises(UndecidedError):
            compare(third, Balls(np.array([1.0])) / 3)
    assert (third < 1).all() and not (third == 1).any()
    with pytest.raises(TypeError, match="log"):
        np.log(third)


def test_the_digest_changes_with_any_weight():
    params = load_reference_params(open_checkpoint("stories"))
    other = params._replace(norm=np.nextafter(params.norm, 2))
    assert proof.digest(params) != proof.digest(other)
