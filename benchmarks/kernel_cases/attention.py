"""Cases of attention, over caches of the default context."""

from collections.abc import Iterator

import numpy as np

from benchmarks.kernel_cases.case import BFLOAT16, Case, Limits, array, batches, times
from pallas_kernels.attention_decode import attention_decode
from reference.config import Config

CAPACITY = 4096  # positions of the cache

# By head_dim; keys and values were just written by the kernel before.
_SPLIT = {64: Limits(114, eager=False, wgmma=True), 128: Limits(168, eager=False, wgmma=True)}


def attention_decode_cases(config: Config, dtype: np.dtype) -> Iterator[Case]:
    """One query a sequence, in bfloat16."""
    if dtype != BFLOAT16:
        return
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
    for batch in batches(config, 1, 64):
        cache = array(batch, kv_heads, CAPACITY, head_dim, dtype=dtype)
        kernels = {"attention_decode": _SPLIT.get(head_dim, Limits())}
        if batch == 1:
            kernels["attention_combine"] = Limits()
        yield Case(
            op="attention_decode",
            shape=f"{heads}/{kv_heads}x{head_dim} of {CAPACITY}{times(batch)}",
            dtype=dtype.name,
            function=attention_decode,
            arrays=(array(batch, heads, head_dim, dtype=dtype), cache, cache, array(batch, dtype=np.dtype(np.int32))),
            kernels=kernels,
        )
