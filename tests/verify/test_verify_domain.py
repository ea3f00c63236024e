"""Draws that the user limits to typed values. Each value is used as meant, or refused: no typo hides a wrong kernel."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamaspec.benchmarks.audits.others.table import GGUF, JAX, ONNXRUNTIME, TORCH, TRITON
from llamaspec.model.candidates.table import CANDIDATES
from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import Direct, NoVerdict
from llamaspec.verify.catalogue import CONTRACTS, IMPLEMENTATIONS
from llamaspec.verify.contract import Expected
from llamaspec.verify.draws.domain import LONGEST, choices, domain, narrowed
from llamaspec.verify.draws.draw import HIDDEN, KINDS, Values
from llamaspec.verify.judging.runner import verify
from llamaspec.verify.reports.listing import describe
from llamaspec.verify.reports.report import counterexample

SOFTMAX = CONTRACTS["softmax"]


def run(candidate, texts=(), *, contract=SOFTMAX, examples=60, **options):
    return verify(
        contract,
        Direct(candidate),
        precision=precision("float32"),
        examples=examples,
        seed=0,
        only=choices(texts),
        shrink=False,
        **options,
    )


def right(x):
    top = np.maximum(x.max(axis=-1, keepdims=True), np.float32(-3e38))
    e = np.exp(x - top)
    return e / np.maximum(e.sum(axis=-1, keepdims=True), np.float32(1e-30))


def nan_for_a_row_of_minus_infinity(x):
    with np.errstate(invalid="ignore"):
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)


def always_nan(x):
    return np.full_like(x, np.nan)


def wrong_beyond_one_row(x):
    return np.where(np.arange(len(x))[:, None] == 0, right(x), np.float32(2))


@pytest.mark.parametrize("op", CONTRACTS)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.nested_given])
@given(data=st.data())
def test_every_draw_is_in_its_domain(op, data):
    draws = {name: data.draw(strategy) for name, strategy in CONTRACTS[op].draws.items()}
    assert repr(narrowed(CONTRACTS[op], {name: [value] for name, value in draws.items()})) == repr(
        {name: (value,) for name, value in draws.items()}
    )


def test_all_candidates_are_made_for_values_of_the_domain():
    for job in [*CANDIDATES, *GGUF, *JAX, *ONNXRUNTIME, *TORCH, *TRITON]:
        assert narrowed(CONTRACTS[job.op], job.only).keys() == job.only.keys()
    for op, implementation in IMPLEMENTATIONS.items():
        assert narrowed(CONTRACTS[op], implementation.only).keys() == implementation.only.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hidden=All", "softmax: hidden: expected one of none, first row, second half, .*; got All: did you mean all?"),
        ("hidden=non", "got non: did you mean none?"),
        ("hidden=nnoe", "got nnoe: did you mean none?"),
        ("hidden=second-half", "got second-half: did you mean second half?"),
        ("hidden=none,", "got an empty string"),
        ("hidden=3", "got 3$"),
        ("hidden=null", "got null$"),
        ("hiden=none", "softmax has no draw hiden: expected rows, n, x, around, hidden: did you mean hidden?"),
        ("rows=0", "rows: expected one of 1, 2, 3, 5, or any whole number from 1 to 1048576; got 0"),
        ("n=-1", "got -1"),
        ("n=abc", "got abc"),
        ("n=1.5", "got 1.5"),
        ("n=true", "got True"),
        ("n=[3]", "got .3"),
        ("n=10000000", "got 10000000"),
        ("around=1e9", "any number from -20000 to 20000; got 1e9|got 1000000000.0"),
        ("around=nan", "got nan"),
        ("around=inf", "got inf"),
        ("x=foo", "with KIND one of integers, normal, .*; got foo"),
        ("x=norml(3)", "got norml.3.: did you mean normal?"),
        ("x=normal(3) * 2**99", "EXPONENT from -6 to 6; got normal"),
        ("x=normal(1000)", "SEED from 0 to 999"),
    ],
)
def test_a_value_that_means_nothing_is_refused_in_one_line(text, message):
    with pytest.raises(ValueError, match=message) as refused:
        run(always_nan, [text])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("op", "text", "value"),
    [
        ("softmax", "n=1024", 1024),
        ("softmax", "around=3", 3.0),
        ("softmax", "hidden= every other ", "every other"),
        ("softmax", "x=normal(3)*2**-5", Values("normal", 3, -5)),
        ("softmax", "x=normal(3) * 2**-5", Values("normal", 3, -5)),
        ("attention_decode", "lengths=[7,33]", (7, 33)),
        ("attention_decode", "window=none", None),
        ("attention_decode", "window=null", None),
        ("attention_decode", "padding=0", 0.0),
        ("linear", "bias=null", None),
        ("quantize", "scheme=q8", "q8"),
    ],
)
def test_a_value_is_read_as_its_draw_has_it(op, text, value):
    [(actual,)] = narrowed(CONTRACTS[op], choices([text])).values()
    assert actual == value and type(actual) is type(value)


def test_padding_may_be_nan():
    [(actual,)] = narrowed(CONTRACTS["attention_decode"], choices(["padding=nan"])).values()
    assert np.isnan(actual)


@pytest.mark.parametrize("value", ["none", []])
def test_python_is_told_that_a_draw_takes_a_list(value):
    with pytest.raises(ValueError, match=r"softmax: .*hidden"):
        narrowed(SOFTMAX, {"hidden": value})


def test_a_list_that_is_too_long_is_told_how_long_it_may_be():
    longest = [3] * LONGEST
    decode = CONTRACTS["attention_decode"]
    [(actual,)] = narrowed(decode, choices([f"lengths={longest}"])).values()
    assert actual == tuple(longest)
    with pytest.raises(ValueError, match=r"1,024.*1,025") as refused:
        narrowed(decode, choices([f"lengths={[*longest, 3]}"]))
    assert len(str(refused.value)) < 500


def test_a_draw_is_narrowed_once():
    with pytest.raises(ValueError, match="--set gives n twice"):
        choices(["n=1", "n=2"])


NAMES = [*SOFTMAX.draws, "hiden", "N", "row", "dim", ""]
VALUES = [
    *HIDDEN, *(name.title() for name in HIDDEN), *(name.replace(" ", "-") for name in HIDDEN), "non", "al", "null",
    *KINDS, *(f"{kind}(1)" for kind in KINDS), "normal(3) * 2**-2", "normal(3)*2**2", "norml(1)", "normal(-1)",
    "0", "-1", "1", "2", "1,2", "0,1", "513", "1.0", "1e3", "nan", "inf", "[1]", "[]", "{}", "true", "abc", "", ",",
]  # fmt: skip
SLIPS = [
    change for name in HIDDEN for change in (name.title(), name[1:], name[:-1], name + "s", name.replace(" ", "-"))
]
TYPED = st.one_of(
    st.builds("hidden={}".format, st.sampled_from(SLIPS)),
    st.builds("{}={}".format, st.sampled_from(["rows", "n"]), st.sampled_from(["0", "-1", "1", "2", "1.0", "one"])),
    st.builds("{}={}".format, st.sampled_from(NAMES), st.sampled_from(VALUES) | st.text(max_size=6)),
)

BLIND = {"first row", "second half", "all"}  # these hide whole rows; "second half" does so in a row of one number
WRONG = {
    nan_for_a_row_of_minus_infinity: lambda only: "hidden" in only and not BLIND & set(only["hidden"]),
    always_nan: lambda only: False,
    wrong_beyond_one_row: lambda only: set(only.get("rows", ())) == {1},
}


@pytest.mark.parametrize("candidate", WRONG)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.nested_given])
@given(texts=st.lists(TYPED, min_size=1, max_size=2))
def test_a_wrong_candidate_never_passes_by_what_was_typed(candidate, texts):
    """A wrong candidate never passes because of a typo: it is rejected, or the typed values are refused.

    It may pass only if the typed values exclude the inputs for which it is wrong.
    """
    try:
        report = run(candidate, texts, examples=150)
    except ValueError:
        return
    if report.outcome != "violated":
        only = narrowed(SOFTMAX, choices(texts))
        assert set(only) == set(report.shares) and report.compared
        for name, values in only.items():
            allowed = domain(SOFTMAX.draws[name])
            assert all(value in allowed.drawn or isinstance(value, int | float | Values) for value in values)
        assert WRONG[candidate](only) or set(only.get("hidden", ())) == {"second half"}


def test_a_verdict_needs_a_number_that_was_compared():
    def any_value_will_do(x):
        expected = SOFTMAX.expect(x)
        assert isinstance(expected, Expected)
        return expected._replace(hard=np.full(x.shape, 1e30), alarm=np.full(x.shape, 1e30))

    with pytest.raises(NoVerdict, match=r"softmax float32.*no verdict.*60 examples.*rows=1"):
        run(right, contract=replace(SOFTMAX, expect=any_value_will_do, laws=()))


def test_the_report_says_how_many_numbers_were_compared():
    report = run(right, ["rows=2", "n=3"], examples=50)
    assert report.compared == report.examples * 2 * 3
    assert f"{report.compared:,} numbers compared" in counterexample(report, SOFTMAX)[0]


def test_the_report_says_how_much_of_a_contract_is_left():
    lines = counterexample(run(right, ["hidden=none", "rows=1,2,1024"]), SOFTMAX)
    assert lines[1:2] == ["  narrowed to 12 % of the contract's draws: hidden 1 of 6, rows 3 of 4"]
    assert not any("narrowed" in line for line in counterexample(run(right), SOFTMAX))


def test_inputs_that_cannot_be_made_are_no_verdict():
    with pytest.raises(NoVerdict, match=r"\bx\b.*1048576 x 1048576"):
        run(always_nan, ["rows=1048576", "n=1048576"])


def test_a_definition_that_is_not_finite_is_no_verdict():
    """A definition that returns NaN raises an exception instead of giving a verdict, even under `python -O`."""

    def expect(x, y):
        nan = np.full(x.shape, np.nan)
        return Expected(nan, nan, nan, nan)

    broken = replace(CONTRACTS["add"], expect=expect)
    with pytest.raises(NoVerdict, match="ValueError: the result of the definition is not finite, or its error bound"):
        verify(broken, Direct(lambda x, y: x + y), precision=precision("float32"), examples=9, seed=0)


def test_the_list_has_every_value():
    text = "\n".join(describe(SOFTMAX, []))
    assert "hidden  none, first row, second half, every other, all but the last, all" in text
    assert "rows    1, 2, 3, 5, or any whole number from 1 to 1048576" in text
    assert "x       KIND(SEED) * 2**EXPONENT, with KIND one of integers, normal" in text
