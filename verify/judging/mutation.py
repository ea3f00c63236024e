"""Test a contract with its mutants: count how many it finds, and how soon."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.contract import Contract
from llamaspec.verify.judging.runner import Report, verify
from llamaspec.verify.mutant import Implementation

# Draws of a quick look, of a user's default run, and before we give up on a mutant.
STAGES = (("float32", 40), ("float32", 200), ("bfloat16", 67), ("float16", 67), ("float32", 1000))


class Trial(NamedTuple):
    """One mutant and the outcome of its contract."""

    op: str
    mutant: str
    report: Report

    @property
    def killed(self) -> bool:
        return self.report.worst.finding is not None


def trials(contract: Contract, implementation: Implementation, *, seed: int) -> Iterator[Trial]:
    """Verify every mutant of an implementation with more and more draws (`STAGES`), until a result is wrong."""
    for mutant in implementation.mutants:
        candidate = Direct(implementation.mutated(mutant), name=mutant.name, contiguous=True)
        trial = None
        for dtype, most in STAGES:
            if trial is None or not trial.killed:
                report = verify(
                    contract,
                    candidate,
                    precision=precision(dtype),
                    examples=most,
                    seed=seed,
                    only=implementation.only,
                    shrink=False,
                )
                trial = Trial(contract.name, mutant.name, report)
        if trial is not None:
            yield trial


def row(trial: Trial) -> dict[str, str | int | float]:
    """Make a trial's row of a table. The column "found by" says "lives" if the contract did not find the mutant."""
    finding = trial.report.worst.finding
    return {
        "found by": finding.kind if finding else "lives",
        "dtype": trial.report.dtype,
        "seconds": round(trial.report.seconds, 2),
        "examples": trial.report.examples,
        "op": trial.op,
        "mutant": trial.mutant,
    }


def table(trials: Sequence[Trial]) -> list[str]:
    """Summarize trials by op, then in total, as a Markdown table."""
    lines = [
        "| op | mutants | found out | seconds: median | most | examples: median | most |",
        "|---|---|---|---|---|---|---|",
    ]
    ops = list(dict.fromkeys(trial.op for trial in trials))
    for name, of in [(op, [trial for trial in trials if trial.op == op]) for op in ops] + [("all", list(trials))]:
        seconds, examples = ([getattr(trial.report, what) for trial in of] for what in ("seconds", "examples"))
        lines.append(
            f"| {name} | {len(of)} | {sum(trial.killed for trial in of)} | {median(seconds):.2f} | {max(seconds):.2f} "
            f"| {median(examples):g} | {max(examples)} |"
        )
    return lines
