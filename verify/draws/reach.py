"""The largest size that a contract draws for each dimension.

A size must be above `FAR`, unless the contract states why it is smaller.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hypothesis import strategies as st

from llamaspec.verify.contract import Contract, Use
from llamaspec.verify.draws.domain import LONGEST, domain, sampled, unwrapped

FAR = 8192  # contracts draw a dimension beyond this unless it has a natural limit

# Limits that several contracts share, for `Large.ends`.
WIDTH = "heads of published models have at most 512 features"
HEADS = "published models have at most 232 heads, and each number of heads compiles another program"
SEQUENCES = "a server decodes at most about a thousand sequences at once"


class Reach(NamedTuple):
    """Largest sizes of one dimension."""

    dimension: str  # a draw, or the number of entries of a draw's tuples
    usual: int  # the largest of most draws
    most: int  # the largest of all
    why: str  # why it ends before `FAR`, if it does
    use: Use | None = None  # the largest published one, if we know it


def reaches(contract: Contract) -> list[Reach]:
    """List the largest sizes of every dimension of a contract."""
    names = dict.fromkeys([*contract.shapes, *contract.large.sizes])
    return [reach for name in names for reach in _reaches(contract, name)]


def _reaches(contract: Contract, name: str) -> Iterator[Reach]:
    """Yield the reach of the draw `name`. Yield nothing if the draw is not a size but, for example, a layout's name."""
    strategy, large = contract.draws[name], [*contract.large.sizes.get(name, ())]
    if name in contract.large.widest:
        large.append(contract.large.widest[name])

    def reach(dimension: str, usual: int, larger: list[int]) -> Reach:
        ends, uses = contract.large.ends, contract.large.uses
        return Reach(dimension, usual, max([usual, *larger]), ends.get(dimension, ""), uses.get(dimension))

    if domain(strategy).lists:
        most, entries = _lists(unwrapped(strategy))
        yield reach(name, most, [max(value) for value in large])
        yield reach(f"{name}, how many", entries, [len(value) for value in large])
    elif (usual := _usual(strategy)) is not None:
        yield reach(name, usual, large)


def _usual(strategy: st.SearchStrategy) -> int | None:
    """Return the largest integer that a strategy draws."""
    values = domain(strategy)
    drawn = [value for value in values.drawn if isinstance(value, int)] or list(values.integers or ())
    return max(drawn, default=None)


def _lists(strategy: Any) -> tuple[int, int]:
    """Return two limits of a strategy that draws lists of integers: the largest integer, and the greatest length."""
    if getattr(strategy, "pack", None) is tuple:
        lists = unwrapped(strategy.mapped_strategy)
        return _usual(lists.element_strategy) or 0, min(lists.max_size, LONGEST)
    values = [value for value in sampled(strategy) if isinstance(value, tuple)]
    return max(max(value) for value in values), max(map(len, values))


def table(contracts: Mapping[str, Contract]) -> list[str]:
    """Format the largest sizes of the contracts' dimensions as a Markdown table.

    >>> from llamaspec.verify.catalogue import CONTRACTS
    >>> table({"rope_halves": CONTRACTS["rope_halves"]})[-2]
    '| rope_halves | pairs | 64 | 257 |  | heads of published models have at most 512 features |'
    """
    lines = [
        "| op | dimension | most draws, up to | large draws, up to | largest published use | ends there because |",
        "|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {op} | {reach.dimension} | {reach.usual:,} | {reach.most:,} | {_use_text(reach.use)} | {reach.why} |"
        for op, contract in contracts.items()
        for reach in reaches(contract)
    ]


def _use_text(use: Use | None) -> str:
    return f"{use.size:,}: {use.of}" if use else ""
