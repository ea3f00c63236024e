"""The runner: draw, call, judge, and once something is wrong, look for the smallest draw that shows it."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, errors
from hypothesis import strategies as st

from verify.candidate import Candidate, NoVerdict
from verify.contract import Contract
from verify.domain import narrowed, parsed, shares
from verify.examination import LAW, NOT_TWICE, Draw, Examination, Unjudged, examine
from verify.judge import Finding
from verify.precision import Precision

LARGE = 5  # one shape in so many is a large one
SHRINKING = 20.0  # seconds that the search for a smaller counterexample may take

Progress = Callable[[int], object]  # told after each example how many there were


@dataclass(frozen=True)
class Report:
    """Outcome of a run of one contract on one candidate."""

    op: str
    candidate: str
    dtype: str
    seed: int | None  # of the draws; None for a replay, which draws nothing
    examples: int  # until the first that is wrong, or in all
    seconds: float
    worst: Examination  # the counterexample if there is one, or the suspicious draw, or the one nearest to its bound
    cut_short: bool = False  # by the time that it had, with nothing wrong until then
    compared: int = 0  # numbers, in all examples
    shares: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # of draws that were narrowed, as `shares` has
    said: Sequence[str] = ()  # last lines that the candidate printed

    @property
    def outcome(self) -> str:
        if self.worst.violated:
            return "violated"
        return "suspicious" if self.worst.finding else "within bounds"


class _Wrong(Exception):
    """A signal to Hypothesis that a draw is a counterexample."""


class _Enough(BaseException):
    """A way out of Hypothesis, which would take an Exception for a counterexample."""


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

    `shapes` limits the number of different shapes, for candidates that are compiled for each; `only` replaces the
    values that a draw of a contract is taken from. Raises ValueError for a draw that the contract does not have, or a
    value that is not in its domain; NoVerdict where nothing can be said of the candidate, not one number having been
    compared, or something being missing here; Unjudged where the judge fails.
    """
    start = monotonic()
    only = narrowed(contract, only or {})
    search = _Search(contract, candidate, precision, seconds, shrink, progress)
    large = contract.large.narrowings(only, most=min(shapes or examples, examples // 2) // LARGE)
    search.run(_strategy(contract, seed=seed, shapes=shapes, only=only), examples=examples - 2 * len(large), seed=seed)
    for number, sizes in enumerate(large, 1):  # two draws each: the simplest values, and any
        if not search.smallest and not search.cut_short:
            strategy = _strategy(contract, seed=seed, shapes=None, only=parsed(sizes))
            search.run(strategy, examples=2, seed=seed + number)
    if search.may_shrink and shapes is not None:  # a smaller one may exist among all shapes
        any_shape = _Search(contract, candidate, precision, SHRINKING, shrink, lambda examples: None)
        try:
            any_shape.run(_strategy(contract, seed=seed, shapes=None, only=only), examples=examples, seed=seed)
        except (NoVerdict, ImportError, Unjudged):
            pass  # the counterexample that there is stays
        search.prefer(any_shape.smallest)
    worst = search.settled()
    if worst.finding is None and not search.compared:
        number = "1 example" if search.examples == 1 else f"{search.examples} examples"
        raise NoVerdict(
            f"{contract.name} {precision.name}: no number was compared in {number}, which is no verdict "
            f"(at the first: {', '.join(f'{name}={value}' for name, value in search.first.items() if name != LAW)})"
        )
    return Report(
        op=contract.name,
        candidate=candidate.name,
        dtype=precision.name,
        seed=seed,
        examples=search.examples,
        seconds=monotonic() - start,
        worst=worst,
        cut_short=search.cut_short,
        compared=search.compared,
        shares=shares(contract, only),
    )


class _Search:
    """State of a search while Hypothesis draws, and when it is to stop."""

    def __init__(self, contract, candidate, precision, seconds, shrink, progress):
        self.contract, self.candidate, self.precision = contract, candidate, precision
        self.shrink, self.progress = shrink, progress
        self.end = monotonic() + seconds
        self.examples = 0
        self.compared = 0
        self.first: Draw = {}
        self.fault: BaseException | None = None  # that ended the search: none of the candidate's
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
                _run(test)
            except (_Wrong, _Enough):
                pass
            except errors.Flaky:
                if self.smallest is None:  # or `settled` says that it was not the same twice
                    raise
        if self.fault and not (self.smallest and isinstance(self.fault, Exception)):
            raise self.fault

    @property
    def may_shrink(self) -> bool:
        """Whether there is a counterexample of a candidate that answers when it is called again."""
        smallest = self.smallest
        return self.shrink and smallest is not None and smallest.finding is not None and smallest.finding.kind != "hung"

    def prefer(self, other: Examination | None) -> None:
        """Keep the smaller of two counterexamples."""
        if other and (not self.smallest or _weight(other, self.contract) <= _weight(self.smallest, self.contract)):
            self.smallest = other

    def examine(self, draw: Draw) -> None:
        """Judge a draw. An exception that ends the program or the search passes Hypothesis by."""
        try:
            self._examine(draw)
        except (_Wrong, _Enough):
            raise
        except BaseException as error:
            self.fault = error
            raise _Enough from error

    def _examine(self, draw: Draw) -> None:
        found = self.smallest is not None
        if self.examples and monotonic() > self.end:  # a run without a draw would have nothing to say
            self.cut_short = not found
            raise _Enough
        examination = examine(self.contract, self.candidate, self.precision, draw)
        if not found:
            self.examples += 1
            self.first = self.first or draw
            self.compared += examination.compared
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
        try:
            again = examine(self.contract, self.candidate, self.precision, smallest.draw)
        except (NoVerdict, ImportError, Unjudged):
            return smallest
        if again.violated:
            return again
        kind, message, condition = smallest.finding
        if kind != NOT_TWICE:
            message = f"right when called again with the same inputs; the first time: {kind}: {message}"
        return replace(smallest, finding=Finding(NOT_TWICE, message, condition))


def _run(test: Callable[[], object]) -> None:
    """Run a test of Hypothesis, and end as a signal's handler says, where it raises SystemExit or KeyboardInterrupt.

    A signal may arrive while Hypothesis itself is at work, which then sees a failing example that does not fail again,
    or draws that differ from those before, and raises an error of its own.
    """
    try:
        test()
    except (_Wrong, _Enough):
        raise
    except BaseException as error:
        if ending := _ending(error, set()):
            raise ending from None
        raise


def _ending(error: BaseException | None, seen: set[int]) -> BaseException | None:
    """The exception behind `error` that was to end the program, if there is one."""
    if error is None or id(error) in seen:
        return None
    seen.add(id(error))
    if isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
        return error
    within = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    found = (_ending(one, seen) for one in (*within, error.__cause__, error.__context__))
    return next((one for one in found if one), None)


def _weight(examination: Examination, contract: Contract) -> tuple[int, int]:
    """A measure of how much there is to read in a counterexample."""
    numbers = [_leaves(examination.draw[name]) for name in contract.shapes if name in examination.draw]
    return sum(sum(leaves) + len(leaves) for leaves in numbers), len(str(examination.draw))


def _leaves(value: Any) -> list[int]:
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value] if isinstance(value, int) else []


def _strategy(
    contract: Contract, *, seed: int, shapes: int | None, only: Mapping[str, Sequence[Any]]
) -> st.SearchStrategy[Draw]:
    def narrowed(draws: Mapping[str, st.SearchStrategy]) -> dict[str, st.SearchStrategy]:
        return {name: st.sampled_from(only[name]) if name in only else draws[name] for name in draws}

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
    """Draw up to `count` different values, the smallest first."""
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

    _run(collect)
    return sorted(pool.values(), key=lambda draw: sum(leaf for value in draw.values() for leaf in _leaves(value)))
