"""Every dimension of every contract is drawn beyond `FAR`, or the contract states why not."""

import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.catalogue import CONTRACTS
from llamaspec.verify.contract import Contract, Large
from llamaspec.verify.declare import declare, sizes
from llamaspec.verify.draws.domain import parsed
from llamaspec.verify.draws.drawing import uniform
from llamaspec.verify.draws.published import GRID
from llamaspec.verify.draws.reach import FAR, reaches
from llamaspec.verify.judging.runner import verify
from llamaspec.verify.reports.listing import describe
from llamaspec.verify.reports.replay import Replay, check, digest, load, save
from llamaspec.verify.reports.report import counterexample
from tests.goldens.make_sizes import PAGE, with_table


def early(contract: Contract) -> list[str]:
    """List the dimensions for which the contract's statement of a limit is wrong.

    Such a dimension is never drawn beyond `FAR`, and the contract states no reason. Or it is drawn beyond `FAR`, and
    the contract states a reason for a limit.
    """
    return [reach.dimension for reach in reaches(contract) if (reach.most <= FAR) != bool(reach.why)]


@pytest.mark.parametrize("op", CONTRACTS)
def test_every_dimension_is_drawn_far_or_ends_for_a_reason(op: str):
    contract = CONTRACTS[op]
    assert early(contract) == []
    assert set(contract.large.ends) <= {reach.dimension for reach in reaches(contract)}
    assert {name for names in contract.large.closer.values() for name in names} <= set(contract.draws)
    assert set(contract.large.closer) <= set(contract.large.sizes)


def test_a_user_draws_the_largest_of_every_dimension():
    """A user's 200 draws include 20 with large shapes, among them the largest size of each dimension."""
    for op, contract in CONTRACTS.items():
        drawn = contract.large.narrowings({}, most=20)
        for name, larger in contract.large.sizes.items():
            assert any(shape.get(name) == [larger[-1]] for shape in drawn), (op, name)


def test_every_published_use_is_drawn():
    """Each dimension with a published use is drawn beyond that use, and beyond the 65,535 blocks of a grid."""
    for op, contract in CONTRACTS.items():
        for reach in reaches(contract):
            if reach.use is not None:
                assert reach.most > max(reach.use.size, 65_535 if reach.use.grid else 0), (op, reach.dimension)
        known = {reach.dimension for reach in reaches(contract) if reach.use or reach.why}
        assert set(contract.large.sizes) - known <= {"start", "page", "pairs", "spare"}, op
        assert set(contract.large.widest) <= set(contract.draws)


@pytest.mark.parametrize(("examples", "shapes", "drawn"), [(200, None, True), (200, 64, True), (67, 22, False)])
def test_a_run_of_200_draws_includes_the_published_sizes(examples: int, shapes: int | None, drawn: bool):
    """A run of 200 draws also has draws of published sizes, which the report does not count as examples."""
    seen = set()

    def gemv(x, weight):
        seen.add(weight.shape)
        return CONTRACTS["gemv"].definition(x, weight).astype(x.dtype)

    options = {"examples": examples, "shapes": shapes, "seed": 0, "shrink": False}
    report = verify(CONTRACTS["gemv"], Direct(gemv), precision=precision("float32"), **options)
    assert report.outcome == "within bounds" and report.examples == examples
    assert {(266_241, 8), (9, 74_881)} <= seen if drawn else max(max(shape) for shape in seen) < GRID


def test_a_slow_candidate_is_not_called_at_the_sizes_of_published_models(monkeypatch):
    """`verify` omits the draws of published sizes if a call would take too long, and the report says so.

    An interpreted kernel may need minutes for 133,121 rows.
    """
    monkeypatch.setattr("llamaspec.verify.judging.runner.PATIENCE", 1.0)

    def slow(x, y):
        time.sleep(0.2 * (len(x) > GRID // 8))
        assert len(x) < GRID
        return x + y

    add, few = CONTRACTS["add"], {"precision": precision("float32"), "examples": 200, "seed": 0}
    report = verify(add, Direct(slow), **few)
    assert report.outcome == "within bounds"
    ((reason, count),) = report.not_judged.items()
    assert re.fullmatch(r"at the sizes of published models, a call would take about \d+ s", reason) and count == 2
    assert not verify(replace(add, large=replace(add.large, widest={})), Direct(slow), **few).not_judged


@pytest.mark.parametrize(("kernel", "name"), [(lambda y: y[:65_535], "rows"), (lambda y: y, "cols")])
def test_a_kernel_that_ends_at_a_grid_or_at_a_buffer_is_violated(kernel, name: str):
    def gemv(x, weight):
        cols = 12_288 if name == "cols" else None
        y = CONTRACTS["gemv"].definition(x[:cols], weight[:, :cols])
        y[len(kernel(y)) :] = 0
        return y.astype(x.dtype)

    contract = CONTRACTS["gemv"]
    report = verify(contract, Direct(gemv), precision=precision("float32"), examples=200, seed=0, shrink=False)
    assert report.outcome == "violated" and report.worst.draw[name] == contract.large.widest[name]
    assert any("a large draw" in line for line in counterexample(report, contract))
    only = {"rows": [9], "cols": [17]}
    assert (
        verify(
            contract, Direct(gemv), precision=precision("float32"), examples=200, seed=0, shrink=False, only=only
        ).outcome
        == "within bounds"
    )


def test_a_dimension_that_ends_early_is_seen():
    add = CONTRACTS["add"]
    assert early(replace(add, large=Large({"dim": [8321]}))) == ["rows"]
    assert early(replace(add, large=Large({"dim": [8321], "rows": [4161]}))) == ["rows"]
    assert early(replace(add, large=replace(add.large, ends={"rows": "a reason"}))) == ["rows"]


def test_the_page_has_the_table():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "run `python -m tests.goldens.make_sizes`"


@pytest.mark.sampled(2)  # 1 to 2 s each
@pytest.mark.parametrize("op", ["add", "rmsnorm", "linear", "rope_halves"])
def test_rows_beyond_4096_are_found_at_default_settings(op: str):
    """At default settings, `verify` rejects a kernel that is wrong after row 4096 of its first argument."""
    contract = CONTRACTS[op]

    def within(*arguments, **options):
        y = contract.definition(*arguments, **options).astype(arguments[0].dtype)
        y[4096:] = 0
        return y

    report = verify(contract, Direct(within), precision=precision("float32"), examples=200, seed=0, shrink=False)
    assert report.outcome == "violated"
    assert max(value for value in report.worst.draw.values() if isinstance(value, int)) > FAR
    (hint,) = [line for line in counterexample(report, contract) if "a large draw" in line]
    assert re.search(r" with \w+ up to \d, were right$", hint)
    assert not any(hint in line for line in counterexample(replace(report, seed=None), contract))


@pytest.mark.parametrize(
    ("op", "name"), [("attention_decode", "lengths"), ("norm_qkv", "positions"), ("moe", "chosen")]
)
def test_a_large_counterexample_can_be_replayed(op: str, name: str, tmp_path: Path):
    """A large counterexample can be replayed, even if `--set` would refuse its long list or its small sizes."""
    contract = CONTRACTS[op]
    largest = max(contract.large.sizes[name], key=lambda size: len(size) if isinstance(size, tuple) else size)
    only = {**contract.large.beside, **contract.large.closer.get(name, {}), name: [largest]}
    draw = next(uniform(contract, None, parsed(only), seed=0))
    digested = digest(contract, "float32", draw)
    path = save(Replay(op, "mine.py", "numpy", "float32", draw, digested, "value"), tmp_path)
    check(load(path), contract, path)
    draw = {**draw, name: (2,) * 1040 if isinstance(largest, tuple) else -1}
    with pytest.raises(ValueError, match=f"{op}: {name}: expected one of"):
        check(Replay(op, "mine.py", "numpy", "float32", draw, digested, "value"), contract, path)


@pytest.mark.parametrize("rows", [st.integers(1, 4), st.one_of(st.just(1), st.just(4)), [1, 4]])
def test_sizes_of_a_contract_of_ones_own_have_a_reach(rows):
    def total(x):
        return np.sum(x, axis=-1)

    contract = declare(total, arrays={"x": "rows n"}, sizes={"rows": rows, "n": sizes(8, most=17)}, large={"n": [99]})
    assert [reach[:3] for reach in reaches(contract)] == [("rows", 4, 4), ("n", 17, 99)]
    assert "  large   one at a time: n to 99" in describe(contract, [])


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (st.sampled_from([(1, 7), (2,)]), [("lengths", 7, 7), ("lengths, how many", 2, 2)]),
        (st.lists(st.integers(1, 9), min_size=1).map(tuple), [("lengths", 9, 9), ("lengths, how many", 1024, 1024)]),
        (st.sampled_from(["rows", "columns"]), []),
    ],
)
def test_other_draws_of_ones_own_have_a_reach(strategy, expected):
    contract = replace(CONTRACTS["add"], shapes={"lengths": strategy}, large=Large())
    assert [reach[:3] for reach in reaches(contract)] == expected
