"""Draw the inputs of a run in three ways: by Hypothesis, uniformly, or by simplifying a counterexample.

Hypothesis prefers the simplest values and repeats parts of earlier draws: nearly half of 200 draws have the smallest
size. The uniform draws take every value of a strategy equally often, so that the seed matters less.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st

from llamaspec.verify.contract import Contract
from llamaspec.verify.draws.domain import sampled, unwrapped
from llamaspec.verify.draws.draw import AGAIN, LAW, LAYOUT, OF_THE_CALL, Draw, Values

Sampler = Callable[[Random], Any]


def sampler(strategy: st.SearchStrategy) -> Sampler:
    """Make a function that draws every value, alternative and kind of array of `strategy` equally often.

    >>> draw = sampler(st.sampled_from([1, 2, 3]))
    >>> sorted({draw(Random(seed)) for seed in range(20)})
    [1, 2, 3]
    """
    strategy = unwrapped(strategy)
    if (alternatives := getattr(strategy, "original_strategies", None)) is not None:
        samplers = [sampler(alternative) for alternative in alternatives]
        return lambda random: random.choice(samplers)(random)
    if getattr(strategy, "target", None) is Values:
        fields = {name: sampler(field) for name, field in strategy.kwargs.items()}  # type: ignore
        return lambda random: Values(**{name: field(random) for name, field in fields.items()})
    if hasattr(strategy, "start") and hasattr(strategy, "end"):
        low, high = strategy.start, strategy.end  # type: ignore
        return lambda random: random.randint(low, high)
    if getattr(strategy, "pack", None) is tuple:
        many: Any = unwrapped(strategy.mapped_strategy)  # type: ignore
        entry, least, most = sampler(many.element_strategy), many.min_size, int(many.max_size)
        return lambda random: tuple(entry(random) for _ in range(random.randint(least, most)))
    if hasattr(strategy, "elements") and not getattr(strategy, "_transformations", ()):
        elements = list(strategy.elements)  # type: ignore
    else:
        elements = sampled(strategy)
    return lambda random: random.choice(elements)


def draws_from(strategies: Mapping[str, st.SearchStrategy], random: Random) -> Iterator[dict[str, Any]]:
    """Yield draws without end: a random value of every strategy, by name."""
    samplers = {name: sampler(strategy) for name, strategy in strategies.items()}
    while True:
        yield {name: draw(random) for name, draw in samplers.items()}


def simpler(strategies: Mapping[str, st.SearchStrategy], draw: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield draws with one simpler value than `draw`, such as a smaller size.

    >>> list(simpler({"n": st.sampled_from([1, 2, 3, 5, 7])}, {"n": 5}))
    [{'n': 1}, {'n': 2}, {'n': 3}]
    """
    if LAYOUT in draw:
        yield {name: value for name, value in draw.items() if name != LAYOUT}
    for name, strategy in strategies.items():
        for value in _simpler(unwrapped(strategy), draw[name]):
            yield {**draw, name: value}


def _simpler(strategy: Any, value: Any) -> list[Any]:
    elements = list(getattr(strategy, "elements", ()))
    if elements:
        at = elements.index(value) if value in elements else 0
        return [elements[place] for place in sorted({0, at // 2, at - 1}) if 0 <= place < at]
    if isinstance(value, Values):
        fields = getattr(strategy, "kwargs", {})
        kinds = _simpler(unwrapped(fields["kind"]), value.kind) if "kind" in fields else []
        simpler_values = [Values(kind, value.seed, value.exponent) for kind in kinds]
        if value.exponent and "exponent" in fields and fields["exponent"].start <= 0 <= fields["exponent"].end:
            simpler_values.append(Values(value.kind, value.seed, 0))
        return [*simpler_values, Values(value.kind, 0, value.exponent)] if value.seed else simpler_values
    if isinstance(value, tuple):
        return [(entry,) for entry in value] if len(value) > 1 else []
    return []


def narrowed_draws(
    draws: Mapping[str, st.SearchStrategy], only: Mapping[str, Sequence[Any]]
) -> dict[str, st.SearchStrategy]:
    return {name: st.sampled_from(only[name]) if name in only else draws[name] for name in draws}


def _values(contract: Contract, only: Mapping[str, Sequence[Any]]) -> dict[str, st.SearchStrategy]:
    """Make strategies for the variables that determine the numbers in arrays, and for the choice of a law to check.

    We leave out a law if it changes a variable in `only`, since the kernel may not support other values of the
    variable.
    """
    laws = st.sampled_from([None, *(law.name for law in contract.laws if not only.keys() & set(law.sets)), AGAIN])
    return {**narrowed_draws(contract.values, only), LAW: laws}


def all_draws(contract: Contract, only: Mapping[str, Sequence[Any]]) -> dict[str, st.SearchStrategy]:
    return _ordered(contract, {**narrowed_draws(contract.shapes, only), **_values(contract, only)})


def _ordered(contract: Contract, drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the variables of a draw into the order of the contract."""
    return {name: drawn[name] for name in [*contract.draws, *OF_THE_CALL] if name in drawn}


def strategy(
    contract: Contract, shapes: Sequence[Draw] | None, only: Mapping[str, Sequence[Any]]
) -> st.SearchStrategy[Draw]:
    """Make a strategy for Hypothesis. Shapes come from `shapes`; None allows every shape."""
    shape = st.fixed_dictionaries(narrowed_draws(contract.shapes, only)) if shapes is None else st.sampled_from(shapes)
    values = st.fixed_dictionaries(_values(contract, only))
    return st.builds(lambda shape, values: _ordered(contract, {**shape, **values}), shape, values)


def uniform(
    contract: Contract,
    shapes: Sequence[Draw] | None,
    only: Mapping[str, Sequence[Any]],
    *,
    seed: int,
    layouts: Sequence[str] = (),
) -> Iterator[Draw]:
    """Yield random draws in which every value is equally likely. Shapes come from `shapes`; None allows every shape.

    Every second draw, on average, has one of `layouts`. The choice of layouts does not change the other variables.
    """
    random, places = Random(seed), Random(seed)
    shape = draws_from(narrowed_draws(contract.shapes, only), random)
    for values in draws_from(_values(contract, only), random):
        sizes = next(shape) if shapes is None else random.choice(shapes)
        layout = {LAYOUT: places.choice(layouts)} if layouts and places.random() < 1 / 2 else {}
        yield _ordered(contract, {**sizes, **values, **layout})


def pool_of_shapes(strategies: Mapping[str, st.SearchStrategy], count: int, *, seed: int) -> list[Draw]:
    """Draw up to `count` different shapes, the smallest first."""
    drawn = itertools.islice(draws_from(strategies, Random(seed)), 4 * count)
    pool = list({str(draw): draw for draw in drawn}.values())[:count]
    return sorted(pool, key=lambda draw: sum(leaf for value in draw.values() for leaf in leaves(value)))


def leaves(value: Any) -> list[int]:
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value] if isinstance(value, int) else []
