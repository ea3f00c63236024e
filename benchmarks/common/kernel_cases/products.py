"""Cases of the products: the weights of a layer, or of the LM head, times one vector or several."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from llamaspec.benchmarks.common.kernel_cases import exact, plain
from llamaspec.benchmarks.common.kernel_cases.case import (
    BFLOAT16,
    EVERYWHERE,
    FLOAT32,
    Case,
    CaseFamily,
    KernelLimits,
    KernelWork,
    Meeting,
    Variant,
    array,
    times,
)
from llamaspec.benchmarks.common.kernel_cases.limits import product_limits
from llamaspec.model.weights.forms.table import LEVELS
from llamaspec.pallas_kernels.gemv import gemv
from llamaspec.pallas_kernels.norm_gate_up import norm_gate_up
from llamaspec.pallas_kernels.norm_qkv import PIECE, norm_qkv
from llamaspec.pallas_kernels.parts.levels import Levels
from llamaspec.pallas_kernels.parts.matrix import ScaledCodes, ScaledE4M3, product_of, shares
from llamaspec.pallas_kernels.parts.quantized_product import GROUPS
from llamaspec.pallas_kernels.unsupported import Unsupported
from llamaspec.reference.config import Config


class Coded(NamedTuple):
    """A form of a quantized matrix: the bits of a code, and which scales, minima or levels turn codes into weights."""

    bits: int
    group: int | None  # columns that share a scale; None: a whole row does
    minima: bool = False
    levels: Levels | None = None
    e4m3: bool = False


# Kernels take these schemes of `--quantize`, and a few other forms that files have.
SCHEME_FORMS = {
    "q8": Coded(8, 64),
    "q8_row": Coded(8, None),
    "q4": Coded(4, 64),
    "nf4": Coded(4, 64, levels=LEVELS["nf4"]),
    "mxfp4": Coded(4, 32, levels=LEVELS["mxfp4"]),
    "fp8": Coded(8, None, e4m3=True),
}
EVERY_FORM = SCHEME_FORMS | {
    f"q{bits}_{group}": Coded(bits, group)
    for bits in (8, 4)
    for group in GROUPS
    if group != SCHEME_FORMS[f"q{bits}"].group
}
EVERY_FORM |= {f"q{bits}_{group}_min": Coded(bits, group, minima=True) for bits in (8, 4) for group in GROUPS}
EVERY_FORM |= {"q6_16": Coded(6, 16), "q5_32": Coded(5, 32), "q5_32_min": Coded(5, 32, minima=True)}
EVERY_FORM |= {"iq4_nl": Coded(4, 32, levels=LEVELS["iq4_nl"]), "fp4": Coded(4, 64, levels=LEVELS["fp4"])}
# A file may hold q and k in codes of one form and v in another: Q4_K_M and Q5_K_M do so in half of the layers.
MIXED = ("q4_32_min+q6_16", "q5_32_min+q6_16")


@CaseFamily
def gemv_cases(config: Config, dtype: np.dtype, work: KernelWork) -> Iterator[Case]:
    """Yield cases of the output and down projections with their residuals, and of the LM head with the last norm."""
    rows, cols = config.dim, config.heads * config.head_dim
    for batch in work.batches(1, 2, 4, 8):
        yield _residual(rows, cols, dtype, batch=batch)
    yield _residual(config.dim, config.ffn, dtype)
    yield _head(config, dtype)


@CaseFamily
def norm_gate_up_cases(config: Config, dtype: np.dtype, work: KernelWork) -> Iterator[Case]:
    for batch in work.batches(1, 8):
        yield _norm_gate_up(config, dtype, batch=batch)


@CaseFamily
def norm_qkv_cases(config: Config, dtype: np.dtype, work: KernelWork) -> Iterator[Case]:
    for batch in work.batches(1, 8):
        yield _norm_qkv(config, dtype, work, batch=batch)


@CaseFamily
def quantized_cases(config: Config, dtype: np.dtype, work: KernelWork) -> Iterator[Case]:
    """Yield cases of every product with quantized matrices, for an x in bfloat16."""
    if dtype != BFLOAT16:
        return
    for scheme in SCHEME_FORMS:
        for batch in work.batches(1, 4):
            yield from _first_three(config, dtype, work, batch=batch, scheme=scheme)
        yield _residual(config.dim, config.ffn, dtype, scheme=scheme)
        yield _head(config, dtype, scheme=scheme)


@partial(Variant, meetings=EVERYWHERE)
def form_cases(config: Config, dtype: np.dtype, work: KernelWork) -> Iterator[Case]:
    """Yield cases of every product with one vector, for matrices in every form that kernels take."""
    for scheme in EVERY_FORM:
        yield from _first_three(config, dtype, work, scheme=scheme)
        yield _residual(config.dim, config.ffn, dtype, scheme=scheme)
        yield _head(config, dtype, scheme=scheme)
    for schemes in MIXED:
        yield _norm_qkv(config, dtype, work, scheme=schemes)


@partial(Variant, meetings=(Meeting("tinyllama-1.1b", BFLOAT16), Meeting("llama-3.1-8b", FLOAT32)))
def bias_cases(config: Config, dtype: np.dtype, work: KernelWork) -> Iterator[Case]:
    """Yield cases of every product that may have a bias, with one vector and matrices in every form."""
    for scheme in (None, *EVERY_FORM):
        yield from _first_three(config, dtype, work, scheme=scheme, bias=True)
    for schemes in MIXED:
        yield _norm_qkv(config, dtype, work, scheme=schemes, bias=True)


@partial(
    Variant,
    meetings=(
        Meeting("tinyllama-1.1b", FLOAT32, {"batch": 2}),
        Meeting("llama-3.1-8b", BFLOAT16, {"batch": 2}),
        Meeting("llama-3.1-8b", BFLOAT16, {"batch": 4}),
    ),
)
def several_cases(config: Config, dtype: np.dtype, work: KernelWork, *, batch: int) -> Iterator[Case]:
    """Yield cases of every product with `batch` vectors. A product that may have a bias has one.

    Matrices are quantized in every form. For one or two vectors, there are also cases with float matrices.
    """
    for scheme in (None, *EVERY_FORM) if batch <= 2 else EVERY_FORM:
        yield from _first_three(config, dtype, work, batch=batch, scheme=scheme, bias=True)
        yield _head(config, dtype, batch=batch, scheme=scheme)
    for schemes in MIXED:
        yield _norm_qkv(config, dtype, work, batch=batch, scheme=schemes, bias=True)


def _first_three(config: Config, dtype: np.dtype, work: KernelWork, **chosen: Any) -> Iterator[Case]:
    """Yield cases of three products of a layer: output projection, gate and up, and QKV.

    We omit the down projection, which is like the output projection with longer rows.
    """
    yield _residual(config.dim, config.heads * config.head_dim, dtype, **chosen)
    yield _norm_gate_up(config, dtype, **chosen)
    yield _norm_qkv(config, dtype, work, **chosen)


def _residual(
    rows: int, cols: int, dtype: np.dtype, *, batch: int = 1, scheme: str | None = None, bias: bool = False
) -> Case:
    """Make a case of W x + residual."""

    def form(product: Callable[..., Any]) -> Callable[..., Any]:
        return lambda w, x, residual, **options: product(w, x, residual=residual, **options)

    residual = array(batch, rows, dtype=dtype)
    return _gemv("residual", form, rows, cols, residual, batch=batch, scheme=scheme, bias=bias)


def _head(config: Config, dtype: np.dtype, *, batch: int = 1, scheme: str | None = None) -> Case:
    """Make a case of the LM head: W times a normalized x."""

    def form(product: Callable[..., Any]) -> Callable[..., Any]:
        return lambda w, x, norm, **options: product(w, x, norm=norm, eps=config.eps, out=jnp.float32, **options)

    norm = array(config.dim, dtype=dtype)
    return _gemv("norm", form, config.vocab, config.dim, norm, batch=batch, scheme=scheme)


def _gemv(
    what: str, form: Callable[..., Any], rows: int, cols: int, operand: Any, *,
    batch: int, scheme: str | None, bias: bool = False,
) -> Case:  # fmt: skip
    """Make a case of a product of W and x with a third argument, `operand`: a residual or a norm.

    `form` takes one of the three functions `gemv` (ours, XLA's, exact), and returns a function of W, x and `operand`.
    """
    dtype = np.dtype(operand.dtype)
    w, x = coded_matrix(rows, cols, dtype, scheme), array(batch, cols, dtype=dtype)
    case = Case(
        op=f"{_named('gemv', scheme)} {what}",
        shape=f"{rows}x{cols}{times(batch)}",
        dtype=dtype.name,
        function=form(gemv),
        plain=form(plain.gemv),
        exact=form(exact.gemv),
        arrays=(w, x, operand),
        kernels={"gemv": _limits("gemv", w, x, normed=what == "norm")},
        bits=_bits(dtype, scheme),
    )
    return _with_bias(case, rows) if bias else case


def _norm_gate_up(
    config: Config, dtype: np.dtype, *, batch: int = 1, scheme: str | None = None, bias: bool = False
) -> Case:
    rows, cols = 2 * config.ffn, config.dim
    w, x = coded_matrix(rows, cols, dtype, scheme), array(batch, cols, dtype=dtype)
    case = Case(
        op=_named("norm_gate_up", scheme),
        shape=f"{rows}x{cols}{times(batch)}",
        dtype=dtype.name,
        function=partial(norm_gate_up, eps=config.eps),
        plain=partial(plain.norm_gate_up, eps=config.eps),
        exact=partial(exact.norm_gate_up, eps=config.eps),
        arrays=(w, x, array(cols, dtype=dtype)),
        kernels={"norm_gate_up": _limits("norm_gate_up", w, x, normed=True, runs=2)},
        bits=_bits(dtype, scheme),
    )
    return _with_bias(case, rows) if bias else case


def _norm_qkv(
    config: Config, dtype: np.dtype, work: KernelWork, *, batch: int = 1, scheme: str | None = None, bias: bool = False
) -> Case:
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
    rows = (heads + 2 * kv_heads) * head_dim
    cache = array(batch, kv_heads, work.capacity, head_dim, dtype=dtype)
    turns = array(batch, head_dim // 2, dtype=FLOAT32)
    first, *last = (scheme or "").split("+")
    cut = rows - kv_heads * head_dim if last else rows
    w = coded_matrix(cut, config.dim, dtype, first or None)
    if last:
        w = w, coded_matrix(rows - cut, config.dim, dtype, last[0])
    x = array(batch, config.dim, dtype=dtype)
    case = Case(
        op=_named("norm_qkv", scheme),
        shape=f"{heads}+2x{kv_heads}x{head_dim}x{config.dim}{times(batch)}",
        dtype=dtype.name,
        function=partial(norm_qkv, heads=heads, eps=config.eps),
        plain=partial(plain.norm_qkv, heads=heads, eps=config.eps),
        exact=partial(exact.norm_qkv, heads=heads, eps=config.eps),
        values={5: np.full(batch, work.capacity // 2, np.int32)},
        arrays=(
            w,
            x,
            array(config.dim, dtype=dtype),
            cache,
            cache,
            array(batch, dtype=np.dtype(np.int32)),
            turns,
            turns,
        ),
        donated=(3, 4),
        kernels={"norm_qkv": _limits("norm_qkv", w, x, normed=True, runs=2, rows=PIECE)},
        bits=_bits(dtype, first or None),
    )
    return _with_bias(case, rows) if bias else case


def _with_bias(case: Case, rows: int) -> Case:
    """Add a bias to a case, as its last array."""

    def last(form: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arrays, **options: form(*arrays[:-1], bias=arrays[-1], **options)

    bias = array(rows, dtype=np.dtype(case.dtype))
    forms = {"function": last(case.function), "plain": last(case.plain), "exact": last(case.exact)}
    return replace(case, op=f"{case.op} bias", arrays=(*case.arrays, bias), **forms)


def _limits(op: str, w: Any, x: Any, **how: Any) -> KernelLimits:
    """Return limits for the kernel of W x. If x needs several launches, the limits are for the largest launch."""
    if isinstance(w, tuple):  # a loop for each matrix
        return KernelLimits(max(_limits(op, part, x, **how).registers for part in w))
    most = shares(w, len(x))[0].stop
    vectors: Any = array(most, x.shape[1], dtype=x.dtype)
    try:
        product = product_of(op, w, vectors, **how)
    except Unsupported:
        return KernelLimits()  # refused, and never compiled
    return product_limits(product, normed=how["normed"])


def coded_matrix(rows: int, cols: int, dtype: np.dtype, scheme: str | None) -> Any:
    """Return the shapes and dtypes of a matrix quantized as `EVERY_FORM[scheme]`.

    If `scheme` is None, the matrix has the dtype `dtype` instead.
    """
    if scheme is None:
        return array(rows, cols, dtype=dtype)
    bits, group, minima, levels, e4m3 = EVERY_FORM[scheme]
    words = np.dtype(np.int32)
    codes = array(rows, cols // 8, dtype=words) if bits < 8 else array(rows, cols, dtype=np.dtype(np.int8))
    low_bits = array(rows, (bits - 4) * cols // 32, dtype=words) if 4 < bits < 8 else None
    shape = (rows,) if group is None else (rows, cols // group)
    scales: Any = array(*shape, dtype=FLOAT32)
    if e4m3:
        return ScaledE4M3(codes, scales)
    return ScaledCodes(codes, scales, scales if minima else None, levels, low_bits)


def _bits(dtype: np.dtype, scheme: str | None) -> int:
    """Count the bits of a weight, without scales."""
    return EVERY_FORM[scheme].bits if scheme else dtype.itemsize * 8


def _named(op: str, scheme: str | None) -> str:
    return f"{op} {scheme}" if scheme else op
