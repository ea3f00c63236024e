"""`verify --algebra` compares formulas, without rounding."""

import json
import math
from collections.abc import Iterator
from fractions import Fraction

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax import lax

from llamaspec.verify.algebra import equality
from llamaspec.verify.algebra.constants import Constant, constant
from llamaspec.verify.algebra.primes import Primes, inverse, is_prime, matmul, power, root
from llamaspec.verify.algebra.residues import Residues
from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.catalogue import CONTRACTS
from llamaspec.verify.judging.formula import DIFFERENT, EQUAL, UNDECIDED, Formula
from llamaspec.verify.judging.runner import verify
from tests.support.processes import REPOSITORY
from tests.verify import formulas
from tests.verify.formulas import MUTANTS, RIGHT

SMALL = {  # sizes that JAX traces quickly
    "add": {"rows": [1, 3], "dim": [1, 9]},
    "rmsnorm": {"rows": [1, 2], "dim": [1, 3, 8, 17]},
    "linear": {"batch": [1, 2], "rows": [1, 3], "cols": [2, 9]},
    "softmax": {"rows": [1, 3], "n": [2, 7]},
    "swiglu": {"rows": [1, 3], "ffn": [1, 9]},
    "attention": {
        "batch": [1],
        "queries": [2, 3],
        "keys": [3, 5],
        "kv_heads": [1, 2],
        "group": [2],
        "head_dim": [3, 8],
    },
    "rope_halves": {"batch": [1, 2], "seq": [2, 3], "heads": [2], "pairs": [1, 3]},
    "rope_interleaved": {"batch": [1, 2], "seq": [2, 3], "heads": [2], "pairs": [1, 3]},
}
CANDIDATES = [(op, function) for op, functions in RIGHT.items() for function in functions]
WRONG = [(implementation, mutant) for implementation in MUTANTS for mutant in implementation.mutants]
FEATURES = {"rows", "dim", "x", "weight", "eps"}


@pytest.fixture(autouse=True)
def definitions_take_residues() -> Iterator[None]:
    """Turn off run-time type checks: definitions get residues, a type that no annotation allows."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def compared(op, function, *, shapes=3, seed=0, **only) -> Formula:
    few = pytest.MonkeyPatch()
    with few.context() as patch:
        patch.setattr(equality, "SHAPES", shapes)
        patch.setattr(equality, "LARGE", 0)
        patch.setattr(equality, "PAIRS", 0)
        narrowed = {**SMALL[op], **only}
        return equality.compare(CONTRACTS[op], function, precision=precision("float32"), only=narrowed, seed=seed)


@pytest.mark.parametrize(("op", "function"), CANDIDATES, ids=lambda entry: getattr(entry, "__name__", entry))
def test_a_right_formula_is_equal(op, function):
    formula = compared(op, function)
    assert (formula.outcome, formula.message) == (EQUAL, "")
    assert formula.trials >= formula.shapes >= 2


def test_the_page_lists_at_least_thirty_mutants():
    names = [f"| {implementation.of} | {mutant.name} |" for implementation, mutant in WRONG]
    assert len(set(names)) == len(names) >= 30
    page = (REPOSITORY / "docs/algebra.md").read_text()
    assert [name for name in names if name not in page] == []
    assert f"For these {len(names)} changes" in page


@pytest.mark.parametrize(
    ("implementation", "mutant"), WRONG, ids=[f"{implementation.of}: {mutant.name}" for implementation, mutant in WRONG]
)
def test_a_wrong_formula_is_found_that_rounding_hides(implementation, mutant):
    formula = compared(implementation.of, implementation.mutated(mutant))
    assert formula.outcome == DIFFERENT, formula.message
    assert "another formula: without rounding, expected" in formula.message


def results_of(implementation, mutant):
    static = ("eps",) if implementation.of == "rmsnorm" else ()
    function = jax.jit(implementation.mutated(mutant), static_argnames=static)
    return Direct(function, arrays="jax", name=mutant.name)


@pytest.mark.slow  # 14 s in all
@pytest.mark.parametrize(
    ("implementation", "mutant"), WRONG, ids=[f"{implementation.of}: {mutant.name}" for implementation, mutant in WRONG]
)
def test_the_float_bound_does_not_see_these_mutants(implementation, mutant):
    op = implementation.of
    report = verify(
        CONTRACTS[op],
        results_of(implementation, mutant),
        precision=precision("float32"),
        examples=60,
        seed=0,
        shapes=2,
        only=SMALL[op],
        shrink=False,
    )
    assert report.outcome == "within bounds", report.worst.finding


def logarithm(x, weight, *, eps):
    mean = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * weight * jnp.exp(-0.5 * jnp.log(mean + eps))


def sorting(x, weight, *, eps):
    return formulas.rmsnorm(jnp.sort(x, axis=-1), weight, eps=eps)


def branching(x, weight, *, eps):
    return formulas.rmsnorm(x, weight, eps=eps) if x[0, 0] > 0 else x


def wide(x, weight, *, eps):
    return formulas.rmsnorm(x, weight, eps=eps)[None]


def truncating(x, weight, *, eps):
    return formulas.rmsnorm(x.astype(jnp.int32).astype(jnp.float32), weight, eps=eps)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (logarithm, "the candidate uses the primitive log, which is outside the algebra"),
        (sorting, "the candidate uses the primitive sort, which is outside the algebra"),
        (branching, "JAX cannot trace the candidate: TracerBoolConversionError: Attempted boolean conversion"),
        (wide, "expected the shape "),
        (truncating, "the candidate uses a conversion of floating-point numbers to int32, which is outside the alg"),
    ],
)
def test_a_candidate_outside_the_algebra_gets_no_verdict_in_one_line(function, message):
    formula = compared("rmsnorm", function)
    assert formula.outcome == UNDECIDED
    assert formula.message.startswith(message)
    assert "\n" not in formula.line()


def test_an_op_outside_the_algebra_gets_no_verdict():
    formula = of_op("logsumexp", formulas.softmax, rows=[2], n=[3])
    assert formula.message == "the definition uses np.log, which is outside the algebra"


def test_numbers_that_are_not_finite_are_another_formula():
    def unguarded(x):
        return jax.nn.softmax(x, axis=-1)

    assert compared("softmax", unguarded, hidden=["none"]).outcome == EQUAL
    formula = compared("softmax", unguarded, hidden=["first row"])
    assert (formula.outcome, formula.message[-15:]) == (DIFFERENT, "expected 0, got nan"[-15:])


def test_a_root_of_the_square_of_a_root_is_the_root():
    """Half of all elements have no root, and equal formulas may then differ."""

    def roots(x, weight, *, eps):
        scale = jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
        return x * weight * scale / (scale * scale)

    assert compared("rmsnorm", roots).outcome == EQUAL


def mean_square(x, eps):
    return jnp.mean(x * x, axis=-1, keepdims=True) + eps


def a_trace_of_a_sign(x, weight, *, eps):
    """Add 1e-9 (|x| - x): the root of a square is x in half of all trials."""
    return formulas.rmsnorm(x, weight, eps=eps) + 1e-9 * (jnp.sqrt(x * x) - x)


def a_trace_of_a_root(x, weight, *, eps):
    """Multiply by 1 + 2e-9. Where a number is not a square, its root's square is the number times -1."""
    squares = mean_square(x, eps)
    return formulas.rmsnorm(x, weight, eps=eps) * (1 + 1e-9 * (lax.rsqrt(squares) ** 2 * squares + 1))


def test_a_root_does_not_hide_a_trace():
    formula = compared("rmsnorm", a_trace_of_a_root, rows=[8], dim=[3])
    assert (formula.outcome, "another formula" in formula.message) == (DIFFERENT, True)


def test_the_root_of_a_square_gets_no_verdict():
    formula = compared("rmsnorm", a_trace_of_a_sign)
    expected = "it takes the root of a square, so a sign is unknown in the algebra"
    assert (formula.outcome, formula.message) == (UNDECIDED, expected)


def test_a_wrong_sign_is_found_in_the_float64_numbers():
    """The root's square is -1 times a number that is not a square, but not in float64."""

    def negative(x, weight, *, eps):
        squares = mean_square(x, eps)
        return -x * weight * lax.rsqrt(squares) ** 3 * squares

    assert compared("rmsnorm", negative, rows=[8]).outcome == DIFFERENT


def test_a_constant_that_may_be_rounded_gets_no_verdict():
    def scaled(x, weight, *, eps):
        return formulas.rmsnorm(x, weight, eps=eps) * 0.9999997

    formula = compared("rmsnorm", scaled)
    assert formula.outcome == UNDECIDED
    assert formula.message.endswith("; a rounding error of the constant 0.999999702 may explain it")


def test_an_identity_of_sines_gets_no_verdict():
    def doubled(x, positions, frequencies):
        angle = positions[..., None, None] * frequencies
        a, b = jnp.split(x, 2, axis=-1)
        cos, sin = 1 - 2 * jnp.sin(angle / 2) ** 2, 2 * jnp.sin(angle / 2) * jnp.cos(angle / 2)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    formula = compared("rope_halves", doubled)
    assert formula.outcome == UNDECIDED
    assert formula.message.endswith("; an identity of sines and cosines may explain it, and we know only a few")


def test_the_probability_is_estimated_for_exponents_that_are_products():
    assert not compared("softmax", formulas.softmax).estimated
    formula = compared("attention", formulas.attention)
    assert formula.estimated
    assert formula.line().endswith("; another formula passes with a probability estimated below 1e-12")


def of_op(op, function, **only):
    return equality.compare(CONTRACTS[op], function, precision=precision("float32"), only=only, seed=0)


def test_the_root_of_a_constant_is_known():
    """With one feature, the variance is 0, and the number under the root is eps, which is a square for all primes."""

    def layernorm(x, weight, bias, *, eps):
        centered = x - jnp.mean(x, axis=-1, keepdims=True)
        y = centered * lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + eps) * weight
        return y if bias is None else y + bias

    formula = of_op("layernorm", layernorm, rows=[2], dim=[1])
    assert (formula.outcome, formula.message) == (EQUAL, "")


def test_two_dimensions_are_large_at_once(monkeypatch):
    def wrong_in_the_last_tile(x, y):
        return x - y if x.shape[0] > 64 and x.shape[1] > 1024 else x + y

    monkeypatch.setattr(equality, "SHAPES", 1)
    monkeypatch.setattr(equality, "LARGE", 1)
    formula = of_op("add", wrong_in_the_last_tile)
    assert (formula.outcome, formula.draw["rows"], formula.draw["dim"]) == (DIFFERENT, 66, 1041)


def test_a_definition_may_clip():
    def clamped_swiglu(gate, up):
        gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)

    formula = of_op("clamped_swiglu", clamped_swiglu, rows=[2], ffn=[3])
    assert (formula.outcome, formula.message) == (EQUAL, "")


def test_gelu_is_read_with_pi():
    formula = of_op("gelu", jax.nn.gelu, rows=[2], ffn=[3])
    assert (formula.outcome, formula.message) == (EQUAL, "")


def test_time_that_runs_out_is_no_verdict():
    contract = CONTRACTS["add"]
    formula = equality.compare(contract, formulas.add, precision=precision("float32"), only={}, seed=0, seconds=1e-9)
    assert (formula.outcome, formula.message) == (UNDECIDED, "the smallest shape took more than 1e-09 s")


@pytest.fixture
def primes() -> Primes:
    return Primes.random(np.random.default_rng(0))


def test_exp_turns_sums_into_products(primes):
    p, q = primes.moduli
    assert is_prime(p)
    assert is_prime(q)
    assert p == 2 * q + 1
    x, y = np.random.default_rng(1).integers(0, q, (2, 100))
    np.testing.assert_array_equal(primes.exp((x + y) % q), primes.exp(x) * primes.exp(y) % p)
    assert primes.exp(np.array([0, 1])).tolist() == [1, primes.omega]


def test_products_of_matrices_are_exact(primes):
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, primes.p, (2, 3, 70)), rng.integers(0, primes.p, (70, 5))
    a[0, 0], b[:, 0] = primes.p - 1, primes.p - 1
    expected = (a.astype(object) @ b.astype(object)) % primes.p
    np.testing.assert_array_equal(matmul(a, b, primes.p), expected.astype(np.int64))


def test_roots_and_inverses(primes):
    x, y = np.random.default_rng(3).integers(1, primes.p, (2, 100))
    p = primes.p
    np.testing.assert_array_equal(x * inverse(x, p) % p, 1)
    np.testing.assert_array_equal(root(x * x % p, p) ** 2 % p, x * x % p)
    np.testing.assert_array_equal(root(x, p) * root(y, p) % p, root(x * y % p, p))
    for small in (2, 3, 5, 7):
        for modulus in primes.moduli:
            assert root(np.array([small]), modulus) ** 2 % modulus == small
    np.testing.assert_array_equal(power(x, 3, p), [pow(int(number), 3, p) for number in x])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1e-5, Constant(Fraction(1, 100_000))),
        (-0.5, Constant(Fraction(-1, 2))),
        (1 / 3, Constant(Fraction(1, 3))),
        (1 / 8321, Constant(Fraction(1, 8321))),
        (128**-0.5, Constant(Fraction(1), Fraction(1, 128))),
        (511**0.5, Constant(Fraction(1), Fraction(511))),
        (math.log(2), Constant(Fraction(1), logs=1)),
        (math.log2(math.e) * 96**-0.5, Constant(Fraction(1), Fraction(1, 96), logs=-1)),
        (math.sqrt(2 / math.pi), Constant(Fraction(1), Fraction(2), pis=-1)),
        (math.pi / 2, Constant(Fraction(1, 2), pis=2)),
        (0.999999, Constant(Fraction(999_999, 1_000_000))),
    ],
)
def test_a_constant_is_the_number_that_its_author_meant(dtype, value, expected):
    assert constant(float(np.dtype(dtype).type(value)), dtype) == expected


def test_sines_and_cosines_are_a_circle(primes):
    angle = Residues.random(primes, np.random.default_rng(4).normal(size=50), np.random.default_rng(5))
    sine, cosine = np.sin(angle), np.cos(angle)
    np.testing.assert_array_equal((sine * sine + cosine * cosine).parts[0], 1)
    np.testing.assert_array_equal((np.sin(-angle) + sine).parts[0], 0)
    np.testing.assert_array_equal((np.cos(-angle) - cosine).parts[0], 0)
    zero = angle - angle
    assert not np.any(np.sin(zero).parts[0])
    assert np.all(np.cos(zero).parts[0] == 1)


CLI = """
import jax, jax.numpy as jnp
def add(x, y): return x + y + 1e-9 * x
def right(x, y): return y + x
def narrow(x, y):
    wide = x.astype(jnp.float32) + y.astype(jnp.float32)
    return (wide + 1e-9 * wide if x.dtype == jnp.bfloat16 else wide).astype(x.dtype)
def rmsnorm(x, weight, *, eps):
    wide = jnp.sort(x.astype(jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps) * weight).astype(x.dtype)
"""


@pytest.fixture
def candidates(tmp_path) -> str:
    (tmp_path / "formulas.py").write_text(CLI)
    return str(tmp_path / "formulas.py")


FEW = ("--examples", "3", "--shapes", "2", "--set", "rows=1,3", "--dtype", "float32", "--seed", "1")


def test_a_different_formula_within_the_bound_is_a_violation(run, candidates):
    code, out, _ = run("verify", "add", "--candidate", candidates, "--algebra", *FEW, "--set", "dim=1,9", "--json")
    answer = json.loads(out)
    (report,) = answer["reports"]
    assert (code, answer["outcome"], report["outcome"], report["finding"]["kind"]) == (1, *["violated"] * 2, "algebra")
    assert report["algebra"]["outcome"] == "not equal"
    assert report["hard"] < 1
    assert report["finding"]["condition"].startswith("all results are within their bounds")


@pytest.mark.slow  # 4 s
def test_the_formula_is_compared_for_each_dtype(run, candidates):
    few = (*FEW[:4], "--set", "rows=2", "--set", "dim=3")
    code, out, _ = run("verify", "add", "--candidate", f"{candidates}:narrow", "--algebra", *few, "--json")
    reports = json.loads(out)["reports"]
    assert code == 1
    assert {report["dtype"]: report["algebra"]["outcome"] for report in reports} == {
        **{"float32": "equal", "float16": "equal"},
        "bfloat16": "not equal",
    }


@pytest.mark.slow  # 2 s
def test_an_equal_formula_is_a_line_of_the_report(run, candidates):
    code, out, _ = run("verify", "add", "--candidate", f"{candidates}:right", "--algebra", *FEW, "--set", "dim=1,9")
    assert code == 0
    assert "\n  algebra: equal to the definition for " in out
    assert out.count("algebra") == 1


@pytest.mark.slow  # 2 s
def test_a_violation_of_the_bound_is_reported_first(run, candidates):
    code, out, _ = run("verify", "rmsnorm", "--candidate", candidates, "--algebra", *FEW, "--set", "dim=9")
    assert code == 1
    assert "  value: " in out
    assert "algebra: no verdict: the candidate uses the primitive sort, which is outside the algebra" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--candidate", "mine.py:add", "--arrays", "numpy"), "--algebra reads the formula of a JAX function"),
        (("--candidate", "mine.py:add", "--arrays", "torch"), "--algebra reads the formula of a JAX function"),
        (("--candidate", "mine.py:add", "--python", "/usr/bin/python3"), "--algebra traces the candidate with this"),
        (("--mutants",), "--algebra does not work with --replay, --model or --mutants"),
    ],
)
def test_algebra_needs_a_jax_function(run, options, message):
    code, _, error = run("verify", "add", "--algebra", *options)
    assert code == 2
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
