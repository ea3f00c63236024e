"""Judge one draw: its inputs, a call of the candidate, and a verdict on what it returns."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamaspec.verify.bounds.precision import Precision
from llamaspec.verify.candidates.candidate import Candidate, Failure, NoVerdict, Outputs
from llamaspec.verify.candidates.worker import HELD
from llamaspec.verify.contract import Arguments, Contract, Expected, Trial, with_rounding
from llamaspec.verify.draws.draw import AGAIN, LAW, SEEDS, Draw, Values
from llamaspec.verify.judging.judge import Finding, Point, broken, judge, returned_precision

NOT_TWICE = "not the same twice"  # kind of a finding
REUSED = "reused"  # kind of a finding
OTHERS = "for other numbers than these, of the same kinds: every seed plus one"


@dataclass(frozen=True)
class Examination:
    """One draw, judged."""

    draw: Draw
    hard: float = 0.0
    alarm: float = 0.0
    finding: Finding | None = None
    compared: int = 0  # numbers that have a bound
    place: str = ""  # where the result is nearest to its hard bound, and how near
    differs: str = ""  # where two results for the same inputs have other bits, both within the bound
    points: tuple[Point, ...] = ()

    @property
    def violated(self) -> bool:
        return self.finding is not None and self.finding.kind != "suspicious"


class Unjudged(RuntimeError):
    """The judge itself failed, with the same draw twice: a fault of this package, and no verdict."""


def examine(
    contract: Contract, candidate: Candidate, precision: Precision, draw: Draw, *, deterministic: bool = False
) -> Examination:
    """Judge one draw: its values, and the law that it names.

    A judge that fails once, and not with the same draw again, was given two different results: that is a finding.
    Results of other bits for the same inputs are one too where they should be `deterministic`.
    Raises Unjudged where it fails again, NoVerdict where no inputs can be made of the draw, and whatever `call` of the
    candidate raises.
    """
    arguments, expected = _due(contract, precision, draw)
    try:
        examination = _judged(contract, candidate, precision, draw, arguments, expected)
        if deterministic and examination.differs and not examination.violated:
            return replace(examination, finding=Finding(NOT_TWICE, examination.differs))
        return examination
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


def takes(contract: Contract, candidate: Candidate, precision: Precision, draws: Iterable[Draw]) -> bool:
    """Whether `candidate` returns anything for one of `draws`: it takes their dtype, though it raises for others.

    A candidate that hangs or crashes does not refuse a dtype either, and nobody waits for it again.
    """
    for draw in draws:
        try:
            outcome = candidate.call(*contract.split(_due(contract, precision, draw)[0]))
        except (NoVerdict, ImportError):
            continue
        if isinstance(outcome, Outputs) or outcome.kind in ("hung", "crashed"):
            return True
    return False


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
    call = _Calls(contract, candidate)
    called = call(arguments)
    if isinstance(called, Finding):
        return Examination(draw, np.inf, np.inf, called)
    verdict = judge(called, expected, precision)
    examination = Examination(
        draw,
        verdict.hard,
        verdict.alarm,
        verdict.finding,
        verdict.compared,
        place=verdict.place,
        points=verdict.points,
    )
    if examination.violated:
        return examination
    if draw.get(LAW) == AGAIN:
        return _called_again(call, precision, examination, arguments, expected, called)
    law = next((law for law in contract.laws if law.name == draw.get(LAW)), None)
    if law is None:
        return examination

    def again(**changes: Any) -> tuple[np.ndarray, ...]:
        outputs = call({**arguments, **changes})
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
        if claim and finding and (differs := _difference(called, again())):
            # A candidate that adds up in another order each time cannot keep a law to the bit, but within its bounds.
            held = claim._replace(tolerance=claim.tolerance + 2 * max(map(_largest_bound, bounds)))
            finding, examination = broken(law, held), replace(examination, differs=differs)
    except _Failed as failed:
        finding = failed.finding
    return replace(examination, finding=finding) if finding else examination


def _called_again(
    call: "_Calls",
    precision: Precision,
    examination: Examination,
    arguments: Arguments,
    expected: tuple[Expected, ...],
    called: tuple[np.ndarray, ...],
) -> Examination:
    """Call with other numbers, and once more with the same: no state of the candidate may decide its result.

    Two more calls with other numbers show buffers that are returned in turn.
    """
    contract, draw = call.contract, examination.draw
    others = _others(contract, precision, draw, 1)
    due = contract.expected(others)
    between = call(others)
    found = between if isinstance(between, Finding) else judge(between, due, precision).finding
    if found and found.kind == REUSED:
        return replace(examination, finding=found)
    if found and found.kind != "suspicious":
        return replace(examination, finding=found._replace(condition=OTHERS))
    second = call(arguments)
    if not isinstance(second, Finding):
        found = judge(second, expected, precision).finding
        if found is None or found.kind == "suspicious":
            return replace(
                examination,
                differs=_difference(called, second),
                finding=_in_turn(call, precision, draw) or examination.finding,
            )
        second = found
    if second.kind in ("hung", "crashed", REUSED):
        return replace(examination, finding=second)
    message = f"right at first; after a call with other inputs, for the same ones: {second.kind}: {second.message}"
    return replace(examination, finding=Finding(NOT_TWICE, message, second.condition))


def _in_turn(call: "_Calls", precision: Precision, draw: Draw) -> Finding | None:
    """Call with numbers that no call had before, until each of `HELD` buffers in turn would be written to again."""
    while call.made <= HELD:
        outputs = call(_others(call.contract, precision, draw, call.made))
        if isinstance(outputs, Finding):
            return outputs if outputs.kind == REUSED else outputs._replace(condition=OTHERS)
    return None


def _others(contract: Contract, precision: Precision, draw: Draw, by: int) -> Arguments:
    """Make arguments of the same shapes and kinds with other numbers: every seed plus `by`."""

    def other(value: Any) -> Any:
        return replace(value, seed=(value.seed + by) % SEEDS) if isinstance(value, Values) else value

    return contract.arguments(precision=precision, **{k: other(v) for k, v in draw.items() if k != LAW})


def _difference(first: tuple[np.ndarray, ...], second: tuple[np.ndarray, ...]) -> str:
    """Say where two results have other bits; empty where they are the same."""
    for one, two in zip(first, second, strict=True):
        if one.dtype != two.dtype or one.shape != two.shape:
            return f"{two.dtype.name} {two.shape} after {one.dtype.name} {one.shape} for the same inputs"
        if one.tobytes() != two.tobytes():
            bits = [np.ascontiguousarray(a).view(np.uint8).reshape(a.size, -1) for a in (one, two)]
            apart = np.any(bits[0] != bits[1], axis=1)
            at = np.unravel_index(int(np.argmax(apart)), one.shape)
            place = ", ".join(str(int(i)) for i in at)
            return f"at [{place}] {two[at]:.9g} after {one[at]:.9g} for the same inputs"
    return ""


def _largest_bound(bound: np.ndarray) -> float:
    return float(np.max(bound, initial=0, where=np.isfinite(bound)))


class _Failed(Exception):
    """The failure of a candidate while a law was looked at."""

    def __init__(self, finding: Finding):
        super().__init__(finding.message)
        self.finding = finding


class _Calls:
    """Calls of a candidate for one draw. None may write to its inputs, or to the result of a call before it."""

    def __init__(self, contract: Contract, candidate: Candidate):
        self.contract, self.candidate = contract, candidate
        self.made = 0

    def __call__(self, arguments: Arguments) -> tuple[np.ndarray, ...] | Finding:
        outcome = self.candidate.call(*self.contract.split(arguments))
        self.made += 1
        if isinstance(outcome, Failure):
            return Finding(outcome.kind, outcome.message, _of_another_library(outcome))
        if outcome.changed:
            return Finding("inputs", f"wrote to its input {' and '.join(outcome.changed)}")
        if outcome.overwritten == 1 < self.made:
            return Finding(REUSED, "wrote to the result of the call before: two calls share a buffer")
        if 1 < outcome.overwritten < self.made:
            return Finding(REUSED, f"wrote to the result of {outcome.overwritten} calls before: calls share buffers")
        return tuple(_at_most_float32(array) for array in outcome.arrays)


def _at_most_float32(array: np.ndarray) -> np.ndarray:
    """Round float64 to the float32 that contracts speak of: every bound has room for this rounding."""
    if array.dtype != np.float64:
        return array
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _of_another_library(failure: Failure) -> str:
    """Say how a candidate gets other arrays, where it raised because of the type of those that it got."""
    of_types = failure.kind == "raised" and failure.message.startswith(("TypeError", "AttributeError"))
    if not of_types or not re.search("ndarray|ArrayImpl|Tensor", failure.message):
        return ""
    return "are arrays of another library due? --arrays jax|numpy|torch|cupy chooses"
