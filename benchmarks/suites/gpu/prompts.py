"""Times attention to a prompt, compared with cuDNN's attention, the fastest that is available."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from llamaspec.benchmarks.common.report import Row, skipped, timed
from llamaspec.benchmarks.suites.gpu.clock import Deadline
from llamaspec.benchmarks.suites.gpu.scale import Scale
from llamaspec.model.insight.machine import random_numbers
from llamaspec.model.insight.timing import Seconds, measure_turns
from llamaspec.model.running.compile import LOOPS_IN_GRAPHS
from llamaspec.pallas_kernels.attention_prefill import attention_prefill
from llamaspec.reference.config import Config


def time_attention(scale: Scale, clock: Deadline) -> Iterator[Row]:
    """Time attention for each model and length of a prompt, with an empty cache before the prompt."""
    for name, config in scale.attended:
        for tokens in scale.prompts:
            case = f"{name}, {tokens} tokens"
            if clock.over:
                yield skipped(case)
                continue
            yield {"case": case, **_row(config, tokens, scale)}


def _row(config: Config, tokens: int, scale: Scale) -> Row:
    q, k, v = (random_numbers(i, 1, tokens, heads, config.head_dim, dtype=jnp.bfloat16)
               for i, heads in enumerate((config.heads, config.kv_heads, config.kv_heads)))  # fmt: skip
    cache = [a.swapaxes(1, 2) + 0 for a in (k, v)]  # [1, kv_heads, tokens, head_dim]
    start = jnp.zeros(1, jnp.int32)
    with scale.running():
        by_kernel = _seconds(attention_prefill, scale, q, *cache, start)
    best = "cudnn" if scale.device == "gpu" else "xla"
    beside = partial(jax.nn.dot_product_attention, is_causal=True, implementation=best)
    by_cudnn = _seconds(beside, scale, q, k, v)
    flops = 4 * config.heads * config.head_dim * tokens * (tokens + 1) / 2
    moved = 2 * q.nbytes + k.nbytes + v.nbytes
    return {
        **timed(by_kernel, bytes=moved, flops=flops, dtype="bfloat16"),
        "beside": best,
        "plain": by_cudnn.median,
        "speedup": by_cudnn.median / by_kernel.median,
    }


def _seconds(attention: Callable[..., Any], scale: Scale, q: jax.Array, *arguments: jax.Array) -> Seconds:
    """Time a call in a loop on the device. The result of a call is the q of the next call."""

    def chained(turns, q, *arguments):
        def body(_, q):
            for _ in range(scale.chained):
                q = attention(q, *arguments).reshape(q.shape)
            return q

        return lax.fori_loop(0, turns, body, q)

    program = jax.jit(chained).lower(1, q, *arguments).compile(LOOPS_IN_GRAPHS)
    turn = measure_turns(lambda turns: program(turns, q, *arguments), scale.span, scale.effort)
    return turn.over(scale.chained)
