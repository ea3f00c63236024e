"""All contracts, and the mutants that show what each is worth, by the name of the op."""

from verify.contract import Contract
from verify.contracts import (
    add,
    argmax,
    attention,
    embedding,
    linear,
    moe,
    qk_norm,
    quantized,
    rmsnorm,
    rope,
    sampling,
    softmax,
    swiglu,
)
from verify.mutant import Implementation
from verify.mutants import add as add_mutants
from verify.mutants import argmax as argmax_mutants
from verify.mutants import attention as attention_mutants
from verify.mutants import embedding as embedding_mutants
from verify.mutants import linear as linear_mutants
from verify.mutants import moe as moe_mutants
from verify.mutants import qk_norm as qk_norm_mutants
from verify.mutants import quantized as quantized_mutants
from verify.mutants import rmsnorm as rmsnorm_mutants
from verify.mutants import rope as rope_mutants
from verify.mutants import sampling as sampling_mutants
from verify.mutants import softmax as softmax_mutants
from verify.mutants import swiglu as swiglu_mutants

_CONTRACTS = [
    add.CONTRACT,
    argmax.CONTRACT,
    attention.ATTENTION,
    attention.DECODE,
    attention.PAGED,
    attention.PREFILL,
    embedding.CONTRACT,
    linear.GEMM,
    linear.GEMV,
    linear.LINEAR,
    moe.MOE,
    moe.ROUTE,
    qk_norm.CONTRACT,
    *quantized.CONTRACTS,
    rmsnorm.CONTRACT,
    rope.HALVES,
    rope.INTERLEAVED,
    sampling.DISTRIBUTION,
    sampling.DRAW,
    softmax.CONTRACT,
    swiglu.CONTRACT,
]
_IMPLEMENTATIONS = [
    add_mutants.IMPLEMENTATION,
    argmax_mutants.IMPLEMENTATION,
    *attention_mutants.IMPLEMENTATIONS,
    embedding_mutants.IMPLEMENTATION,
    linear_mutants.GEMM,
    linear_mutants.GEMV,
    linear_mutants.LINEAR,
    *moe_mutants.IMPLEMENTATIONS,
    qk_norm_mutants.IMPLEMENTATION,
    *quantized_mutants.IMPLEMENTATIONS,
    rmsnorm_mutants.IMPLEMENTATION,
    rope_mutants.HALVES,
    rope_mutants.INTERLEAVED,
    *sampling_mutants.IMPLEMENTATIONS,
    softmax_mutants.IMPLEMENTATION,
    swiglu_mutants.IMPLEMENTATION,
]

CONTRACTS: dict[str, Contract] = {contract.name: contract for contract in _CONTRACTS}
IMPLEMENTATIONS: dict[str, Implementation] = {
    implementation.function.__name__: implementation for implementation in _IMPLEMENTATIONS
}


def contract_for(name: str) -> Contract:
    """Raises ValueError for an op that has no contract."""
    if name not in CONTRACTS:
        raise ValueError(f"no contract is called {name}: there are {', '.join(CONTRACTS)}")
    return CONTRACTS[name]
