"""All contracts, and the mutants that test them, by the name of the op.

We collect contracts from the modules of `verify/contracts` and mutants from `verify/mutants`; no other list names them.
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
from llamaspec.verify.draws.published import with_uses
from llamaspec.verify.mutant import Implementation


def _instances[Kind](module: Any, kind: type[Kind]) -> Iterator[Kind]:
    """Yield the instances of `kind` that global names of `module` refer to, without duplicates."""
    yield from {id(value): value for value in vars(module).values() if isinstance(value, kind)}.values()


def instances_in[Kind](package: ModuleType, kind: type[Kind]) -> Iterator[Kind]:
    """Yield the instances of `kind` that global names of the package's modules refer to, without duplicates."""
    seen: set[int] = set()
    for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        for value in _instances(import_module(f"{package.__name__}.{name}"), kind):
            if id(value) not in seen:
                seen.add(id(value))
                yield value


def by_op[Kind](entries: Iterator[tuple[str, Kind]]) -> dict[str, Kind]:
    """Make a dict sorted by the op's name. Raises ValueError if two entries have the same name.

    >>> by_op(iter([("rope", 1), ("add", 2)]))
    {'add': 2, 'rope': 1}
    """
    table: dict[str, Kind] = {}
    for op, entry in entries:
        if op in table:
            raise ValueError(f"{op} is defined twice")
        table[op] = entry
    return dict(sorted(table.items()))


CONTRACTS: dict[str, Contract] = by_op(
    (entry.name, with_uses(entry)) for entry in instances_in(llamaspec.verify.contracts, Contract)
)
IMPLEMENTATIONS: dict[str, Implementation] = by_op(
    (entry.of, entry) for entry in instances_in(llamaspec.verify.mutants, Implementation)
)


def contract_for(name: str, contracts: Mapping[str, Contract] = CONTRACTS) -> Contract:
    """Look up the contract of an op. Raises ValueError for an op that has none."""
    if name not in contracts:
        bare = {op.replace("_", ""): op for op in contracts}  # rope is part of rope_halves, and rms_norm is rmsnorm
        part = [op for spelt, op in bare.items() if name and name.replace("_", "").lower() in spelt]
        meant = " or ".join(part[:5] or get_close_matches(name, contracts))
        hint = f"did you mean {meant}? --list shows all" if meant else f"expected one of {', '.join(contracts)}"
        raise ValueError(f"there is no contract {name}: {hint}")
    return contracts[name]


def in_file(path: str) -> tuple[dict[str, Contract], dict[str, Implementation]]:
    """Collect the contracts, and the implementations with mutants, that the Python file at `path` defines.

    Raises ImportError, in one line, for a file that cannot be imported, and ValueError for a file without a contract.
    """
    module = load_file(path)
    contracts = by_op((entry.name, entry) for entry in _instances(module, Contract))
    if not contracts:
        raise ValueError(f"{path} defines no contract: make one with llamaspec.verify.declare")
    return contracts, by_op((entry.of, entry) for entry in _instances(module, Implementation))
