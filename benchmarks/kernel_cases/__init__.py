"""The kernel table: every (op, shape, dtype) that the ten published Llamas ask of our kernels.

It is what is lowered (tests/kernels/test_lowering.py) and compiled for an H200 (benchmarks/gpu_compile) without a GPU,
and held against the exact numbers and timed on one (benchmarks/gpu).

    case.py       a case: our kernels, XLA's form, the exact numbers; arrays and limits
    limits.py     what the compiler may make of a product
    plain.py      XLA's form of every op
    exact.py      the exact numbers and their error bounds
    ...           cases, by family

A kernel joins it with a function of a model's config and a dtype, named in `OPS`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import numpy as np

from benchmarks.kernel_cases.attention import (
    attention_decode_cases,
    attention_paged_cases,
    attention_prefill_cases,
    window_cases,
)
from benchmarks.kernel_cases.case import BFLOAT16, FLOAT32, Case, Work
from benchmarks.kernel_cases.products import (
    bias_cases,
    form_cases,
    gemm_cases,
    gemv_cases,
    norm_gate_up_cases,
    norm_qkv_cases,
    quantized_cases,
    several_cases,
)
from benchmarks.kernel_cases.rows import layer_row_cases, logit_cases
from model.insight.shapes import SHAPES
from reference.config import Config

# One line a kernel, or a family of them.
OPS: tuple[Callable[[Config, np.dtype, Work], Iterator[Case]], ...] = (
    norm_qkv_cases,
    attention_decode_cases,
    norm_gate_up_cases,
    gemv_cases,
    quantized_cases,
    gemm_cases,
    attention_paged_cases,
    attention_prefill_cases,
    layer_row_cases,
    logit_cases,
)

# Models that have most of what there is: what is compiled and lowered where all of the table would take too long. Heads
# of 64 and of 128.
SAMPLE = {"tinyllama-1.1b", "llama-3.1-8b"}
ONE_IN = 11  # of the variants are in the sample: so that each kind of codes is, and a window

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


@cache
def variants() -> dict[str, Case]:
    """What else a table of `pallas_ops` has kernels for, by name: of two models, so that each pair of features meets.

    Codes in every group that kernels take, activations in float32, biases, sliding windows, several vectors. Published
    Llamas have none of them; models of other families, and other files, have.
    """
    both = [partial(op, dtype=dtype, work=Work()) for op in (form_cases, window_cases) for dtype in (FLOAT32, BFLOAT16)]
    asked: dict[str, list[Callable[[Config], Iterator[Case]]]] = {
        "tinyllama-1.1b": [
            *both,
            partial(bias_cases, dtype=BFLOAT16, work=Work()),
            partial(several_cases, dtype=FLOAT32, work=Work(), batch=2),
        ],
        "llama-3.1-8b": [
            *both,
            partial(bias_cases, dtype=FLOAT32, work=Work()),
            partial(several_cases, dtype=BFLOAT16, work=Work(), batch=2),
            partial(several_cases, dtype=BFLOAT16, work=Work(), batch=4),
        ],
    }
    cases = (replace(case, models=(model,)) for model, ops in asked.items() for op in ops for case in op(SHAPES[model]))
    return {case.name: case for case in cases if case.name not in kernel_cases()}


def gated_cases() -> dict[str, Case]:
    """All that is lowered and compiled without a GPU: the table and the variants."""
    return kernel_cases() | variants()


def sampled() -> dict[str, Case]:
    """Those of a check that has to be short: what two models have of the table, and some variants."""
    some = [case for case in kernel_cases().values() if SAMPLE & set(case.models)]
    return {case.name: case for case in (*some, *list(variants().values())[::ONE_IN])}
