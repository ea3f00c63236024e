"""User-defined contracts: derived error bounds hold for float32 code, and are nearly as tight as possible."""

import re
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import pytest
from hypothesis import strategies as st

from llamaspec.cli import llamaspec
from llamaspec.verify.bounds.carried import Carried, Rounding
from llamaspec.verify.bounds.precision import TINY, U, precision
from llamaspec.verify.candidates.candidate import Direct, NoVerdict
from llamaspec.verify.catalogue import in_file
from llamaspec.verify.contract import Expected, with_rounding
from llamaspec.verify.declare import declare, derived, sizes
from llamaspec.verify.draws.draw import Values
from llamaspec.verify.judging.mutation import trials
from llamaspec.verify.judging.runner import verify
from tests.support.processes import REPOSITORY

FOLDER = REPOSITORY / "docs" / "contracts"
EXAMPLES = ("layernorm", "group_norm", "gelu_gated_linear", "fused_cross_entropy")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_finds_its_mutants(name):
    contracts, implementations = in_file(str(FOLDER / f"{name}.py"))
    mutant_trials = list(trials(contracts[name], implementations[name], seed=0))
    assert len(mutant_trials) >= 8
    assert [trial.mutant for trial in mutant_trials if not trial.killed or trial.report.examples > 200] == []


@pytest.mark.sampled(5)  # 9 cases, 6 s
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_accepts_its_right_function(name, dtype):
    contracts, implementations = in_file(str(FOLDER / f"{name}.py"))
    candidate = Direct(implementations[name].function)
    report = verify(contracts[name], candidate, precision=precision(dtype), examples=30, seed=4)
    assert report.outcome == "within bounds", report.worst


FORMULAS = {
    "softmax": lambda x, y: (
        np.exp(x - np.max(x, axis=-1, keepdims=True))
        / np.sum(np.exp(x - np.max(x, axis=-1, keepdims=True)), axis=-1, keepdims=True)
    ),
    "rms": lambda x, y: x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * y,
    "swish": lambda x, y: x / (1 + np.exp(-x)) * y,
    "product": lambda x, y: np.tanh(x) @ y.T,
    "difference": lambda x, y: (x - y) ** 3,
    "logarithm": lambda x, y: np.log(np.sum(np.square(x), axis=-1) + 1) - np.log1p(np.abs(x[..., 0])),
    "choice": lambda x, y: np.where(x > 0, x * y, 0.1 * np.minimum(x, y)),
    "moves": lambda x, y: np.concatenate([x[..., ::2], -y.reshape(y.shape)[..., 1::2]], axis=-1).sum(axis=-1).mean(),
    "turns": lambda x, y: np.stack([x * np.cos(y) - y * np.sin(x), *np.split(np.sin(x) * y, 1, axis=-1)]),
    "roots": lambda x, y: np.sqrt(np.abs(x)) / (2 + np.expm1(np.minimum(y, 1.0))),
}


def bound(formula: Callable[..., Any], **options: Any) -> Callable[..., Expected]:
    """Return a function that derives the bound of a formula with one result."""

    def expect(*arguments: np.ndarray) -> Expected:
        expected = derived(formula, **options)(*arguments)
        assert isinstance(expected, Expected)
        return expected

    return expect


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_derived_bound_holds_in_float32(name, scale):
    """The derived bound of a formula holds for the same formula in float32."""
    formula, rng = FORMULAS[name], np.random.default_rng(0)
    for _ in range(8):
        x, y = (rng.normal(size=(3, 50)).astype(np.float32) * np.float32(scale) for _ in range(2))
        expected = bound(formula)(x, y)
        with np.errstate(all="ignore"):
            exact = formula(x.astype(np.float64), y.astype(np.float64))
            computed = formula(x, y)
        np.testing.assert_allclose(expected.value, exact, rtol=1e-12, atol=1e-300)
        assert np.all(np.abs(computed - exact) <= expected.hard)


def test_a_derived_bound_is_a_few_roundings():
    x, y = (np.full((1, 4), value, np.float32) for value in (3.0, 5.0))
    expected = bound(lambda x, y: x * y + y)(x, y)
    hard, _ = with_rounding(expected, precision("float32"))
    assert np.all(hard <= 2 * U * 20.1 + 20 * TINY) and np.all(hard >= U * 20)


def test_where_a_rounding_decides_both_choices_are_within_the_bound():
    x = np.array([[1.0, 1.1, 1.2]], np.float32)
    expected = bound(lambda x: np.where(x * x > np.float32(1.1) ** 2, x, 0.0))(x)
    assert np.all(expected.hard[0, [0, 2]] == 0)  # certain: 1 is below, 1.2 is above
    assert expected.hard[0, 1] >= x[0, 1]
    assert bound(lambda x: np.where(x * x > np.float32(1.1) ** 2, 1.0, 3.0))(x).hard[0, 1] >= 2
    equal = bound(lambda x: np.where(np.sum(np.exp(x), axis=-1) == 0, 1.0, np.sum(x, axis=-1)))(x)
    assert equal.value[0] == np.sum(x.astype(np.float64)) and equal.hard[0] < 1e-5


def test_a_narrower_rounding_is_declared():
    x = np.linspace(-3, 3, 64).astype(np.float32)
    wide = bound(lambda x: np.exp(x) * x)(x)
    narrow = bound(lambda x: np.exp(x) * x, rounding=Rounding.of(precision("bfloat16")))(x)
    np.testing.assert_array_equal(wide.value, narrow.value)
    assert np.all(narrow.hard[x != 0] > 1000 * wide.hard[x != 0])


@pytest.mark.parametrize(
    "formula", [lambda x: np.sum(x, axis=-1), lambda x: x @ np.ones((2, 1)), lambda x: x[0, 1:] * 257.0]
)
def test_sums_products_of_matrices_and_constants_are_rounded_too(formula):
    """Bounds count the rounding of sums, products and constants: in bfloat16, 256 + 1 and 257 become 256."""
    expected = bound(formula, rounding=Rounding.of(precision("bfloat16")))(np.array([[256.0, 1.0]], np.float32))
    assert expected.value.ravel().tolist() == [257]
    assert 1 <= expected.hard.max() < 3


@pytest.mark.parametrize(
    ("formula", "error"),
    [
        (lambda x: np.sort(x), "cannot derive a bound for np.sort"),
        (lambda x: np.arctan(x), "cannot derive a bound for np.arctan"),
        (lambda x: x**0.5, "powers other than 2, 3, 4"),
        (lambda x: np.isfinite(x * x > 1.21), "rounding could change np.greater"),
        (lambda x: np.sum(x * x > 1.21), "change np.greater: cannot derive a bound for np.sum"),
        (lambda x: x if np.all(x * x > 1.21) else -x, "rounding could change np.greater"),
        (lambda x: x if np.sum(x) else -x, "rounding could change which branch is taken"),
        (lambda x: np.where(Carried([1.0]), x, 0.0), "rounding could change .* np.where"),  # type: ignore
        (lambda x: np.multiply.reduce(x), "cannot derive a bound for np.multiply.reduce"),
    ],
)
def test_what_is_not_covered_is_named(formula, error):
    with pytest.raises(TypeError, match=error):
        derived(formula)(np.full(4, 1.1, np.float32))


def test_a_declaration_that_leaves_something_open():
    def scaled(x, weight, *, factor):
        return x * weight * factor

    arrays, options = {"x": "rows dim", "weight": "dim"}, {"factor": [2.0]}
    with pytest.raises(ValueError, match=r"scaled.*factor.*arrays.*options"):
        declare(scaled, arrays=arrays, sizes={"rows": [1], "dim": [3]})
    with pytest.raises(ValueError, match=r"`sizes` lacks: dim$"):
        declare(scaled, arrays=arrays, sizes={"rows": [1]}, options=options)
    with pytest.raises(ValueError, match=r"scaled.*bias"):
        declare(scaled, arrays={**arrays, "bias": "dim"}, sizes={"rows": [1], "dim": [3]}, options=options)
    contract = declare(scaled, arrays=arrays, sizes={"rows": [1, 2], "dim": sizes(8, most=17)}, options=options)
    wrong = Direct(lambda x, weight, *, factor: (x * weight * factor)[:1040])
    report = verify(contract, wrong, precision=precision("float32"), examples=200, seed=0, shrink=False)
    assert report.outcome == "violated" and report.worst.draw["rows"] > 1040


def in_groups(x, *, groups):
    return np.sum(x.reshape(groups, x.shape[0] // groups), axis=-1)


def test_sizes_that_depend_on_each_other_are_products():
    """A size declared as a product of other sizes is their product in all draws, even in large ones.

    An argument with the name of a size gets the value of this size.
    """
    contract = declare(
        in_groups, arrays={"x": "groups*width"}, sizes={"groups": [1, 2, 3], "width": [2, 5]}, large={"groups": [99]}
    )
    report = verify(contract, Direct(in_groups), precision=precision("float32"), examples=60, seed=0)
    assert report.outcome == "within bounds" and report.examples == 60
    arguments = contract.arguments(precision=precision("float32"), groups=99, width=5, x=Values("normal"))
    assert arguments["x"].shape == (495,) and arguments["groups"] == 99


def test_the_error_names_sizes_that_do_not_fit_together():
    contract = declare(in_groups, arrays={"x": "channels"}, sizes={"channels": [5], "groups": [2]})
    with pytest.raises(NoVerdict, match=r"channels=5.*cannot reshape.*some of channels, groups depend.*groups\*width"):
        verify(contract, Direct(in_groups), precision=precision("float32"), examples=3, seed=0)
    with pytest.raises(ValueError, match=r"cannot read the dimension channels//groups: expected sizes"):
        declare(in_groups, arrays={"x": "channels//groups"}, sizes={"channels": [5], "groups": [2]})
    with pytest.raises(ValueError, match="dimensions that `sizes` lacks: width"):
        declare(in_groups, arrays={"x": "2*width+groups"}, sizes={"groups": [2]})


@pytest.mark.parametrize(
    ("n", "beside", "large"),
    [
        (st.integers(8, 1500), [8], [66, 1041]),
        (st.integers(1, 8).map(lambda half: 2 * half), [4], [66, 1041, 8321]),
        (sizes(8, most=17), [5], [66, 1041, 8321]),
        ([1, 4], [4], [66, 1041, 8321]),
    ],
)
def test_a_range_of_sizes_is_kept(n, beside, large):
    """Large draws respect a declared range of sizes. A declared list of sizes limits only the small draws."""
    contract = declare(lambda x: x, arrays={"x": "rows n"}, sizes={"rows": [2], "n": n})
    assert (contract.large.beside["n"], contract.large.sizes["n"]) == (beside, large)


def run(*arguments: str) -> None:
    llamaspec.main(["verify", *arguments], standalone_mode=False)


def test_the_command_takes_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = str(FOLDER / "layernorm.py")
    few = ("--arrays", "numpy", "--examples", "30", "--seed", "1", "--dtype", "float32")
    run("--contract", file, "--candidate", f"{file}:right", *few)
    assert capsys.readouterr().out.startswith(f"within bounds layernorm float32  {file}:right")
    run("--contract", file, "--list")
    assert "  kills   10 mutants: mean left out; " in capsys.readouterr().out
    (tmp_path / "mine.py").write_text("def layernorm(x, weight, bias, *, eps):\n    return x * weight + bias\n")
    with pytest.raises(SystemExit):
        run("--contract", file, "--candidate", "mine.py", *few)
    *_, line = capsys.readouterr().out.splitlines()
    assert line.endswith(f" --contract {file}")
    with pytest.raises(SystemExit):
        run(*line.split()[2:])
    for arguments, error in [
        (["--contract", file], "name it with --candidate"),
        (["--contract", "none.py", "--candidate", "mine.py"], "there is no file none.py"),
        (["--contract", "mine.py", "--candidate", "mine.py"], "mine.py defines no contract"),
        (
            ["softmax", "--contract", file, "--candidate", "mine.py"],
            "there is no contract softmax: expected one of layern",
        ),
    ]:
        with pytest.raises(click.UsageError, match=error):
            run(*arguments)


def test_the_page_on_contracts_runs(tmp_path):
    page = (FOLDER.parent / "contracts.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(# layernorm.py[^`]*)```", page)
    (tmp_path / "layernorm.py").write_text(source)
    contracts, _ = in_file(str(tmp_path / "layernorm.py"))
    _, implementations = in_file(str(FOLDER / "layernorm.py"))
    right = Direct(implementations["layernorm"].function)
    report = verify(contracts["layernorm"], right, precision=precision("float32"), examples=20, seed=0)
    assert report.outcome == "within bounds"
    for name in EXAMPLES:
        count = len(in_file(str(FOLDER / f"{name}.py"))[1][name].mutants)
        assert re.search(rf"\({re.escape(f'contracts/{name}.py')}\) \| [^|]* \| {count} \|", page)
