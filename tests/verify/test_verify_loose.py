"""Weaker contracts accept code that rounds every intermediate result, and little else."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace

import click
import jaxtyping
import numpy as np
import pytest

from llamaspec.cli import llamaspec
from llamaspec.verify.bounds.precision import PRECISIONS
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.catalogue import CONTRACTS, IMPLEMENTATIONS
from llamaspec.verify.contract import Claim, Large, Law, Trial
from llamaspec.verify.judging.runner import Report, verify
from llamaspec.verify.loose import loosened
from llamaspec.verify.pytest import contract


@pytest.fixture(autouse=True)
def definitions_take_other_arrays() -> Iterator[None]:
    """Turn off run-time type checks: definitions get arrays with error bounds, a type that no annotation allows."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def added(x):
    """Sum the last axis in float32, and round the sum once."""
    return np.sum(x.astype(np.float32), axis=-1, keepdims=True).astype(x.dtype)


def plain_softmax(x):
    top = x.max(axis=-1, keepdims=True)
    e = np.exp(x - np.where(np.isinf(top), 0, top).astype(x.dtype))
    total = added(e)
    return (e / np.where(total == 0, 1, total)).astype(x.dtype)


def plain_rmsnorm(x, weight, *, eps):
    mean = added(x * x) / x.dtype.type(x.shape[-1])
    return x / np.sqrt(mean + x.dtype.type(eps)) * weight


def plain_swiglu(gate, up):
    return gate / (1 + np.exp(-gate)).astype(gate.dtype) * up


# Mutants that round an intermediate result.
CLAIM_LESS = {
    "rmsnorm": {
        "squares summed in bfloat16",
        "scale in bfloat16",
        "rounded to bfloat16 before the weight",
    },
    "swiglu": {"silu in bfloat16"},
}
SOURCE = """
import numpy as np


def softmax(x):
    top = x.max(axis=-1, keepdims=True)
    e = np.exp(x - np.where(np.isinf(top), 0, top).astype(x.dtype))
    total = np.sum(e.astype(np.float32), axis=-1, keepdims=True).astype(x.dtype)
    return (e / np.where(total == 0, 1, total)).astype(x.dtype)


def wrong(x):
    return softmax(-x)
"""


def judged(op: str, candidate, dtype: str, *, weaker: bool, examples: int = 60) -> Report:
    judging_contract = loosened(CONTRACTS[op], dtype) if weaker else CONTRACTS[op]
    return verify(
        judging_contract, Direct(candidate), precision=PRECISIONS[dtype], examples=examples, seed=0, shrink=False
    )


@pytest.mark.sampled(2)  # 1 s each
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("op", "plain"), [("softmax", plain_softmax), ("rmsnorm", plain_rmsnorm)])
def test_plain_code_is_within_the_weaker_contract_alone(op, plain, dtype):
    report = judged(op, plain, dtype, weaker=True)
    assert report.outcome == "within bounds", report.worst
    assert report.compared > 100_000 and report.nearest.hard > 0.03  # compared, and with tight bounds
    assert judged(op, plain, dtype, weaker=False).outcome == "violated"


def test_a_weaker_contract_leaves_out_the_laws_that_the_other_does():
    for op in ("rmsnorm", "softmax"):
        weaker = loosened(CONTRACTS[op], "bfloat16")
        assert [law.sets for law in weaker.laws] == [law.sets for law in CONTRACTS[op].laws]


def test_a_sigmoid_of_its_own_is_within_the_weaker_contract():
    assert judged("swiglu", plain_swiglu, "bfloat16", weaker=True).outcome == "within bounds"


@pytest.mark.sampled(2)  # 1 s each
@pytest.mark.parametrize("op", ["softmax", "rmsnorm", "linear", "attention", "rope_halves", "softmax_backward"])
def test_a_right_function_is_right_by_the_weaker_contract_too(op):
    report = judged(op, IMPLEMENTATIONS[op].function, "bfloat16", weaker=True, examples=30)
    assert report.outcome == "within bounds", report.worst


def test_a_wrong_function_is_wrong_by_the_weaker_contract_too():
    """The weaker contract rejects errors that no rounding explains: a wrong sign and a wrong eps."""
    assert judged("softmax", lambda x: plain_softmax(-x), "bfloat16", weaker=True).outcome == "violated"
    halved = judged("rmsnorm", lambda x, weight, *, eps: plain_rmsnorm(x, weight, eps=4 * eps), "bfloat16", weaker=True)
    assert halved.outcome == "violated"


@pytest.mark.parametrize("tolerance", [0.0, 1e-9])
def test_a_weaker_law_allows_both_errors_unless_it_requires_equal_bits(tolerance):
    value = np.ones((1, 2))
    law = Law("it is what it was", lambda trial: Claim(trial.again()[0], value, tolerance))
    looser = loosened(replace(CONTRACTS["add"], laws=[law]), "bfloat16")
    arguments = {name: np.ones((1, 2), np.float32) for name in "xy"}
    (expected,) = looser.expected(arguments)
    claim = looser.laws[0].check(Trial(arguments, (value,), (expected.hard,), lambda **_: (value,)))
    assert claim is not None and claim.tolerance == tolerance + 2 * expected.hard.max() * (tolerance > 0)


@pytest.mark.sampled(1)  # 2 to 3 s each
@pytest.mark.parametrize("op", CLAIM_LESS)
def test_the_mutants_that_live_are_those_that_claim_less(op):
    looser, checked = loosened(CONTRACTS[op], "bfloat16"), IMPLEMENTATIONS[op]
    implementation = replace(checked, function=inspect.unwrap(checked.function))  # mutants change its source
    options = {"precision": PRECISIONS["bfloat16"], "examples": 40, "seed": 0, "shrink": False}
    report_by_mutant = {
        mutant.name: verify(looser, Direct(implementation.mutated(mutant)), **options)
        for mutant in implementation.mutants
    }
    assert {name for name, report in report_by_mutant.items() if report.outcome == "within bounds"} <= CLAIM_LESS[op]


BITS = {"tf32x3": 11, "bf16x3": 8}  # significant bits of a part


def part(x, bits: int, *, cut: bool):
    """Round float32 numbers to `bits` significant bits. With `cut`, cut off the other bits instead."""
    words = x.astype(np.float32).view(np.uint32)
    dropped = np.uint32(24 - bits)
    half = np.uint32(0) if cut else (np.uint32(1) << (dropped - np.uint32(1)))
    return ((words + half) >> dropped << dropped).view(np.float32)


def chopped(x):
    """Convert float64 numbers to float32, rounded towards zero."""
    y = x.astype(np.float32)
    return np.where(np.abs(y) > np.abs(x), np.nextafter(y, np.float32(0)), y)


def in_parts(bits: int, *, cut: bool, products: int = 3):
    """Return a function that multiplies matrices [... n] and [n ...] in float32 by parts, as matrix units do.

    It splits each number into a big and a small part, with `bits` significant bits each, and adds the largest
    `products` products of parts. With `cut`, it cuts bits off instead of rounding, in the parts and in the sums.
    """

    def product(a, b):
        (big_a, small_a), (big_b, small_b) = (
            (big := part(x, bits, cut=cut), part(x - big, bits, cut=cut)) for x in (a, b)
        )
        pairs = [(small_a, big_b), (big_a, small_b), (big_a, big_b)][-products:]
        total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
        for left, right in pairs:
            for k in range(a.shape[-1]):
                exact = left[..., k, None].astype(np.float64) * right[..., k, None, :]
                total = chopped(total.astype(np.float64) + exact) if cut else (total + exact).astype(np.float32)
        return total

    return product


def attention_by(product):
    def attention(q, k, v, mask):
        k, v = (np.repeat(a.transpose(0, 2, 1, 3), q.shape[2] // a.shape[2], axis=1) for a in (k, v))
        scores = np.stack(
            [
                np.stack([product(q_row[:, h], k_row[h].T) for h in range(q.shape[2])])
                for q_row, k_row in zip(q, k, strict=True)
            ]
        )
        scores = scores / np.float32(np.sqrt(q.shape[-1])) + mask[:, None]
        p = IMPLEMENTATIONS["softmax"].function(scores.reshape(-1, scores.shape[-1])).reshape(scores.shape)
        o = [[product(p_head, v_head) for p_head, v_head in zip(*row, strict=True)] for row in zip(p, v, strict=True)]
        return np.array(o).reshape(*p.shape[:-1], v.shape[-1]).transpose(0, 2, 1, 3)

    return attention


FEW = {"precision": PRECISIONS["float32"], "examples": 20, "seed": 0, "shrink": False}
SMALL = {"gemm": {"cols": [1, 8, 64, 257]}, "attention": {"keys": [1, 9], "batch": [1], "mask": ["causal", "none"]}}


def outcome(candidate, examined) -> str:
    only = SMALL[examined.name]
    return verify(replace(examined, large=Large()), Direct(candidate), **FEW, only=only).outcome


@pytest.mark.parametrize("cut", [False, True], ids=["rounded", "cut"])
@pytest.mark.parametrize(("unit", "bits"), BITS.items())
def test_products_of_parts_are_within_their_own_contract_alone(unit: str, bits: int, cut: bool):
    """An emulation of three products of parts passes, even if it cuts off sums. Fewer products or bits are refused."""

    def gemm(bits: int, products: int):
        product = in_parts(bits, cut=cut, products=products)
        return lambda x, weight: product(x, weight.T)

    weaker = loosened(CONTRACTS["gemm"], unit)
    assert outcome(gemm(bits, products=3), weaker) == "within bounds"
    assert outcome(gemm(bits, products=3), CONTRACTS["gemm"]) == "violated"
    assert outcome(gemm(bits, products=1), weaker) == "violated"
    assert outcome(gemm(bits - 3, products=3), weaker) == "violated"


def test_attention_by_products_of_parts():
    weaker = loosened(CONTRACTS["attention"], "tf32x3")
    assert outcome(attention_by(in_parts(11, cut=True)), weaker) == "within bounds"
    assert outcome(attention_by(in_parts(11, cut=True, products=1)), weaker) == "violated"


def test_a_contract_without_products_of_matrices_refuses_parts():
    with pytest.raises(ValueError, match="rmsnorm multiplies no matrices, so tf32x3 changes nothing"):
        loosened(CONTRACTS["rmsnorm"], "tf32x3")


def run(*arguments: str) -> None:
    llamaspec.main(["verify", *arguments], standalone_mode=False)


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)


def test_the_command_says_that_the_contract_is_a_weaker_one(own_file, capsys):
    few = ("softmax", "--arrays", "numpy", "--examples", "20", "--seed", "1", "--loose", "u=bfloat16")
    run(*few, "--candidate", "mine.py")
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("within bounds softmax bfloat16  mine.py:softmax")
    assert re.match("  a weaker contract: .*bfloat16", second)
    with pytest.raises(SystemExit):
        run(*few, "--candidate", "mine.py:wrong")
    *_, line = capsys.readouterr().out.splitlines()
    assert line.endswith(".json --loose u=bfloat16")
    with pytest.raises(SystemExit):
        run(*line.split()[2:])
    assert "a weaker contract" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--loose", "u=bf16"), "expected u=bfloat16, u=float16, u=tf32x3 or u=bf16x3, got u=bf16"),
        (
            ("--loose", "u=bfloat16", "--dtype", "float32"),
            "expected arrays of bfloat16 for a weaker contract in bfloat16, got float32",
        ),
    ],
)
def test_what_is_no_weaker_contract_is_refused(own_file, arguments, error):
    with pytest.raises(click.UsageError, match=error):
        run("softmax", "--candidate", "mine.py", *arguments)


def test_an_op_that_no_weaker_contract_is_derived_for(own_file):
    with pytest.raises(click.UsageError, match=r"argmax.*np\.argmax"):
        run("argmax", "--candidate", "mine.py:softmax", "--loose", "u=float16")
    with pytest.raises(click.UsageError, match="--loose needs your own function"):
        run("softmax", "--loose", "u=float16")


def test_in_pytest():
    contract("softmax", arrays="numpy", loose="u=float16", examples=20, seed=0)(plain_softmax)()
    with pytest.raises(AssertionError, match="a weaker contract: each intermediate"):
        contract("softmax", arrays="numpy", loose="u=float16", examples=20, seed=0)(lambda x: plain_softmax(-x))()
    with pytest.raises(ValueError, match=r"float16.*bfloat16"):
        contract("softmax", loose="u=float16", dtype=["bfloat16"])
