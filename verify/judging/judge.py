"""Judge whether a result is within its bounds, and if not, say what is wrong."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from llamaspec.verify.bounds.precision import PRECISIONS, Precision
from llamaspec.verify.bounds.summation import Roundings, no_sum
from llamaspec.verify.contract import Claim, Expected, Law, as_float64, with_rounding

CANCELLING = 100.0  # terms this many times larger than their sum have canceled
PARTS = 8  # parts of a result; each gives one point for a plot
SAYS_NOTHING = 1e30  # a bound this large allows any number: `verify.bounds.running_error.NO_BOUND`


class Finding(NamedTuple):
    """A fault of a result.

    `kind` is "raised", "hung", "crashed", "reply", "inputs", "definition", "shape", "dtype", "not finite", "value",
    "law", "reused" or "not the same twice". The kind "suspicious" means that the result is not certainly wrong.
    """

    kind: str
    message: str
    condition: str = ""  # whether rounding could explain it, or another hint


class Point(NamedTuple):
    """One number of a result, compared with the exact one, for a plot."""

    magnitude: float  # magnitude of the exact value
    error: float
    bound: float  # hard
    position: int  # index in the result, row by row
    of: int  # number of entries of the result


class Verdict(NamedTuple):
    """Outcome of a comparison: the largest errors as shares of their bounds, and a finding, if any.

    A share of 1 means that the error equals its bound. `compared` counts numbers that have a bound. `place` describes
    the number nearest to its hard bound.
    """

    hard: float
    alarm: float
    finding: Finding | None
    compared: int = 0
    place: str = ""
    explained: str = ""  # why a number beyond its alarm is no finding
    points: tuple[Point, ...] = ()  # the number nearest to its bound in each of `PARTS` of each result


def judge(outputs: tuple[np.ndarray, ...], expected: tuple[Expected, ...], precision: Precision) -> Verdict:
    """Compare a candidate's results with the expected ones; `precision` is the dtype of the inputs."""
    if len(outputs) != len(expected):
        return Verdict(np.inf, np.inf, Finding("shape", f"expected {len(expected)} arrays, got {len(outputs)}"))
    worst = Verdict(0.0, 0.0, None)
    for i, (actual, output) in enumerate(zip(outputs, expected, strict=True)):
        verdict = _judge_one(actual, output, precision, "" if len(outputs) == 1 else f"output {i} ")
        if verdict.finding is not None and (worst.finding is None or worst.finding.kind == "suspicious"):
            worst = worst._replace(finding=verdict.finding)
        worst = worst._replace(
            hard=max(worst.hard, verdict.hard),
            alarm=max(worst.alarm, verdict.alarm),
            compared=worst.compared + verdict.compared,
            points=worst.points + verdict.points,
            explained=worst.explained or verdict.explained,
            place=verdict.place if verdict.hard > worst.hard or not worst.place else worst.place,
        )
    return worst


def _judge_one(actual: np.ndarray, expected: Expected, precision: Precision, which: str) -> Verdict:
    value = np.asarray(expected.value)
    if actual.shape != value.shape:
        return Verdict(np.inf, np.inf, Finding("shape", f"{which}expected {value.shape}, got {actual.shape}"))
    returned = returned_precision(actual, value, precision)
    if isinstance(returned, Finding):
        return Verdict(np.inf, np.inf, returned)
    if not value.size:
        return Verdict(0.0, 0.0, None)

    hard, alarm = (np.broadcast_to(bound, value.shape) for bound in with_rounding(expected, returned))
    got, exact = as_float64(actual), as_float64(value)
    overflow = np.isinf(got) & (np.where(got > 0, exact, -exact) + hard >= returned.largest)  # exact may have any sign
    with np.errstate(invalid="ignore"):
        error = np.where((got == exact) | overflow | np.isposinf(hard), 0.0, np.abs(got - exact))
    over, near = (_ratio(error, bound) for bound in (hard, alarm))
    sums = expected.sums() if np.any(near > 1) else no_sum()
    explained = (near > 1) & (error <= alarm + sums.running * (1 + returned.unit))
    unexplained = np.where(explained, 0.0, near)
    at = _worst(over)
    finding = None
    place = _difference(which, at, actual, value, hard, "bound") if error[at] else ""
    if not over[at] <= 1:
        kind = "value" if np.isfinite(got[at]) else "not finite"
        finding = Finding(kind, _difference(which, at, actual, value, hard, "bound"), _condition(expected, at))
    elif unexplained[_worst(unexplained)] > 1:
        at = _worst(unexplained)
        finding = Finding("suspicious", _difference(which, at, actual, value, alarm, "alarm"), _condition(expected, at))
    compared = int(np.count_nonzero(hard < SAYS_NOTHING))
    why = _running_sum(np.where(explained, near, 0), sums) if np.any(explained) else ""
    points = _points(exact, error, hard, over)
    return Verdict(_largest(over), _largest(near), finding, compared, place, explained=why, points=points)


def _running_sum(near: np.ndarray, sums: Roundings) -> str:
    """Format a message which says that a running sum explains the largest error.

    `near` has each error divided by its measured bound (`Expected.alarm`).
    """
    at = _worst(near)
    running, blocked, terms = (np.broadcast_to(part, near.shape)[at] for part in sums)
    message = f"{near[at]:.2g} times the alarm, which a running sum of {terms:,} terms explains"
    if running < 2 * blocked:  # a short sum
        return message
    return f"{message}; a sum in blocks would be {running / blocked:.2g} times as exact"


def _points(exact: np.ndarray, error: np.ndarray, bound: np.ndarray, over: np.ndarray) -> tuple[Point, ...]:
    exact, error, bound, over = (array.ravel() for array in (np.abs(exact), error, bound, over))
    borders = sorted({over.size * part // PARTS for part in range(PARTS + 1)})
    places = [low + int(np.argmax(over[low:high])) for low, high in pairwise(borders)]
    return tuple(
        Point(float(exact[at]), float(error[at]), float(bound[at]), at, over.size)
        for at in places
        if bound[at] < SAYS_NOTHING
    )


def returned_precision(actual: np.ndarray, value: np.ndarray, precision: Precision) -> Precision | Finding:
    """Return the precision of a result, or a finding if the result's dtype is narrower than the inputs' dtype."""
    name = actual.dtype.name
    if value.dtype.kind != "f":
        return precision if actual.dtype.kind in "iu" else Finding("dtype", f"expected integers, got {name}")
    if name == "float64":
        return PRECISIONS["float32"]
    if name != precision.name and name != "float32":
        return Finding("dtype", f"expected {precision.name} or wider, got {name}")
    return PRECISIONS[name]


def broken(law: Law, claim: Claim) -> Finding | None:
    """Return a finding if the law does not hold."""
    actual, expected = as_float64(claim.actual), as_float64(claim.expected)
    if actual.shape != expected.shape:
        return Finding("law", f"broken law ({law.name}): the two sides have shapes {actual.shape} and {expected.shape}")
    if not actual.size:
        return None
    tolerance = np.broadcast_to(claim.tolerance, expected.shape)
    with np.errstate(invalid="ignore"):
        # We already compared a number that overflows the dtype on one side only with its bound.
        equal = (actual == expected) | (np.isnan(actual) & np.isnan(expected)) | np.isinf(actual) | np.isinf(expected)
        equal = equal | np.isposinf(tolerance)
        error = np.where(equal, 0.0, np.abs(actual - expected))
    over = _ratio(error, tolerance)
    at = _worst(over)
    if over[at] <= 1:
        return None
    return Finding(
        "law",
        f"broken law ({law.name}): at {_index(at)} the two sides are {actual[at]:.7g} and {expected[at]:.7g}"
        + (f", {error[at]:.2g} apart, {tolerance[at]:.2g} allowed" if tolerance[at] else ", which must be equal"),
    )


def _ratio(error: np.ndarray, bound: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, 0.0, error / bound)


def _largest(ratio: np.ndarray) -> float:
    largest = float(ratio[_worst(ratio)])
    return np.inf if np.isnan(largest) else largest


def _worst(ratio: np.ndarray) -> tuple[int, ...]:
    """Return the index of the largest ratio. NaN counts as larger than any number."""
    return tuple(int(i) for i in np.unravel_index(np.argmax(ratio), ratio.shape))


def _index(at: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, at))}]"


def _difference(which: str, at: tuple[int, ...], actual, value, bound, word: str) -> str:
    got, exact = float(actual[at]), float(value[at])
    if value.dtype.kind != "f":
        return f"{which}at {_index(at)}: expected {int(exact)}, got {int(got)}"
    line = f"{which}at {_index(at)}: expected {exact:.7g}, got {got:.7g}"
    error = abs(got - exact)
    if not np.isfinite(error):
        return line
    times = error / bound[at] if bound[at] else np.inf
    return f"{line}: off by {error:.3g}, {times:.3g} times the {word} of {bound[at]:.3g}"


def _condition(expected: Expected, at: tuple[int, ...]) -> str:
    if np.asarray(expected.value).dtype.kind != "f":
        return ""
    size, exact = (
        float(np.broadcast_to(a, np.shape(expected.value))[at]) for a in (expected.size, np.abs(expected.value))
    )
    if not size:
        return "every term is zero"
    if exact * CANCELLING < size:
        times = f"{size / exact:.2g} times" if exact else "all of"
        return f"the terms are {times} their sum: cancellation, which the bound allows for"
    return "well-conditioned: rounding cannot explain this"
