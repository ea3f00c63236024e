"""Cases of the ops that go over rows of activations: alone, since in a step they are parts of the products."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.kernel_cases.case import FLOAT32, Case, Limits, array, batches, times
from pallas_kernels.add import add
from pallas_kernels.argmax import argmax
from pallas_kernels.logsumexp import logsumexp
from pallas_kernels.rmsnorm import add_rmsnorm, rmsnorm
from pallas_kernels.rope import rope
from pallas_kernels.softmax import WHOLE, softmax
from pallas_kernels.swiglu import swiglu
from reference.config import Config


def layer_row_cases(config: Config, dtype: np.dtype) -> Iterator[Case]:
    """Norm, residual, RoPE and SwiGLU: of one token, and of one model for a chunk of a prompt too."""
    dim, heads, head_dim = config.dim, config.heads, config.head_dim
    for tokens in batches(config, 1, 256):
        row, weight = array(tokens, dim, dtype=dtype), array(dim, dtype=dtype)
        turns = array(tokens, head_dim // 2, dtype=FLOAT32)
        ops = (
            ("rmsnorm", dim, partial(rmsnorm, eps=config.eps), (row, weight)),
            ("add_rmsnorm", dim, partial(add_rmsnorm, eps=config.eps), (row, row, weight)),
            ("add", dim, add, (row, row)),
            ("swiglu", config.ffn, swiglu, (array(tokens, 2 * config.ffn, dtype=dtype),)),
            ("rope", f"{heads}x{head_dim}", rope, (array(tokens, heads, head_dim, dtype=dtype), turns, turns)),
        )
        for op, shape, function, arrays in ops:
            kernels = {op.removeprefix("add_"): Limits()}
            yield Case(op, f"{shape}{times(tokens)}", dtype.name, function, arrays, kernels)


def logit_cases(config: Config, dtype: np.dtype) -> Iterator[Case]:
    """What sampling asks of a row of logits, which are float32."""
    if dtype == FLOAT32:
        logits = array(1, config.vocab, dtype=dtype)
        spans = {} if config.vocab <= WHOLE else {"exp_sums": Limits()}
        for op, function, kernels in (
            ("softmax", softmax, {**spans, "softmax": Limits()}),
            ("logsumexp", logsumexp, {"exp_sums": Limits(), "logsumexp": Limits()}),
            ("argmax", argmax, {"argmax_spans": Limits(59), "argmax": Limits(22)}),
        ):
            yield Case(op, f"{config.vocab}", dtype.name, function, (logits,), kernels)
