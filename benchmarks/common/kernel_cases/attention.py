"""Cases of attention to a full cache."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from llamaspec.benchmarks.common.kernel_cases import exact, plain
from llamaspec.benchmarks.common.kernel_cases.case import (
    BFLOAT16,
    EVERYWHERE,
    LATE,
    Case,
    CaseFamily,
    KernelLimits,
    KernelWork,
    Variant,
    array,
    times,
)
from llamaspec.pallas_kernels.attention_decode import attention_decode
from llamaspec.pallas_kernels.attention_paged import attention_paged
from llamaspec.pallas_kernels.attention_prefill import attention_prefill
from llamaspec.reference.config import Config

INT32 = np.dtype(np.int32)

WINDOW = 1000  # positions; both ends fall inside tiles of 64 or 128 keys
TURN = 518  # instructions for 64 keys and values of heads of 128; 128 keys of heads of 64 take fewer
PREFILL = KernelLimits(168, eager=False, wgmma=True)  # 384 threads share the registers of an SM


def decode_limits(config: Config, dtype: np.dtype) -> KernelLimits:
    """Return limits for a decode kernel.

    In bfloat16, the tensor cores always compute 8 query heads, even for a group with fewer, so registers depend only on
    head_dim. In float32, each query head of a group has its q, output and online softmax in registers, so registers
    depend on the size of the group. The kernel must not load keys and values before the previous kernel has ended,
    because that kernel writes some of them.
    """
    if config.head_dim not in (64, 128):
        return KernelLimits()  # the kernel refuses such heads
    if dtype == BFLOAT16:
        return KernelLimits({64: 114, 128: 168}[config.head_dim], eager=False, wgmma=True, loop=TURN)
    group = config.heads // config.kv_heads
    return KernelLimits(79 if group == 1 else 180 if group <= 4 else 255, eager=False)


@CaseFamily
def attention_decode_cases(config: Config, dtype: np.dtype, work: KernelWork) -> Iterator[Case]:
    """Yield cases of decode attention: one query for each sequence, with contiguous caches."""
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
    for batch in work.batches(1, 64):
        cache = array(batch, kv_heads, work.capacity, head_dim, dtype=dtype)
        kernels = {"attention_decode": decode_limits(config, dtype)}
        if batch * kv_heads < 132:  # fewer blocks than SMs: several share the keys of a head
            kernels["attention_combine"] = LATE
        yield Case(
            op="attention_decode",
            shape=f"{heads}/{kv_heads}x{head_dim} of {work.capacity}{times(batch)}",
            dtype=dtype.name,
            function=attention_decode,
            plain=plain.attention_decode,
            exact=exact.attention_decode,
            values={3: np.full(batch, work.capacity, np.int32)},
            arrays=(array(batch, heads, head_dim, dtype=dtype), cache, cache, array(batch, dtype=INT32)),
            kernels=kernels,
        )


@CaseFamily
def attention_paged_cases(config: Config, dtype: np.dtype, work: KernelWork) -> Iterator[Case]:
    """Yield cases of decode attention with a paged cache: one query for each of several sequences."""
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
    pages = work.capacity // work.page
    cache = array(work.sequences * pages, kv_heads, work.page, head_dim, dtype=dtype)
    kernels = {"attention_paged": decode_limits(config, dtype)}
    if work.sequences * kv_heads < 132:
        kernels["attention_combine"] = LATE
    yield Case(
        op="attention_paged",
        shape=f"{heads}/{kv_heads}x{head_dim} of {pages}x{work.page}{times(work.sequences)}",
        dtype=dtype.name,
        function=attention_paged,
        plain=plain.attention_paged,
        exact=exact.attention_paged,
        values={
            3: np.random.default_rng(0).permutation(work.sequences * pages).reshape(-1, pages).astype(np.int32),
            4: np.full(work.sequences, work.capacity, np.int32),
        },
        arrays=(
            array(work.sequences, heads, head_dim, dtype=dtype),
            cache,
            cache,
            array(work.sequences, pages, dtype=INT32),
            array(work.sequences, dtype=INT32),
        ),
        kernels=kernels,
    )


@CaseFamily
def attention_prefill_cases(config: Config, dtype: np.dtype, work: KernelWork) -> Iterator[Case]:
    """Yield cases of prefill attention in bfloat16, for the last chunk of a prompt that fills the cache."""
    if dtype == BFLOAT16:
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        cache = array(1, kv_heads, work.capacity, head_dim, dtype=dtype)
        yield Case(
            op="attention_prefill",
            shape=f"{work.chunk}x{heads}/{kv_heads}x{head_dim} of {work.capacity}",
            dtype=dtype.name,
            function=attention_prefill,
            plain=plain.attention_prefill,
            exact=exact.attention_prefill,
            values={3: np.full(1, work.capacity - work.chunk, np.int32)},
            arrays=(array(1, work.chunk, heads, head_dim, dtype=dtype), cache, cache, array(1, dtype=INT32)),
            kernels={"attention_prefill": PREFILL},
            flops=4 * heads * head_dim * work.chunk * (work.capacity - work.chunk // 2),
            streams=False,
        )


@partial(Variant, meetings=EVERYWHERE)
def window_cases(config: Config, dtype: np.dtype, work: KernelWork) -> Iterator[Case]:
    """Yield cases with a sliding window, for one sequence or for several that share pages."""
    for cases in (attention_decode_cases, attention_paged_cases, attention_prefill_cases):
        for case in cases(config, dtype, work._replace(several=False)):
            forms = {name: partial(getattr(case, name), window=WINDOW) for name in ("function", "plain", "exact")}
            yield replace(case, op=f"{case.op} window", **forms)
