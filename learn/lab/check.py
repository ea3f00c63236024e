"""Checks the solution of an exercise, and explains the verdict."""

import difflib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from llamaspec.learn.lab.exercise import Broken, Exercise
from llamaspec.learn.lab.folder import KERNEL, function_of, kernel, narrowings
from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.campaign import Campaign, CandidateJob, Stage, run
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.candidates.worker import load_file
from llamaspec.verify.catalogue import contract_for
from llamaspec.verify.judging.runner import Report, unseen, verify
from llamaspec.verify.reports.report import counterexample

EXAMPLES, SECONDS = 1000, 60.0
SOLVED = ".solved"  # a file in an exercise's folder, with the digest of the kernel that was accepted
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


def check(
    exercise: Exercise, folder: Path, *, seed: int = 0, progress: Stage = unseen, in_process: bool = False
) -> CheckResult:
    """Check the kernel in a folder, and return the verdict.

    The kernel runs in a process of its own, or with `in_process` in this one:
    a browser tab cannot start another. If the kernel is right, writes a file
    into the folder. `is_solved` looks for this file. Calls `progress` with the
    number of examples that are done, out of `EXAMPLES`. Raises
    FileNotFoundError for a missing kernel, and ImportError for a kernel that
    cannot be imported.
    """
    file = folder / KERNEL
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: make it with llamaspec lab start {exercise.number}")
    if exercise.op:
        judge = _judged_here if in_process else _judged_apart
        result = _verdict(exercise, judge(exercise, file, seed, progress))
    else:
        assert not isinstance(exercise, Broken) and exercise.judge is not None
        result = _check_layer(exercise.judge, file, function_of(exercise))
    if result.solved:
        (folder / SOLVED).write_text(_digest(file), encoding="utf-8")
    return result


def is_solved(folder: Path) -> bool:
    """Return whether `check` accepted the kernel in a folder, and the kernel has not changed since."""
    mark, file = folder / SOLVED, folder / KERNEL
    return mark.is_file() and file.is_file() and mark.read_text(encoding="utf-8") == _digest(file)


def _digest(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def _judged_apart(exercise: Exercise, file: Path, seed: int, progress: Stage) -> Report:
    campaign = Campaign(seed=seed, arrays="numpy", examples=EXAMPLES, seconds=SECONDS)
    job = CandidateJob(exercise.op, f"{file}:{function_of(exercise)}", arrays="numpy", only=narrowings(exercise))
    [(report, _)] = run([job], campaign, progress=progress)
    return report


def _judged_here(exercise: Exercise, file: Path, seed: int, progress: Stage) -> Report:
    function = function_of(exercise)
    contract = contract_for(exercise.op)
    return verify(
        contract,
        Direct(getattr(load_file(str(file)), function), name=f"{file}:{function}"),
        precision=precision("float32"),
        examples=EXAMPLES,
        seed=seed,
        seconds=SECONDS,
        only=narrowings(exercise),
        progress=progress(exercise.op),
    )


def _verdict(exercise: Exercise, report: Report) -> CheckResult:
    lines = counterexample(report, contract_for(exercise.op), advice=False)
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
