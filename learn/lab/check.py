"""Judges an exercise, and explains the verdict."""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from llamaspec.learn.lab.exercise import Broken, Exercise
from llamaspec.learn.lab.folder import KERNEL, function_of, kernel, only
from llamaspec.verify.campaign import Campaign, CandidateJob, Stage, run
from llamaspec.verify.candidates.worker import load_file
from llamaspec.verify.judging.runner import unseen

EXAMPLES, SECONDS = 1000, 60.0
SEEN_BY = {  # for each kind of finding, a sentence that says how we found it
    "value": "The error bound found it: rounding cannot explain an error this large.",
    "suspicious": "The alarm found it: rounding could only just explain it.",
    "law": "A law found it: two results that must agree do not.",
    "not finite": "The bound found it: expected a finite number.",
    "shape": "The shape is wrong.",
    "dtype": "The dtype is wrong.",
    "raised": "It raised an exception.",
    "hung": "It did not finish.",
    "not the same twice": "Calling it twice gave different results.",
    "inputs": "It changed its inputs.",
}


class CheckResult(NamedTuple):
    """Whether an exercise is solved, and the lines to print."""

    solved: bool
    lines: list[str]


def check(exercise: Exercise, folder: Path, *, seed: int = 0, progress: Stage = unseen) -> CheckResult:
    """Judge the kernel in a folder. Raises FileNotFoundError for a missing kernel, ImportError for a broken one.

    Calls `progress` with the number of examples done, out of `EXAMPLES`.
    """
    file = folder / KERNEL
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}: llamaspec lab start {exercise.number} makes it")
    if not exercise.op:
        assert not isinstance(exercise, Broken) and exercise.judge is not None
        return _own(exercise.judge, file, function_of(exercise))
    campaign = Campaign(seed=seed, arrays="numpy", examples=EXAMPLES, seconds=SECONDS)
    job = CandidateJob(exercise.op, f"{file}:{function_of(exercise)}", arrays="numpy", only=only(exercise))
    [(report, lines)] = run([job], campaign, progress=progress)
    finding = report.worst.finding
    if finding is None:
        return CheckResult(True, [lines[0], f"Solved: {report.compared:,} numbers were compared."])
    return CheckResult(False, [*lines, SEEN_BY.get(finding.kind, "")])


def _own(judge: Callable[[Callable], str | None], file: Path, function: str) -> CheckResult:
    try:
        wrong = judge(getattr(load_file(str(file)), function))
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    return CheckResult(False, [wrong]) if wrong else CheckResult(True, ["Solved."])


def solution(exercise: Exercise) -> list[str]:
    """Show the wrong and the right line, and a project that made the mistake. For a layer, name its definition."""
    if not isinstance(exercise, Broken):
        return [f"{exercise.file} has the definition, with its derivation."]
    wrong, right = kernel(exercise).splitlines(), kernel(exercise, solved=True).splitlines()
    changes = [
        line
        for line in difflib.unified_diff(wrong, right, lineterm="", n=2)
        if not line.startswith(("---", "+++", "@@"))
    ]
    return [f"{exercise.mutant[0].upper()}{exercise.mutant[1:]}:", "", *changes, "", exercise.seen]
