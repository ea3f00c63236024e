"""Values that each draw of a contract may take.

A person narrows a draw by hand, and a value that means nothing would leave nothing to compare. Every such value is
therefore checked: a text is one of those that are drawn; a number may also lie between or, as a size, beyond them.
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

LARGEST_SIZE = 2**20  # that a whole number may be narrowed to, where no range is drawn
LONGEST = 1024  # entries of a list of whole numbers
SHOWN = 200  # characters of a value that is refused


@dataclass(frozen=True)
class Arrays:
    """Arrays that a draw fills: kinds, and inclusive ranges of seeds and exponents."""

    kinds: tuple[str, ...]
    seeds: tuple[int, int]
    exponents: tuple[int, int]

    def __str__(self) -> str:
        return "KIND(SEED) * 2**EXPONENT, a kind being {}, a seed from {} to {}, an exponent from {} to {}".format(
            ", ".join(self.kinds), *self.seeds, *self.exponents
        )

    def holds(self, values: Values) -> bool:
        """Whether `values` may be drawn."""
        return (
            values.kind in self.kinds
            and self.seeds[0] <= values.seed <= self.seeds[1]
            and self.exponents[0] <= values.exponent <= self.exponents[1]
        )


@dataclass(frozen=True)
class Domain:
    """Values that a draw may take: those that are drawn, and others of their kind."""

    drawn: tuple[Any, ...] = ()  # None, texts and numbers, in the order of the contract
    whole: tuple[int, int] | None = None  # any whole number in this inclusive range, too
    real: tuple[float, float] | None = None  # any number in this inclusive range, too
    arrays: Arrays | None = None
    lists: tuple[int, int] | None = None  # entries of a list of whole numbers are in this inclusive range

    def __str__(self) -> str:
        parts = [", ".join(map(written, self.drawn))] if self.drawn else []
        if self.whole:
            parts.append("any whole number from {} to {}".format(*self.whole))
        if self.real:
            parts.append("any number from {:g} to {:g}".format(*self.real))
        if self.arrays:
            parts.append(str(self.arrays))
        if self.lists:
            parts.append(f"[N, N, ...] of at most {LONGEST:,} whole numbers from {self.lists[0]} to {self.lists[1]}")
        return ", or ".join(parts)

    @property
    def count(self) -> int:
        """How many different values or kinds of array are drawn; 0 where these are not counted."""
        return len(self.drawn) + (len(self.arrays.kinds) if self.arrays else 0)

    def value(self, choice: Any) -> Any:
        """`choice` as a draw has it, whether it comes from Python or was typed. Raises ValueError for any other."""
        for read in (self._listed, self._array, self._list, self._number):
            found = read(choice.strip() if isinstance(choice, str) else choice)
            if found is not _NOTHING:
                return found
        got = written(choice) or "an empty text"
        if len(got) > SHOWN:
            got = f"{got[:SHOWN]}..."
        if isinstance(choice, list | tuple):
            got += f", {len(choice):,} entries"
        raise ValueError(f"one of {self}; got {got}{self._guess(choice)}")

    def _listed(self, choice: Any) -> Any:
        for value in self.drawn:
            if isinstance(value, str) and choice == value:
                return value
            if value is None and (choice is None or choice in ("null", "none", "None")):
                return None
            if isinstance(value, float) and math.isnan(value) and _is_nan(choice):
                return value
        return _NOTHING

    def _array(self, choice: Any) -> Any:
        if self.arrays is None:
            return _NOTHING
        if isinstance(choice, str):
            try:
                choice = Values.parse(choice)
            except ValueError:
                return _NOTHING
        return choice if isinstance(choice, Values) and self.arrays.holds(choice) else _NOTHING

    def _list(self, choice: Any) -> Any:
        if self.lists is None or not isinstance(choice, list | tuple) or not 0 < len(choice) <= LONGEST:
            return _NOTHING
        low, high = self.lists
        return tuple(choice) if all(type(entry) is int and low <= entry <= high for entry in choice) else _NOTHING

    def _number(self, choice: Any) -> Any:
        if isinstance(choice, str):
            choice = _as_number(choice)
        if isinstance(choice, bool) or not isinstance(choice, int | float) or not math.isfinite(choice):
            return _NOTHING
        if self.whole and isinstance(choice, int) and self.whole[0] <= choice <= self.whole[1]:
            return choice
        if self.real and self.real[0] <= choice <= self.real[1]:
            return float(choice)
        return _NOTHING

    def _guess(self, choice: Any) -> str:
        texts = [value for value in self.drawn if isinstance(value, str)] + list(
            self.arrays.kinds if self.arrays else ()
        )
        return did_you_mean(choice, texts) if isinstance(choice, str) else ""


_NOTHING = object()


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """The end of an error line that names what `text` was probably meant to be, or nothing.

    >>> did_you_mean("All", ["none", "all"]), did_you_mean("x", ["none", "all"])
    (': did you mean all?', '')
    """
    lowered = {name.lower(): name for name in known}
    near = get_close_matches(text.partition("(")[0].strip().replace("-", " ").lower(), lowered, n=1, cutoff=0.6)
    return f": did you mean {lowered[near[0]]}?" if near else ""


def written(value: Any) -> str:
    """`value` as `--set` takes it."""
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
    """The domain of a draw, read from its strategy."""
    strategy = unwrapped(strategy)
    if (alternatives := getattr(strategy, "original_strategies", None)) is not None:
        return _either([domain(alternative) for alternative in alternatives])
    if getattr(strategy, "target", None) is Values:
        fields = {name: domain(field) for name, field in strategy.kwargs.items()}  # type: ignore
        seeds, exponents = fields["seed"].whole, fields["exponent"].whole
        assert seeds and exponents
        return Domain(arrays=Arrays(fields["kind"].drawn, seeds, exponents))
    if hasattr(strategy, "start") and hasattr(strategy, "end"):
        return Domain(whole=(strategy.start, strategy.end))  # type: ignore
    if hasattr(strategy, "elements") and not getattr(strategy, "_transformations", ()):
        return _of_values(strategy.elements)  # type: ignore
    if getattr(strategy, "pack", None) is tuple:
        entries = domain(getattr(unwrapped(strategy.mapped_strategy), "element_strategy"))  # type: ignore  # noqa: B009
        return Domain(lists=entries.whole)
    return _of_values(sampled(strategy))


def unwrapped(strategy: Any) -> Any:
    while hasattr(strategy, "wrapped_strategy"):
        strategy = strategy.wrapped_strategy
    return strategy


def _of_values(values: Sequence[Any]) -> Domain:
    """Domain of a strategy that draws from `values`."""
    plain = tuple(value for value in values if not isinstance(value, tuple))
    whole = [value for value in plain if type(value) is int]
    real = [value for value in plain if isinstance(value, float) and math.isfinite(value)]
    entries = [entry for value in values if isinstance(value, tuple) for entry in value]
    return Domain(
        drawn=plain,
        whole=(min(whole), max(LARGEST_SIZE, *whole)) if whole else None,
        real=(min(real), max(real)) if real else None,
        lists=(min(entries), LARGEST_SIZE) if entries else None,
    )


def _either(domains: Sequence[Domain]) -> Domain:
    """Union of domains. Of two ranges of a kind, the first stays."""

    def first(name: str) -> Any:
        return next((getattr(one, name) for one in domains if getattr(one, name) is not None), None)

    parts = {name: first(name) for name in ("whole", "real", "arrays", "lists")}
    return Domain(tuple(value for one in domains for value in one.drawn), **parts)


def sampled(strategy: st.SearchStrategy) -> list[Any]:
    """Values that a strategy of an unknown form draws."""
    found: dict[str, Any] = {}

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
        found[repr(value)] = value

    collect()
    return list(found.values())


def narrowed(contract: Contract, only: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """`only` with every value as its draw has it.

    Raises ValueError, in one line that lists what is allowed, for a draw that the contract does not have, for a value
    outside the domain of its draw, and for no values at all.
    """
    found = {}
    for name, choices in only.items():
        if name not in contract.draws:
            raise ValueError(
                f"{contract.name} draws {', '.join(contract.draws)}; got {name}{did_you_mean(name, contract.draws)}"
            )
        allowed = domain(contract.draws[name])
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not len(choices):
            raise ValueError(f"{contract.name}: {name} is narrowed to a list of values; got {choices!r}")
        try:
            found[name] = tuple(allowed.value(choice) for choice in choices)
        except ValueError as error:
            raise ValueError(f"{contract.name}: {name} is {error}") from None
    return found


def choices(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Read how a person narrows draws. Raises ValueError.

    >>> choices(["dim=128,256", "window=null,3", "hidden=none,every other", "lengths=[1,2],[3]"])
    {'dim': [128, 256], 'window': [None, 3], 'hidden': ['none', 'every other'], 'lengths': [(1, 2), (3,)]}
    """
    chosen = {}
    for text in texts:
        name, _, listed = (part.strip() for part in text.partition("="))
        if not name or not listed:
            raise ValueError(f"a draw is narrowed as NAME=VALUE,VALUE, got {text}")
        if name in chosen:
            raise ValueError(f"{name} is narrowed twice: list all of its values in one --set")
        try:
            found = json.loads(f"[{listed}]")
        except (json.JSONDecodeError, RecursionError):
            found = [value.strip() for value in listed.split(",")]
        chosen[name] = [tuple(value) if isinstance(value, list) else value for value in found]
    return chosen


def parsed(only: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """`only` of a contract itself, which may leave the domains of its draws, with the texts of arrays read."""

    def read(choice: Any) -> Any:
        try:
            return Values.parse(choice) if isinstance(choice, str) else choice
        except ValueError:
            return choice

    return {name: tuple(map(read, choices)) for name, choices in only.items()}


def shares(contract: Contract, only: Mapping[str, Sequence[Any]]) -> dict[str, tuple[int, int]]:
    """For each draw that `only` narrows, how many of its values or kinds of array are left, and of how many."""
    found = {}
    for name, choices in narrowed(contract, only).items():
        of = domain(contract.draws[name]).count
        left = len({choice.kind if isinstance(choice, Values) else repr(choice) for choice in choices})
        if of:
            found[name] = (min(left, of), of)
    return found
