"""The coded GEMM (quantized codes times several vectors) against float64, for every code format, tiling and width."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamaspec.benchmarks.common.kernel_cases import exact
from llamaspec.benchmarks.common.kernel_cases.coded_gemm import FORMS, case
from llamaspec.benchmarks.common.kernel_cases.products import EVERY_FORM
from llamaspec.benchmarks.common.random_model import random_shapes
from llamaspec.model.cache import Pages
from llamaspec.model.ops.gpu import calls, pallas_ops
from llamaspec.model.ops.gpu_products import MOST_ONE_BY_ONE, operand, step_product
from llamaspec.model.weights.forms.integers import Int8
from llamaspec.model.weights.forms.table import LEVELS
from llamaspec.model.weights.gpu_codes import arranged
from llamaspec.pallas_kernels.coded_gemm import MOST_VECTORS, WIDTHS, BlockGrid, coded_gemm, cut_for, geometry_of
from llamaspec.pallas_kernels.parts import int4
from llamaspec.pallas_kernels.parts.compat import interpreter
from llamaspec.pallas_kernels.parts.decoded_codes import RUN, in_order, scales_of
from llamaspec.pallas_kernels.parts.matrix import ScaledCodes
from llamaspec.reference.config import Config
from tests.support.strategies import Noise, assert_within, noises

BFLOAT16 = np.dtype(jnp.bfloat16)
CUTS = [BlockGrid(stages=2), BlockGrid(stages=2, turn=256), BlockGrid(blocks=2, parts=2, stages=2)]


def draw(noise: Noise, rows: int, cols: int, form: str) -> ScaledCodes:
    """Draw codes from their whole range, and positive scales."""
    bits, group, *_ = EVERY_FORM[form]
    codes = noise.rng.integers(-(1 << bits - 1), 1 << bits - 1, (rows, cols)).astype(np.int8)
    scales = np.abs(noise(rows) if group is None else noise(rows, cols // group))
    minima = jnp.asarray(8 * noise(*scales.shape)) if form.endswith("_min") else None
    w = ScaledCodes(jnp.asarray(codes), jnp.asarray(scales), minima)
    if bits == 8:
        return w
    if bits == 4:
        return replace(w, codes=jnp.asarray(int4.pack(codes)))
    unsigned = codes.view(np.uint8) & (1 << bits) - 1
    words = int4.packed_apart(unsigned, int4.order_of(group or 0, levels=False), bits=bits)
    return replace(
        w, **{name: jnp.asarray(a.view(np.int32)) for name, a in zip(("codes", "low_bits"), words, strict=True)}
    )


def multiply(w: ScaledCodes, x: np.ndarray, cut: BlockGrid | None = None) -> np.ndarray:
    with interpreter():
        return np.asarray(coded_gemm(w, jnp.asarray(x), cut=cut))


def check(w: ScaledCodes, x: np.ndarray, y: np.ndarray) -> None:
    expected = exact.coded_gemm(jax.tree.map(np.asarray, w), x)
    assert_within(y, expected.value, expected.error)


@settings(max_examples=1)
@given(
    noise=noises,
    form=st.sampled_from(FORMS),
    batch=st.integers(1, 20),
    cut=st.sampled_from(CUTS),
)
@example(noise=Noise(0), form="q8", batch=3, cut=CUTS[0])
@example(noise=Noise(1, outliers=True), form="q4_32", batch=9, cut=replace(CUTS[2], turn=64))
@example(noise=Noise(4), form="q4_32_min", batch=3, cut=CUTS[0])
@example(noise=Noise(5), form="q8_16", batch=3, cut=replace(CUTS[0], turn=64))
@example(noise=Noise(6), form="q6_16", batch=3, cut=replace(CUTS[2], turn=64))
@example(noise=Noise(7), form="q5_32_min", batch=3, cut=CUTS[0])
@example(noise=Noise(3), form="q8_row", batch=3, cut=CUTS[1])
def test_product(noise, form, batch, cut):
    """The product is within its error bound.

    The columns fill the ring buffers more than twice, and the last step may be partial.
    """
    bits, group, *_ = EVERY_FORM[form]
    wide = cut.parts if group != 128 else 2 * cut.parts
    cols = 1280 * wide + (128 if bits == 8 and group in (None, 16, 32) and cut.parts == 1 else 0)
    w, x = draw(noise, 64 * cut.blocks, cols, form), noise(batch, cols, dtype=BFLOAT16)
    check(w, x, multiply(w, x, cut))


def test_each_column_meets_its_own_code_and_scale():
    """A one-hot vector selects one column of the weights, rounded once."""
    columns = np.array([0, 31, 77, 128, 640, 1023])
    x = np.zeros((len(columns), 1024), BFLOAT16)
    x[np.arange(len(columns)), columns] = 1
    w = draw(Noise(0), 64, 1024, "q4")
    weights = exact.levels_of(w) * np.repeat(np.asarray(w.scales, np.float64), 64, axis=1)
    np.testing.assert_array_equal(multiply(w, x, CUTS[0]), weights[:, columns].T.astype(np.float32))


def unordered(x: jax.Array, run: int) -> jax.Array:
    del run
    return x


def of_the_next_group(ref, first: int, count: int, target) -> list:
    return scales_of(ref, (first + 1) % ref.shape[-1], count, target)


@pytest.mark.parametrize(("name", "mutant"), [("in_order", unordered), ("scales_of", of_the_next_group)])
def test_the_bound_tells_a_wrong_product(name, mutant, monkeypatch):
    """A mutant exceeds the error bound. No other test uses this `BlockGrid`, so no cached program is reused."""
    monkeypatch.setattr("llamaspec.pallas_kernels.coded_gemm." + name, mutant)
    w, x = draw(Noise(0), 64, 1024, "q8"), Noise(1)(2, 1024, dtype=BFLOAT16)
    cut = BlockGrid(stages=3, turn=64 if name == "scales_of" else 128)
    with pytest.raises(AssertionError):
        check(w, x, multiply(w, x, cut))


def test_a_vector_gives_the_same_bits_whatever_the_others_are():
    w, x = draw(Noise(0), 64, 1024, "q8"), Noise(1)(7, 1024, dtype=BFLOAT16)
    batch = np.concatenate([Noise(2)(4, 1024, dtype=BFLOAT16) * 100, x[:1], np.full((1, 1024), np.nan, BFLOAT16)])
    np.testing.assert_array_equal(multiply(w, batch, CUTS[0])[4], multiply(w, x, CUTS[0])[0])


@settings(max_examples=3)
@given(runs=st.integers(1, 4), rows=st.integers(1, 3), run=st.sampled_from([RUN // 2, RUN]))
def test_the_order_of_columns_moves_each_once_and_within_its_run(runs, rows, run):
    x = np.arange(rows * runs * run, dtype=np.float32).reshape(rows, -1)
    reordered = np.asarray(in_order(jnp.asarray(x), run))
    assert np.all(reordered // run == x // run)
    np.testing.assert_array_equal(np.sort(reordered, axis=1), x)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("rows", "cols"), [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096)])
def test_a_chosen_cut_fits(width, rows, cols):
    for form in FORMS:
        bits, group, *_ = EVERY_FORM[form]
        cut = cut_for(rows, cols, width=width, bits=bits, group=group)
        geometry = geometry_of(*case(rows, cols, batch=width, scheme=form).arrays)
        assert geometry.cut == cut
        assert geometry.stages >= 2 and geometry.stages * geometry.step_bytes < 227 * 1024
        assert geometry.steps * geometry.columns * cut.parts >= cols


def refused(codes=(64, 1024), scales=(64, 16), x=(3, 1024), *, kind="int8", dtype="bfloat16", cut=None, **fields):
    def call() -> jax.Array:  # builds arrays only when called, because every pytest worker collects all cases
        w = ScaledCodes(jnp.zeros(codes, kind), jnp.zeros(scales, jnp.float32), **fields)
        return coded_gemm(w, jnp.zeros(x, dtype), cut=cut)

    return call


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (refused(x=(1024,)), r"x \[batch, cols\]"),
        (refused(x=(3, 512)), r"x \[batch, cols\]"),
        (refused(kind="int16"), "codes in int8 or packed int32"),
        (refused(dtype="float32"), "x in bfloat16"),
        (refused(scales=(64, 128)), "a scale per group of 16, 32"),
        (refused(codes=(64, 128), scales=(64, 64), kind="int32"), "a scale per group of 16, 32"),
        (refused(scales=(63, 16)), r"scales \[64, 16\]"),
        (refused(minima=np.zeros((64, 15), np.float32)), r"minima \[64, 16\]"),
        (refused(scales=(64,), minima=np.zeros(64, np.float32)), "only with scales per group, got scales per row"),
        (refused(levels=LEVELS["nf4"]), "does not support codes with levels"),
        (refused(x=(65, 1024)), "1 to 64 vectors, got 65"),
        (refused(x=(0, 1024)), "1 to 64 vectors, got 0"),
        (refused(codes=(96, 1024), scales=(96, 16)), "rows in multiples of 64"),
        (refused(codes=(64, 1088), scales=(64, 17), x=(3, 1088)), "columns in multiples of 256"),
        (refused(cut=BlockGrid(blocks=2)), "cannot cut"),
        (refused(cut=BlockGrid(parts=3)), "cannot cut"),
        (refused(cut=BlockGrid(turn=96)), "cannot cut"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_it_cannot_do_is_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()


WIDE = Config(
    dim=1024, layers=1, heads=16, kv_heads=2, head_dim=64, ffn=1024, vocab=64, context=128, eps=1e-5, theta=1e4
)
PRODUCT_KERNELS = r"name=_(coded_gemm|gemv|norm_qkv|norm_gate_up)\b"  # kernels that compute products
PRODUCTS = ("norm_qkv", "project_add", "norm_gate_up", "down_add", "norm_logits")


@pytest.mark.sampled(7)  # 14 cases, 5 s
@pytest.mark.parametrize(
    ("scheme", "dtype", "batch", "at_once"),
    [
        ("q8", BFLOAT16, MOST_ONE_BY_ONE, False),
        ("q8", BFLOAT16, MOST_ONE_BY_ONE + 1, True),
        ("q4", BFLOAT16, MOST_VECTORS, True),
        ("q8", BFLOAT16, MOST_VECTORS + 1, False),
        ("q8", np.dtype(np.float32), 3, False),
        ("nf4", BFLOAT16, 3, False),
        (None, BFLOAT16, 3, False),
    ],
)
@pytest.mark.parametrize("pages", [None, Pages(number=20, size=8)])
def test_a_step_of_several_sequences_multiplies_by_codes_at_once(scheme, dtype, batch, at_once, pages):
    """A decode step of several sequences uses the coded GEMM for all supported codes, even with paged caches."""
    programs, _ = programs_of(WIDE, scheme, batch, dtype=dtype, pages=pages)
    assert uses_coded_gemm(programs) == dict.fromkeys(PRODUCTS, at_once)
    by_kernels = scheme is not None and batch <= MOST_VECTORS
    has_kernel = {name: re.search(PRODUCT_KERNELS, program) is not None for name, program in programs.items()}
    assert has_kernel == dict.fromkeys(PRODUCTS, by_kernels)  # all products of a step take the same path


@pytest.mark.sampled(6)  # 18 cases, 3 s
@pytest.mark.parametrize(
    ("switches", "cache_dtype", "refused"),
    [
        ({"qk_norm": True}, None, ["norm_qkv"]),
        ({"layer_norm": True}, None, ["norm_qkv", "norm_gate_up", "norm_logits"]),
        ({}, np.dtype(np.int8), ["norm_qkv"]),
    ],
)
@pytest.mark.parametrize(
    ("scheme", "batch", "at_once", "one_by_one"),
    [
        ("q8", MOST_ONE_BY_ONE + 1, True, False),
        ("q8", MOST_ONE_BY_ONE, False, True),
        ("nf4", 3, False, True),
        ("nf4", 9, False, False),
        (None, 1, False, True),
        (None, 3, False, False),
    ],
)
def test_an_op_without_a_fused_kernel_still_multiplies_by_a_kernel(
    switches, cache_dtype, refused, scheme, batch, at_once, one_by_one
):
    """An op that no fused kernel supports runs as XLA ops, but its matrix product still uses a kernel if one fits."""
    programs, reasons = programs_of(replace(WIDE, **switches), scheme, batch, cache_dtype=cache_dtype)
    assert {name for name in PRODUCTS if reasons[name]} >= set(refused)
    assert uses_coded_gemm(programs) == dict.fromkeys(PRODUCTS, at_once)
    assert {"name=_gemv" in programs[name] for name in refused} == {one_by_one}


def uses_coded_gemm(programs):
    """Return for each op whether its program calls the coded GEMM."""
    return {name: "_coded_gemm" in program for name, program in programs.items()}


def programs_of(config: Config, scheme: str | None, batch: int, *, dtype=BFLOAT16, **cache):
    """Trace each product op of a decode step. Return the programs, and the reasons why an op is not a fused kernel."""
    shapes = random_shapes(config, dtype=dtype, positions=136, quantize=scheme)
    params = jax.eval_shape(arranged, shapes)._replace(rope=None)
    sizes = {"batch": batch, "capacity": 136, **cache}
    ops, reasons = pallas_ops(config, params, **sizes)
    programs = {
        call.name: str(jax.make_jaxpr(partial(getattr(ops, call.op), **call.fixed))(*call.arguments))
        for call in calls(config, params, **sizes)
        if call.name in PRODUCTS
    }
    return programs, reasons


def test_a_product_of_a_step_is_that_of_its_codes():
    matrix = arranged(
        Int8(jnp.asarray(Noise(0).rng.integers(-127, 128, (64, 1024)), jnp.int8), jnp.asarray(Noise(1)(64, 16)), None)
    )
    x = jnp.asarray(Noise(2)(3, 1, 1024, dtype=BFLOAT16))
    with interpreter():
        y = np.asarray(step_product(x, matrix))
    assert y.shape == (3, 1, 64)
    expected = exact.coded_gemm(jax.tree.map(np.asarray, operand(matrix)), np.asarray(x)[:, 0])
    assert_within(y[:, 0], expected.value, expected.error)
