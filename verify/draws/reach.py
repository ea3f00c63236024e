"""How far each dimension of a contract is drawn: beyond `FAR`, or up to an end that has a reason."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hypothesis import strategies as st

from llamaspec.verify.contract import Contract
from llamaspec.verify.draws.domain import LONGEST, domain, sampled, unwrapped

FAR = 8192  # a dimension without a natural end is drawn beyond this

# Ends of several contracts, for `Large.ends`.
WIDTH = "heads of published models have at most 512 features"
HEADS = "published models have at most 232 heads, and attention of each is a program of its own"
SEQUENCES = "a server decodes at most about a thousand sequences at once"


class Reach(NamedTuple):
    """How far one dimension is drawn."""

    dimension: str  # a draw, or how many entries the tuples of a draw have
    usual: int  # the largest of most draws
    most: int  # the largest of all
    why: str  # it ends there, where that is before `FAR`


def reaches(contract: Contract) -> list[Reach]:
    """List the dimensions of a contract: draws that decide shapes, and others that become large."""
    names = dict.fromkeys([*contract.shapes, *contract.large.sizes])
    return [reach for name in names for reach in _reaches(contract, name)]


def _reaches(contract: Contract, name: str) -> Iterator[Reach]:
    """Yield how far a draw goes, unless it is no size, such as the name of a layout."""
    strategy, large = contract.draws[name], contract.large.sizes.get(name, ())

    def reach(dimension: str, usual: int, larger: list[int]) -> Reach:
        return Reach(dimension, usual, max([usual, *larger]), contract.large.ends.get(dimension, ""))

    if domain(strategy).lists:
        most, entries = _lists(unwrapped(strategy))
        yield reach(name, most, [max(value) for value in large])
        yield reach(f"{name}, how many", entries, [len(value) for value in large])
    elif (usual := _usual(strategy)) is not None:
        yield reach(name, usual, list(large))


def _usual(strategy: st.SearchStrategy) -> int | None:
    """The largest whole number that is drawn."""
    values = domain(strategy)
    drawn = [value for value in values.drawn if isinstance(value, int)] or list(values.whole or ())
    return max(drawn, default=None)


def _lists(strategy: Any) -> tuple[int, int]:
    """The largest entry and the most entries of a draw of lists."""
    if getattr(strategy, "pack", None) is tuple:
        lists = unwrapped(strategy.mapped_strategy)
        return _usual(lists.element_strategy) or 0, min(lists.max_size, LONGEST)
    values = [value for value in sampled(strategy) if isinstance(value, tuple)]
    return max(max(value) for value in values), max(map(len, values))


def table(contracts: Mapping[str, Contract]) -> list[str]:
    """Tabulate how far the dimensions of `contracts` are drawn, in Markdown.

    >>> from llamaspec.verify.catalogue import CONTRACTS
    >>> table({"rope_halves": CONTRACTS["rope_halves"]})[-2]
    '| rope_halves | pairs | 64 | 257 | heads of published models have at most 512 features |'
    """
    lines = [
        "| op | dimension | most draws, up to | large draws, up to | ends there because |",
        "|---|---|---|---|---|",
    ]
    return lines + [
        f"| {op} | {one.dimension} | {one.usual:,} | {one.most:,} | {one.why} |"
        for op, contract in contracts.items()
        for one in reaches(contract)
    ]
