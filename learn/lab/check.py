"""The judge of an exercise, in words."""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from llamaspec.learn.lab.exercise import Broken, Exercise
from llamaspec.learn.lab.folder import KERNEL, function_of, kernel, only
from llamaspec.verify.campaign import Campaign, Job, Stage, run
from llamaspec.verify.candidates.worker import load_file
from llamaspec.verify.judging.runner import unseen

EXAMPLES, SECONDS = 1000, 60.0
SEEN_BY = {  # who saw a fault, by the kind of the finding
    "value": "The error bound saw it: the result is further from the definition than rounding can bring it.",
    "suspicious": "The alarm saw it: rounding could only just explain it.",
    "law": "A law saw it: two results that must agree do not.",
    "not finite": "The bound saw it: a finite number was due.",
    "shape": "The shape gives it away.",
    "dtype": "The dtype gives it away.",
    "raised": "It does not come to a result.",
    "hung": "It does not come to an end.",
    "not the same twice": "Calling it twice showed it: the results differ.",
    "inputs": "Its inputs were compared afterwards: it had changed them.",
}


class Outcome(NamedTuple):
    """Whether an exercise is solved, and what was said."""

    solved: bool
    lines: list[str]


def check(one: Exercise, folder: Path, *, seed: int = 0, progress: Stage = unseen) -> Outcome:
    """Judge the kernel in a folder. Raises FileNotFoundError where there is none, ImportError for one that fails.

    `progress` is told of the examples that are done, of `EXAMPLES`.
    """
    file = folder / KERNEL
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there: llamaspec lab start {one.number} makes it")
    if not one.op:
        assert not isinstance(one, Broken) and one.judge is not None
        return _own(one.judge, file, function_of(one))
    campaign = Campaign(seed=seed, arrays="numpy", examples=EXAMPLES, seconds=SECONDS)
    job = Job(one.op, f"{file}:{function_of(one)}", arrays="numpy", only=only(one))
    [(report, lines)] = run([job], campaign, progress=progress)
    finding = report.worst.finding
    if finding is None:
        return Outcome(True, [lines[0], f"Solved: {report.compared:,} numbers were compared."])
    return Outcome(False, [*lines, SEEN_BY.get(finding.kind, "")])


def _own(judge: Callable[[Callable], str | None], file: Path, function: str) -> Outcome:
    try:
        wrong = judge(getattr(load_file(str(file)), function))
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    return Outcome(False, [wrong]) if wrong else Outcome(True, ["Solved."])


def solution(one: Exercise) -> list[str]:
    """Show the wrong line and the right one, and where such a mistake was made; of a layer to write, its definition."""
    if not isinstance(one, Broken):
        return [f"{one.file} has the definition, with its derivation."]
    wrong, right = kernel(one).splitlines(), kernel(one, solved=True).splitlines()
    changes = [
        line
        for line in difflib.unified_diff(wrong, right, lineterm="", n=2)
        if not line.startswith(("---", "+++", "@@"))
    ]
    return [f"{one.mutant[0].upper()}{one.mutant[1:]}:", "", *changes, "", one.seen]
