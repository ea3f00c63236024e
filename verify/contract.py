"""Contracts: inputs for an op, its exact outputs, bounds on the error of a result, and laws for any input."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from jaxtyping import Bool, Float, Shaped

from llamaspec.verify.bounds.precision import Precision
from llamaspec.verify.bounds.summation import Roundings, no_sum

Arguments = dict[str, Any]  # arguments by name, in the order of the definition's signature


class Expected(NamedTuple):
    """One output: the exact value, and bounds on the error of a float32 computation before its last rounding.

    `hard` is proved: a larger error means a bug, in the candidate or in the proof. `alarm` is measured: good
    implementations stayed within it on all our data, so a larger error is suspicious. An infinite bound allows any
    value.
    """

    value: Shaped[np.ndarray, "..."]  # float64 or integers
    hard: Float[np.ndarray, "..."]
    alarm: Float[np.ndarray, "..."]
    size: Float[np.ndarray, "..."]  # sum of the magnitudes of all terms; far above |value| where they cancel
    # Errors that long float32 sums, one term after the other, may add to the alarm. Computed if they are needed.
    sums: Callable[[], Roundings] = no_sum
    rounded: bool = True  # True: once, to the result's dtype; False: the op only copies numbers


class Claim(NamedTuple):
    """A law's claim for one draw: `actual` is within `tolerance` of `expected`."""

    actual: Shaped[np.ndarray, "..."]
    expected: Shaped[np.ndarray, "..."]
    tolerance: Float[np.ndarray, "..."] | float


class Trial(NamedTuple):
    """The inputs and results of one draw, for checking a law.

    A law may call the candidate again, with changed arguments.
    """

    arguments: Arguments
    outputs: tuple[np.ndarray, ...]
    bounds: tuple[np.ndarray, ...]  # hard, with the rounding of the outputs
    again: Callable[..., tuple[np.ndarray, ...]]


class Law(NamedTuple):
    """A property of all results. Its name states the property in a sentence, for messages."""

    name: str
    check: Callable[[Trial], Claim | None]  # None: the law does not apply
    sets: tuple[str, ...] = ()  # draws that the law replaces; we skip it if the user narrowed one


def independent(what: str, *names: str) -> Law:
    """Make a law: entry i of the first output depends only on entry i of the arguments `names`, along the first axis.

    To check this, we call the candidate again with only the last entry. `what` names an entry in messages, for example
    "a row".
    """

    def check(trial: Trial) -> Claim:
        last = len(trial.arguments[names[0]]) - 1
        row = slice(last, last + 1)
        again = trial.again(**{name: trial.arguments[name][row] for name in names})
        return Claim(again[0], trial.outputs[0][row], 2 * trial.bounds[0][row])

    return Law(f"{what} has the same result alone and together with others", check)


class Use(NamedTuple):
    """The largest size of a dimension in a published model."""

    size: int
    of: str  # what has this size
    grid: bool = True  # a kernel may run a block for each entry of the dimension


# Sizes of the other dimensions next to one of `Large.widest`, so that a draw stays small.
FEW: Mapping[str, int] = {
    **{"batch": 1, "kv_heads": 1, "group": 1, "heads": 1, "queries": 2, "seq": 2, "keys": 3, "pairs": 4},
    **dict.fromkeys(("cols", "dim", "n", "ffn"), 8),
}


@dataclass(frozen=True)
class Large:
    """Sizes larger than a kernel's tile, for one dimension at a time.

    A kernel may be right for sizes up to its tile, and wrong for larger sizes.
    """

    sizes: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # large values, by draw
    beside: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # values of the other draws at the same time
    closer: Mapping[str, Mapping[str, Sequence[Any]]] = field(
        default_factory=dict
    )  # further narrowings, by the large draw
    empty: Sequence[str] = ()  # draws that may be 0: the results are empty
    ends: Mapping[str, str] = field(default_factory=dict)  # why a dimension ends before `verify.draws.reach.FAR`
    uses: Mapping[str, Use] = field(default_factory=dict)  # by dimension, as `verify.draws.reach` names it
    widest: Mapping[str, Any] = field(default_factory=dict)  # by draw: a size beyond the dimension's use

    def narrowings(self, only: Mapping[str, Sequence[Any]], *, most: int) -> list[dict[str, Sequence[Any]]]:
        """List up to `most` narrowings, the smallest sizes first.

        A narrowing maps names of drawn variables to their allowed values. Each narrowing gives one dimension one large
        size, and limits other variables to the values in `beside` and `closer`. But a variable in `only` keeps its
        values from `only`. If there are more than `most` narrowings, we leave out the smallest sizes of every
        dimension.

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
        chosen = sorted(sorted(ranked, key=lambda entry: entry[1])[:most], key=lambda entry: entry[0])
        return [self.narrowing(name, size, only) for _, _, size, name in chosen]

    def narrowing(self, name: str, size: Any, only: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
        """Make the narrowing that gives the variable `name` the large value `size` (see `narrowings`)."""
        return {**self.beside, **self.closer.get(name, {}), **only, name: [size]}

    def pair_narrowings(self, only: Mapping[str, Sequence[Any]], *, most: int) -> list[dict[str, Sequence[Any]]]:
        """List up to `most` narrowings that give two variables their smallest large size. Leave out those in `only`.

        >>> Large({"rows": [5, 9], "dim": [33]}, beside={"n": [1]}).pair_narrowings({}, most=2)
        [{'n': [1], 'rows': [5], 'dim': [33]}]
        """
        pairs = itertools.combinations([name for name in self.sizes if name not in only], 2)
        return [
            {**self.narrowing(first, self.sizes[first][0], only), second: [self.sizes[second][0]]}
            for first, second in itertools.islice(pairs, most)
        ]

    def empty_narrowings(self, only: Mapping[str, Sequence[Any]]) -> list[dict[str, Sequence[Any]]]:
        """For each variable in `empty`, list a narrowing that sets it to 0. Leave out the variables in `only`."""
        return [{**self.beside, **only, name: [0]} for name in self.empty if name not in only]

    def widest_narrowings(self, only: Mapping[str, Sequence[Any]]) -> list[dict[str, Sequence[Any]]]:
        """List one narrowing for each size in `widest`. Leave out the variables in `only`.

        >>> large = Large(beside={"rows": [1], "dim": [2]}, widest={"rows": 66_561, "dim": 66_561})
        >>> large.widest_narrowings({"dim": [3]})
        [{'rows': [66561], 'dim': [3]}]
        """
        few = {name: [most] for name, most in FEW.items() if name in self.beside}
        return [self.narrowing(name, size, {**few, **only}) for name, size in self.widest.items() if name not in only]


@dataclass(frozen=True)
class Contract:
    """Inputs, exact outputs, error bounds and laws, to verify an implementation of `definition`."""

    definition: Callable[..., Any]  # the definition in float64; candidates have its signature
    shapes: Mapping[str, st.SearchStrategy]  # draws that decide the shapes
    values: Mapping[str, st.SearchStrategy]  # draws that decide the numbers
    arguments: Callable[..., Arguments]  # makes the arguments from both kinds of draws and a `precision`
    expect: Callable[..., Expected | tuple[Expected, ...]]  # called with the definition's arguments
    domain: str
    bound: str  # the formulas of `expect`, for a reader
    laws: Sequence[Law] = ()
    large: Large = field(default_factory=Large)
    weaker: str = ""  # description of what a weaker contract allows

    @property
    def name(self) -> str:
        return self.definition.__name__

    @property
    def draws(self) -> Mapping[str, st.SearchStrategy]:
        return {**self.shapes, **self.values}

    def makes(self, names: Iterable[str]) -> bool:
        """Tell whether a draw with exactly these variables suffices to make the arguments.

        All `names` must be in the contract. A variable may be missing if `arguments` has a default for it.
        """
        parameters = inspect.signature(self.arguments).parameters
        optional = {name for name, parameter in parameters.items() if parameter.default is not parameter.empty}
        return set(self.draws) - optional <= set(names) <= set(self.draws)

    def split(self, arguments: Arguments) -> tuple[Arguments, Arguments]:
        """Split `arguments` into positional and keyword arguments.

        A keyword parameter that the contract does not draw keeps its default.
        """
        parameters = inspect.signature(self.definition).parameters
        named = {name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
        return (
            {name: arguments[name] for name in parameters if name not in named},
            {name: arguments[name] for name in parameters if name in named & arguments.keys()},
        )

    def expected(self, arguments: Arguments) -> tuple[Expected, ...]:
        """Compute the exact outputs for `arguments` and their bounds.

        Raises ValueError for an output that is not finite, and for a bound that is NaN.
        """
        positional, keyword = self.split(arguments)
        expected = self.expect(*positional.values(), **keyword)
        expected = (expected,) if isinstance(expected, Expected) else expected
        if not all(np.all(np.isfinite(output.value)) and not np.any(np.isnan(output.hard)) for output in expected):
            raise ValueError(
                "the result of the definition is not finite, or its error bound is NaN"
            )  # not an assert: python -O skips those
        return expected


def beyond(*borders: int) -> tuple[int, ...]:
    """List a length a little above each tile size in `borders`, to reveal kernels that lose the tail after a tile.

    A longer tile needs a longer tail, because the error bound of a long sum may hide the loss of a few terms.

    >>> beyond(8, 1024, 4096)
    (9, 1041, 4161)
    """
    return tuple(border + 1 + border // 64 for border in borders)


def as_float64(array: Shaped[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Convert to float64 without changing a number."""
    return np.asarray(array).astype(np.float64)


def of_one_size(terms: Float[np.ndarray, "... n"]) -> Bool[np.ndarray, "..."]:
    """Find sums with terms that are all equally large, except zeros.

    In a running sum of such terms, the rounding errors may all have the same sign. The measured bound
    (`Expected.alarm`) assumes random signs, so it does not apply to these sums.
    """
    largest = np.max(terms, axis=-1, initial=0)
    return np.min(np.where(terms > 0, terms, np.inf), axis=-1, initial=np.inf) >= largest * 0.999


def with_rounding(expected: Expected, precision: Precision) -> tuple[np.ndarray, np.ndarray]:
    """Compute the proved and the measured bound (`hard`, `alarm`) for a result that is rounded once to `precision`."""
    if not expected.rounded:
        return expected.hard, expected.hard
    size = np.abs(as_float64(expected.value))
    hard, alarm = (
        bound + precision.smallest + (precision.unit * (size + bound) if precision.unit else 0)  # 0 times infinity
        for bound in (expected.hard, expected.alarm)
    )
    return np.asarray(hard), np.asarray(np.minimum(hard, alarm))  # arithmetic turns a 0-d array into a number
