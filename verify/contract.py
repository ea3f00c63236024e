"""Contracts: the inputs of an op, its exact outputs, how far a result may be from them, and laws for any input."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from jaxtyping import Bool, Float, Shaped

from llamaspec.verify.bounds.precision import Precision

Arguments = dict[str, Any]  # by name, in the order of the definition's signature


class Expected(NamedTuple):
    """One output: the exact value, and how far a computation in float32 may be from it before it is rounded to a dtype.

    `hard` is proved: a result beyond it means a bug, in the candidate or in the proof. Good implementations stayed
    within `alarm` on all data that was tried: a result beyond it is suspicious. An infinite bound allows any value.
    """

    value: Shaped[np.ndarray, "..."]  # float64, or whole numbers
    hard: Float[np.ndarray, "..."]
    alarm: Float[np.ndarray, "..."]
    size: Float[np.ndarray, "..."]  # sum of the magnitudes of all terms; far above |value| where they cancel
    rounded: bool = True  # once, to the dtype that is returned; False for numbers that are only moved


class Claim(NamedTuple):
    """A law's claim for one draw: `actual` is within `tolerance` of `due`."""

    actual: Shaped[np.ndarray, "..."]
    due: Shaped[np.ndarray, "..."]
    tolerance: Float[np.ndarray, "..."] | float


class Trial(NamedTuple):
    """One draw for a law, which may call the candidate again with some arguments changed."""

    arguments: Arguments
    outputs: tuple[np.ndarray, ...]
    bounds: tuple[np.ndarray, ...]  # hard, with the rounding of the outputs
    again: Callable[..., tuple[np.ndarray, ...]]


class Law(NamedTuple):
    """A property that holds for any values. Its name completes the sentence "it does not hold that ..."."""

    name: str
    check: Callable[[Trial], Claim | None]  # None where the law does not apply
    sets: tuple[str, ...] = ()  # draws that it replaces by values of its own: left out where one of them is narrowed


def alone(what: str, *names: str) -> Law:
    """A law of ops that work entry by entry on the first axis of arguments `names`. It compares the first output."""

    def check(trial: Trial) -> Claim:
        last = len(trial.arguments[names[0]]) - 1
        one = slice(last, last + 1)
        again = trial.again(**{name: trial.arguments[name][one] for name in names})
        return Claim(again[0], trial.outputs[0][one], 2 * trial.bounds[0][one])

    return Law(f"{what} alone gives what it gives among others", check)


@dataclass(frozen=True)
class Large:
    """Sizes beyond a tile, one dimension at a time: a kernel may be right within its tiles and wrong beyond one."""

    sizes: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # by the draw that becomes large
    beside: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # narrowings of the other draws meanwhile
    closer: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)  # further ones, while that draw is
    ends: Mapping[str, str] = field(default_factory=dict)  # why a dimension ends before `verify.draws.reach.FAR`

    def narrowings(self, only: Mapping[str, Sequence[Any]], *, most: int) -> list[dict[str, Sequence[Any]]]:
        """List up to `most` narrowings of draws, the smallest sizes first, without the draws that `only` narrows.

        Where there are more, the smallest sizes of each draw are left out.

        >>> large = Large({"rows": [5, 9], "dim": [33]}, beside={"rows": [1], "dim": [2]})
        >>> large.narrowings({}, most=2)
        [{'rows': [1], 'dim': [33]}, {'rows': [9], 'dim': [2]}]
        >>> large.narrowings({"rows": [3]}, most=2)
        [{'rows': [3], 'dim': [33]}]
        >>> Large({"rows": [9]}, beside={"dim": [2]}, closer={"rows": {"dim": [1]}}).narrowings({}, most=1)
        [{'dim': [1], 'rows': [9]}]
        """
        ranked = [
            (rank, place, size, name)
            for name, sizes in self.sizes.items()
            if name not in only
            for place, (rank, size) in enumerate(reversed(list(enumerate(sizes))))
        ]
        chosen = sorted(sorted(ranked, key=lambda one: one[1])[:most], key=lambda one: one[0])
        return [{**self.beside, **self.closer.get(name, {}), **only, name: [size]} for _, _, size, name in chosen]


@dataclass(frozen=True)
class Contract:
    """The inputs, exact outputs, error bounds and laws that an implementation of `definition` is held to."""

    definition: Callable[..., Any]  # in float64; candidates are called in the same way
    shapes: Mapping[str, st.SearchStrategy]  # draws that decide the shapes
    values: Mapping[str, st.SearchStrategy]  # draws that decide the numbers
    arguments: Callable[..., Arguments]  # makes the arguments from both kinds of draws and a `precision`
    expect: Callable[..., Expected | tuple[Expected, ...]]  # called as the definition is
    domain: str
    bound: str  # the formulas of `expect`, for a reader
    laws: Sequence[Law] = ()
    large: Large = field(default_factory=Large)
    weaker: str = ""  # in words, what a candidate may do that it otherwise may not

    @property
    def name(self) -> str:
        return self.definition.__name__

    @property
    def draws(self) -> Mapping[str, st.SearchStrategy]:
        return {**self.shapes, **self.values}

    def split(self, arguments: Arguments) -> tuple[Arguments, Arguments]:
        """Split `arguments` into those that are passed by position and those that are passed by name.

        A parameter that is passed by name and that the contract does not draw keeps its default.
        """
        parameters = inspect.signature(self.definition).parameters
        named = {name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
        return (
            {name: arguments[name] for name in parameters if name not in named},
            {name: arguments[name] for name in parameters if name in named & arguments.keys()},
        )

    def expected(self, arguments: Arguments) -> tuple[Expected, ...]:
        """Compute the exact outputs for `arguments` and their bounds.

        Raises ValueError for an output that is not finite, and for a bound that is no number.
        """
        positional, keyword = self.split(arguments)
        expected = self.expect(*positional.values(), **keyword)
        expected = (expected,) if isinstance(expected, Expected) else expected
        if not all(np.all(np.isfinite(due.value)) and not np.any(np.isnan(due.hard)) for due in expected):
            raise ValueError("the definition is not finite, or its bound is no number")  # also where -O drops asserts
        return expected


def beyond(*borders: int) -> tuple[int, ...]:
    """Name lengths beyond tiles, for `Large`: by one, and by more where one term of a sum would be lost in rounding.

    >>> beyond(8, 1024, 4096)
    (9, 1041, 4161)
    """
    return tuple(border + 1 + border // 64 for border in borders)


def as_float64(array: Shaped[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Widen to float64, which changes no number."""
    return np.asarray(array).astype(np.float64)


def of_one_size(terms: Float[np.ndarray, "... n"]) -> Bool[np.ndarray, "..."]:
    """Find the sums whose terms, apart from zeros, are all equally large.

    A running sum of such terms errs in one direction again and again. Alarms assume errors as often up as down, so they
    do not apply there.
    """
    largest = np.max(terms, axis=-1, initial=0)
    return np.min(np.where(terms > 0, terms, np.inf), axis=-1, initial=np.inf) >= largest * 0.999


def with_rounding(expected: Expected, precision: Precision) -> tuple[np.ndarray, np.ndarray]:
    """Compute the hard bound and the alarm for a result that is rounded once, to `precision`, on the way out."""
    if not expected.rounded:
        return expected.hard, expected.hard
    size = np.abs(as_float64(expected.value))
    hard, alarm = (
        bound + precision.unit * (size + bound) + precision.smallest for bound in (expected.hard, expected.alarm)
    )
    return np.asarray(hard), np.asarray(np.minimum(hard, alarm))  # arithmetic makes a number of an array without axes
