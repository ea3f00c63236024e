"""How large everything is that a run of the suite does: on a GPU, or to see on a CPU that the suite itself works."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu.varied import in_two_launches, routed_cases, varied_cases
from benchmarks.kernel_cases import OPS, kernel_cases, refusal, variants
from benchmarks.kernel_cases.attention import (
    attention_decode_cases,
    attention_paged_cases,
    attention_prefill_cases,
    window_cases,
)
from benchmarks.kernel_cases.case import BFLOAT16, FLOAT32, Case, Work
from benchmarks.kernel_cases.products import (
    bias_cases,
    gemm_cases,
    gemv_cases,
    norm_gate_up_cases,
    norm_qkv_cases,
    quantized_cases,
)
from benchmarks.kernel_cases.rows import layer_row_cases, logit_cases
from model.insight.machine import SIZES, Sizes
from model.insight.shapes import SHAPES
from model.insight.timing import Effort
from model.running.programs import longest_burst
from pallas_kernels.parts.compat import interpreter
from reference.config import Config


@dataclass(frozen=True)
class Model:
    """A model of random weights."""

    name: str
    config: Config
    dtype: str
    quantize: str | None = None
    by: tuple[str, ...] = ("kernels",)  # tables of ops: XLA takes half a minute to compile a large model

    @property
    def title(self) -> str:
        """What a report calls it.

        >>> Model("llama-3.1-8b", TINY, "bfloat16", "q4").title
        'llama-3.1-8b bfloat16 q4'
        """
        return " ".join(filter(None, (self.name, self.dtype, self.quantize)))


@dataclass(frozen=True)
class Scale:
    """What is run, and how often."""

    name: str
    device: str  # that JAX must have
    running: Callable[[], AbstractContextManager[Any]]  # what kernels run in
    memory: Sizes
    checked: tuple[Case, ...]  # held against the exact numbers
    repeats: int  # of each of them, that must give the same
    varied: tuple[Case, ...]  # what no published Llama has, held likewise
    varied_repeats: int
    timed: tuple[Case, ...]
    timed_variants: tuple[Case, ...]
    cleared: tuple[tuple[Config, int], ...]  # decode attention of which model, over how many keys, with rows to clear
    calls: int  # of a kernel in a turn of a loop, each with other arguments than the one before
    span: float  # seconds that a measurement of such turns takes, about
    prepared: int  # cases that are compiled at once, before any of them is timed
    effort: Effort  # in timing kernels
    model_effort: Effort
    chained: int  # calls of attention in a turn of a loop
    tiles: tuple[int, ...]  # rows of a tile that are tried
    models: tuple[Model, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    chunk: int
    burst: int
    attended: tuple[tuple[str, Config], ...]  # models for whose attention to a prompt the best there is is timed, too
    launched: Model  # the model that is started, and decodes under each of the compiler's settings


# Rows as long as in the largest models, so that rings wrap many times, but few of them: the exact product is NumPy's.
LONG = Config(
    dim=2048, layers=1, heads=16, kv_heads=4, head_dim=128, ffn=14_336, vocab=4096, context=4096, eps=1e-5, theta=1e4
)
NARROW_HEADS = replace(LONG, dim=1024, heads=32, head_dim=64, ffn=5632, vocab=50_256)

TINY = Config(
    dim=256, layers=1, heads=4, kv_heads=2, head_dim=64, ffn=256, vocab=64, context=256, eps=1e-5, theta=1e4, tied=True
)
# Of rows of 1024, the shortest that kernels take codes in, a few: before the residual, and after a norm.
SHORT = replace(TINY, dim=16, heads=16, ffn=1024, vocab=16)
WIDE = replace(TINY, dim=1024, heads=1, kv_heads=1, ffn=16, vocab=16)
TINY_WORK = Work(capacity=128, chunk=64, sequences=2)


TIMED_FIRST = {"tinyllama-1.1b", "llama-3.1-8b"}
APART = ("rmsnorm", "add_rmsnorm", "add", "swiglu", "rope")  # which decoding has as parts of others


def checked_cases() -> Iterator[Case]:
    """Every kernel in every dtype that it has, for one sequence and for several; heads of 128 and of 64."""
    for config, dtype, several in ((LONG, BFLOAT16, True), (LONG, FLOAT32, False), (NARROW_HEADS, BFLOAT16, False)):
        for op in OPS:
            yield from op(config, dtype, Work(several=several, capacity=1024, chunk=333))
    yield from attention_decode_cases(NARROW_HEADS, BFLOAT16, Work())  # in tiles of 128 keys


def timed_cases() -> Iterator[Case]:
    """The kernel table in the dtypes that models run in, what matters most first: the ops of decoding one sequence with
    two of the models, then their others, then what other models have."""
    cases = [case for name, case in kernel_cases().items() if refusal(name) is None and _run(case)]
    yield from sorted(
        cases, key=lambda case: (not TIMED_FIRST & set(case.models), " x" in case.shape, case.op in APART)
    )


def once(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Of cases with one name, which are alike, one."""
    return tuple({case.name: case for case in cases}.values())


def _run(case: Case) -> bool:
    """Whether it is decoded by: large models are not in float32, but for the logits."""
    large = not {"stories-110m", "tinyllama-1.1b"} & set(case.models)
    return not large or case.dtype == "bfloat16" or case.op in ("softmax", "logsumexp", "argmax")


def tiny_cases() -> Iterator[Case]:
    """A case or two of each kernel, of few thread blocks: the interpreter takes half a second for each."""
    for op in (
        norm_qkv_cases, norm_gate_up_cases, gemv_cases, gemm_cases, attention_paged_cases, attention_prefill_cases,
    ):  # fmt: skip
        yield from op(TINY, BFLOAT16, TINY_WORK)
    for dtype in (FLOAT32, BFLOAT16):
        yield from attention_decode_cases(TINY, dtype, TINY_WORK)
    for op in (layer_row_cases, logit_cases):
        yield from op(TINY, FLOAT32, TINY_WORK)
    yield from tiny_quantized_cases()


def tiny_quantized_cases() -> Iterator[Case]:
    for config in (SHORT, WIDE):
        yield from (case for case in quantized_cases(config, BFLOAT16, TINY_WORK) if case.shape.endswith("x1024"))


def tiny_varied_cases() -> Iterator[Case]:
    """One with each thing that the table's cases have not."""
    yield from routed_cases(TINY, FLOAT32, 3)
    yield from window_cases(TINY, FLOAT32, TINY_WORK)
    yield next(case for case in bias_cases(WIDE, BFLOAT16, TINY_WORK) if case.op == "norm_gate_up q4_32 bias")
    yield next(case for case in in_two_launches(WIDE, BFLOAT16) if case.op == "norm_gate_up q8 bias")


def full() -> Scale:
    """For an H200: about nine minutes."""
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
            Model("tinyllama-1.1b", tinyllama, "bfloat16"),
            Model("llama-3.1-8b", large, "bfloat16"),
            Model("llama-3.1-8b", large, "bfloat16", "q8"),
            Model("llama-3.1-8b", large, "bfloat16", "q4"),
            Model("tinyllama-1.1b", tinyllama, "bfloat16", "q8"),
            Model("tinyllama-1.1b", tinyllama, "float32"),
            Model("tinyllama-1.1b", tinyllama, "bfloat16", by=("XLA",)),
        ),
        contexts=(128, 8000),
        prompts=(512, 4096),
        chunk=256,
        burst=longest_burst("gpu"),
        attended=(("tinyllama-1.1b", tinyllama), ("llama-3.1-8b", large)),
        launched=Model("tinyllama-1.1b", tinyllama, "bfloat16"),
    )


def dry() -> Scale:
    """For a CPU: the same code over next to nothing, its kernels interpreted."""
    tiny = Model("tiny", TINY, "bfloat16", by=("kernels", "XLA"))
    return Scale(
        name="dry",
        device="cpu",
        running=interpreter,
        memory=Sizes(1 << 20, 64, Effort(2)),
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
