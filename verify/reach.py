"""How far each dimension of a contract is drawn: beyond `FAR`, or up to an end that has a reason."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from verify.contract import Contract
from verify.domain import domain, unwrapped

FAR = 8192  # a dimension without a natural end is drawn beyond this

# Ends of several contracts, for `Large.ends`.
WIDTH = "heads of published models have at most 256 features"
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
    strategy, large = contract.draws[name], contract.large.sizes.get(name, ())

    def reach(dimension: str, usual: int, larger: list[int]) -> Reach:
        return Reach(dimension, usual, max([usual, *larger]), contract.large.ends.get(dimension, ""))

    if not domain(strategy).lists:
        yield reach(name, max(value for value in domain(strategy).drawn if isinstance(value, int)), list(large))
        return
    entries: Any = unwrapped(unwrapped(strategy).mapped_strategy)
    yield reach(name, max(domain(entries.element_strategy).drawn), [max(value) for value in large])
    yield reach(f"{name}, how many", int(entries.max_size), [len(value) for value in large])


def table(contracts: Mapping[str, Contract]) -> list[str]:
    """Tabulate how far the dimensions of `contracts` are drawn, in Markdown.

    >>> from verify.catalogue import CONTRACTS
    >>> table({"rope_halves": CONTRACTS["rope_halves"]})[-2]
    '| rope_halves | pairs | 64 | 129 | heads of published models have at most 256 features |'
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
