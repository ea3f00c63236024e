"""Checks the solution of an exercise, and explains the verdict."""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from llamaspec.learn.lab.exercise import Broken, Exercise
from llamaspec.learn.lab.folder import KERNEL, function_of, kernel, narrowings
from llamaspec.verify.campaign import Campaign, CandidateJob, Stage, run
from llamaspec.verify.candidates.worker import load_file
from llamaspec.verify.judging.runner import unseen

EXAMPLES, SECONDS = 1000, 60.0
SEEN_BY = {  # kind of finding: a sentence that says how we found it
    "value": "The error bound was violated: rounding cannot explain an error this large.",
    "suspicious": "The error is suspicious: rounding could only just explain it.",
    "law": "A law was violated: two results that must agree do not agree.",
    "not finite": "The result contains NaN or infinity: expected finite numbers.",
    "shape": "The result has the wrong shape.",
    "dtype": "The result has the wrong dtype.",
    "raised": "The kernel raised an exception.",
    "hung": "The kernel did not finish in time.",
    "not the same twice": "Two calls of the kernel with the same inputs gave different results.",
    "inputs": "The kernel changed its inputs.",
}


class CheckResult(NamedTuple):
    """The verdict on an exercise: whether it is solved, and the lines to print."""

    solved: bool
    lines: list[str]


def check(exercise: Exercise, folder: Path, *, seed: int = 0, progress: Stage = unseen) -> CheckResult:
    """Check the kernel in a folder. Raises FileNotFoundError for a missing kernel, ImportError for one that cannot be
    imported.

    Calls `progress` with the number of examples done, out of `EXAMPLES`.
    """
    file = folder / KERNEL
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: make it with llamaspec lab start {exercise.number}")
    if not exercise.op:
        assert not isinstance(exercise, Broken) and exercise.judge is not None
        return _check_layer(exercise.judge, file, function_of(exercise))
    campaign = Campaign(seed=seed, arrays="numpy", examples=EXAMPLES, seconds=SECONDS)
    job = CandidateJob(exercise.op, f"{file}:{function_of(exercise)}", arrays="numpy", only=narrowings(exercise))
    [(report, lines)] = run([job], campaign, progress=progress)
    finding = report.worst.finding
    if finding is None:
        return CheckResult(True, [lines[0], f"Solved: {report.compared:,} values are within their bounds."])
    return CheckResult(False, [*lines, SEEN_BY.get(finding.kind, "")])


def _check_layer(judge: Callable[[Callable], str | None], file: Path, function: str) -> CheckResult:
    try:
        wrong = judge(getattr(load_file(str(file)), function))
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    return CheckResult(False, [wrong]) if wrong else CheckResult(True, ["Solved."])


def solution(exercise: Exercise) -> list[str]:
    """Return the lines of a solution.

    For a broken kernel: the mutant's name, the wrong and the right line, and a project that had this mistake. For a
    layer to write: the file of `reference/` that defines the layer.
    """
    if not isinstance(exercise, Broken):
        return [f"{exercise.file} contains the definition and its derivation."]
    wrong, right = kernel(exercise).splitlines(), kernel(exercise, solved=True).splitlines()
    changes = [
        line
        for line in difflib.unified_diff(wrong, right, lineterm="", n=2)
        if not line.startswith(("---", "+++", "@@"))
    ]
    return [f"{exercise.mutant[0].upper()}{exercise.mutant[1:]}:", "", *changes, "", exercise.seen]
