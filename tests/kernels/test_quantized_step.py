"""Kernels compute a quantized Llama: weights have the right layout, ops are within bounds, and tokens equal XLA's."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamaspec.benchmarks.common.kernel_cases import exact
from llamaspec.model.cache import LayerCache, LayerPages, LayerStore, empty_cache
from llamaspec.model.checkpoints.checkpoint import Codes
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.forward import decode, state_after
from llamaspec.model.ops.gpu import pallas_ops
from llamaspec.model.ops.gpu_products import MOST_SEQUENCES, operand, prompt_product
from llamaspec.model.ops.table import Ops, Positions
from llamaspec.model.ops.xla import XLA
from llamaspec.model.options import SamplingOptions
from llamaspec.model.sampling import as_arrays
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.forms.fp8 import FP8
from llamaspec.model.weights.forms.integers import Int4, Int4Words, Int8
from llamaspec.model.weights.forms.table import CLASS_OF_FORM, LEVELS
from llamaspec.model.weights.gpu_codes import Stacked, arranged
from llamaspec.model.weights.loading import load_params
from llamaspec.model.weights.params import FeedForward, Params
from llamaspec.pallas_kernels.parts import int4
from llamaspec.pallas_kernels.parts.compat import interpreter
from llamaspec.pallas_kernels.parts.matrix import MAX_BATCH, ScaledE4M3
from llamaspec.pallas_kernels.unsupported import Unsupported
from llamaspec.reference.config import Config
from llamaspec.verify.bounds.running_error import Approx, gamma
from tests.kernels.kernel_ops import KERNEL_OPS
from tests.support.random_models import random_checkpoint
from tests.support.strategies import Noise, assert_within

# Kernels take codes only in rows of at least 1024 columns.
NARROW = Config(
    dim=1024, layers=1, heads=16, kv_heads=2, head_dim=64, ffn=1024, vocab=64, context=128, eps=1e-5, theta=1e4
)
CAPACITY = 136
FLOAT32 = np.dtype(np.float32)


def load(scheme: str, *, seed: int) -> Params:
    """Load random weights in the layout that `load_params` chooses for a GPU that runs the kernels."""
    checkpoint = quantized(random_checkpoint(NARROW, seed=seed), scheme)
    return arranged(load_params(checkpoint, dtype=FLOAT32, positions=CAPACITY))


@pytest.mark.parametrize(("rows", "cols"), [(1, 128), (8, 384), (16, 1024)])
def test_codes_are_packed_as_the_kernels_read_them(rows, cols):
    codes = np.random.default_rng(cols).integers(-8, 8, (rows, cols)).astype(np.int8)
    pairs = (codes + 8).astype(np.uint8).reshape(rows, -1, 2, 16)
    stored = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(rows, -1)  # layout of `model.weights.forms.integers.Int4`
    words = arranged(Int4(jnp.asarray(stored), jnp.ones((rows, cols // 32)), None))
    np.testing.assert_array_equal(words.codes, int4.pack(codes), strict=True)
    np.testing.assert_array_equal(words.levels(), codes)


FORM_GROUPS = [
    *((form, group) for form in ("int4", "int8", "int4_min", "int8_min") for group in (16, 32, 64, 128)),
    *((form, group) for form in ("int6", "int5", "int5_min") for group in (16, 32)),
    *((form, levels.group) for form, levels in LEVELS.items()),
    ("fp8", 1024),
]
RANGES = {"int6": (-32, 32), "int5": (-16, 16), "int5_min": (0, 32)}  # value ranges of codes that a byte does not fill


def drawn(form: str, group: int, *, rows: int = 8, cols: int = 1024, zeros: bool = False, seed: int = 0) -> Any:
    """Draw a matrix in a loaded model's layout, with random codes, and scales that float16 represents exactly."""
    rng, kind = np.random.default_rng(seed), CLASS_OF_FORM[form]  # type: ignore
    shapes = kind.shapes(rows, cols, Codes(kind.form, group, zeros=zeros, bytes=0, parts=lambda: iter(())))

    def numbers(shape: Any) -> jax.Array:
        if shape.dtype == np.float32:
            return jnp.asarray(rng.normal(size=shape.shape).astype(np.float16).astype(np.float32))
        bits = rng.integers(*RANGES.get(form, (0, 256)), shape.shape).astype(np.int8).view(np.uint8)
        bits = bits & 0x77 if form == "fp8" else bits  # no NaN
        return jnp.asarray(bits.view(shape.dtype))

    matrix = jax.tree.map(numbers, shapes)
    if form == "mxfp4":
        matrix = matrix._replace(scales=jnp.asarray(rng.integers(100, 150, shapes.scales.shape), jnp.uint8))
    return matrix


def test_every_form_is_drawn():
    assert {form for form, _ in FORM_GROUPS} == set(CLASS_OF_FORM)


@pytest.mark.sampled(7)  # 42 cases, 7 s
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("form", "group"), FORM_GROUPS)
def test_kernels_multiply_by_the_weights_of_the_file(form, group, zeros):
    """The matrix that a kernel multiplies has the file's weights, rounded at most once to float32.

    NF4 and FP4 weights may also be off by 2^-23 times their scale.
    """
    if zeros and form not in ("int4", "int8"):
        return
    matrix = drawn(form, group, zeros=zeros)
    stored = arranged(matrix)
    np.testing.assert_array_equal(stored.weights(), matrix.weights())
    w = operand(stored)
    assert not isinstance(w, jax.Array) and w.shape == (8, 1024)
    if isinstance(w, ScaledE4M3):
        return  # the operand has the same codes and scales
    assert w.group == group
    scales = np.repeat(np.asarray(w.scales, np.float64), group, axis=1)
    weights = exact.levels_of(w) * scales
    if w.minima is not None:
        weights = weights + np.repeat(np.asarray(w.minima, np.float64), group, axis=1)
    decoded = np.asarray(matrix.weights(), np.float64)
    off = np.abs(weights - decoded)
    assert np.all(off <= (2.0**-23 * np.abs(scales) if form in ("nf4", "fp4") else 0) + 2.0**-24 * np.abs(decoded))


def test_arranged_weights_are_the_same_weights_in_every_form():
    rng = np.random.default_rng(0)
    matrix = Int4(
        jnp.asarray(rng.integers(0, 256, (8, 128)), jnp.uint8), jnp.asarray(rng.random((8, 4)), jnp.float32), None
    )
    words = arranged(matrix)
    assert isinstance(words, Int4Words) and (words.cols, words.group) == (256, 64)
    np.testing.assert_array_equal(words.weights(), matrix.weights())
    for block, start, stop in ((256, 0, 256), (64, 32, 64)):
        pairs = zip(words.pieces(block, start, stop), matrix.pieces(block, start, stop), strict=True)
        for (column, levels), (column_again, levels_again) in pairs:
            assert column == column_again
            np.testing.assert_array_equal(levels, levels_again)


def test_int4_of_columns_that_no_kernel_takes_stays_as_it_is():
    matrix = Int4(jnp.zeros((8, 48), jnp.uint8), jnp.ones((8, 3)), None)
    assert arranged(matrix) is matrix


@pytest.mark.slow  # 24 s
def test_every_op_of_a_step_is_within_its_bound_by_kernels_and_plain():
    """Every op of a step is within its bound with kernels and with XLA, for a contiguous and for a paged cache."""
    params = load("q8_row", seed=1)
    layer, config, rng = params.layers[0], NARROW, np.random.default_rng(1)
    assert isinstance(layer.ffn, FeedForward)
    at = np.array([3, 71], np.int32)
    positions = Positions(jnp.asarray(at[:, None]), *(jnp.asarray(a) for a in params.rope.on_host(at[:, None])))
    x = jnp.asarray(rng.standard_normal((2, 1, config.dim)), jnp.float32)
    stale = jnp.full((2, config.kv_heads, CAPACITY, config.head_dim), jnp.nan)
    weights = {
        name: jax.tree.map(np.asarray, operand(weight))
        for name, weight in (
            ("qkv", layer.qkv.weight), ("o", layer.o.weight), ("gate_up", layer.ffn.gate_up.weight),
            ("down", layer.ffn.down.weight), ("head", params.head),
        )
    }  # fmt: skip
    vectors = np.asarray(x)[:, 0]
    cos, sin = params.rope.on_host(at)
    norms = [np.asarray(norm) for norm in (layer.attention_norm, layer.ffn_norm, params.norm)]
    q, k, v = exact.norm_qkv(
        weights["qkv"], vectors, norms[0], np.asarray(stale), np.asarray(stale), at, cos, sin,
        heads=config.heads, eps=config.eps,
    )  # fmt: skip
    expected = {
        "q": q,
        "k": k.map(lambda part: part[np.arange(2), :, at]),
        "v": v.map(lambda part: part[np.arange(2), :, at]),
        "project_add": exact.gemv(weights["o"], vectors, residual=vectors),
        "norm_gate_up": exact.norm_gate_up(weights["gate_up"], vectors, norms[1], eps=config.eps),
        "down_add": exact.gemv(weights["down"], vectors, residual=vectors),
        "norm_logits": exact.gemv(weights["head"], vectors, norm=norms[2], eps=config.eps),
    }

    def check(ops: Ops, cache: LayerStore, place: tuple[Any, ...]) -> None:
        q, cache = ops.norm_qkv(x, layer, cache, positions, config=config)
        results = {
            "q": q[:, 0],
            "k": cache.k[place],
            "v": cache.v[place],
            "project_add": ops.project_add(x, layer, x)[:, 0],
            "norm_gate_up": ops.norm_gate_up(x, layer, config=config)[:, 0],
            "down_add": ops.down_add(x, layer, x)[:, 0],
            "norm_logits": ops.norm_logits(x, params, config=config)[:, 0],
        }
        for name, result in results.items():
            within(result, expected[name])

    rows = LayerCache(stale, stale), (np.arange(2), slice(None), at)
    with interpreter():
        check(KERNEL_OPS, *rows)
    check(XLA, *rows)
    pages = jnp.full((5, config.kv_heads, 64, config.head_dim), jnp.nan)
    table = jnp.array([[3, 0], [1, 4]], jnp.int32)
    in_pages = LayerPages(pages, pages, table), (np.array([3, 4]), slice(None), at % 64)
    with interpreter():
        check(KERNEL_OPS, *in_pages)


def within(actual, expected: Approx) -> None:
    assert_within(np.asarray(actual), expected.value, expected.error)


@pytest.mark.slow  # 5 s
def test_q_k_and_v_of_two_forms_are_one_kernel():
    """A qkv matrix with parts in two quantized forms (as in a Q5_K_M file) runs as one kernel.

    For a prompt, its product agrees with the decoded weights of both parts.
    """
    params = load("q8", seed=4)
    rows = [NARROW.heads * NARROW.head_dim + NARROW.kv_heads * NARROW.head_dim, NARROW.kv_heads * NARROW.head_dim]
    parts = tuple(
        arranged(drawn(form, group, rows=count, cols=NARROW.dim, seed=count))
        for (form, group), count in zip((("int5_min", 32), ("int6", 16)), rows, strict=True)
    )
    layer = params.layers[0]
    layer = layer._replace(qkv=layer.qkv._replace(weight=Stacked(parts)))
    x, norm = Noise(0)(1, NARROW.dim), np.asarray(layer.attention_norm)
    at = np.array([5], np.int32)
    cos, sin = map(jnp.asarray, params.rope.on_host(at))
    positions = Positions(jnp.asarray(at[:, None]), cos[:, None], sin[:, None])
    stale = jnp.full((1, NARROW.kv_heads, CAPACITY, NARROW.head_dim), jnp.nan)
    ops, reasons = pallas_ops(NARROW, params._replace(layers=[layer]), capacity=CAPACITY)
    assert reasons["norm_qkv"] is None
    with interpreter():
        q, cache = ops.norm_qkv(jnp.asarray(x)[:, None], layer, LayerCache(stale, stale), positions, config=NARROW)
    weights = jax.tree.map(np.asarray, tuple(operand(part) for part in parts))
    expected = exact.norm_qkv(
        weights, x, norm, np.asarray(stale), np.asarray(stale), at, np.asarray(cos), np.asarray(sin),
        heads=NARROW.heads, eps=NARROW.eps,
    )  # fmt: skip
    for actual, exact_part in zip((q[:, 0], cache.k, cache.v), expected, strict=True):
        assert np.array_equal(np.isnan(actual), np.isnan(exact_part.value))
        new = ~np.isnan(exact_part.value)
        assert_within(np.asarray(actual)[new], exact_part.value[new], exact_part.error[new])
    many = jnp.asarray(Noise(1)(1, 3, NARROW.dim))
    full_weights = jnp.concatenate([part.weights() for part in parts])
    np.testing.assert_allclose(prompt_product(many, Stacked(parts)), many @ full_weights.T, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("scheme", ["q8", "q8_row", "q4"])
def test_prompts_multiply_weights_rounded_to_their_own_dtype(scheme):
    """For a bfloat16 prompt, products use weights rounded to bfloat16; for a float32 prompt, float32 weights."""
    ffn = load(scheme, seed=2).layers[0].ffn
    assert isinstance(ffn, FeedForward)
    down = ffn.down.weight
    assert isinstance(down, QuantizedMatrix)
    weights = np.asarray(down.weights(), np.float64)
    for dtype, unit in ((jnp.bfloat16, 2.0**-8), (jnp.float32, 0.0)):
        x = Noise(seed=5)(1, 40, NARROW.ffn, dtype=np.dtype(dtype))
        program = jax.jit(prompt_product).lower(x, down)
        operands = re.findall(r"dot_general.*\(tensor<[^>]*x(\w+)>, tensor<[^>]*x(\w+)>\)", program.as_text())
        assert operands == [("bf16", "bf16") if unit else ("f32", "f32")]
        wide = x.astype(np.float64)
        size = np.abs(wide) @ np.abs(weights).T
        bound = (unit + gamma(NARROW.ffn + 1) * (1 + unit)) * size
        assert_within(np.asarray(program.compile()(x, down)), wide @ weights.T, bound)


@pytest.mark.slow  # 33 s
def test_the_text_is_that_of_the_plain_form():
    """The compiled decode loop gives the same two greedy tokens with kernels and with XLA's ops."""
    params = load("q4", seed=3)
    cache = empty_cache(NARROW, batch=1, capacity=CAPACITY, dtype=FLOAT32)
    arguments = (
        params, state_after(np.array([1]), np.zeros((1, NARROW.vocab), bool)), cache, np.zeros((1, 2), np.uint32),
        as_arrays(SamplingOptions(temperature=0.0)), np.array([-1], np.int32), np.int32(2),
    )  # fmt: skip

    def text(ops: Ops) -> list[int]:
        drawn, *_ = jax.jit(partial(decode, config=NARROW, ops=ops, greedy=True, burst=2))(*arguments)
        return np.asarray(drawn)[:, 0].tolist()

    with interpreter():
        actual = text(KERNEL_OPS)
    assert actual == text(XLA)
    assert len(set(actual)) > 1


@pytest.mark.parametrize("batch", [MOST_SEQUENCES + 1, MAX_BATCH, MAX_BATCH + 1])
def test_quantized_products_are_kernels_up_to_their_batch_limit(batch):
    params, x = load("q8", seed=0), jax.ShapeDtypeStruct((batch, 1, NARROW.dim), FLOAT32)
    ops, _ = pallas_ops(NARROW, params, batch=batch, capacity=CAPACITY)
    program = str(jax.make_jaxpr(ops.project_add)(x, params.layers[0], x))
    assert ("griddepcontrol_wait" in program) == (batch <= MAX_BATCH)


def test_unsupported_codes_run_as_xla_ops_with_a_reason():
    """Kernels support e4m3 weights only with one scale per row.

    With one scale per 32 columns, the ops run as XLA ops, and the reason says why.
    """
    params, x = load("q8", seed=0), jnp.ones((1, 1, NARROW.dim))
    layer = params.layers[0]
    assert isinstance(layer.ffn, FeedForward)
    rng, gate_up = np.random.default_rng(0), layer.ffn.gate_up
    shapes = FP8.shapes(2 * NARROW.ffn, NARROW.dim, Codes("fp8", 32, zeros=False, bytes=0, parts=lambda: iter(())))
    drawn = jax.tree.map(lambda a: jnp.asarray(rng.integers(1, 127, a.shape), a.dtype), shapes)
    layer = layer._replace(ffn=layer.ffn._replace(gate_up=gate_up._replace(weight=drawn)))
    ops, reasons = pallas_ops(NARROW, params._replace(layers=[layer]), capacity=CAPACITY)
    assert (
        reasons["norm_gate_up"]
        == "kernels multiply by fp8 weights with one scale per row, got one scale per 32 columns"
    )
    assert reasons["down_add"] is None
    routed, plain = (table.norm_gate_up(x, layer, config=NARROW) for table in (ops, XLA))
    np.testing.assert_array_equal(routed, plain)


def test_integers_that_kernels_cannot_read_are_refused_by_name():
    codes, scales = jnp.zeros((8, 512), jnp.uint8), jnp.ones((8, 16))
    rows = arranged(Int8(jnp.zeros((8, 1024), jnp.int8), jnp.ones((8, 1)), jnp.zeros((8, 1), jnp.int8)))
    with pytest.raises(Unsupported, match=r"int8.*zero points"):
        operand(rows)
    with pytest.raises(Unsupported, match=r"int4.*model/weights/gpu_codes\.py"):
        operand(Int4(codes, scales, None))
