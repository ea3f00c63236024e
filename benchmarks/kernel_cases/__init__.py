"""The kernel table: every (op, shape, dtype) that the ten published Llamas ask of our kernels.

It is what is lowered (tests/kernels/test_lowering.py) and compiled for an H200 (benchmarks/gpu_compile) without a GPU,
and held against the exact numbers and timed on one (benchmarks/gpu).

    case.py       a case: our kernels, XLA's form, the exact numbers; arrays and limits
    plain.py      XLA's form of every op
    exact.py      the exact numbers and their error bounds
    ...           cases, by family

A kernel joins it with a function of a model's config and a dtype, named in `OPS`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np

from benchmarks.kernel_cases.attention import attention_decode_cases, attention_paged_cases, attention_prefill_cases
from benchmarks.kernel_cases.case import BFLOAT16, FLOAT32, Case, Work
from benchmarks.kernel_cases.products import (
    gemm_cases,
    gemv_cases,
    norm_gate_up_cases,
    norm_qkv_cases,
    quantised_cases,
)
from benchmarks.kernel_cases.rows import layer_row_cases, logit_cases
from model.shapes import SHAPES
from reference.config import Config

# One line a kernel, or a family of them.
OPS: tuple[Callable[[Config, np.dtype, Work], Iterator[Case]], ...] = (
    norm_qkv_cases,
    attention_decode_cases,
    norm_gate_up_cases,
    gemv_cases,
    quantised_cases,
    gemm_cases,
    attention_paged_cases,
    attention_prefill_cases,
    layer_row_cases,
    logit_cases,
)

# Models that have most of what there is: what is compiled and lowered where all of the table would take too long.
SAMPLE = {"tinyllama-1.1b", "llama-3.1-8b"}

# What kernels refuse of the table, by name, and in which words: the plain form runs there.
REFUSED = (
    (r" q8_row .*x(288|512|768|1376) ", "columns of W in multiples of 128, 1024 at least"),
    (r" (q8|q4) .*x(512|768) ", "columns of W in multiples of 256, 1024 at least"),
    (r" (q8|q4) .*x(288|1376) ", "takes a scale for each"),
    (r"^(norm_|gemv ).*x(288|1376) float32", "columns of W in multiples of 128 in float32"),
    (r"^(norm_|gemv ).*x(288|1376) bfloat16", "columns of W in multiples of 256 in bfloat16"),
    (r"^attention_.*x48 ", "heads of 64 or 128"),
    (r"^rope .*x48 ", r"heads of \(64, 128, 256\)"),
)


def refusal(name: str) -> str | None:
    """A pattern of the words in which a kernel refuses this case; None for what it can do.

    >>> refusal("attention_decode 6/6x48 of 4096 float32"), refusal("attention_decode 8/8x64 of 4096 float32")
    ('heads of 64 or 128', None)
    """
    return next((words for pattern, words in REFUSED if re.search(pattern, name)), None)


@cache
def kernel_cases() -> dict[str, Case]:
    """The table, by name; a shape that several models share is in it once."""
    cases: dict[str, Case] = {}
    for model, config in SHAPES.items():
        work = Work(several=model == "llama-3.1-8b")
        for case in (case for op in OPS for dtype in (FLOAT32, BFLOAT16) for case in op(config, dtype, work)):
            known = cases.get(case.name, case)
            cases[case.name] = replace(known, models=(*known.models, model))
    return cases
