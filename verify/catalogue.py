"""All contracts, and the mutants that show what each is worth, by the name of the op.

A contract is in this table because a module of `verify/contracts` holds it, and mutants are because a module of
`verify/mutants` does: nothing else names them.
"""

import pkgutil
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any

import llamaspec.verify.contracts
import llamaspec.verify.mutants
from llamaspec.verify.candidates.worker import load_file
from llamaspec.verify.contract import Contract
from llamaspec.verify.mutant import Implementation


def _held[Kind](module: Any, kind: type[Kind]) -> Iterator[Kind]:
    """Yield the instances of `kind` in `module`, each once."""
    yield from {id(value): value for value in vars(module).values() if isinstance(value, kind)}.values()


def found[Kind](package: ModuleType, kind: type[Kind]) -> Iterator[Kind]:
    """Yield the instances of `kind` that the modules of `package` hold by a name of their own, each once."""
    seen: set[int] = set()
    for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        for value in _held(import_module(f"{package.__name__}.{name}"), kind):
            if id(value) not in seen:
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


CONTRACTS: dict[str, Contract] = by_op((one.name, one) for one in found(llamaspec.verify.contracts, Contract))
IMPLEMENTATIONS: dict[str, Implementation] = by_op(
    (one.of, one) for one in found(llamaspec.verify.mutants, Implementation)
)


def contract_for(name: str, contracts: Mapping[str, Contract] = CONTRACTS) -> Contract:
    """Look up the contract of an op. Raises ValueError for an op that has none."""
    if name not in contracts:
        bare = {op.replace("_", ""): op for op in contracts}  # rope is part of rope_halves, and rms_norm is rmsnorm
        part = [op for spelt, op in bare.items() if name and name.replace("_", "").lower() in spelt]
        meant = " or ".join(part[:5] or get_close_matches(name, contracts))
        known = f"is it {meant}? `--list` has all" if meant else f"there are {', '.join(contracts)}"
        raise ValueError(f"no contract is called {name}: {known}")
    return contracts[name]


def in_file(path: str) -> tuple[dict[str, Contract], dict[str, Implementation]]:
    """Contracts, and implementations with mutants, that the Python file at `path` holds by a name of its own.

    Raises ImportError, in one line, for a file that cannot be imported, and ValueError for one without a contract.
    """
    module = load_file(path)
    contracts = by_op((one.name, one) for one in _held(module, Contract))
    if not contracts:
        raise ValueError(f"{path} holds no contract: llamaspec.verify.declare makes one")
    return contracts, by_op((one.of, one) for one in _held(module, Implementation))
