"""How far every dimension of every contract is drawn, and that nothing ends early without a reason."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from verify.candidate import Direct
from verify.catalogue import CONTRACTS
from verify.contract import Contract, Large
from verify.precision import precision
from verify.reach import FAR, reaches, table
from verify.report import counterexample
from verify.runner import verify


def early(contract: Contract) -> list[str]:
    """Dimensions that end before `FAR` without a reason, or have a reason and do not end."""
    return [one.dimension for one in reaches(contract) if (one.most <= FAR) != bool(one.why)]


@pytest.mark.parametrize("op", CONTRACTS)
def test_every_dimension_is_drawn_far_or_ends_for_a_reason(op: str):
    contract = CONTRACTS[op]
    assert early(contract) == []
    assert set(contract.large.ends) <= {one.dimension for one in reaches(contract)}
    assert {name for names in contract.large.closer.values() for name in names} <= set(contract.draws)
    assert set(contract.large.closer) <= set(contract.large.sizes)


def test_a_user_draws_the_largest_of_every_dimension():
    """200 draws have room for 20 large shapes, and the smallest of each dimension are left out first."""
    for op, contract in CONTRACTS.items():
        drawn = contract.large.narrowings({}, most=20)
        for name, sizes in contract.large.sizes.items():
            assert any(shape.get(name) == [sizes[-1]] for shape in drawn), (op, name)


def test_a_dimension_that_ends_early_is_seen():
    add = CONTRACTS["add"]
    assert early(replace(add, large=Large({"dim": [8321]}))) == ["rows"]
    assert early(replace(add, large=Large({"dim": [8321], "rows": [4161]}))) == ["rows"]
    assert early(replace(add, large=replace(add.large, ends={"rows": "a reason"}))) == ["rows"]


def test_the_page_has_the_table():
    text = Path("docs/sizes.md").read_text(encoding="utf-8")
    assert "\n".join(table(CONTRACTS)) in text


@pytest.mark.parametrize("op", ["add", "rmsnorm", "linear", "rope_halves"])
def test_rows_beyond_4096_are_found_at_default_settings(op: str):
    """`rows` are whatever the first axis of the first argument is called."""
    contract = CONTRACTS[op]

    def within(*arguments, **options):
        y = contract.definition(*arguments, **options).astype(arguments[0].dtype)
        y[4096:] = 0
        return y

    report = verify(contract, Direct(within), precision=precision("float32"), examples=200, seed=0, shrink=False)
    assert report.outcome == "violated"
    assert max(value for value in report.worst.draw.values() if isinstance(value, int)) > FAR
    (hint,) = [line for line in counterexample(report, contract) if "a shape beyond a tile" in line]
    assert re.search(r"nothing was wrong in the draws before it, of \w+ up to \d$", hint)
    assert not any(hint in line for line in counterexample(replace(report, seed=None), contract))
