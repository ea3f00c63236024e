"""Cases of attention, over caches of the default context."""

from collections.abc import Iterator

import numpy as np

from benchmarks.kernel_cases.case import BFLOAT16, FLOAT32, Case, Limits, array, batches, times
from pallas_kernels.attention_decode import attention_decode
from pallas_kernels.attention_paged import attention_paged
from pallas_kernels.attention_prefill import attention_prefill
from reference.config import Config

CAPACITY = 4096  # positions of the cache
PAGE = 64  # positions of a page
SEQUENCES = 8  # that share pages
CHUNK = 256  # tokens of a prompt
INT32 = np.dtype(np.int32)

# By dtype and head_dim. Keys and values were just written by the kernel before, and are not read before its end.
DECODE = {
    (BFLOAT16, 64): Limits(114, eager=False, wgmma=True),
    (BFLOAT16, 128): Limits(168, eager=False, wgmma=True),
    (FLOAT32, 64): Limits(180, eager=False),
    (FLOAT32, 128): Limits(255, eager=False),
}
PREFILL = Limits(168, eager=False, wgmma=True)  # 384 threads share the registers of a processor


def attention_decode_cases(config: Config, dtype: np.dtype) -> Iterator[Case]:
    """One query a sequence."""
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
    for batch in batches(config, 1, 64):
        cache = array(batch, kv_heads, CAPACITY, head_dim, dtype=dtype)
        kernels = {"attention_decode": DECODE.get((dtype, head_dim), Limits())}
        if batch * kv_heads < 132:  # fewer blocks than processors: several share the keys of a head
            kernels["attention_combine"] = Limits()
        yield Case(
            op="attention_decode",
            shape=f"{heads}/{kv_heads}x{head_dim} of {CAPACITY}{times(batch)}",
            dtype=dtype.name,
            function=attention_decode,
            arrays=(array(batch, heads, head_dim, dtype=dtype), cache, cache, array(batch, dtype=INT32)),
            kernels=kernels,
        )


def attention_paged_cases(config: Config, dtype: np.dtype) -> Iterator[Case]:
    """One query a sequence, of several that share the memory of a cache."""
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
    pages = CAPACITY // PAGE
    cache = array(SEQUENCES * pages, kv_heads, PAGE, head_dim, dtype=dtype)
    kernels = {"attention_paged": DECODE.get((dtype, head_dim), Limits())}
    if SEQUENCES * kv_heads < 132:
        kernels["attention_combine"] = Limits()
    yield Case(
        op="attention_paged",
        shape=f"{heads}/{kv_heads}x{head_dim} of {pages}x{PAGE}{times(SEQUENCES)}",
        dtype=dtype.name,
        function=attention_paged,
        arrays=(
            array(SEQUENCES, heads, head_dim, dtype=dtype),
            cache,
            cache,
            array(SEQUENCES, pages, dtype=INT32),
            array(SEQUENCES, dtype=INT32),
        ),
        kernels=kernels,
    )


def attention_prefill_cases(config: Config, dtype: np.dtype) -> Iterator[Case]:
    """A chunk of a prompt, in bfloat16."""
    if dtype == BFLOAT16:
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        cache = array(1, kv_heads, CAPACITY, head_dim, dtype=dtype)
        yield Case(
            op="attention_prefill",
            shape=f"{CHUNK}x{heads}/{kv_heads}x{head_dim} of {CAPACITY}",
            dtype=dtype.name,
            function=attention_prefill,
            arrays=(array(1, CHUNK, heads, head_dim, dtype=dtype), cache, cache, array(1, dtype=INT32)),
            kernels={"attention_prefill": PREFILL},
            streams=False,
        )
