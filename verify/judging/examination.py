"""Judge one draw: make its inputs, call the candidate, and judge the result."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamaspec.verify.bounds.precision import Precision
from llamaspec.verify.candidates.candidate import Candidate, Failure, NotJudged, NoVerdict, Outputs, in_layout
from llamaspec.verify.candidates.worker import RECENT
from llamaspec.verify.contract import Arguments, Contract, Expected, Trial, with_rounding
from llamaspec.verify.draws.draw import AGAIN, LAW, LAYOUT, OF_THE_CALL, SEEDS, Draw, Values
from llamaspec.verify.judging.judge import Finding, Point, broken, judge, returned_precision
from llamaspec.verify.judging.keywords import accepted

OUT_OF_MEMORY = re.compile(r"_?\w*(MemoryError|RuntimeError: RESOURCE_EXHAUSTED)\b")
REPEATS = 16  # calls with the same inputs to find out whether their results differ in their bits
NOT_TWICE = "not the same twice"  # kind of a finding
REUSED = "reused"  # kind of a finding
OTHER_SEEDS = "the other inputs have numbers of the same kinds: every seed is one larger"


@dataclass(frozen=True)
class Examination:
    """A draw and the verdict on it."""

    draw: Draw
    hard: float = 0.0
    alarm: float = 0.0
    finding: Finding | None = None
    compared: int = 0  # numbers that have a bound
    place: str = ""  # the number nearest to its hard bound, in words
    differs: str = ""  # two results for the same inputs that differ in their bits, both within the bound
    explained: str = ""  # why a number beyond its alarm is no finding
    points: tuple[Point, ...] = ()

    @property
    def violated(self) -> bool:
        return self.finding is not None and self.finding.kind != "suspicious"


class Unjudged(RuntimeError):
    """The judge failed twice with the same draw: a bug of this package, and no verdict."""


@np.errstate(all="ignore")  # a law may overflow float16, which is no fault
def examine(
    contract: Contract,
    candidate: Candidate,
    precision: Precision,
    draw: Draw,
    *,
    deterministic: bool = False,
    left_out: set[str] | None = None,
) -> Examination:
    """Judge the candidate's result for one draw, and check the law that the draw names.

    If judging the result raises an exception, we call the candidate and judge again. If this succeeds, the candidate
    returned two different results for the same inputs: we report that as a finding. If it fails again, we raise
    Unjudged. With `deterministic`, two results with different bits for the same inputs are a finding, too. `left_out`
    has the names of optional keyword arguments that the candidate did not accept in earlier draws. We add new names to
    it. Also raises NoVerdict if the draw gives no inputs, and every exception that the candidate's `call` raises.
    """
    left_out = set() if left_out is None else left_out
    arguments, expected = _prepared(contract, precision, draw)
    try:
        examination = _judged(contract, candidate, precision, draw, arguments, expected, left_out)
        if deterministic and examination.differs and not examination.violated:
            return replace(examination, finding=Finding(NOT_TWICE, examination.differs))
        return examination
    except (NoVerdict, ImportError):
        raise
    except Exception as error:
        first = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    try:
        _judged(contract, candidate, precision, draw, arguments, expected, left_out)
    except (NoVerdict, ImportError):
        raise
    except Exception as error:
        raise Unjudged(f"{contract.name}: the result for {draw} cannot be judged: {first}") from error
    message = f"the first result could not be judged ({first}), but a second result for the same inputs could"
    return Examination(draw, np.inf, np.inf, Finding(NOT_TWICE, message))


def takes(contract: Contract, candidate: Candidate, precision: Precision, draws: Iterable[Draw]) -> bool:
    """Return whether `candidate` returns a result for any of `draws`. If so, it supports the draws' dtype.

    A candidate that hangs or crashes did not refuse the dtype, so we return True and do not call it again.
    """
    left_out: set[str] = set()
    for draw in draws:
        try:
            arguments, _ = _prepared(contract, precision, draw)
            outcome = accepted(contract, candidate.call, *contract.split(arguments), left_out)
        except (NoVerdict, ImportError):
            continue
        if isinstance(outcome, Outputs) or outcome.kind in ("hung", "crashed"):
            return True
    return False


def _prepared(contract: Contract, precision: Precision, draw: Draw) -> tuple[Arguments, tuple[Expected, ...]]:
    """Make the inputs and the expected results of a draw.

    We do this before the call, so that the candidate cannot change them.
    """
    drawn = {name: value for name, value in draw.items() if name not in OF_THE_CALL}
    try:
        arguments = contract.arguments(precision=precision, **drawn)
        return arguments, contract.expected(arguments)
    except MemoryError as error:
        raise NotJudged("this machine has too little memory for the exact result") from error
    except Exception as error:
        written = ", ".join(f"{name}={value}" for name, value in drawn.items())
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise NoVerdict(f"{contract.name}: cannot make inputs and expected results from {written}: {why}") from error


def _judged(
    contract: Contract,
    candidate: Candidate,
    precision: Precision,
    draw: Draw,
    arguments: Arguments,
    expected: tuple[Expected, ...],
    left_out: set[str],
) -> Examination:
    call = _Calls(contract, candidate, draw.get(LAYOUT, ""), left_out)
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
        explained=verdict.explained,
        points=verdict.points,
    )
    if examination.violated:
        return examination
    if draw.get(LAW) == AGAIN:
        return _called_again(call, precision, examination, arguments, expected, called)
    law = next((law for law in contract.laws if law.name == draw.get(LAW)), None)
    if law is None or not any(np.size(output.value) for output in expected):
        return examination

    def again(**changes: Any) -> tuple[np.ndarray, ...]:
        outputs = call({**arguments, **changes})
        if isinstance(outputs, Finding):
            raise _Failed(outputs)
        return outputs

    bounds = []
    for actual, output in zip(called, expected, strict=True):
        returned = returned_precision(actual, np.asarray(output.value), precision)
        assert isinstance(returned, Precision)
        bounds.append(with_rounding(output, returned)[0])
    try:
        claim = law.check(Trial(arguments, called, tuple(bounds), again))
        finding = broken(law, claim) if claim else None
        if claim and finding and (differs := _differs(called, again)):
            # A candidate that sums in another order each time can keep a law only within its bounds.
            loosened = claim._replace(tolerance=claim.tolerance + 2 * max(map(_largest_bound, bounds)))
            finding, examination = broken(law, loosened), replace(examination, differs=differs)
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
    """Call with different inputs, then with the first inputs again. Both results must be right.

    More calls with different inputs find a candidate that returns one of a few buffers each time, and so overwrites an
    earlier result.
    """
    contract, draw = call.contract, examination.draw
    changed = _other_numbers(contract, precision, draw, 1)
    changed_expected = contract.expected(changed)
    between = call(changed)
    finding = between if isinstance(between, Finding) else judge(between, changed_expected, precision).finding
    if finding and finding.kind == REUSED:
        return replace(examination, finding=finding)
    if finding and finding.kind != "suspicious":
        return replace(examination, finding=finding._replace(condition=OTHER_SEEDS))
    second = call(arguments)
    if not isinstance(second, Finding):
        finding = judge(second, expected, precision).finding
        if finding is None or finding.kind == "suspicious":
            return replace(
                examination,
                differs=_difference(called, second),
                finding=_in_turn(call, precision, draw) or examination.finding,
            )
        second = finding
    if second.kind in ("hung", "crashed", REUSED):
        return replace(examination, finding=second)
    message = "right in the first call; with the same inputs again, after a call with other inputs: "
    message += f"{second.kind}: {second.message}"
    return replace(examination, finding=Finding(NOT_TWICE, message, second.condition))


def _in_turn(call: "_Calls", precision: Precision, draw: Draw) -> Finding | None:
    """Call with new inputs until more than `RECENT` calls are made. Return a finding for the first failed call.

    So we notice a candidate that cycles through up to `RECENT` output buffers, and overwrites an earlier result.
    """
    while call.calls <= RECENT:
        outputs = call(_other_numbers(call.contract, precision, draw, call.calls))
        if isinstance(outputs, Finding):
            return outputs if outputs.kind == REUSED else outputs._replace(condition=OTHER_SEEDS)
    return None


def _other_numbers(contract: Contract, precision: Precision, draw: Draw, by: int) -> Arguments:
    """Make arguments of the same shapes and kinds, but with different numbers: we add `by` to every seed."""

    def reseeded(value: Any) -> Any:
        return replace(value, seed=(value.seed + by) % SEEDS) if isinstance(value, Values) else value

    return contract.arguments(precision=precision, **{k: reseeded(v) for k, v in draw.items() if k not in OF_THE_CALL})


def _difference(first: tuple[np.ndarray, ...], second: tuple[np.ndarray, ...]) -> str:
    """Say where the bits of two results differ. Returns "" if all bits are equal."""
    for before, after in zip(first, second, strict=True):
        if before.dtype != after.dtype or before.shape != after.shape:
            return f"{after.dtype.name} {after.shape} after {before.dtype.name} {before.shape} for the same inputs"
        if before.tobytes() != after.tobytes():
            bits = [np.ascontiguousarray(a).view(np.uint8).reshape(a.size, -1) for a in (before, after)]
            apart = np.any(bits[0] != bits[1], axis=1)
            at = np.unravel_index(int(np.argmax(apart)), before.shape)
            place = ", ".join(str(int(i)) for i in at)
            return f"at [{place}] {after[at]:.9g} after {before[at]:.9g} for the same inputs"
    return ""


def _differs(first: tuple[np.ndarray, ...], again: Callable[[], tuple[np.ndarray, ...]]) -> str:
    """Call up to `REPEATS` times, until a result differs from the first. Describe the difference, or return ""."""
    return next(filter(None, (_difference(first, again()) for _ in range(REPEATS))), "")


def _largest_bound(bound: np.ndarray) -> float:
    return float(np.max(bound, initial=0, where=np.isfinite(bound)))


class _Failed(Exception):
    """A failure of the candidate while we checked a law."""

    def __init__(self, finding: Finding):
        super().__init__(finding.message)
        self.finding = finding


class _Calls:
    """Calls of a candidate for one draw. A call must not write to its inputs or to an earlier result."""

    def __init__(self, contract: Contract, candidate: Candidate, layout: str, left_out: set[str]):
        self.contract, self.candidate, self.layout, self.left_out = contract, candidate, layout, left_out
        self.calls = 0

    def __call__(self, arguments: Arguments) -> tuple[np.ndarray, ...] | Finding:
        positional, keyword = (in_layout(part, self.layout) for part in self.contract.split(arguments))
        outcome = accepted(self.contract, self.candidate.call, positional, keyword, self.left_out)
        if isinstance(outcome, Failure) and outcome.kind == "raised" and OUT_OF_MEMORY.match(outcome.message):
            raise NotJudged("the candidate ran out of memory")
        self.calls += 1
        if isinstance(outcome, Failure):
            return Finding(outcome.kind, outcome.message, _of_another_library(outcome))
        if outcome.changed:
            return Finding("inputs", f"wrote to its input {' and '.join(outcome.changed)}")
        if outcome.overwritten == 1 < self.calls:
            return Finding(REUSED, "wrote to the result of the previous call: two calls share a buffer")
        if 1 < outcome.overwritten < self.calls:
            return Finding(REUSED, f"wrote to the result of {outcome.overwritten} calls earlier: calls share buffers")
        return tuple(_at_most_float32(array) for array in outcome.arrays)


def _at_most_float32(array: np.ndarray) -> np.ndarray:
    """Round a float64 result to float32. Contracts bound float32 results, so each bound has room for this rounding."""
    if array.dtype != np.float64:
        return array
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _of_another_library(failure: Failure) -> str:
    """Say how to choose a different array library, if the candidate raised because of the type of its arguments."""
    of_types = failure.kind == "raised" and failure.message.startswith(("TypeError", "AttributeError"))
    if not of_types or not re.search("ndarray|ArrayImpl|Tensor", failure.message):
        return ""
    return "does it expect arrays of another library? choose with --arrays jax|numpy|torch|cupy"
