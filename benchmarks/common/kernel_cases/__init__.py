"""The kernel table: every op, shape and dtype with which the ten published Llamas call our kernels.

Without a GPU we lower the cases (tests/kernels/test_lowering.py) and compile them for an H200 (benchmarks/gates).
On a GPU we compare their results with exact numbers and time them (benchmarks/suites/gpu).

    case.py       a case: our kernel, XLA's op, the exact op, their arguments, and limits
    limits.py     limits on the registers and instructions of a product
    plain.py      every op in jax.numpy, which XLA compiles
    exact.py      every op in float64, with error bounds
    ...           cases, by family

To add a kernel to the table, declare a `CaseFamily` in any module of this package. It has a function that makes cases
from a model's config, a dtype and an amount of work. For a feature that no published Llama has, declare a `Variant`.
"""

import pkgutil
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module

from llamaspec.benchmarks.common.kernel_cases.case import (
    BFLOAT16,
    FLOAT32,
    TWO_MODELS,
    Case,
    CaseFamily,
    KernelWork,
    Variant,
)
from llamaspec.model.insight.shapes import SHAPES


def _declared[Kind: (CaseFamily, Variant)](kind: type[Kind]) -> Iterator[Kind]:
    """Yield the families or the variants that the modules of this package declare."""
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        yield from (value for value in vars(import_module(f"{__name__}.{name}")).values() if isinstance(value, kind))


OPS = tuple(_declared(CaseFamily))
ONE_IN = 22  # the sample has every 22nd variant; together they have each kind of codes, and a window
SIZES = re.compile(r"(?<= )\d[\dx]*(?= )")  # of matrices and vectors in a case's name; heads have a / or a +

# Kernels refuse cases with these names, with messages that match these patterns. XLA's ops run instead.
REFUSED = (
    (r" q8_row .*x(288|512|768|1376) ", "at least 1024 columns of W, in multiples of 128,"),
    (r" (q8|q4|nf4) .*x(512|768) ", "at least 1024 columns of W, in multiples of 256,"),
    (r" (q8|q4|nf4) .*x(288|1376) ", "takes a scale for each"),
    (r" mxfp4 .*x(288|512|768|1376) ", "at least 1024 columns of W, in multiples of 256,"),
    (r" fp8 .*x(288|1376) ", "columns of W in multiples of 256 in bfloat16"),
    (r"^(norm_|gemv ).*x(288|1376) float32", "columns of W in multiples of 128 in float32"),
    (r"^(norm_|gemv ).*x(288|1376) bfloat16", "columns of W in multiples of 256 in bfloat16"),
    (r"^attention_.*x48 ", "a head_dim of 64 or 128"),
)

CARD_SAMPLE = (
    "rmsnorm 4096 float32",
    "rmsnorm 4096 bfloat16",
    "softmax 128256 float32",
    "gemv residual 2048x5632 float32",
    "gemv residual 4096x4096 bfloat16",
    "gemv residual 4096x14336 bfloat16",
    "gemv norm 32000x2048 bfloat16",
    "gemv residual 4096x4096 x8 bfloat16",
    "norm_qkv 32+2x4x64x2048 float32",
    "norm_qkv 32+2x8x128x4096 bfloat16",
    "norm_gate_up 11264x2048 float32",
    "norm_gate_up 28672x4096 bfloat16",
    "gemv fp8 residual 4096x4096 bfloat16",
    "gemv q8 residual 4096x4096 bfloat16",
    "gemv q8 residual 4096x14336 bfloat16",
    "gemv q8_row norm 32000x2048 bfloat16",
    "gemv q4 residual 4096x4096 bfloat16",
    "gemv q4 residual 4096x4096 x4 bfloat16",
    "gemv q4_32_min residual 2048x5632 bfloat16",
    "gemv q6_16 norm 128256x4096 float32",
    "gemv q5_32_min residual 2048x2048 bfloat16",
    "gemv nf4 residual 4096x4096 bfloat16",
    "norm_qkv q8 32+2x8x128x4096 bfloat16",
    "norm_qkv q4_32_min+q6_16 bias 32+2x4x64x2048 bfloat16",
    "norm_gate_up q8 28672x4096 bfloat16",
    "norm_gate_up q4 28672x4096 bfloat16",
    "attention_decode 32/4x64 of 4096 float32",
    "attention_decode 32/8x128 of 4096 bfloat16",
    "attention_paged 32/4x64 of 64x64 x8 float32",
    "attention_paged 32/8x128 of 64x64 x8 bfloat16",
)


def refusal(name: str) -> str | None:
    """Return a pattern for the error message of a kernel that refuses the case `name`; None if none does.

    >>> refusal("attention_decode 6/6x48 of 4096 float32"), refusal("attention_decode 8/8x64 of 4096 float32")
    ('a head_dim of 64 or 128', None)
    """
    return next((words for pattern, words in REFUSED if re.search(pattern, name)), None)


@cache
def kernel_cases() -> dict[str, Case]:
    """Build the table, by name. A case that several models share occurs once, with the names of these models."""
    cases: dict[str, Case] = {}
    for model, config in SHAPES.items():
        work = KernelWork(several=model == "llama-3.1-8b")
        for case in (case for op in OPS for dtype in (FLOAT32, BFLOAT16) for case in op(config, dtype, work)):
            known = cases.get(case.name, case)
            cases[case.name] = replace(known, models=(*known.models, model))
    return cases


@cache
def variants() -> dict[str, Case]:
    """Build the cases of all `Variant`s, by name. Some combine two features.

    The features are: every form of quantized codes that kernels accept, activations in float32, biases, sliding
    windows, and several vectors. Published Llamas have none of these features.
    """
    cases = (
        replace(case, models=(meeting.model,))
        for variant in _declared(Variant)
        for meeting in variant.meetings
        for case in variant(SHAPES[meeting.model], meeting.dtype, KernelWork(), **meeting.options)
    )
    return {case.name: case for case in cases if case.name not in kernel_cases()}


def gated_cases() -> dict[str, Case]:
    """Return the table and the variants together: the cases that we lower and compile without a GPU."""
    return kernel_cases() | variants()


def card_sampled() -> dict[str, Case]:
    """Choose the cases that we compile for cards on which we measure nothing.

    The cases cover each kernel and each kind of weights. We omit prompts and `coded_gemm`, which need wgmma.
    """
    cases = gated_cases()
    return {name: cases[name] for name in CARD_SAMPLE}


def sampled() -> dict[str, Case]:
    """Choose cases for a shorter check: one of each kind in the table for two models, and some variants.

    Two cases are of one kind if their names differ only in sizes, except for the numbers of heads. The sample has the
    last case of each kind, because it is the largest.
    """
    cases = [case for case in kernel_cases().values() if set(TWO_MODELS) & set(case.models)]
    largest = {SIZES.sub("", case.name): case for case in cases}
    return {case.name: case for case in (*largest.values(), *list(variants().values())[::ONE_IN])}
