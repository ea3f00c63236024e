"""The kernel cases of `benchmarks.common.kernel_cases` lower for an H200, or are refused with the expected reason.

Lowering checks layouts, copies and shared memory without a GPU.
"""

import os

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from llamaspec.benchmarks.common.kernel_cases import gated_cases, kernel_cases, refusal, sampled
from llamaspec.benchmarks.common.kernel_cases.case import Case
from llamaspec.pallas_kernels.unsupported import Unsupported

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")

# By default, run the cases of two models only; all cases take minutes.
CASES = gated_cases() if os.environ.get("KERNEL_TABLE") == "whole" else sampled()


def lower(case: Case) -> str:
    """Lower a kernel case for an H200, and return the module as a string."""
    with use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=H200)):
        return jax.jit(case.function).trace(*case.arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.sampled(6)  # 74 cases
@pytest.mark.parametrize("name", [name for name in CASES if refusal(name) is None])
def test_a_case_of_the_table_lowers_for_an_h200(name: str):
    case = CASES[name]
    assert lower(case).count("@mosaic_gpu") == len(case.kernels)


@pytest.mark.parametrize("name", [name for name in kernel_cases() if refusal(name) is not None])
def test_what_a_kernel_refuses_is_written_down(name: str):
    with pytest.raises(Unsupported, match=refusal(name)):
        lower(kernel_cases()[name])
