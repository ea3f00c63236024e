"""The values that each variable of a contract's draws may take.

A user limits variables to values by hand, and a meaningless value would leave nothing to compare. So we check each
value. A string must be one that the contract draws. A number may also lie between the numbers that the contract draws.
An integer, such as a size, may also be larger than the drawn ones, up to `LARGEST_SIZE`.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis import strategies as st

from llamaspec.verify.contract import Contract
from llamaspec.verify.draws.draw import Values

LARGEST_SIZE = 2**20  # most value of an integer that is drawn from a list
LONGEST = 1024  # most entries of a list of integers
PRINTED = 200  # characters of a refused value that we print


@dataclass(frozen=True)
class Arrays:
    """Kinds of array that a variable may describe, with inclusive ranges of seeds and exponents."""

    kinds: tuple[str, ...]
    seeds: tuple[int, int]
    exponents: tuple[int, int]

    def __str__(self) -> str:
        return "KIND(SEED) * 2**EXPONENT, with KIND one of {}, SEED from {} to {} and EXPONENT from {} to {}".format(
            ", ".join(self.kinds), *self.seeds, *self.exponents
        )

    def holds(self, values: Values) -> bool:
        """Return whether `values` may be drawn."""
        return (
            values.kind in self.kinds
            and self.seeds[0] <= values.seed <= self.seeds[1]
            and self.exponents[0] <= values.exponent <= self.exponents[1]
        )


@dataclass(frozen=True)
class Domain:
    """Values to which a user may set a variable: the values that the contract draws, and similar ones."""

    drawn: tuple[Any, ...] = ()  # None, strings and numbers, in the order of the contract
    integers: tuple[int, int] | None = None  # any whole number in this inclusive range, too
    real: tuple[float, float] | None = None  # any number in this inclusive range, too
    arrays: Arrays | None = None
    lists: tuple[int, int] | None = None  # entries of a list of whole numbers are in this inclusive range

    def __str__(self) -> str:
        parts = [", ".join(map(as_text, self.drawn))] if self.drawn else []
        if self.integers:
            parts.append("any whole number from {} to {}".format(*self.integers))
        if self.real:
            parts.append("any number from {:g} to {:g}".format(*self.real))
        if self.arrays:
            parts.append(str(self.arrays))
        if self.lists:
            parts.append(f"[N, N, ...] of at most {LONGEST:,} whole numbers from {self.lists[0]} to {self.lists[1]}")
        return ", or ".join(parts)

    @property
    def count(self) -> int:
        """Return how many values, or kinds of array, the contract draws for the variable; 0 for ranges and lists."""
        return len(self.drawn) + (len(self.arrays.kinds) if self.arrays else 0)

    def value(self, choice: Any) -> Any:
        """Convert `choice`, a Python value or a typed string, to a value of the variable.

        Raises ValueError if `choice` is not allowed.
        """
        for read in (self._listed, self._array, self._list, self._number):
            value = read(choice.strip() if isinstance(choice, str) else choice)
            if value is not _MISSING:
                return value
        got = as_text(choice) or "an empty string"
        if len(got) > PRINTED:
            got = f"{got[:PRINTED]}..."
        if isinstance(choice, list | tuple):
            got += f", {len(choice):,} entries"
        raise ValueError(f"expected one of {self}; got {got}{self._guess(choice)}")

    def _listed(self, choice: Any) -> Any:
        for value in self.drawn:
            if isinstance(value, str) and choice == value:
                return value
            if value is None and (choice is None or choice in ("null", "none", "None")):
                return None
            if isinstance(value, float) and math.isnan(value) and _is_nan(choice):
                return value
        return _MISSING

    def _array(self, choice: Any) -> Any:
        if self.arrays is None:
            return _MISSING
        if isinstance(choice, str):
            try:
                choice = Values.parse(choice)
            except ValueError:
                return _MISSING
        return choice if isinstance(choice, Values) and self.arrays.holds(choice) else _MISSING

    def _list(self, choice: Any) -> Any:
        if self.lists is None or not isinstance(choice, list | tuple) or not 0 < len(choice) <= LONGEST:
            return _MISSING
        low, high = self.lists
        return tuple(choice) if all(type(entry) is int and low <= entry <= high for entry in choice) else _MISSING

    def _number(self, choice: Any) -> Any:
        if isinstance(choice, str):
            choice = _as_number(choice)
        if isinstance(choice, bool) or not isinstance(choice, int | float) or not math.isfinite(choice):
            return _MISSING
        if self.integers and isinstance(choice, int) and self.integers[0] <= choice <= self.integers[1]:
            return choice
        if self.real and self.real[0] <= choice <= self.real[1]:
            return float(choice)
        return _MISSING

    def _guess(self, choice: Any) -> str:
        texts = [value for value in self.drawn if isinstance(value, str)] + list(
            self.arrays.kinds if self.arrays else ()
        )
        return did_you_mean(choice, texts) if isinstance(choice, str) else ""


_MISSING = object()


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Return the end of an error line that suggests a known name similar to `text`, or an empty string.

    >>> did_you_mean("All", ["none", "all"]), did_you_mean("x", ["none", "all"])
    (': did you mean all?', '')
    """
    lowered = {name.lower(): name for name in known}
    near = get_close_matches(text.partition("(")[0].strip().replace("-", " ").lower(), lowered, n=1, cutoff=0.6)
    return f": did you mean {lowered[near[0]]}?" if near else ""


def as_text(value: Any) -> str:
    """Format `value` in the form that `--set` reads."""
    if value is None:
        return "null"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _is_nan(choice: Any) -> bool:
    number = _as_number(choice) if isinstance(choice, str) else choice
    return isinstance(number, float) and math.isnan(number)


def _as_number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return None


def domain(strategy: st.SearchStrategy) -> Domain:
    """Read the domain of a variable from its strategy."""
    strategy = unwrapped(strategy)
    if (alternatives := getattr(strategy, "original_strategies", None)) is not None:
        return _union([domain(alternative) for alternative in alternatives])
    if getattr(strategy, "target", None) is Values:
        fields = {name: domain(field) for name, field in strategy.kwargs.items()}  # type: ignore
        seeds, exponents = fields["seed"].integers, fields["exponent"].integers
        assert seeds and exponents
        return Domain(arrays=Arrays(fields["kind"].drawn, seeds, exponents))
    if hasattr(strategy, "start") and hasattr(strategy, "end"):
        return Domain(integers=(strategy.start, strategy.end))  # type: ignore
    if hasattr(strategy, "elements") and not getattr(strategy, "_transformations", ()):
        return _of_values(strategy.elements)  # type: ignore
    if getattr(strategy, "pack", None) is tuple:
        entries = domain(getattr(unwrapped(strategy.mapped_strategy), "element_strategy"))  # type: ignore  # noqa: B009
        return Domain(lists=entries.integers)
    return _of_values(sampled(strategy))


def unwrapped(strategy: Any) -> Any:
    while hasattr(strategy, "wrapped_strategy"):
        strategy = strategy.wrapped_strategy
    return strategy


def _of_values(values: Sequence[Any]) -> Domain:
    """Make the domain of a strategy that draws from `values`."""
    plain = tuple(value for value in values if not isinstance(value, tuple))
    integers = [value for value in plain if type(value) is int]
    real = [value for value in plain if isinstance(value, float) and math.isfinite(value)]
    entries = [entry for value in values if isinstance(value, tuple) for entry in value]
    return Domain(
        drawn=plain,
        integers=(min(integers), max(LARGEST_SIZE, *integers)) if integers else None,
        real=(min(real), max(real)) if real else None,
        lists=(min(entries), LARGEST_SIZE) if entries else None,
    )


def _union(domains: Sequence[Domain]) -> Domain:
    """Unite domains. If two domains have a range of the same type, we keep the range of the first."""

    def first(name: str) -> Any:
        return next((getattr(part, name) for part in domains if getattr(part, name) is not None), None)

    parts = {name: first(name) for name in ("integers", "real", "arrays", "lists")}
    return Domain(tuple(value for part in domains for value in part.drawn), **parts)


def sampled(strategy: st.SearchStrategy) -> list[Any]:
    """Collect the values that a strategy of unknown form draws."""
    values: dict[str, Any] = {}

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=300,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        verbosity=Verbosity.quiet,
        suppress_health_check=tuple(HealthCheck),  # type: ignore
    )
    @hypothesis.given(strategy)
    def collect(value: Any) -> None:
        values[repr(value)] = value

    collect()
    return list(values.values())


def narrowed(contract: Contract, only: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """Convert the values to which a user limits variables. `only` has these values by the variable's name.

    Raises ValueError, in one line with the allowed values, for a variable that the contract does not have, for a value
    outside the variable's domain, and for an empty list.
    """
    chosen = {}
    for name, choices in only.items():
        if name not in contract.draws:
            raise ValueError(
                f"{contract.name} has no draw {name}: expected {', '.join(contract.draws)}"
                f"{did_you_mean(name, contract.draws)}"
            )
        allowed = domain(contract.draws[name])
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not len(choices):
            raise ValueError(f"{contract.name}: expected a list of values for {name}, got {choices!r}")
        try:
            chosen[name] = tuple(allowed.value(choice) for choice in choices)
        except ValueError as error:
            raise ValueError(f"{contract.name}: {name}: {error}") from None
    return chosen


def choices(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parse the `--set` options, which limit variables to values. Raises ValueError for options that we cannot parse.

    >>> choices(["dim=128,256", "window=null,3", "hidden=none,every other", "lengths=[1,2],[3]"])
    {'dim': [128, 256], 'window': [None, 3], 'hidden': ['none', 'every other'], 'lengths': [(1, 2), (3,)]}
    """
    chosen = {}
    for text in texts:
        name, _, listed = (part.strip() for part in text.partition("="))
        if not name or not listed:
            raise ValueError(f"expected NAME=VALUE,VALUE, got {text}")
        if name in chosen:
            raise ValueError(f"--set gives {name} twice: list all of its values in one --set")
        try:
            values = json.loads(f"[{listed}]")
        except (json.JSONDecodeError, RecursionError):
            values = [value.strip() for value in listed.split(",")]
        chosen[name] = [tuple(value) if isinstance(value, list) else value for value in values]
    return chosen


def parsed(only: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """Parse strings that describe arrays, such as "normal(3)", in a contract's own narrowing.

    We do not check that values are in a variable's domain: the contract itself may use values outside the domain.
    """

    def read(choice: Any) -> Any:
        try:
            return Values.parse(choice) if isinstance(choice, str) else choice
        except ValueError:
            return choice

    return {name: tuple(map(read, choices)) for name, choices in only.items()}


def shares(contract: Contract, only: Mapping[str, Sequence[Any]]) -> dict[str, tuple[int, int]]:
    """Return for each variable in `only` how many values (or kinds of array) remain, and how many the contract draws.

    Variables with ranges or lists of values are left out.
    """
    counts = {}
    for name, choices in narrowed(contract, only).items():
        of = domain(contract.draws[name]).count
        remaining = len({choice.kind if isinstance(choice, Values) else repr(choice) for choice in choices})
        if of:
            counts[name] = (min(remaining, of), of)
    return counts
