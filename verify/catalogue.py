"""All contracts, and the mutants that show what each is worth, by the name of the op."""

from verify.contract import Contract
from verify.contracts import rmsnorm
from verify.mutant import Implementation
from verify.mutants import rmsnorm as mutated_rmsnorm

CONTRACTS: dict[str, Contract] = {contract.name: contract for contract in [rmsnorm.CONTRACT]}

IMPLEMENTATIONS: dict[str, Implementation] = {
    implementation.function.__name__: implementation for implementation in [mutated_rmsnorm.IMPLEMENTATION]
}


def contract_for(name: str) -> Contract:
    """Raises ValueError for an op that has no contract."""
    if name not in CONTRACTS:
        raise ValueError(f"no contract is called {name}: there are {', '.join(CONTRACTS)}")
    return CONTRACTS[name]
