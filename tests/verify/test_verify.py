"""The verifier draws inputs, judges results, and finds small counterexamples that can be replayed."""

import dataclasses
import json
import sys
import zlib
from collections.abc import Iterator
from importlib import import_module
from xml.etree import ElementTree

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy import array

from llamaspec.verify.bounds.precision import PRECISIONS, precision
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.catalogue import CONTRACTS, contract_for
from llamaspec.verify.contract import Expected
from llamaspec.verify.draws.domain import choices
from llamaspec.verify.draws.draw import KINDS, Values, integers, values
from llamaspec.verify.draws.seeded import PROVIDERS, by_the_seed_alone
from llamaspec.verify.judging.examination import Examination, examine
from llamaspec.verify.judging.judge import Finding, judge
from llamaspec.verify.judging.runner import verify
from llamaspec.verify.reports import replay
from llamaspec.verify.reports.replay import Replay
from llamaspec.verify.reports.report import WRONG, as_annotations, as_json, as_junit, counterexample

FLOAT32 = precision("float32")
RMSNORM = contract_for("rmsnorm")

precisions = st.sampled_from(sorted(PRECISIONS)).map(precision)


def expected_exactly(value, *, bound=0.0) -> tuple[Expected]:
    value = np.asarray(value, np.float64)
    return (Expected(value, np.full(value.shape, bound), np.full(value.shape, bound / 4), np.abs(value)),)


def right(x, weight, *, eps):
    x, weight = (a.astype(np.float32) for a in (x, weight))
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight


def eps_outside(x, weight, *, eps):
    return x / (np.sqrt(np.mean(x * x, axis=-1, keepdims=True)) + np.float32(eps)) * weight


@pytest.fixture(autouse=True, scope="module")
def time_to_shrink() -> Iterator[None]:
    """Allow unlimited time to shrink a counterexample, since the machine may be busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llamaspec.verify.judging.runner.SHRINKING", np.inf)
        yield


def run(function, *, examples=50, seed=0, **options):
    return verify(RMSNORM, Direct(function), precision=FLOAT32, examples=examples, seed=seed, **options)


@given(value=values(), shape=st.sampled_from([(0,), (1,), (3,), (2, 5)]), array_precision=precisions)
def test_values_are_finite_and_named(value, shape, array_precision):
    array = value.array("x", *shape, precision=array_precision)
    assert array.shape == shape and array.dtype == array_precision.dtype
    assert np.all(np.isfinite(array.astype(np.float64)))
    assert Values.parse(str(value)) == value


def test_values_never_change():
    """`normal(7)` in a replay file means the same numbers in every version of the verifier."""
    drawn = [Values(kind, seed=7).array("x", 3, 4, precision=FLOAT32).tobytes() for kind in KINDS]
    assert [zlib.crc32(numbers) for numbers in drawn] == [
        211228714,
        2016154080,
        920474930,
        3767618322,
        3127145030,
        1154332885,
        1602840510,
        3906494220,
        749691197,
        546722209,
    ]
    assert integers(7, "tokens", 4, below=100).tolist() == [49, 67, 45, 18]


@pytest.mark.parametrize("text", ["", "normal", "normal(-1)", "odd(3)", "normal(1) * 2**x"])
def test_what_is_no_values_is_refused(text):
    with pytest.raises(ValueError, match="kind"):
        Values.parse(text)


@pytest.mark.parametrize(
    ("actual", "kind"),
    [
        (array([1, 2], np.float32), None),
        (array([1, 2.5], np.float32), "suspicious"),
        (array([1, 3.25], np.float32), "value"),
        (array([np.nan, 2], np.float32), "not finite"),
        (array([1, np.inf], np.float32), "not finite"),
        (array([1, 2, 3], np.float32), "shape"),
        (array([[1, 2]], np.float32), "shape"),
        (array([1, 2], np.int32), "dtype"),
        (array([1, 2], np.float16), "dtype"),
        (array([1, 2], np.float64), None),
    ],
)
def test_each_fault_has_its_name(actual, kind):
    finding = judge((actual,), expected_exactly([1.0, 2.0], bound=1.0), FLOAT32).finding
    assert (finding and finding.kind) == kind


def test_a_result_that_is_missing():
    assert judge((), expected_exactly([1.0]), FLOAT32).finding == ("shape", "expected 1 arrays, got 0", "")


def test_what_overflows_its_dtype_may_be_infinite():
    half = precision("float16")
    assert judge((array([np.inf], np.float16),), expected_exactly([7e4]), half).finding is None
    assert judge((array([-np.inf], np.float16),), expected_exactly([7e4]), half).finding is not None
    assert judge((array([np.inf], np.float16),), expected_exactly([6e4]), half).finding is not None
    for infinite in (np.inf, -np.inf):  # up to the bound of sums that cancel
        assert judge((array([infinite], np.float16),), expected_exactly([0.0], bound=7e4), half).finding is None
        assert judge((array([infinite], np.float16),), expected_exactly([0.0], bound=6e4), half).finding is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_infinite_bound_allows_any_number(dtype: str):
    expected = expected_exactly([1.0], bound=np.inf)
    assert judge((array([2.0], np.float32),), expected, precision(dtype)).finding is None


def test_one_rounding_on_the_way_out_is_allowed():
    near = np.asarray([1 + 2**-9], ml_dtypes.bfloat16)
    assert near[0] == 1
    assert judge((near,), expected_exactly([1 + 2**-9]), precision("bfloat16")).finding is None
    assert judge((near.astype(np.float32),), expected_exactly([1 + 2**-9]), precision("bfloat16")).finding is not None


def test_bad_conditioning_is_reported():
    value = np.array([1e-6])
    expected = (Expected(value, value, value, np.array([1.0])),)
    finding = judge((array([1], np.float32),), expected, FLOAT32).finding
    assert (
        finding and finding.condition == "the terms are 1e+06 times their sum: cancellation, which the bound allows for"
    )


def test_a_right_function_passes():
    report = run(right)
    assert report.outcome == "within bounds"
    assert report.examples == 50 and not report.cut_short
    assert 0 < report.worst.hard < 1


def test_a_bias_is_a_term_of_the_sum_in_any_order():
    """The bound holds if the bias is added first, last or in between; XLA's CPU products start their sum with it."""
    x, weight, bias = np.full((1, 64), 0.1, np.float32), np.ones((1, 64), np.float32), np.array([1000], np.float32)
    begun = bias.copy()
    for column in range(64):
        begun += x[:, column] * weight[:, column]
    expected = CONTRACTS["linear"].expected({"x": x, "weight": weight, "bias": bias})
    verdict = judge((begun[None],), expected, FLOAT32)
    assert verdict.finding is None or verdict.finding.kind == "suspicious"  # all roundings have the same sign
    assert verdict.hard > 0.1  # an error of 50 units in the last place, which a bias added last cannot have


def test_a_counterexample_is_small_and_has_six_lines():
    report = run(eps_outside)
    assert report.outcome == "violated"
    assert (report.worst.draw["rows"], report.worst.draw["dim"]) == (1, 1)
    lines = counterexample(report, RMSNORM, replay="f.json")
    assert len(lines) == 6
    assert lines[1:3] == ["  rows=1 dim=1 x=integers(0) weight=integers(0) eps=1e-05", "  x=[[-3]] weight=[2]"]
    assert max(map(len, lines)) <= 120


def test_the_same_seed_draws_the_same():
    assert [run(eps_outside, seed=5, shrink=False).worst.draw for _ in range(2)] == [
        run(eps_outside, seed=5, shrink=False).worst.draw
    ] * 2


def test_a_seed_draws_the_same_whatever_is_imported(tmp_path, monkeypatch):
    """A seed draws the same inputs for any set of imported modules.

    Hypothesis itself draws constants from imported modules.
    """

    def drawn() -> list[str]:
        draws: list[str] = []

        class Watched(Direct):
            def call(self, positional, keyword):
                draws.append(f"{positional} {keyword}")
                return super().call(positional, keyword)

        candidate = Watched(lambda x, y: x + y)
        verify(CONTRACTS["add"], candidate, precision=FLOAT32, examples=100, seed=5, shrink=False)
        return draws

    before = drawn()
    (tmp_path / "odd.py").write_text(f"NUMBERS = {list(range(1000))}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    import_module("odd")
    assert drawn() == before


def test_a_hypothesis_without_such_numbers_is_left_as_it_is(monkeypatch):
    """With the oldest supported Hypothesis, which has no module of constants, `by_the_seed_alone` changes nothing."""
    monkeypatch.setitem(sys.modules, PROVIDERS, None)
    with by_the_seed_alone():
        pass


def test_what_is_wrong_only_once_is_not_the_same_twice():
    calls = []

    def races(x, weight, *, eps):
        calls.append(1)
        return right(x, weight, eps=eps) + (len(calls) == 5)

    finding = run(races).worst.finding
    assert finding and finding.kind == "not the same twice"
    assert finding.message.startswith(
        "right in a second call with the same inputs; in the first call: value: at [0, 7]"
    )


def test_draws_can_be_narrowed():
    seen = set()

    def watched(x, weight, *, eps):
        seen.add((x.shape, eps))
        return right(x, weight, eps=eps)

    run(watched, only={"rows": [2], "dim": [128], "eps": [1e-6]})
    assert {shape for shape, _ in seen if shape[0] == 2} == {(2, 128)}
    with pytest.raises(ValueError, match=r"rmsnorm.*width.*rows, dim, x, weight, eps"):
        run(right, only={"width": [3]})


def test_values_are_narrowed_as_they_are_printed():
    report = run(eps_outside, only={"x": ["positive(3) * 2**-8"], "eps": [1e-5]}, shrink=False)
    assert report.worst.draw["x"] == Values("positive", 3, -8)


def test_shapes_can_be_few():
    seen = set()

    def watched(x, weight, *, eps):
        seen.add(x.shape)
        return right(x, weight, eps=eps)

    report = run(watched, shapes=3)
    assert len({dim for _, dim in seen}) <= 3
    assert "(50 examples of 3 shapes, " in counterexample(report, RMSNORM)[0]  # named only if limited
    assert "(50 examples of 1 shape, " in counterexample(run(right, shapes=1), RMSNORM)[0]
    assert "(50 examples, " in counterexample(run(right), RMSNORM)[0]


def test_a_counterexample_may_be_smaller_than_the_few_shapes():
    assert run(eps_outside, shapes=2, only={"rows": [5, 3], "dim": [1, 257]}).worst.draw["dim"] == 1
    report = run(lambda x, weight, *, eps: -right(x, weight, eps=eps), shapes=1, seed=11)
    assert (report.worst.draw["rows"], report.worst.draw["dim"]) == (1, 1)


def test_a_budget_ends_a_run():
    report = run(right, examples=100_000, seconds=2.0)
    assert report.outcome == "within bounds"
    assert 0 < report.examples < 100_000
    assert (
        f"({report.examples} examples before the time ran out, {report.compared:,} numbers compared, seed 0"
        in counterexample(report, RMSNORM)[0]
    )
    assert run(right, seconds=0.0).examples == 1


def test_every_law_of_a_right_function_holds():
    laws = {law.name for law in RMSNORM.laws}
    draw = {"rows": 3, "dim": 5, "x": Values("normal"), "weight": Values("normal"), "eps": 1e-5}
    for law in laws:
        assert examine(RMSNORM, Direct(right), FLOAT32, {**draw, "law": law}).finding is None


def test_a_broken_law_is_named():
    def odd(x, weight, *, eps):
        y = right(x, weight, eps=eps)
        return y * (1 + 2.0**-23 * (y < 0))

    finding = run(odd, examples=1000).worst.finding
    assert finding and finding.kind == "law"
    assert "rmsnorm(-x) equals -rmsnorm(x)" in finding.message


def test_a_replay_is_the_same_call(tmp_path):
    report = run(eps_outside)
    draw = {**report.worst.draw, "several": (1, 2), "none": None}
    inputs = replay.digest(RMSNORM, "float32", report.worst.draw)
    original = Replay("rmsnorm", "m:f", "numpy", "float32", draw, inputs, "value: wrong")
    path = replay.save(original, tmp_path)
    assert replay.load(path) == original
    another = replay.save(dataclasses.replace(original, candidate="m:g"), tmp_path)  # wrong for the same inputs
    assert another != path and replay.load(path) == original
    assert replay.save(original, tmp_path) == path
    assert {"python", "llamaspec", "numpy"} <= set(json.loads(path.read_text())["versions"])


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 0}', '{"format": 1, "draw": {"x": {"values": "?"}}}'])
def test_what_is_no_replay_is_refused(text, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError):
        replay.load(path)


def test_reports_are_written_as_json_and_junit():
    reports = [run(right), run(eps_outside)]
    summary = json.loads(json.dumps(as_json(reports), allow_nan=False))
    assert summary["outcome"] == "violated"
    assert [report["outcome"] for report in summary["reports"]] == ["within bounds", "violated"]
    lines = [
        [*counterexample(report, CONTRACTS["rmsnorm"]), "  llamaspec verify --replay r.json"] for report in reports
    ]
    suite = ElementTree.fromstring(as_junit(reports, lines))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "1", "0")
    (failure,) = suite.findall("testcase/failure")
    assert failure.text and failure.text.endswith("llamaspec verify --replay r.json")


def test_a_suspicious_result_fails_a_strict_run_and_no_other():
    finding = Finding("suspicious", "at [0]: expected 1, got 1.1")
    report = dataclasses.replace(run(right), worst=Examination({"dim": 3}, finding=finding))
    skipped = dataclasses.replace(report, not_taken="it takes float32 only")
    reports, lines, strict = [report, skipped], [["suspicious", "  dim=3"]] * 2, ("violated", "suspicious")
    for wrong, failures, kind in ((WRONG, "0", "warning"), (strict, "1", "error")):
        suite = ElementTree.fromstring(as_junit(reports, lines, wrong=wrong))
        assert (suite.get("failures"), suite.get("skipped")) == (failures, "1")
        assert len(suite.findall("testcase/skipped")) == 1
        assert as_annotations(reports, lines, wrong=wrong)[0] == f"::{kind} title=suspicious%3A rmsnorm float32::dim=3"


@pytest.mark.parametrize("text", ["3", "dim=", "=3"])
def test_narrowing_that_is_misspelt(text):
    with pytest.raises(ValueError, match="expected NAME=VALUE,VALUE, got"):
        choices([text])


def test_an_op_without_a_contract():
    with pytest.raises(ValueError, match=r"partial_rope.*rope_halves.*rope_halves_backward.*rope_interleaved"):
        contract_for("rope")
    with pytest.raises(ValueError, match=r"rmsnorm.*rmsnorm_backward"):
        contract_for("RMS_norm")
    with pytest.raises(ValueError, match=r"softmx.*softmax.*--list"):
        contract_for("softmx")
    with pytest.raises(ValueError, match=r"\bconv\b"):
        contract_for("conv")
