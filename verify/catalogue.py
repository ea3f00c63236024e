"""All contracts, and the mutants that show what each is worth, by the name of the op.

A contract is in this table because a module of `verify/contracts` holds it, and mutants are because a module of
`verify/mutants` does: nothing else names them.
"""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import verify.contracts
import verify.mutants
from verify.contract import Contract
from verify.mutant import Implementation


def found[Kind](package: ModuleType, kind: type[Kind]) -> Iterator[Kind]:
    """Yield the instances of `kind` that the modules of `package` hold by a name of their own, each once."""
    seen: set[int] = set()
    for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        for value in vars(import_module(f"{package.__name__}.{name}")).values():
            if isinstance(value, kind) and id(value) not in seen:
                seen.add(id(value))
                yield value


def by_op[Kind](entries: Iterator[tuple[str, Kind]]) -> dict[str, Kind]:
    """Sort entries by the name of the op. Raises ValueError where two have the same.

    >>> by_op(iter([("rope", 1), ("add", 2)]))
    {'add': 2, 'rope': 1}
    """
    table: dict[str, Kind] = {}
    for op, entry in entries:
        if op in table:
            raise ValueError(f"{op} is defined twice")
        table[op] = entry
    return dict(sorted(table.items()))


CONTRACTS: dict[str, Contract] = by_op((one.name, one) for one in found(verify.contracts, Contract))
IMPLEMENTATIONS: dict[str, Implementation] = by_op(
    (one.function.__name__, one) for one in found(verify.mutants, Implementation)
)


def contract_for(name: str) -> Contract:
    """Look up the contract of an op. Raises ValueError for an op that has none."""
    if name not in CONTRACTS:
        raise ValueError(f"no contract is called {name}: there are {', '.join(CONTRACTS)}")
    return CONTRACTS[name]
