"""Contracts, mutants and candidates are found in their modules, and contracts draw sizes larger than a tile."""

import sys
from pathlib import Path

import numpy as np
import pytest

from llamaspec.model import candidates
from llamaspec.model.candidates import table
from llamaspec.verify import contracts, mutants
from llamaspec.verify.bounds.precision import U, precision
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.catalogue import CONTRACTS, IMPLEMENTATIONS, by_op, contract_for, instances_in
from llamaspec.verify.contract import Contract, as_float64
from llamaspec.verify.draws.draw import Values
from llamaspec.verify.judging.examination import examine
from llamaspec.verify.judging.judge import judge
from llamaspec.verify.judging.runner import verify
from llamaspec.verify.mutant import Implementation
from tests.support.strategies import share_of

HALVE = """
import numpy as np
from hypothesis import strategies as st

from llamaspec.verify.contract import Contract, Expected
from llamaspec.verify.contracts.add import CONTRACT as OF_ANOTHER_FILE
from llamaspec.verify.draws.draw import values


def halve(x):
    return x.astype(np.float64) / 2


def arguments(*, precision, rows, x):
    return {"x": x.array("x", rows, precision=precision)}


def expect(x):
    value = halve(x)
    return Expected(value, np.zeros(value.shape), np.zeros(value.shape), np.abs(value))


HALVE = Contract(halve, {"rows": st.just(3)}, {"x": values()}, arguments, expect, domain="x", bound="exact")
"""
MUTANTS = """
from llamaspec.verify.mutant import implementation


def halve(x):
    return x / 2


IMPLEMENTATION = implementation(halve, "doubled\\n    - / 2\\n    + * 2\\n")
"""
CANDIDATE = """
from llamaspec.model.candidates.own import own_candidate


@own_candidate("halve", dtypes=("float32",))
def by_shift(x):
    return x / 2
"""


@pytest.fixture
def drop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function that adds a module with given source code to a package for the duration of a test."""

    def drop(package, name: str, text: str) -> None:
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / f"{name}.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)

    return drop


def test_a_module_in_contracts_is_found(drop):
    drop(contracts, "halve", HALVE)
    names = by_op((contract.name, contract) for contract in instances_in(contracts, Contract))
    assert set(names) == {*CONTRACTS, "halve"}


def test_a_module_in_mutants_is_found(drop):
    drop(mutants, "halve", MUTANTS)
    names = [implementation.function.__name__ for implementation in instances_in(mutants, Implementation)]
    assert sorted(names) == sorted([*IMPLEMENTATIONS, "halve"])


def test_a_module_in_candidates_is_found(drop):
    drop(candidates, "halve", CANDIDATE)
    known = {candidate.function for candidate in table.CANDIDATES}
    [new] = [candidate for candidate in table.listed_candidates() if candidate.function not in known]
    assert new[:2] == ("halve", "llamaspec.model.candidates.halve:by_shift")


def test_two_definitions_of_one_op_are_an_error():
    with pytest.raises(ValueError, match="add is defined twice"):
        by_op(iter([("add", 1), ("add", 2)]))


def test_definitions_are_pages_of_the_reference():
    outside = [
        name
        for name, contract in CONTRACTS.items()
        if not contract.definition.__module__.startswith("llamaspec.reference.")
    ]
    assert outside == []


def test_a_kernel_wrong_beyond_one_tile_is_detected_by_default():
    def rmsnorm(x, weight, *, eps):
        squares = np.sum((x * x)[:, :1024], axis=-1, keepdims=True)
        return x / np.sqrt(squares / x.shape[-1] + np.float32(eps)) * weight

    report = verify(
        contract_for("rmsnorm"), Direct(rmsnorm), precision=precision("float32"), examples=200, seed=0, shrink=False
    )
    assert report.outcome == "violated"
    assert report.worst.draw["dim"] > 1024


def test_large_sizes_are_part_of_the_examples():
    def rmsnorm(x, weight, *, eps):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight

    report = verify(contract_for("rmsnorm"), Direct(rmsnorm), precision=precision("float32"), examples=50, seed=0)
    assert (report.outcome, report.examples) == ("within bounds", 50)


def test_weights_rounded_to_float16_pass_in_float16():
    """Attention with weights rounded to float16 passes.

    Small float16 weights are subnormal, with a spacing of 2^-24.
    """

    def attention(q, k, v, mask):
        q, k, v = (a.astype(np.float32) for a in (q, k, v))
        k, v = (np.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(np.float32(q.shape[-1])) + mask[:, None]
        top = np.max(scores, axis=-1, keepdims=True)
        p = np.exp(scores - np.where(np.isfinite(top), top, 0))
        total = np.sum(p, axis=-1, keepdims=True)
        p = p.astype(np.float16).astype(np.float32)
        o = np.einsum("bhqk,bkhd->bqhd", p / np.where(total == 0, 1, total), v)
        return o.astype(np.float16)

    draw = {
        "batch": 1, "queries": 3, "keys": 33, "kv_heads": 1, "group": 1, "head_dim": 8,
        "q": Values("normal", 1, 2), "k": Values("normal", 2, 1), "v": Values("equal", 3, -8),
        "shift": 0.0, "mask": "causal",
    }  # fmt: skip
    contract, half = contract_for("attention"), precision("float16")
    for scale in range(-8, 3):
        examination = examine(contract, Direct(attention), half, {**draw, "v": Values("wide", 3, scale)})
        assert examination.finding is None, examination
    report = verify(contract, Direct(attention), precision=half, examples=share_of(100), seed=0)
    assert report.outcome == "within bounds", report.worst


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_router_that_tells_zeros_apart_passes_where_their_signs_differ(zero):
    """A router may rank a logit of -0 after a logit of 0, as XLA's top_k does. The definition treats them as equal.

    For equal logits with equal signs, the contract rejects a wrong order.
    """
    x, router = np.full((1, 1), zero, np.float32), np.array([[-1.0], [1.0], [-2.0]], np.float32)
    contract = contract_for("route")
    expected = contract.expected({"x": x, "router": router, "experts_per_token": 1})
    outputs = np.array([[1]]), np.ones((1, 1), np.float32)
    assert judge(outputs, expected, precision("float32")).finding is None
    ties = contract.expected({"x": np.zeros((1, 2), np.float32), "router": router @ [[1, -1]], "experts_per_token": 1})
    assert judge(outputs, ties, precision("float32")).finding is not None


def test_a_parameter_that_a_contract_does_not_draw_keeps_its_default():
    arguments = {"x": np.ones((1, 1)), "router": np.ones((1, 1)), "experts_per_token": 1}
    positional, by_name = contract_for("route").split(arguments)
    assert [*positional] == ["x", "router"] and by_name == {"experts_per_token": 1}
    with pytest.raises(KeyError, match="router"):
        contract_for("route").split({"x": arguments["x"], "experts_per_token": 1})


def test_the_printed_bound_of_softmax_is_the_one_in_force():
    """The bound that the judge uses for softmax equals the formula that `verify` prints.

    The scores are equal, so a = 0, and the formula becomes ((1 + s) / (1 - s) - 1) p with s = (n + 10 b) u.
    """
    n = 64
    [expected] = contract_for("softmax").expected({"x": np.zeros((1, n), np.float32)})
    s = (n + 10 * 64) * U
    np.testing.assert_allclose(expected.hard, ((1 + s) / (1 - s) - 1) / n, rtol=1e-4)


def test_a_negative_zero_is_no_smaller_than_zero():
    def argmax(x):
        ordered = as_float64(x) - 1e-300 * np.signbit(x)
        return np.argmax(ordered, axis=-1)

    for seed in range(3):
        report = verify(
            contract_for("argmax"),
            Direct(argmax),
            precision=precision("float32"),
            examples=200,
            seed=seed,
            shrink=False,
        )
        assert report.outcome == "violated"
