"""Compiles a chunk of a prompt without a GPU, with llamaspec's options, and checks that cuBLASLt computes its products.

We compile without autotuning. XLA's own kernels for products are slow without it (`model.running.compile`), so cuBLASLt
must compute the products.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from llamaspec.benchmarks.gates.compiler import hlo_for_h200

import jax  # isort: skip  # after the compiler's module, which sets variables that JAX reads when it is imported

from llamaspec.benchmarks.common.random_model import random_shapes
from llamaspec.benchmarks.gates.decode_steps import CAPACITY, DTYPES, FEW_LAYERS
from llamaspec.benchmarks.gates.program import products
from llamaspec.model.forward import prefill
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.ops.gpu import pallas_ops
from llamaspec.model.running.compile import model_options
from llamaspec.model.running.programs import CACHE, MIDDLE, Layout, prefill_shapes
from llamaspec.model.weights.gpu_codes import arranged

CHUNKS = ("tinyllama-1.1b bfloat16 q8", "tinyllama-1.1b bfloat16", "tinyllama-1.1b bfloat16 q4")
PRODUCTS_A_LAYER = 4  # q, k and v; o; gate and up; down


class ChunkFacts(NamedTuple):
    """Facts of a compiled chunk."""

    layers: int
    calls: int  # calls of cuBLASLt
    kernels: int  # XLA's own kernels for products


def compile_chunk(name: str) -> ChunkFacts:
    """Compile the prompt chunk `name` for a model of `FEW_LAYERS` layers. `name` must be in `CHUNKS`."""
    model, dtype, *scheme = name.split()
    config = replace(SHAPES[model], layers=FEW_LAYERS)
    layout = Layout(1, CAPACITY, MIDDLE, 128, DTYPES[dtype])
    params = random_shapes(config, dtype=DTYPES[dtype], positions=layout.rows, quantize=next(iter(scheme), None))
    params = jax.eval_shape(arranged, params)
    ops, _ = pallas_ops(config, params, capacity=layout.rows)
    cache = jax.eval_shape(partial(layout.empty_cache, config))
    hlo = hlo_for_h200(
        *(partial(prefill, config=config, ops=ops), params, *prefill_shapes(layout, cache)),
        donate=(CACHE,),
        options=model_options("gpu", params, config, ops=ops, batch=1),
    )
    return ChunkFacts(FEW_LAYERS, *products(hlo))


def broken_by_chunk(chunk: ChunkFacts) -> list[str]:
    """List the broken gates of a chunk.

    The last layer needs only one product, for keys and values, because a chunk computes no logits.
    """
    expected = PRODUCTS_A_LAYER * (chunk.layers - 1) + 1
    if (chunk.calls, chunk.kernels) != (expected, 0):
        return [f"expected {expected} calls of cuBLASLt, got {chunk.calls} calls and {chunk.kernels} kernels of XLA"]
    return []
