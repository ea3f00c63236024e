"""Our own ops meet their contracts: the quick form of `make verify`.

The code inside a block's fused ops is verified in test_model_against_reference.py, layer by layer. An interpreted
attention kernel takes seconds per example, so only `make verify` and tests/kernels verify attention kernels.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamaspec import pallas_kernels
from llamaspec.model.candidates import kernels as kernel_candidates
from llamaspec.model.candidates.table import CANDIDATES
from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.bounds.running_error import TANH
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.candidates.worker import load
from llamaspec.verify.catalogue import CONTRACTS, contract_for
from llamaspec.verify.judging.runner import verify
from llamaspec.verify.reports.report import counterexample

PLAIN = [candidate for candidate in CANDIDATES if not candidate.kernel]
KERNELS = [candidate for candidate in CANDIDATES if candidate.kernel]


def functions(candidates):
    return [(candidate, dtype) for candidate in candidates for dtype in candidate.dtypes]


@pytest.mark.sampled(4)  # 1 s each
@pytest.mark.parametrize(("candidate", "dtype"), functions(PLAIN))
def test_plain_ops(candidate, dtype):
    assert_accepted(candidate, dtype, examples=10, shapes=2)


@pytest.mark.sampled(4)  # 1 s each
@pytest.mark.parametrize("candidate", [candidate for candidate in KERNELS if "attention" not in candidate.op])
def test_kernels(candidate):
    assert_accepted(candidate, candidate.dtypes[0], examples=3, shapes=1)


def assert_accepted(candidate, dtype, *, examples, shapes):
    report = verify(
        contract_for(candidate.op),
        Direct(load(candidate.function), arrays="jax", name=candidate.function),
        precision=precision(dtype),
        examples=examples,
        seed=7,
        shapes=shapes,
        only=candidate.only,
    )
    assert report.outcome == "within bounds", "\n".join(counterexample(report, contract_for(candidate.op)))


TANH_BETWEEN = 2.0**-12, 10.0  # below, tanh x is x up to u / 3; beyond, it is 1 up to 0.07 u


@pytest.mark.sampled(1)  # 10 s: all of them
@pytest.mark.parametrize("step", [61, 1], ids=["one in 61", "all"])
def test_tanh_is_within_its_bound_for_every_float32(step):
    """tanh is within its error bound for every float32.

    With u = 2^-24, the worst error is 4.90 u for XLA with fused multiply-adds, 6.89 u without, and 1.83 u for NumPy.
    `XLA_FLAGS=--xla_cpu_max_isa=AVX` turns fused multiply-adds off. On an H100, the worst error over the same numbers
    is 5.43 u for XLA (jax 0.11.2) and 3.33 u for torch (2.11.0).
    """
    first, last = np.array(TANH_BETWEEN, np.float32).view(np.uint32).tolist()
    for start in range(first, last, 2**22 * step):
        x = np.arange(start, min(start + 2**22 * step, last), step, dtype=np.uint32).view(np.float32)
        exact = np.tanh(x.astype(np.float64))
        for tanh in (jax.jit(jnp.tanh), np.tanh):
            computed = np.asarray(tanh(x))
            assert np.max(np.abs(computed / exact - 1)) <= TANH
            assert np.array_equal(np.asarray(tanh(-x)), -computed)


@pytest.mark.parametrize("tanh", [jax.jit(jnp.tanh), np.tanh], ids=["xla", "numpy"])
def test_tanh_is_x_near_zero_and_1_far_from_it(tanh):
    low, high = TANH_BETWEEN
    x = np.geomspace(2.0**-126, low, 100_001, dtype=np.float32)
    assert np.max(np.abs(np.asarray(tanh(x), np.float64) / x - 1)) <= 2.0**-24
    x = np.append(np.geomspace(high, 3e38, 100_001, dtype=np.float32), np.float32(np.inf))
    assert np.max(np.abs(np.asarray(tanh(x), np.float64) - 1)) <= TANH


def test_the_table_names_what_there_is():
    assert len({(candidate.op, candidate.function) for candidate in CANDIDATES}) == len(CANDIDATES)
    for candidate in CANDIDATES:
        assert set(candidate.only) <= set(CONTRACTS[candidate.op].draws)


OPS_OF_KERNELS = {  # where the op does not have the name of the file
    "coded_gemm": {"gemm_quantized"},
    "gemv": {"gemv", "gemv_quantized", "gemv_fixed_point", "norm_linear", "linear_add"},
}


def test_every_kernel_file_has_contracts_and_candidates():
    """Each file of `pallas_kernels` defines a kernel with the name of the file, and `verify` can call this kernel.

    Every op of a kernel has a contract.
    """
    folder = Path(pallas_kernels.__path__[0])
    kernels = {path.stem for path in folder.glob("*.py") if f"\ndef {path.stem}(" in path.read_text(encoding="utf-8")}
    assert {"coded_gemm", "rmsnorm", "attention_paged"} <= kernels
    assert kernels == {path.stem for path in folder.glob("*.py")} - {"__init__", "unsupported"}
    ops = {op for kernel in kernels for op in OPS_OF_KERNELS.get(kernel, {kernel})}
    assert {candidate.op for candidate in KERNELS} == ops <= set(CONTRACTS)
    text = Path(str(kernel_candidates.__file__)).read_text(encoding="utf-8")
    assert {kernel for kernel in kernels if f"pallas_kernels.{kernel} import {kernel} as" in text} == kernels
