"""Cases of RMSNorm and softmax as separate kernels. In a decode step, RMSNorm is part of other kernels."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from llamaspec.benchmarks.common.kernel_cases import exact, plain
from llamaspec.benchmarks.common.kernel_cases.case import (
    FLOAT32,
    LATE,
    Case,
    CaseFamily,
    KernelLimits,
    KernelWork,
    array,
    times,
)
from llamaspec.pallas_kernels.rmsnorm import rmsnorm
from llamaspec.pallas_kernels.softmax import REGISTER_SCORES, softmax
from llamaspec.reference.config import Config


@CaseFamily
def norm_cases(config: Config, dtype: np.dtype, work: KernelWork) -> Iterator[Case]:
    """Yield a case of RMSNorm for one token and, if `work` has several, a case for 256 tokens."""
    for tokens in work.batches(1, 256):
        yield Case(
            op="rmsnorm",
            shape=f"{config.dim}{times(tokens)}",
            dtype=dtype.name,
            function=partial(rmsnorm, eps=config.eps),
            plain=partial(plain.rmsnorm, eps=config.eps),
            exact=partial(exact.rmsnorm, eps=config.eps),
            arrays=(array(tokens, config.dim, dtype=dtype), array(config.dim, dtype=dtype)),
            kernels={"rmsnorm": KernelLimits()},
        )


@CaseFamily
def logit_cases(config: Config, dtype: np.dtype, work: KernelWork) -> Iterator[Case]:
    """Yield a case of softmax for a row of logits, which are float32."""
    if dtype == FLOAT32:
        kernels = ("softmax",) if config.vocab <= REGISTER_SCORES else ("exp_sums", "softmax")
        yield Case(
            op="softmax",
            shape=f"{config.vocab}",
            dtype=dtype.name,
            function=softmax,
            plain=plain.softmax,
            exact=exact.softmax,
            arrays=(array(1, config.vocab, dtype=dtype),),
            kernels=dict.fromkeys(kernels, LATE),
        )
