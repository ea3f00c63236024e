"""Small cases with options that no published Llama uses. The suite `kernels` compares them with exact numbers.

`kernel_cases.variants` has the same options in the shapes of two models. NumPy would need an hour for their exact
numbers. The cases here are smaller: short rows, or a few long rows. Thread blocks still have several tiles.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from llamaspec.benchmarks.common.kernel_cases import coded_gemm, exact, kernel_cases, plain
from llamaspec.benchmarks.common.kernel_cases.attention import (
    attention_decode_cases,
    attention_paged_cases,
    attention_prefill_cases,
    window_cases,
)
from llamaspec.benchmarks.common.kernel_cases.case import BFLOAT16, FLOAT32, Case, KernelWork, array, times
from llamaspec.benchmarks.common.kernel_cases.products import bias_cases, form_cases, quantized_cases, several_cases
from llamaspec.benchmarks.common.kernel_cases.rows import logit_cases
from llamaspec.model.ops.gpu_products import MOST_SEQUENCES
from llamaspec.model.ops.xla import XLA
from llamaspec.model.weights.params import FeedForward, Layer, Linear
from llamaspec.pallas_kernels.coded_gemm import WIDTHS
from llamaspec.pallas_kernels.parts.key_ring import TILE
from llamaspec.pallas_kernels.parts.matrix import AT_ONCE, MAX_BATCH
from llamaspec.pallas_kernels.parts.tile import Tile
from llamaspec.reference.config import Config

BROAD = Config(
    dim=2048, layers=1, heads=16, kv_heads=4, head_dim=128, ffn=4096, vocab=4096, context=4096, eps=1e-5, theta=1e4
)
NARROW = replace(BROAD, dim=1024, kv_heads=2, head_dim=64, ffn=5632, vocab=12_288)
DEEP = replace(BROAD, dim=256, ffn=14_336)  # its down projection fills its rings many times
LONG = replace(BROAD, dim=1280, ffn=13_824)  # rows of down in Llama 2 13B
LONGER = replace(BROAD, dim=1024, ffn=28_672)  # rows of down in 70B
UNGROUPED = replace(NARROW, kv_heads=16)  # one query head for each key head
WORK = KernelWork(several=True, capacity=1024, chunk=333)
ROWS = (8_193, 50_257, 128_256, 2**20)  # scores in a row, which softmax reads twice


def varied_cases() -> Iterator[Case]:
    """Yield cases that no model of the table has, starting with the newest kind."""
    yield crowded()
    yield come_and_go()
    yield from in_chunks()
    yield from in_wide_tiles()
    yield kernel_cases()["gemv q8 norm 32000x2048 bfloat16"]  # the table of tiles has an entry for it
    for batch in range(MOST_SEQUENCES + 1, MAX_BATCH + 1, 2):
        yield from routed_cases(NARROW, FLOAT32, batch)
        yield from routed_cases(NARROW, BFLOAT16, batch)
    for length in ROWS:
        yield from logit_cases(replace(NARROW, vocab=length), FLOAT32, WORK)
    yield from attentions()
    yield from at_once()
    yield from in_two_launches(NARROW, FLOAT32)
    yield from in_two_launches(BROAD, BFLOAT16, first=2)
    for config, dtype, second_dtype in ((NARROW, BFLOAT16, FLOAT32), (BROAD, FLOAT32, BFLOAT16)):
        yield from bias_cases(config, dtype, WORK)
        yield from several_cases(config, dtype, WORK, batch=2)
        yield from several_cases(config, second_dtype, WORK, batch=AT_ONCE)
        yield from form_cases(config, dtype, WORK)
        yield from (case for case in form_cases(config, second_dtype, WORK) if case.op.startswith("norm_qkv"))
        yield from _downs(DEEP, form_cases(DEEP, dtype, WORK))


def at_once() -> Iterator[Case]:
    """Yield cases of `coded_gemm`, for each number of vectors in `WIDTHS` (kernels pad to these numbers).

    For the smallest number of vectors there are cases of all quantized forms, for larger numbers only of q8 and q4.
    """
    for batch in WIDTHS:
        for form in coded_gemm.FORMS if batch == WIDTHS[0] else ("q8", "q4"):
            yield coded_gemm.case(BROAD.dim, BROAD.ffn, batch=batch, scheme=form)


def crowded() -> Case:
    """Make a case that provokes a race between reads of shared memory and copies to the same memory.

    Four blocks per SM (the maximum) delay the reads. The copies come early, because rings are short and the matrix fits
    in the L2 cache. We removed the fence in `staging.finish_reads` to test this: all of 3,000 runs were wrong. With 400
    blocks of 16 rows, only half of the runs were wrong.
    """
    return _in_tiles(kernel_cases()["gemv norm 32000x512 bfloat16"], Tile(8, 4, 528), "crowded")


def come_and_go() -> Case:
    """Make a product with more blocks than can run at once, and with rings that are filled again.

    The LM heads of 8B (with a longer ring) and 70B have such tiles, but they are too large for NumPy.
    """
    return _in_tiles(kernel_cases()["gemv norm 32000x2048 bfloat16"], Tile(32, 6, 1000), "come and go")


def in_chunks() -> Iterator[Case]:
    """Yield every product for which the table of tiles has steps of several chunks of columns.

    NumPy would take too long for the head, so we give the head's tile to a smaller matrix.
    """
    cases = kernel_cases()
    for shape in ("2048x2048", "2048x5632", "2048x8192", "4096x4096", "5120x5120"):
        yield cases[f"gemv residual {shape} bfloat16"]
    yield _in_tiles(cases["gemv norm 32000x2048 bfloat16"], Tile(16, chunks=2), "in chunks")


def in_wide_tiles() -> Iterator[Case]:
    """Yield quantized products for which the table of tiles has more rows per tile than the rule would choose.

    A scale is for 64 columns or for a whole row. The down projections of Llama 2 13B and 70B, and the output projection
    of 70B, have fewer rows here, because NumPy would take too long.
    """
    for config, tile, tile_of_q4 in ((LONG, Tile(40, 4), Tile(40, 6)), (LONGER, Tile(64), Tile(64))):
        for case in _downs(config, quantized_cases(config, BFLOAT16, WORK)):
            yield _in_tiles(case, tile_of_q4 if case.op == "gemv q4 residual" else tile, "in wide tiles")
    cases = kernel_cases()
    for scheme in ("q8", "q8_row"):
        yield _in_tiles(cases[f"gemv {scheme} residual 3072x8192 bfloat16"], Tile(32), "in wide tiles")
    for name in (
        "gemv q8 residual 4096x14336",
        *(f"gemv {scheme} residual 5120x5120" for scheme in ("q8", "q8_row", "q4")),
        *(f"norm_gate_up q4 16384x{columns}" for columns in (2048, 3072)),
    ):
        yield cases[f"{name} bfloat16"]


def _in_tiles(case: Case, tile: Tile, name: str) -> Case:
    """Return the case of a product with this tile, and with `name` added to its shape."""
    return replace(case, shape=f"{case.shape} {name}", function=partial(case.function, tile=tile))


def _downs(config: Config, cases: Iterable[Case]) -> Iterator[Case]:
    """Select a model's cases of the down projection with one vector."""
    return (case for case in cases if case.shape == f"{config.dim}x{config.ffn}")


def attentions() -> Iterator[Case]:
    """Yield cases of attention: head_dim 64 and 128, MHA and GQA, sliding windows, and rings that are refilled."""
    long = WORK._replace(several=False, capacity=8192)
    for dtype in (FLOAT32, BFLOAT16):
        for config in (NARROW, BROAD, UNGROUPED):
            yield from window_cases(config, dtype, WORK._replace(capacity=2048, chunk=100, sequences=3))
            for cases in (attention_decode_cases, attention_paged_cases, attention_prefill_cases):
                yield from cases(config, dtype, WORK)
            yield from attention_decode_cases(config, dtype, long)
    # The last of these tiles of 128 keys reaches beyond the cache.
    yield from attention_decode_cases(NARROW, BFLOAT16, long._replace(capacity=4104))


def in_two_launches(config: Config, dtype: np.dtype, *, first: int = 0) -> Iterator[Case]:
    """Yield quantized products with more vectors than one launch accepts. The number of vectors differs between ops."""
    sizes = range(AT_ONCE + 1, MAX_BATCH + 1)
    # Products of float weights take one launch, and are in the table.
    by = [[case for case in several_cases(config, dtype, WORK, batch=batch) if " q" in case.op] for batch in sizes]
    for i, cases in enumerate(zip(*by, strict=True)):
        yield cases[(first + i + i // len(cases)) % len(cases)]  # shifts, so that an op gets different numbers


def routed_cases(config: Config, dtype: np.dtype, batch: int) -> Iterator[Case]:
    """Yield float products for more sequences than our kernels accept: XLA computes these.

    In bfloat16 we leave out products with a norm: XLA rounds a normalized vector before the product, kernels do not.
    """
    dim, ffn = config.dim, config.ffn
    vectors = array(batch, ffn, dtype=dtype), array(batch, dim, dtype=dtype)
    down = array(dim, ffn, dtype=dtype), *vectors
    yield _routed("down_add", down, _down_add, *(_with_residual(form) for form in (plain.gemv, exact.gemv)))
    if dtype == FLOAT32:
        gate_up = array(2 * ffn, dim, dtype=dtype), vectors[1], array(dim, dtype=dtype)
        forms = (partial(form, eps=config.eps) for form in (plain.norm_gate_up, exact.norm_gate_up))
        yield _routed("norm_gate_up", gate_up, partial(_norm_gate_up, config), *forms)


def _routed(op: str, arrays: tuple[Any, ...], function: Callable[..., Any], beside: Any, right: Any) -> Case:
    w, x, _ = arrays
    shape = f"{w.shape[0]}x{w.shape[1]}{times(len(x))}"
    return Case(f"{op} by XLA", shape, w.dtype.name, function, arrays, {}, plain=beside, exact=right)


def _with_residual(product: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x, residual: product(w, x, residual=residual)


def _down_add(w, x, residual):
    return XLA.down_add(x[:, None], _layer(down=w), residual[:, None])[:, 0]


def _norm_gate_up(config: Config, w, x, norm):
    return XLA.norm_gate_up(x[:, None], _layer(gate_up=w, norm=norm), config=config)[:, 0]


def _layer(*, gate_up: Any = None, down: Any = None, norm: Any = None) -> Layer:
    none: Any = None
    ffn = FeedForward(Linear(gate_up, None), Linear(down, None))
    return Layer(none, Linear(none, None), None, None, Linear(none, None), norm, ffn)


def clearing_cases(models: tuple[tuple[Config, int], ...]) -> Iterator[tuple[Case, int]]:
    """Yield cases of decode attention with 0, 1 or 63 hidden rows in the last tile of the cache.

    Each case comes with the number of keys that the query sees.
    """
    for config, capacity in models:
        for dtype in (BFLOAT16, FLOAT32):
            (case,) = attention_decode_cases(config, dtype, KernelWork(capacity=capacity))
            for seen in (capacity, capacity - 1, capacity - TILE + 1):
                yield replace(case, shape=f"{case.shape}, {seen} seen", values={3: np.full(1, seen, np.int32)}), seen
