"""Cases of the ops over rows of activations, which run alone here and inside the products in a decode step."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from benchmarks.kernel_cases import exact, plain
from benchmarks.kernel_cases.case import FLOAT32, LATE, Case, Family, Limits, Work, array, times
from pallas_kernels.add import add
from pallas_kernels.argmax import argmax
from pallas_kernels.logsumexp import logsumexp
from pallas_kernels.rmsnorm import add_rmsnorm, rmsnorm
from pallas_kernels.rope import rope
from pallas_kernels.softmax import WHOLE, softmax
from pallas_kernels.swiglu import swiglu
from reference.config import Config


@Family
def layer_row_cases(config: Config, dtype: np.dtype, work: Work) -> Iterator[Case]:
    """Yield norm, residual, RoPE and SwiGLU for one token, and for one model a chunk of a prompt, too."""
    dim, heads, head_dim = config.dim, config.heads, config.head_dim
    for tokens in work.batches(1, 256):
        row, weight = array(tokens, dim, dtype=dtype), array(dim, dtype=dtype)
        turns = array(tokens, head_dim // 2, dtype=FLOAT32)
        ops = (
            (rmsnorm, dim, {"eps": config.eps}, (row, weight)),
            (add_rmsnorm, dim, {"eps": config.eps}, (row, row, weight)),
            (add, dim, {}, (row, row)),
            (swiglu, config.ffn, {}, (array(tokens, 2 * config.ffn, dtype=dtype),)),
            (rope, f"{heads}x{head_dim}", {}, (array(tokens, heads, head_dim, dtype=dtype), turns, turns)),
        )
        for kernel, shape, fixed, arrays in ops:
            kernels = {kernel.__name__.removeprefix("add_"): Limits() if weight in arrays else LATE}
            yield _case(kernel, f"{shape}{times(tokens)}", dtype, arrays, kernels, fixed)


@Family
def logit_cases(config: Config, dtype: np.dtype, work: Work) -> Iterator[Case]:
    """Yield the ops that sampling applies to a row of logits, which are float32."""
    if dtype == FLOAT32:
        logits = array(1, config.vocab, dtype=dtype)
        spans = {} if config.vocab <= WHOLE else {"exp_sums": LATE}
        for kernel, kernels in (
            (softmax, {**spans, "softmax": LATE}),
            (logsumexp, {"exp_sums": LATE, "logsumexp": LATE}),
            (argmax, {"argmax_spans": LATE._replace(registers=59), "argmax": LATE._replace(registers=22)}),
        ):
            yield _case(kernel, f"{config.vocab}", dtype, (logits,), kernels, {})


def _case(kernel, shape: str, dtype: np.dtype, arrays, kernels: Mapping[str, Limits], fixed: dict[str, Any]) -> Case:
    """Make a case of a kernel and the other forms of its name, with `fixed` arguments."""
    op = kernel.__name__
    function, beside, right = (partial(form, **fixed) for form in (kernel, getattr(plain, op), getattr(exact, op)))
    return Case(op, shape, dtype.name, function, arrays, kernels, plain=beside, exact=right)
