"""The runner: draw, call, judge, and once something is wrong, look for the smallest draw that shows it."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, errors
from hypothesis import strategies as st

from llamaspec.verify.bounds.precision import Precision
from llamaspec.verify.candidates.candidate import Candidate, NoVerdict
from llamaspec.verify.contract import Contract
from llamaspec.verify.draws.domain import narrowed, parsed, shares
from llamaspec.verify.draws.draw import LAW, Draw, Values
from llamaspec.verify.draws.drawing import all_draws, leaves, narrowed_draws, pool_of_shapes, simpler, strategy, uniform
from llamaspec.verify.draws.seeded import by_the_seed_alone
from llamaspec.verify.judging.examination import NOT_TWICE, Examination, Unjudged, examine
from llamaspec.verify.judging.judge import Finding, Point
from llamaspec.verify.judging.timing import Timing

LARGE = 5  # one shape in so many is a large one
SIMPLE = 4  # one draw in so many is Hypothesis's, which prefers simple values; others are uniform
SHRINKING = 20.0  # seconds that the search for a smaller counterexample may take

Progress = Callable[[int], object]  # told after each example how many there were


def unseen(stage: str, total: int | None = None) -> Progress:
    """Show nothing of a stage."""
    return lambda examples: None


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
    nearest: Examination = field(default_factory=lambda: Examination({}))  # to its hard bound
    shares_used: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of the bound, by draw and its value
    differs: str = ""  # where two results for the same inputs have other bits, both within the bound
    weaker: str = ""  # contract, in words
    timing: Timing | None = None  # where it was asked for, and the contract holds
    points: Sequence[Point] = ()  # numbers of the results, until the first that is wrong
    shapes: int | None = None  # different ones that were drawn, where their number was limited
    not_taken: str = ""  # why a dtype that nobody asked for is not judged

    @property
    def outcome(self) -> str:
        if self.not_taken:
            return "not judged"
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
    deterministic: bool = False,
    progress: Progress = lambda examples: None,
) -> Report:
    """Hold `candidate` to `contract` on `examples` draws, or as many as can be had in `seconds`.

    Other bits for the same inputs are a fault where the result should be `deterministic`; else they are named.
    `shapes` limits the number of different shapes, for candidates that are compiled for each; `only` replaces the
    values that a draw of a contract is taken from. Raises ValueError for a draw that the contract does not have, or a
    value that is not in its domain; NoVerdict where nothing can be said of the candidate, not one number having been
    compared, or something being missing here; Unjudged where the judge fails.
    """
    start = monotonic()
    only = narrowed(contract, only or {})
    search = _Search(contract, candidate, precision, seconds, shrink, deterministic, progress)
    large = contract.large.narrowings(only, most=min(shapes or examples, examples // 2) // LARGE)
    rest = examples - 2 * len(large)
    simple = -(-rest // SIMPLE)
    pool = pool_of_shapes(narrowed_draws(contract.shapes, only), shapes, seed=seed) if shapes is not None else None
    search.run(strategy(contract, pool, only), examples=simple, seed=seed)
    search.walk(itertools.islice(uniform(contract, pool, only, seed=seed), rest - simple), all_draws(contract, only))
    for number, sizes in enumerate(large, 1):  # two draws each: the simplest values, and any
        if not search.smallest and not search.cut_short:
            search.run(strategy(contract, None, parsed(sizes)), examples=2, seed=seed + number)
    if search.may_shrink and shapes is not None:  # a smaller one may exist among all shapes
        any_shape = _Search(contract, candidate, precision, SHRINKING, shrink, deterministic, lambda examples: None)
        try:
            any_shape.run(strategy(contract, None, only), examples=examples, seed=seed)
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
        nearest=search.nearest,
        shares_used=search.shares_used,
        differs=search.differs,
        weaker=contract.weaker,
        points=search.points,
        shapes=None if shapes is None else len(search.shapes),
    )


class _Search:
    """State of a search while Hypothesis draws, and when it is to stop."""

    def __init__(self, contract, candidate, precision, seconds, shrink, deterministic, progress):
        self.contract, self.candidate, self.precision = contract, candidate, precision
        self.shrink, self.deterministic, self.progress = shrink, deterministic, progress
        self.end = monotonic() + seconds
        self.examples = 0
        self.compared = 0
        self.first: Draw = {}
        self.fault: BaseException | None = None  # that ended the search: none of the candidate's
        self.worst = self.nearest = Examination({})
        self.shares_used: dict[str, dict[str, float]] = {}
        self.differs = ""
        self.points: list[Point] = []
        self.shapes: set[str] = set()
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
        with warnings.catch_warnings(), by_the_seed_alone():
            warnings.simplefilter("ignore", errors.HypothesisWarning)
            try:
                _run(test)
            except (_Wrong, _Enough):
                pass
            except errors.Flaky:
                if self.smallest is None:  # or `settled` says that it was not the same twice
                    raise
        self._raise_fault()

    def walk(self, draws: Iterable[Draw], strategies: Mapping[str, st.SearchStrategy]) -> None:
        """Judge `draws` in order, and at the first that is wrong, look for simpler values of `strategies`."""
        if self.smallest or self.cut_short:
            return
        try:
            for draw in draws:
                self.examine(draw)
        except _Wrong:
            while self.shrink and self._simplified(strategies):
                pass
        except _Enough:
            pass
        self._raise_fault()

    def _simplified(self, strategies: Mapping[str, st.SearchStrategy]) -> bool:
        """Whether a draw with one simpler value is wrong too; it then takes the place of the counterexample."""
        before = self.smallest
        assert before is not None
        for draw in simpler(strategies, before.draw):
            try:
                self.examine(draw)
            except _Wrong:
                if self.smallest is not before:
                    return True
            except _Enough:
                return False
        return False

    def _raise_fault(self) -> None:
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
        examination = self._judge(draw)
        if not found:
            self.examples += 1
            self.first = self.first or draw
            self.compared += examination.compared
            self.progress(self.examples)
            self.worst = max(self.worst, examination, key=lambda one: (one.finding is not None, one.alarm))
            self._note(examination)
        if not examination.violated:
            return
        self.prefer(examination)
        if not self.may_shrink:
            raise _Enough
        if not found:
            self.end = min(self.end, monotonic() + SHRINKING)
        raise _Wrong

    def _judge(self, draw: Draw) -> Examination:
        return examine(self.contract, self.candidate, self.precision, draw, deterministic=self.deterministic)

    def _note(self, examination: Examination) -> None:
        """Keep how much of the bound was used, for each kind of input."""
        self.differs = self.differs or examination.differs
        self.points += examination.points
        self.shapes.add(str([examination.draw[name] for name in self.contract.shapes]))
        self.nearest = max(self.nearest, examination, key=lambda one: one.hard)
        for name, value in examination.draw.items():
            if isinstance(value, Values | str) and name != LAW:
                used = self.shares_used.setdefault(name, {})
                kind = value.kind if isinstance(value, Values) else value
                used[kind] = max(used.get(kind, 0.0), examination.hard)

    def settled(self) -> Examination:
        """The last word: the smallest counterexample, if it is one when it is looked at again."""
        smallest = self.smallest
        if smallest is None or smallest.finding is None:
            return self.worst
        if not self.may_shrink:
            return smallest
        try:
            again = self._judge(smallest.draw)
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
    numbers = [leaves(examination.draw[name]) for name in contract.shapes if name in examination.draw]
    return sum(sum(leaves) + len(leaves) for leaves in numbers), len(str(examination.draw))
