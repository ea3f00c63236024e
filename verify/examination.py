"""Judge one draw: its inputs, a call of the candidate, and a verdict on what it returns."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verify.candidate import Candidate, Failure, NoVerdict
from verify.contract import Arguments, Contract, Expected, Trial, with_rounding
from verify.judge import Finding, broken, judge, returned_precision
from verify.precision import Precision

LAW = "law"  # the draw that says which law is looked at beside the values
NOT_TWICE = "not the same twice"  # kind of a finding

Draw = dict[str, Any]


@dataclass(frozen=True)
class Examination:
    """One draw, judged."""

    draw: Draw
    hard: float = 0.0
    alarm: float = 0.0
    finding: Finding | None = None
    compared: int = 0  # numbers that have a bound

    @property
    def violated(self) -> bool:
        return self.finding is not None and self.finding.kind != "suspicious"


class Unjudged(RuntimeError):
    """The judge itself failed, with the same draw twice: a fault of this package, and no verdict."""


def examine(contract: Contract, candidate: Candidate, precision: Precision, draw: Draw) -> Examination:
    """Judge one draw: its values, and the law that it names.

    A judge that fails once, and not with the same draw again, was given two different results: that is a finding.
    Raises Unjudged where it fails again, NoVerdict where no inputs can be made of the draw, and whatever `call` of the
    candidate raises.
    """
    arguments, expected = _due(contract, precision, draw)
    try:
        return _judged(contract, candidate, precision, draw, arguments, expected)
    except (NoVerdict, ImportError):
        raise
    except Exception as error:
        first = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    try:
        _judged(contract, candidate, precision, draw, arguments, expected)
    except (NoVerdict, ImportError):
        raise
    except Exception as error:
        raise Unjudged(f"{contract.name}: the result for {draw} cannot be judged: {first}") from error
    message = f"the first result could not be judged ({first}), the second one, of the same inputs, could"
    return Examination(draw, np.inf, np.inf, Finding(NOT_TWICE, message))


def _due(contract: Contract, precision: Precision, draw: Draw) -> tuple[Arguments, tuple[Expected, ...]]:
    """Make the inputs and the results that are due, before the candidate is called and could change them."""
    drawn = {name: value for name, value in draw.items() if name != LAW}
    try:
        arguments = contract.arguments(precision=precision, **drawn)
        return arguments, contract.expected(arguments)
    except Exception as error:
        written = ", ".join(f"{name}={value}" for name, value in drawn.items())
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise NoVerdict(f"{contract.name}: no inputs and results can be made of {written}: {why}") from error


def _judged(
    contract: Contract,
    candidate: Candidate,
    precision: Precision,
    draw: Draw,
    arguments: Arguments,
    expected: tuple[Expected, ...],
) -> Examination:
    called = _call(contract, candidate, arguments)
    if isinstance(called, Finding):
        return Examination(draw, np.inf, np.inf, called)
    verdict = judge(called, expected, precision)
    examination = Examination(draw, verdict.hard, verdict.alarm, verdict.finding, verdict.compared)
    law = next((law for law in contract.laws if law.name == draw.get(LAW)), None)
    if examination.violated or law is None:
        return examination

    def again(**changes: Any) -> tuple[np.ndarray, ...]:
        outputs = _call(contract, candidate, {**arguments, **changes})
        if isinstance(outputs, Finding):
            raise _Failed(outputs)
        return outputs

    bounds = []
    for actual, due in zip(called, expected, strict=True):
        returned = returned_precision(actual, np.asarray(due.value), precision)
        assert isinstance(returned, Precision)
        bounds.append(with_rounding(due, returned)[0])
    try:
        claim = law.check(Trial(arguments, called, tuple(bounds), again))
        finding = broken(law, claim) if claim else None
    except _Failed as failed:
        finding = failed.finding
    return replace(examination, finding=finding) if finding else examination


class _Failed(Exception):
    """The failure of a candidate while a law was looked at."""

    def __init__(self, finding: Finding):
        super().__init__(finding.message)
        self.finding = finding


def _call(contract: Contract, candidate: Candidate, arguments: Arguments) -> tuple[np.ndarray, ...] | Finding:
    outcome = candidate.call(*contract.split(arguments))
    if isinstance(outcome, Failure):
        return Finding(outcome.kind, outcome.message)
    if outcome.changed:
        return Finding("inputs", f"wrote to its input {' and '.join(outcome.changed)}")
    return tuple(_at_most_float32(array) for array in outcome.arrays)


def _at_most_float32(array: np.ndarray) -> np.ndarray:
    """Round float64 to the float32 that contracts speak of: every bound has room for this rounding."""
    if array.dtype != np.float64:
        return array
    with np.errstate(over="ignore"):
        return array.astype(np.float32)
