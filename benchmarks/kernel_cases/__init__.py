"""The kernel table: every (op, shape, dtype) that the ten published Llamas ask of our kernels.

It is what is lowered (tests/kernels/test_lowering.py) and compiled for an H200 (benchmarks/gpu_compile) without a GPU.
A kernel joins it with a function of a model's config and a dtype, named in `OPS`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np

from benchmarks.kernel_cases.attention import attention_decode_cases
from benchmarks.kernel_cases.case import BFLOAT16, FLOAT32, Case
from benchmarks.kernel_cases.products import gemv_cases, norm_gate_up_cases, norm_qkv_cases
from benchmarks.kernel_cases.rows import layer_row_cases, logit_cases
from model.shapes import SHAPES
from reference.config import Config

# One line a kernel, or a family of them.
OPS: tuple[Callable[[Config, np.dtype], Iterator[Case]], ...] = (
    norm_qkv_cases,
    attention_decode_cases,
    norm_gate_up_cases,
    gemv_cases,
    layer_row_cases,
    logit_cases,
)

# What kernels refuse of the table, in their words: the plain form runs there.
REFUSED = {
    **dict.fromkeys(
        (
            "norm_qkv 6+2x6x48x288 float32",
            "norm_gate_up 1536x288 float32",
            "gemv residual 288x288 float32",
            "gemv norm 32000x288 float32",
            "gemv residual 512x1376 float32",
        ),
        "columns of W in multiples of 128 in float32",
    ),
    **dict.fromkeys(
        (
            "norm_qkv 6+2x6x48x288 bfloat16",
            "norm_gate_up 1536x288 bfloat16",
            "gemv residual 288x288 bfloat16",
            "gemv norm 32000x288 bfloat16",
            "gemv residual 512x1376 bfloat16",
        ),
        "columns of W in multiples of 256 in bfloat16",
    ),
    "gemv residual 8192x28672 float32": "shared memory",
    "attention_decode 6/6x48 of 4096 bfloat16": "heads of 64 or 128",
    "rope 6x48 float32": "heads of (64, 128, 256) features",
    "rope 6x48 bfloat16": "heads of (64, 128, 256) features",
}


@cache
def kernel_cases() -> dict[str, Case]:
    """The table, by name; a shape that several models share is in it once."""
    cases: dict[str, Case] = {}
    for model, config in SHAPES.items():
        for case in (case for op in OPS for dtype in (FLOAT32, BFLOAT16) for case in op(config, dtype)):
            known = cases.get(case.name, case)
            cases[case.name] = replace(known, models=(*known.models, model))
    return cases
