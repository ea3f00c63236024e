"""Draws, calls, judges; and once something is wrong, looks for the smallest draw that shows it."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, errors
from hypothesis import strategies as st

from verify.candidate import Candidate, Failure
from verify.contract import Arguments, Contract, Trial, with_rounding
from verify.draw import Values
from verify.judge import Finding, broken, judge, returned_precision
from verify.precision import Precision

LARGE = 5  # one shape in so many is a large one
SHRINKING = 20.0  # seconds that the search for a smaller counterexample may take
LAW = "law"  # the draw that says which law is looked at beside the values

Draw = dict[str, Any]
Progress = Callable[[int], object]  # told after each example how many there were


@dataclass(frozen=True)
class Examination:
    """One draw, judged."""

    draw: Draw
    hard: float = 0.0
    alarm: float = 0.0
    finding: Finding | None = None

    @property
    def violated(self) -> bool:
        return self.finding is not None and self.finding.kind != "suspicious"


@dataclass(frozen=True)
class Report:
    """What a run of one contract on one candidate came to."""

    op: str
    candidate: str
    dtype: str
    seed: int
    examples: int  # until the first that is wrong, or in all
    seconds: float
    worst: Examination  # the counterexample if there is one, or the suspicious draw, or the one nearest to its bound
    cut_short: bool = False  # by the time that it had, with nothing wrong until then

    @property
    def outcome(self) -> str:
        if self.worst.violated:
            return "violated"
        return "suspicious" if self.worst.finding else "within bounds"


class _Wrong(Exception):
    """Tells Hypothesis that a draw is a counterexample."""


class _Enough(BaseException):
    """Leaves Hypothesis. No Exception: that would be a counterexample, too."""


def verify(
    contract: Contract,
    candidate: Candidate,
    *,
    precision: Precision,
    examples: int,
    seed: int,
    seconds: float = np.inf,
    shapes: int | None = None,
    only: Mapping[str, Sequence[Any]] | None = None,
    shrink: bool = True,
    progress: Progress = lambda examples: None,
) -> Report:
    """Hold `candidate` to `contract` on `examples` draws, or as many as can be had in `seconds`.

    `shapes` limits the number of different shapes, for candidates that are compiled for each; `only` replaces what a
    draw of a contract is taken from by the values given. Raises ValueError for a draw that the contract has not.
    """
    start = monotonic()
    only = only or {}
    search = _Search(contract, candidate, precision, seconds, shrink, progress)
    large = contract.large.narrowings(only, most=min(shapes or examples, examples // 2) // LARGE)
    search.run(_strategy(contract, seed=seed, shapes=shapes, only=only), examples=examples - 2 * len(large), seed=seed)
    for number, narrowed in enumerate(large, 1):  # two draws each: the simplest values, and any
        if not search.smallest and not search.cut_short:
            search.run(_strategy(contract, seed=seed, shapes=None, only=narrowed), examples=2, seed=seed + number)
    if search.may_shrink and shapes is not None:  # of all shapes there may be a smaller one
        any_shape = _Search(contract, candidate, precision, SHRINKING, shrink, lambda examples: None)
        any_shape.run(_strategy(contract, seed=seed, shapes=None, only=only), examples=examples, seed=seed)
        search.prefer(any_shape.smallest)
    return Report(
        op=contract.name,
        candidate=candidate.name,
        dtype=precision.name,
        seed=seed,
        examples=search.examples,
        seconds=monotonic() - start,
        worst=search.settled(),
        cut_short=search.cut_short,
    )


def examine(contract: Contract, candidate: Candidate, precision: Precision, draw: Draw) -> Examination:
    """Judge one draw: its values, and the law that it names."""
    drawn = {name: value for name, value in draw.items() if name != LAW}
    arguments = contract.arguments(precision=precision, **drawn)
    called = _call(contract, candidate, arguments)
    if isinstance(called, Finding):
        return Examination(draw, np.inf, np.inf, called)
    expected = contract.expected(arguments)
    verdict = judge(called, expected, precision)
    examination = Examination(draw, verdict.hard, verdict.alarm, verdict.finding)
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
    """A candidate gave nothing while a law was looked at."""

    def __init__(self, finding: Finding):
        super().__init__(finding.message)
        self.finding = finding


def _call(contract: Contract, candidate: Candidate, arguments: Arguments) -> tuple[np.ndarray, ...] | Finding:
    outcome = candidate.call(*contract.split(arguments))
    if isinstance(outcome, Failure):
        return Finding(outcome.kind, outcome.message)
    if outcome.changed:
        return Finding("inputs", f"wrote to its input {' and '.join(outcome.changed)}")
    return outcome.arrays


class _Search:
    """What is known while Hypothesis draws, and when it is to stop."""

    def __init__(self, contract, candidate, precision, seconds, shrink, progress):
        self.contract, self.candidate, self.precision = contract, candidate, precision
        self.shrink, self.progress = shrink, progress
        self.end = monotonic() + seconds
        self.examples = 0
        self.worst = Examination({})
        self.smallest: Examination | None = None  # that is wrong
        self.cut_short = False

    def run(self, strategy: st.SearchStrategy[Draw], *, examples: int, seed: int) -> None:
        decorate = hypothesis.settings(
            max_examples=examples,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink) if self.shrink else (Phase.generate,),
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
            suppress_health_check=tuple(HealthCheck),  # type: ignore
        )
        test = hypothesis.seed(seed)(decorate(hypothesis.given(strategy)(self.examine)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", errors.HypothesisWarning)
            try:
                test()
            except (_Wrong, _Enough, errors.Flaky):
                pass

    @property
    def may_shrink(self) -> bool:
        """There is a counterexample, and calling the candidate again does not take as long as it may."""
        smallest = self.smallest
        return self.shrink and smallest is not None and smallest.finding is not None and smallest.finding.kind != "hung"

    def prefer(self, other: Examination | None) -> None:
        """Keep the smaller of two counterexamples."""
        if other and (not self.smallest or _weight(other, self.contract) <= _weight(self.smallest, self.contract)):
            self.smallest = other

    def examine(self, draw: Draw) -> None:
        found = self.smallest is not None
        if self.examples and monotonic() > self.end:  # of no draw at all there would be nothing to say
            self.cut_short = not found
            raise _Enough
        examination = examine(self.contract, self.candidate, self.precision, draw)
        if not found:
            self.examples += 1
            self.progress(self.examples)
            self.worst = max(self.worst, examination, key=lambda one: (one.finding is not None, one.alarm))
        if not examination.violated:
            return
        self.prefer(examination)
        if not self.may_shrink:
            raise _Enough
        if not found:
            self.end = min(self.end, monotonic() + SHRINKING)
        raise _Wrong

    def settled(self) -> Examination:
        """The last word: the smallest counterexample, if it is one when it is looked at again."""
        smallest = self.smallest
        if smallest is None or smallest.finding is None:
            return self.worst
        if not self.may_shrink:
            return smallest
        again = examine(self.contract, self.candidate, self.precision, smallest.draw)
        if again.violated:
            return again
        message = f"wrong once, right when called again with the same inputs: {smallest.finding.message}"
        return replace(smallest, finding=Finding("unstable", message, smallest.finding.condition))


def _weight(examination: Examination, contract: Contract) -> tuple[int, int]:
    """How much there is to read in a counterexample."""
    numbers = [_leaves(examination.draw[name]) for name in contract.shapes if name in examination.draw]
    return sum(sum(leaves) + len(leaves) for leaves in numbers), len(str(examination.draw))


def _leaves(value: Any) -> list[int]:
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value] if isinstance(value, int) else []


def _as_values(choice: Any) -> Any:
    """What a draw is narrowed to: `Values` where it is written as they are.

    >>> _as_values("normal(3)"), _as_values("q8"), _as_values(128)
    (Values(kind='normal', seed=3, exponent=0), 'q8', 128)
    """
    try:
        return Values.parse(choice) if isinstance(choice, str) else choice
    except ValueError:
        return choice


def _strategy(
    contract: Contract, *, seed: int, shapes: int | None, only: Mapping[str, Sequence[Any]]
) -> st.SearchStrategy[Draw]:
    if unknown := set(only) - set(contract.draws):
        raise ValueError(f"{contract.name} draws {', '.join(contract.draws)}; got {', '.join(sorted(unknown))}")

    def narrowed(draws: Mapping[str, st.SearchStrategy]) -> dict[str, st.SearchStrategy]:
        return {
            name: st.sampled_from([_as_values(choice) for choice in only[name]]) if name in only else draws[name]
            for name in draws
        }

    shape = st.fixed_dictionaries(narrowed(contract.shapes))
    if shapes is not None:
        shape = st.sampled_from(_pool(shape, shapes, seed=seed))
    values = narrowed(contract.values)
    if contract.laws:
        values[LAW] = st.sampled_from([None, *(law.name for law in contract.laws)])

    def draw(shape: Draw, values: Draw) -> Draw:
        drawn = {**shape, **values}
        return {name: drawn[name] for name in [*contract.draws, LAW] if name in drawn}  # in the order that is read

    return st.builds(draw, shape, st.fixed_dictionaries(values))


def _pool(strategy: st.SearchStrategy[Draw], count: int, *, seed: int) -> list[Draw]:
    """Up to `count` different draws, the smallest first."""
    pool: dict[str, Draw] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=4 * count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        verbosity=Verbosity.quiet,
        suppress_health_check=tuple(HealthCheck),  # type: ignore
    )
    @hypothesis.given(strategy)
    def collect(draw: Draw) -> None:
        if len(pool) < count:
            pool[str(draw)] = draw

    collect()
    return sorted(pool.values(), key=lambda draw: sum(leaf for value in draw.values() for leaf in _leaves(value)))
