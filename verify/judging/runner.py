"""Draw inputs, call a candidate and judge its results.

After a wrong result, search for the smallest draw that shows it.
"""

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import monotonic
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, errors
from hypothesis import strategies as st

from llamaspec.verify.bounds.precision import Precision
from llamaspec.verify.candidates.candidate import Candidate, Failure, NotJudged, NoVerdict, Outputs
from llamaspec.verify.contract import Contract
from llamaspec.verify.draws.domain import narrowed, parsed, shares
from llamaspec.verify.draws.draw import LAW, OF_THE_CALL, Draw, Values
from llamaspec.verify.draws.drawing import all_draws, leaves, narrowed_draws, pool_of_shapes, simpler, strategy, uniform
from llamaspec.verify.draws.seeded import by_the_seed_alone
from llamaspec.verify.judging.examination import NOT_TWICE, Examination, Unjudged, examine
from llamaspec.verify.judging.formula import Formula
from llamaspec.verify.judging.judge import Finding, Point
from llamaspec.verify.judging.timing import Timing

LARGE = 5  # every fifth shape is a large one
FARTHER = 16  # times as large as a large draw: a draw beyond the sizes of published models
PATIENCE = 20.0  # seconds for a call at such sizes; interpreted kernels may need minutes
FULL = 10  # a run with fewer large shapes leaves out the sizes of published models
SIMPLE = 4  # Hypothesis, which prefers simple values, makes every fourth draw; the others are uniform
SHRINKING = 20.0  # seconds allowed for the search for a smaller counterexample

Progress = Callable[[int], object]  # called after each example with the number of examples


def unseen(stage: str, total: int | None = None) -> Progress:
    """Show no progress."""
    return lambda examples: None


@dataclass(frozen=True)
class Report:
    """Outcome of verifying one candidate against one contract."""

    op: str
    candidate: str
    dtype: str
    seed: int | None  # seed of the draws; None for a replay, which draws nothing
    examples: int  # until the first wrong one, or in total
    seconds: float
    worst: Examination  # the counterexample, else the suspicious draw, else the draw nearest to its bound
    cut_short: bool = False  # the time ran out before all examples
    compared: int = 0  # numbers, in all examples
    shares: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # shares of narrowed draws, from `shares`
    output_lines: Sequence[str] = ()  # last lines that the candidate printed
    nearest: Examination = field(default_factory=lambda: Examination({}))  # the draw nearest to its hard bound
    shares_used: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # bound used, by draw and value
    differs: str = ""  # two results for the same inputs that differ in their bits, both within the bound
    explained: str = ""  # why a number beyond its alarm is no finding
    not_judged: Mapping[str, int] = field(default_factory=dict)  # draws that have no verdict, by the reason
    weaker: str = ""  # the weaker contract, in words
    contiguous: bool = False  # all arrays were contiguous, because the candidate needs that
    timing: Timing | None = None  # if --time was given and the contract holds
    formula: Formula | None = None  # if --algebra was given
    points: Sequence[Point] = ()  # numbers of the results, until the first wrong result
    shapes: int | None = None  # how many were drawn, if `shapes` limited them
    not_taken: str = ""  # why we did not judge a dtype that the user did not name

    @property
    def outcome(self) -> str:
        if self.not_taken:
            return "not judged"
        if self.worst.violated:
            return "violated"
        return "suspicious" if self.worst.finding else "within bounds"


class _Wrong(Exception):
    """Signals to Hypothesis that a draw is a counterexample."""


class _StopDrawing(BaseException):
    """Ends a run of Hypothesis. It is not an Exception, because Hypothesis treats an Exception as a counterexample."""


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
    """Verify `candidate` against `contract` on `examples` draws, or as many as fit into `seconds`.

    With `deterministic`, two results with different bits for the same inputs are a fault. Without it, the report only
    mentions them. `shapes` limits the number of different shapes, for candidates that compile once per shape. `only`
    limits some variables of a draw to values.

    Raises ValueError for a variable that the contract does not have, and for a value outside the variable's domain.
    Raises NoVerdict if no number was compared, or if this machine or this Python lacks something that the candidate
    needs, such as a library. Raises Unjudged if the judge fails.
    """
    start = monotonic()
    only = narrowed(contract, only or {})
    search = _Search(contract, candidate, precision, seconds, shrink, deterministic, progress)
    most = min(shapes or examples, examples // 2) // LARGE
    large = contract.large.narrowings(only, most=most)
    remaining = examples - 2 * len(large)
    simple = -(-remaining // SIMPLE)
    pool = pool_of_shapes(narrowed_draws(contract.shapes, only), shapes, seed=seed) if shapes is not None else None
    search.run(strategy(contract, pool, only), examples=simple, seed=seed)
    search.walk(
        itertools.islice(uniform(contract, pool, only, seed=seed, layouts=candidate.layouts), remaining - simple),
        all_draws(contract, only),
    )
    usual = len(search.candidate.seconds)

    def random_draw(sizes: Mapping[str, Sequence[Any]]) -> Draw:
        return next(uniform(contract, None, parsed(sizes), seed=seed))

    for number, sizes in enumerate(large, 1):  # two draws each: the simplest values, and random ones
        if not search.smallest and not search.cut_short:
            search.run(strategy(contract, None, parsed(sizes)), examples=2, seed=seed + number)
    widest = contract.large.widest_narrowings(only) if most >= FULL else []
    expected_seconds = search.candidate.growth(usual) * FARTHER
    if widest and expected_seconds > PATIENCE and not search.smallest:
        reason = f"at the sizes of published models, a call would take about {expected_seconds:.0f} s"
        search.not_judged[reason] += len(widest)
    else:  # without a law, which would need more calls
        search.judge_more({**random_draw(sizes), LAW: None} for sizes in widest)
    if shapes is None:  # otherwise a shape with a size of 0 would be one more than the candidate may compile
        search.judge_more(random_draw(sizes) for sizes in contract.large.empty_narrowings(only))
    if search.may_shrink and shapes is not None:  # there may be a smaller one among all shapes
        any_shape = _Search(contract, candidate, precision, SHRINKING, shrink, deterministic, lambda examples: None)
        try:
            any_shape.run(strategy(contract, None, only), examples=examples, seed=seed)
        except (NoVerdict, ImportError, Unjudged):
            pass  # keep the counterexample that we have
        search.prefer(any_shape.smallest)
    worst = search.settled()
    if worst.finding is None and not search.compared:
        number = "1 example" if search.examples == 1 else f"{search.examples} examples"
        first = ", ".join(f"{name}={value}" for name, value in search.first.items() if name not in OF_THE_CALL)
        raise NoVerdict(
            f"{contract.name} {precision.name}: no verdict: {number} gave results without a number to compare "
            f"(first example: {first})" + "".join(f"; {reason}" for reason in search.not_judged)
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
        explained=search.explained,
        not_judged=search.not_judged,
        weaker=contract.weaker,
        points=search.points,
        shapes=None if shapes is None else len(search.shapes),
    )


class _Stopwatch:
    """A candidate, and the seconds of each of its calls."""

    def __init__(self, candidate: Candidate):
        self.candidate = candidate
        self.seconds: list[float] = []

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def layouts(self) -> tuple[str, ...]:
        return self.candidate.layouts

    def call(self, positional: dict[str, Any], keyword: dict[str, Any]) -> Outputs | Failure:
        start = monotonic()
        try:
            return self.candidate.call(positional, keyword)
        finally:
            self.seconds.append(monotonic() - start)

    def growth(self, usual: int) -> float:
        """Return the seconds of the slowest call after the first `usual` calls, minus the median of the first calls."""
        return max([0.0, *self.seconds[usual:]]) - median(self.seconds[:usual] or [0.0])


class _Search:
    """State of a search while Hypothesis draws."""

    def __init__(self, contract, candidate, precision, seconds, shrink, deterministic, progress):
        self.contract, self.candidate, self.precision = contract, _Stopwatch(candidate), precision
        self.shrink, self.deterministic, self.progress = shrink, deterministic, progress
        self.end = monotonic() + seconds
        self.examples = 0
        self.compared = 0
        self.not_judged: Counter[str] = Counter()  # draws, by the reason
        self.left_out: set[str] = set()  # optional keyword arguments that the candidate does not accept
        self.first: Draw = {}
        self.fault: BaseException | None = None  # ended the search; not the candidate's fault
        self.worst = self.nearest = Examination({})
        self.shares_used: dict[str, dict[str, float]] = {}
        self.differs = self.explained = ""
        self.points: list[Point] = []
        self.shapes: set[str] = set()
        self.smallest: Examination | None = None  # the smallest counterexample so far
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
            except (_Wrong, _StopDrawing):
                pass
            except errors.Flaky:
                if self.smallest is None:  # otherwise `settled` reports it as not the same twice
                    raise
        self._raise_fault()

    def walk(self, draws: Iterable[Draw], strategies: Mapping[str, st.SearchStrategy]) -> None:
        """Judge `draws` in order. After the first wrong one, try simpler values of `strategies`."""
        if self.smallest or self.cut_short:
            return
        try:
            for draw in draws:
                self.examine(draw)
        except _Wrong:
            while self.shrink and self._simplified(strategies):
                pass
        except _StopDrawing:
            pass
        self._raise_fault()

    def judge_more(self, draws: Iterable[Draw]) -> None:
        """Judge draws that do not count as examples: a size of 0, and the sizes of published models."""
        for draw in draws:
            if self.smallest or self.cut_short:
                return
            if monotonic() > self.end:
                self.cut_short = True
                return
            try:
                examination = self._judge(draw)
            except NotJudged as error:
                self.not_judged[str(error)] += 1
                continue
            self._record(examination)
            self.prefer(examination if examination.violated else None)

    def _simplified(self, strategies: Mapping[str, st.SearchStrategy]) -> bool:
        """Look for a draw that also fails, but has one simpler value. If there is one, keep it as the counterexample.

        Returns whether there is one.
        """
        before = self.smallest
        assert before is not None
        for draw in simpler(strategies, before.draw):
            try:
                self.examine(draw)
            except _Wrong:
                if self.smallest is not before:
                    return True
            except _StopDrawing:
                return False
        return False

    def _raise_fault(self) -> None:
        if self.fault and not (self.smallest and isinstance(self.fault, Exception)):
            raise self.fault

    @property
    def may_shrink(self) -> bool:
        """Tell whether there is a counterexample to shrink. If the candidate hung, we do not shrink."""
        smallest = self.smallest
        return self.shrink and smallest is not None and smallest.finding is not None and smallest.finding.kind != "hung"

    def prefer(self, examination: Examination | None) -> None:
        """Keep the smaller of two counterexamples."""
        if examination and (
            not self.smallest or _weight(examination, self.contract) <= _weight(self.smallest, self.contract)
        ):
            self.smallest = examination

    def examine(self, draw: Draw) -> None:
        """Judge a draw. Exceptions that end the program or the search bypass Hypothesis."""
        try:
            self._examine(draw)
        except (_Wrong, _StopDrawing):
            raise
        except BaseException as error:
            self.fault = error
            raise _StopDrawing from error

    def _examine(self, draw: Draw) -> None:
        shrinking = self.smallest is not None
        if self.examples and monotonic() > self.end:  # always judge at least one draw
            self.cut_short = not shrinking
            raise _StopDrawing
        try:
            examination = self._judge(draw)
        except NotJudged as error:
            if not shrinking:
                self.not_judged[str(error)] += 1
                self.first = self.first or draw
            return
        if not shrinking:
            self.examples += 1
            self.first = self.first or draw
            self.shapes.add(str([draw[name] for name in self.contract.shapes]))
            self.progress(self.examples)
            self._record(examination)
        if not examination.violated:
            return
        self.prefer(examination)
        if not self.may_shrink:
            raise _StopDrawing
        if not shrinking:
            self.end = min(self.end, monotonic() + SHRINKING)
        raise _Wrong

    def _judge(self, draw: Draw) -> Examination:
        return examine(
            self.contract,
            self.candidate,
            self.precision,
            draw,
            deterministic=self.deterministic,
            left_out=self.left_out,
        )

    def _record(self, examination: Examination) -> None:
        """Record what the report needs, such as the largest share of the bound that each kind of input array used."""
        self.compared += examination.compared
        self.worst = max(
            self.worst, examination, key=lambda candidate: (candidate.finding is not None, candidate.alarm)
        )
        self.differs = self.differs or examination.differs
        self.explained = self.explained or examination.explained
        self.points += examination.points
        self.nearest = max(self.nearest, examination, key=lambda candidate: candidate.hard)
        for name, value in examination.draw.items():
            if isinstance(value, Values | str) and name not in OF_THE_CALL:
                used = self.shares_used.setdefault(name, {})
                kind = value.kind if isinstance(value, Values) else value
                used[kind] = max(used.get(kind, 0.0), examination.hard)

    def settled(self) -> Examination:
        """Return the final examination.

        For a counterexample, we judge the smallest one again. If it is right this time, the finding says so.
        """
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
            message = f"right in a second call with the same inputs; in the first call: {kind}: {message}"
        return replace(smallest, finding=Finding(NOT_TWICE, message, condition))


def _run(test: Callable[[], object]) -> None:
    """Run a test of Hypothesis, and pass on a SystemExit or KeyboardInterrupt that a signal handler raises.

    If the signal arrives inside Hypothesis, Hypothesis sees an example that fails only once, or draws that differ from
    earlier examples. It then raises its own error instead.
    """
    try:
        test()
    except (_Wrong, _StopDrawing):
        raise
    except BaseException as error:
        if ending := _ending(error, set()):
            raise ending from None
        raise


def _ending(error: BaseException | None, seen: set[int]) -> BaseException | None:
    """Find the exception behind `error` that should end the program, if there is one."""
    if error is None or id(error) in seen:
        return None
    seen.add(id(error))
    if isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
        return error
    within = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    endings = (_ending(inner, seen) for inner in (*within, error.__cause__, error.__context__))
    return next((inner for inner in endings if inner), None)


def _weight(examination: Examination, contract: Contract) -> tuple[int, int]:
    """Measure a counterexample: the sum of its sizes, then the length of its text. Smaller ones are easier to read."""
    numbers = [leaves(examination.draw[name]) for name in contract.shapes if name in examination.draw]
    return sum(sum(leaves) + len(leaves) for leaves in numbers), len(str(examination.draw))
