"""Sizes and repeats of a run of the suite: on a GPU, or in a dry run on a CPU that tests the suite."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from llamaspec.benchmarks.common.kernel_cases import OPS, kernel_cases, refusal, variants
from llamaspec.benchmarks.common.kernel_cases.attention import (
    attention_decode_cases,
    attention_paged_cases,
    attention_prefill_cases,
    window_cases,
)
from llamaspec.benchmarks.common.kernel_cases.case import BFLOAT16, FLOAT32, Case, KernelWork
from llamaspec.benchmarks.common.kernel_cases.products import (
    bias_cases,
    gemv_cases,
    norm_gate_up_cases,
    norm_qkv_cases,
    quantized_cases,
)
from llamaspec.benchmarks.common.kernel_cases.rows import logit_cases, norm_cases
from llamaspec.benchmarks.suites.gpu.varied import in_two_launches, routed_cases, varied_cases
from llamaspec.model.insight.machine import SIZES, ArraySizes
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.insight.timing import Effort
from llamaspec.model.running.programs import longest_burst
from llamaspec.pallas_kernels.parts.compat import interpreter
from llamaspec.reference.config import Config


@dataclass(frozen=True)
class RandomModel:
    """A model with random weights."""

    name: str
    config: Config
    dtype: str
    quantize: str | None = None
    by: tuple[str, ...] = ("kernels",)  # tables of ops to time; XLA takes half a minute to compile a large model

    @property
    def title(self) -> str:
        """The name in a report.

        >>> RandomModel("llama-3.1-8b", TINY, "bfloat16", "q4").title
        'llama-3.1-8b bfloat16 q4'
        """
        return " ".join(filter(None, (self.name, self.dtype, self.quantize)))


@dataclass(frozen=True)
class Scale:
    """The cases of a run of the suite, and how often each runs."""

    name: str
    device: str  # JAX's name of the required device
    running: Callable[[], AbstractContextManager[Any]]  # makes the context for running kernels
    memory: ArraySizes
    checked: tuple[Case, ...]  # compared with the exact numbers
    repeats: int  # of each case
    varied: tuple[Case, ...]  # the same for options that no published Llama uses
    varied_repeats: int
    timed: tuple[Case, ...]
    timed_variants: tuple[Case, ...]
    cleared: tuple[tuple[Config, int], ...]  # model and number of keys of decode attention that clears rows
    calls: int  # of a kernel in a turn of a loop
    span: float  # approximate seconds of one measurement
    prepared: int  # cases compiled at once before any is timed
    effort: Effort  # of timing kernels
    model_effort: Effort
    chained: int  # calls of attention in a turn of a loop
    tiles: tuple[int, ...]  # rows of a tile to try
    models: tuple[RandomModel, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    chunk: int
    burst: int
    attended: tuple[tuple[str, Config], ...]  # models for timing attention to a prompt against cuDNN's
    launched: RandomModel  # the model for the parts `launching` and `starting`


# Rows are as long as in the largest models, so that rings wrap many times. There are few, because NumPy is slow.
LONG = Config(
    dim=2048, layers=1, heads=16, kv_heads=4, head_dim=128, ffn=14_336, vocab=4096, context=4096, eps=1e-5, theta=1e4
)
NARROW_HEADS = replace(LONG, dim=1024, heads=32, head_dim=64, ffn=5632, vocab=50_256)

TINY = Config(
    dim=256, layers=1, heads=4, kv_heads=2, head_dim=64, ffn=256, vocab=64, context=256, eps=1e-5, theta=1e4, tied=True
)
# Rows of codes have at least 1024 columns. This model has a few such rows, for products with a residual or a norm.
SHORT = replace(TINY, dim=16, heads=16, ffn=1024, vocab=16)
WIDE = replace(TINY, dim=1024, heads=1, kv_heads=1, ffn=16, vocab=16)
TINY_WORK = KernelWork(capacity=128, chunk=64, sequences=2)


TIMED_FIRST = {"tinyllama-1.1b", "llama-3.1-8b"}


def checked_cases() -> Iterator[Case]:
    """Yield cases of every kernel in each of its dtypes, for one sequence and for several, with heads of 128 and 64."""
    for config, dtype, several in ((LONG, BFLOAT16, True), (LONG, FLOAT32, False), (NARROW_HEADS, BFLOAT16, False)):
        for op in OPS:
            yield from op(config, dtype, KernelWork(several=several, capacity=1024, chunk=333))
    yield from attention_decode_cases(NARROW_HEADS, BFLOAT16, KernelWork())  # tiles of 128 keys


def timed_cases() -> Iterator[Case]:
    """Yield the cases of the kernel table in the dtypes that models run in, the most important first.

    The order is: decoding one sequence with two models, the other cases of these models, and then other models.
    """
    cases = [case for name, case in kernel_cases().items() if refusal(name) is None and _run(case)]
    yield from sorted(
        cases, key=lambda case: (not TIMED_FIRST & set(case.models), " x" in case.shape, case.op == "rmsnorm")
    )


def once(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Remove each case with the name of an earlier case, because cases with equal names are equal."""
    return tuple({case.name: case for case in cases}.values())


def _run(case: Case) -> bool:
    """Tell whether models run this case: large models do not run in float32, except for the softmax of logits."""
    large = not {"stories-110m", "tinyllama-1.1b"} & set(case.models)
    return not large or case.dtype == "bfloat16" or case.op == "softmax"


def tiny_cases() -> Iterator[Case]:
    """Yield one or two cases of each kernel, with few thread blocks: the interpreter takes half a second per block."""
    for op in (
        norm_qkv_cases, norm_gate_up_cases, gemv_cases, attention_paged_cases, attention_prefill_cases,
    ):  # fmt: skip
        yield from op(TINY, BFLOAT16, TINY_WORK)
    for dtype in (FLOAT32, BFLOAT16):
        yield from attention_decode_cases(TINY, dtype, TINY_WORK)
    for op in (norm_cases, logit_cases):
        yield from op(TINY, FLOAT32, TINY_WORK)
    yield from tiny_quantized_cases()


def tiny_quantized_cases() -> Iterator[Case]:
    for config in (SHORT, WIDE):
        yield from (case for case in quantized_cases(config, BFLOAT16, TINY_WORK) if case.shape.endswith("x1024"))


def tiny_varied_cases() -> Iterator[Case]:
    """Yield cases with options that the cases of the table do not have."""
    yield from routed_cases(TINY, FLOAT32, 3)
    yield from window_cases(TINY, FLOAT32, TINY_WORK)
    yield next(case for case in bias_cases(WIDE, BFLOAT16, TINY_WORK) if case.op == "norm_gate_up q4_32 bias")
    yield next(case for case in in_two_launches(WIDE, BFLOAT16) if case.op == "norm_gate_up q8 bias")


def full() -> Scale:
    """Make the scale for an H200, which takes about nine minutes."""
    tinyllama, large = SHAPES["tinyllama-1.1b"], SHAPES["llama-3.1-8b"]
    return Scale(
        name="full",
        device="gpu",
        running=nullcontext,
        memory=SIZES["gpu"],
        checked=once(checked_cases()),
        repeats=10_000,
        varied=once(varied_cases()),
        varied_repeats=1000,
        timed=once(timed_cases()),
        timed_variants=tuple(variants().values()),
        cleared=tuple((config, keys) for config in (tinyllama, large) for keys in (128, 4096)),
        calls=64,
        span=0.05,
        prepared=8,
        effort=Effort(3, warm=0),
        model_effort=Effort(5),
        chained=8,
        tiles=(8, 16, 40),
        models=(
            RandomModel("tinyllama-1.1b", tinyllama, "bfloat16"),
            RandomModel("llama-3.1-8b", large, "bfloat16"),
            RandomModel("llama-3.1-8b", large, "bfloat16", "q8"),
            RandomModel("llama-3.1-8b", large, "bfloat16", "q4"),
            RandomModel("tinyllama-1.1b", tinyllama, "bfloat16", "q8"),
            RandomModel("tinyllama-1.1b", tinyllama, "float32"),
            RandomModel("tinyllama-1.1b", tinyllama, "bfloat16", by=("XLA",)),
        ),
        contexts=(128, 8000),
        prompts=(512, 4096),
        chunk=256,
        burst=longest_burst("gpu"),
        attended=(("tinyllama-1.1b", tinyllama), ("llama-3.1-8b", large)),
        launched=RandomModel("tinyllama-1.1b", tinyllama, "bfloat16"),
    )


def dry() -> Scale:
    """Make the scale for a CPU: the same code on tiny cases, with interpreted kernels."""
    tiny = RandomModel("tiny", TINY, "bfloat16", by=("kernels", "XLA"))
    return Scale(
        name="dry",
        device="cpu",
        running=interpreter,
        memory=ArraySizes(1 << 20, 64, Effort(2)),
        checked=once(tiny_cases()),
        repeats=1,
        varied=once(tiny_varied_cases()),
        varied_repeats=1,
        cleared=((TINY, 64),),
        timed_variants=tuple(attention_decode_cases(TINY, BFLOAT16, TINY_WORK)),
        timed=tuple(norm_qkv_cases(replace(TINY, heads=1, kv_heads=1), BFLOAT16, TINY_WORK)),
        calls=2,
        span=0.01,
        prepared=1,
        effort=Effort(1, warm=0),
        model_effort=Effort(1, warm=0),
        chained=1,
        tiles=(),
        models=(tiny,),
        contexts=(8,),
        prompts=(16,),
        chunk=16,
        burst=1,
        attended=(("tiny", TINY),),
        launched=tiny,
    )
