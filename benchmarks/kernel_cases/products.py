"""Cases of the products: all weights of a layer and the LM head times few vectors, and those of a layer times many."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases import exact, plain
from benchmarks.kernel_cases.case import BFLOAT16, FLOAT32, Case, Limits, Work, array, times
from pallas_kernels.gemm import DEPTH, gemm
from pallas_kernels.gemv import gemv
from pallas_kernels.matrix import Codes
from pallas_kernels.norm_gate_up import norm_gate_up
from pallas_kernels.norm_qkv import norm_qkv
from pallas_kernels.tile import tile_for
from reference.config import Config

GROUP = 64  # columns that share a scale

# For one vector. By dtype and rows of a tile; a norm adds a load and a product for every column, a tile in two pieces a
# copy for each turn of the loop, and where a block has several tiles it looks where the next one is.
PLAIN = {
    (FLOAT32, 16): Limits(50, 3.9),
    (BFLOAT16, 8): Limits(54, 6.0),
    (BFLOAT16, 16): Limits(94, 4.3),
    (BFLOAT16, 32): Limits(151, 3.5),
}
NORMED = Limits(96, 5.3)
PAIRED = Limits(96, 6.1)

# The schemes of `--quantize` that have kernels. Registers are traded for instructions: with 168 of them three blocks
# share a processor, and shared memory holds no more, as the vectors are float32 in it. q8 takes more than it was
# designed with, 4.3, none of which converts any longer.
SCHEMES = {"q8": Limits(168, 4.7), "q8_row": Limits(168, 4.6), "q4": Limits(168, 3.9)}


def gemv_cases(config: Config, dtype: np.dtype, work: Work) -> Iterator[Case]:
    """Output projection and down projection with their residual, and the LM head with the last norm."""
    rows, cols = config.dim, config.heads * config.head_dim

    def limits(rows: int, cols: int) -> Limits:
        return PLAIN.get((dtype, tile_for("gemv", rows, cols, dtype).rows), Limits())

    for batch in work.batches(1, 2, 4, 8):
        yield _residual(rows, cols, dtype, batch=batch, limits=limits(rows, cols))
    yield _residual(config.dim, config.ffn, dtype, limits=limits(config.dim, config.ffn))
    yield _head(config, dtype, limits=NORMED)


def norm_gate_up_cases(config: Config, dtype: np.dtype, work: Work) -> Iterator[Case]:
    for batch in work.batches(1, 8):
        yield _norm_gate_up(config, dtype, batch=batch, limits=PAIRED)


def norm_qkv_cases(config: Config, dtype: np.dtype, work: Work) -> Iterator[Case]:
    for batch in work.batches(1, 8):
        yield _norm_qkv(config, dtype, work, batch=batch, limits=PAIRED)


def quantised_cases(config: Config, dtype: np.dtype, work: Work) -> Iterator[Case]:
    """The same of matrices that are quantised; x in bfloat16."""
    if dtype != BFLOAT16:
        return
    for scheme, limits in SCHEMES.items():
        for batch in work.batches(1, 4):
            chosen: dict[str, Any] = {"batch": batch, "scheme": scheme, "limits": limits}
            yield _residual(config.dim, config.heads * config.head_dim, dtype, **chosen)
            yield _norm_gate_up(config, dtype, **chosen)
            yield _norm_qkv(config, dtype, work, **chosen)
        yield _residual(config.dim, config.ffn, dtype, scheme=scheme, limits=limits)
        yield _head(config, dtype, scheme=scheme, limits=limits)


def gemm_cases(config: Config, dtype: np.dtype, work: Work) -> Iterator[Case]:
    """A chunk of a prompt through each matrix of a layer. No table of ops has it, until a GPU has seen it beat XLA."""
    dim, ffn, width = config.dim, config.ffn, config.heads * config.head_dim
    if dtype != BFLOAT16 or any(size % DEPTH for size in (dim, ffn, width)):
        return
    for rows, cols in ((width + 2 * config.kv_heads * config.head_dim, dim), (dim, width), (2 * ffn, dim), (dim, ffn)):
        yield Case(
            op="gemm",
            shape=f"{rows}x{cols}{times(work.chunk)}",
            dtype=dtype.name,
            function=gemm,
            plain=plain.gemm,
            exact=exact.gemm,
            arrays=(array(work.chunk, cols, dtype=dtype), array(rows, cols, dtype=dtype)),
            kernels={"gemm": Limits(wgmma=True)},
            flops=2 * work.chunk * rows * cols,
            streams=False,
        )


def _residual(
    rows: int, cols: int, dtype: np.dtype, *, batch: int = 1, scheme: str | None = None, limits: Limits
) -> Case:
    """W x + residual."""

    def form(product: Callable[..., Any]) -> Callable[..., Any]:
        return lambda w, x, residual, **tile: product(w, x, residual=residual, **tile)

    residual = array(batch, rows, dtype=dtype)
    return _gemv("residual", form, rows, cols, residual, batch=batch, scheme=scheme, limits=limits)


def _head(config: Config, dtype: np.dtype, *, scheme: str | None = None, limits: Limits) -> Case:
    """W times a normed x."""

    def form(product: Callable[..., Any]) -> Callable[..., Any]:
        return lambda w, x, norm, **tile: product(w, x, norm=norm, eps=config.eps, out=jnp.float32, **tile)

    norm = array(config.dim, dtype=dtype)
    return _gemv("norm", form, config.vocab, config.dim, norm, scheme=scheme, limits=limits)


def _gemv(
    what: str, form: Callable[..., Any], rows: int, cols: int, other: Any, *,
    batch: int = 1, scheme: str | None, limits: Limits,
) -> Case:  # fmt: skip
    """W x together with `other`, in a `form` that takes the three."""
    dtype = np.dtype(other.dtype)
    return Case(
        op=f"{_named('gemv', scheme)} {what}",
        shape=f"{rows}x{cols}{times(batch)}",
        dtype=dtype.name,
        function=form(gemv),
        plain=form(plain.gemv),
        exact=form(exact.gemv),
        arrays=(_matrix(rows, cols, dtype, scheme), array(batch, cols, dtype=dtype), other),
        kernels={"gemv": limits if batch == 1 else Limits()},
        bits=_bits(dtype, scheme),
    )


def _norm_gate_up(config: Config, dtype: np.dtype, *, batch: int, scheme: str | None = None, limits: Limits) -> Case:
    rows, cols = 2 * config.ffn, config.dim
    return Case(
        op=_named("norm_gate_up", scheme),
        shape=f"{rows}x{cols}{times(batch)}",
        dtype=dtype.name,
        function=partial(norm_gate_up, eps=config.eps),
        plain=partial(plain.norm_gate_up, eps=config.eps),
        exact=partial(exact.norm_gate_up, eps=config.eps),
        arrays=(_matrix(rows, cols, dtype, scheme), array(batch, cols, dtype=dtype), array(cols, dtype=dtype)),
        kernels={"norm_gate_up": limits if batch == 1 else Limits()},
        bits=_bits(dtype, scheme),
    )


def _norm_qkv(
    config: Config, dtype: np.dtype, work: Work, *, batch: int, scheme: str | None = None, limits: Limits
) -> Case:
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
    rows = (heads + 2 * kv_heads) * head_dim
    cache = array(batch, kv_heads, work.capacity, head_dim, dtype=dtype)
    turns = array(batch, head_dim // 2, dtype=FLOAT32)
    return Case(
        op=_named("norm_qkv", scheme),
        shape=f"{heads}+2x{kv_heads}x{head_dim}x{config.dim}{times(batch)}",
        dtype=dtype.name,
        function=partial(norm_qkv, heads=heads, eps=config.eps),
        plain=partial(plain.norm_qkv, heads=heads, eps=config.eps),
        exact=partial(exact.norm_qkv, heads=heads, eps=config.eps),
        given={5: np.full(batch, work.capacity // 2, np.int32)},
        arrays=(
            _matrix(rows, config.dim, dtype, scheme),
            array(batch, config.dim, dtype=dtype),
            array(config.dim, dtype=dtype),
            cache,
            cache,
            array(batch, dtype=np.dtype(np.int32)),
            turns,
            turns,
        ),
        donated=(3, 4),
        kernels={"norm_qkv": limits if batch == 1 else Limits()},
        bits=_bits(dtype, scheme),
    )


def _matrix(rows: int, cols: int, dtype: np.dtype, scheme: str | None) -> Any:
    if scheme is None:
        return array(rows, cols, dtype=dtype)
    packed, kind = (cols // 8, np.int32) if scheme == "q4" else (cols, np.int8)
    scales = (rows,) if scheme == "q8_row" else (rows, cols // GROUP)
    arrays: tuple[Any, Any] = array(rows, packed, dtype=np.dtype(kind)), array(*scales, dtype=FLOAT32)
    return Codes(*arrays)


def _bits(dtype: np.dtype, scheme: str | None) -> int:
    """Of a weight, without what its scale takes."""
    return {None: dtype.itemsize * 8, "q4": 4}.get(scheme, 8)


def _named(op: str, scheme: str | None) -> str:
    return f"{op} {scheme}" if scheme else op
