"""Contracts reject every mutant and accept every right implementation.

The thousand short runs are in a separate process, without the tests' shape checks.
"""

import json
import subprocess
import sys
from statistics import median

import numpy as np
import pytest

from llamaspec.verify.bounds.precision import TINY, precision
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.catalogue import CONTRACTS, IMPLEMENTATIONS
from llamaspec.verify.draws.draw import LAW, Values
from llamaspec.verify.judging.examination import examine
from llamaspec.verify.mutant import implementation
from tests.goldens.make_mutants import PAGE
from tests.support.tables import table_rows

MUTANTS = [(op, mutant.name) for op, right in IMPLEMENTATIONS.items() for mutant in right.mutants]
# The mutants of these ops take seven eighths of the time, since a draw of attention or experts is slow. Most have a
# similar op among the fast ones: rope_interleaved for other rotations, rmsnorm for norms, linear and gemv for products,
# logsumexp for cross_entropy.
LONG = [
    *("attention", "attention_prefill", "attention_decode", "attention_paged", "moe", "distribution", "norm_qkv"),
    *("gemv_quantized", "gemv_fixed_point", "softmax", "attention_weights", "sink_attention", "attention_backward"),
    *("rope_halves", "qk_norm", "wide_qk_norm", "norm_linear", "norm_gate_up", "shared_expert"),
    *("linear_add", "partial_rope", "cross_entropy", "gemm", "layernorm"),
]
FAST = [op for op in IMPLEMENTATIONS if op not in LONG]

RIGHT = """
import json
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.catalogue import CONTRACTS, IMPLEMENTATIONS
from llamaspec.verify.bounds.precision import PRECISIONS
from llamaspec.verify.judging.runner import verify

reports = [
    verify(CONTRACTS[op], Direct(right.function), precision=precision, examples=12, seed=0, only=right.only)
    for op, right in IMPLEMENTATIONS.items()
    for precision in PRECISIONS.values()
]
print(json.dumps([[report.op, report.dtype, report.outcome, str(report.worst)] for report in reports]))
"""


def answer(*command: str):
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert run.returncode in (0, 1) and run.stdout, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize(
    "ops", [pytest.param(FAST, id="fast ops"), pytest.param(LONG, id="long ops", marks=pytest.mark.slow)]
)
def test_every_mutant_is_found_out(ops: list[str]):
    rows = answer("-m", "llamaspec.cli", "verify", *ops, "--mutants", "--seed", "0", "--json")
    assert [(row["op"], row["mutant"]) for row in rows] == [
        (op, mutant) for mutant_op in ops for op, mutant in MUTANTS if op == mutant_op
    ]
    assert [(row["op"], row["mutant"]) for row in rows if row["found by"] == "lives"] == []
    expected = [table_row(op, [row["examples"] for row in rows if row["op"] == op]) for op in sorted(ops)]
    assert [cells for cells in page_rows() if cells[0] in ops] == expected, "run `python -m tests.goldens.make_mutants`"


def page_rows() -> list[list[str]]:
    """Return the rows of the table in docs/mutants.md without the seconds, which depend on the machine."""
    return [[*cells[:3], *cells[5:]] for cells in table_rows(PAGE.read_text(encoding="utf-8"))]


def table_row(op: str, examples: list[int]) -> list[str]:
    """Make the table row of an op. `examples` has the number of examples until each of its mutants was rejected."""
    return [op, str(len(examples)), str(len(examples)), f"{median(examples):g}", str(max(examples))]


def test_the_page_has_a_row_for_every_op_and_the_total():
    *rows, total = page_rows()
    counts = [[op, str(len(right.mutants)), str(len(right.mutants))] for op, right in IMPLEMENTATIONS.items()]
    assert [cells[:3] for cells in rows] == counts, "run `python -m tests.goldens.make_mutants`"
    assert total[:3] == ["all", str(len(MUTANTS)), str(len(MUTANTS))]


@pytest.mark.slow  # 13 s
def test_right_implementations_pass():
    assert [report for report in answer("-c", RIGHT) if report[2] != "within bounds"] == []


def test_scores_whose_rounding_is_large_are_no_alarm():
    """Attention with large rounding errors in its scores is accepted.

    If a score is off by a, a weight is off by a factor of up to e^a, which is more than 1 + a.
    """
    draw = {
        "offsets": (31,), "queries": 8, "spare": 7, "kv_heads": 3, "group": 7, "head_dim": 3,
        "q": Values("wide", 85, 4), "k": Values("halves", 189, 4), "v": Values("wide", 481, 7),
        "shift": 0.0, "window": 8, "padding": 100.0,
    }  # fmt: skip
    op = "attention_prefill"
    candidate = Direct(IMPLEMENTATIONS[op].function)
    assert examine(CONTRACTS[op], candidate, precision("float32"), draw).finding is None


def test_a_residual_that_is_flushed_to_zero_is_no_alarm():
    """A candidate may flush a subnormal residual to zero, because GPUs and XLA flush all subnormal float32 numbers."""
    draw = {
        "batch": 1, "rows": 8, "cols": 256, "bias": None,
        "x": Values("integers", 243, 5), "weight": Values("integers", 243, 0), "residual": Values("denormal", 345, -5),
        LAW: "x = 0 gives the residual, bit for bit unless it is subnormal",
    }  # fmt: skip
    assert draw[LAW] in {law.name for law in CONTRACTS["linear_add"].laws}
    right = IMPLEMENTATIONS["linear_add"].function

    def flushing(*arguments, **options):
        y = right(*arguments, **options)
        return np.where(np.abs(y) < TINY, np.zeros_like(y), y)

    assert examine(CONTRACTS["linear_add"], Direct(flushing), precision("float32"), draw).finding is None


def test_every_contract_has_mutants():
    assert set(IMPLEMENTATIONS) == set(CONTRACTS)
    assert len(set(MUTANTS)) == len(MUTANTS)


def test_a_change_that_does_not_apply_is_an_error():
    """A mutant with a change that does not apply is an error: it would survive, and make the contract look weak."""
    changes = implementation(answer, "typo\n    - runn =\n    + run =\n")
    with pytest.raises(ValueError, match=r"answer, typo: .*'runn ='"):
        changes.mutated(changes.mutants[0])
