"""Products with quantized matrices depend on every code, scale and zero point."""

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.checkpoints.checkpoint import Codes, CodesWithMinima, Form, Part, Tensor
from llamaspec.model.checkpoints.codes import WITH_MINIMA, dequantized, exact_weights
from llamaspec.model.ops import products
from llamaspec.model.ops.products import cpu_product, dot, partial_sums
from llamaspec.model.running.compile import compiler_options
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.forms.table import CLASS_OF_FORM
from llamaspec.model.weights.groups import can_multiply
from llamaspec.model.weights.loading import abstract_params, load_params
from llamaspec.model.weights.params import FeedForward, Linear, weight_bytes
from llamaspec.reference.quantizers.affine import Affine
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.verify.bounds.precision import TINY
from llamaspec.verify.bounds.running_error import flushed, gamma
from tests.support.random_models import SMALL, random_checkpoint
from tests.support.strategies import Noise, assert_within, dtypes, noises, seeds

FLOAT32 = np.dtype(np.float32)


@dataclass
class Matrix:
    """A recipe for quantized matrices: codes from their whole range, and scales from 2^-4 to 2^4.

    Each minimum is minus the scale times a random code, so that weights may cancel to 0.
    """

    form: Form
    zeros: bool
    group: int  # 0: one group per row
    seed: int

    def __call__(self, rows: int, cols: int) -> tuple[Tensor, Part]:
        rng = np.random.default_rng(self.seed)
        group = self.group or cols
        grid = (rows, -(-cols // group))
        low, high = {
            "int8": (-128, 128), "int8_min": (-128, 128), "int6": (-32, 32), "int5": (-16, 16), "int5_min": (0, 32),
            "int4": (-8, 8), "fp8": (0, 256),
        }.get(self.form, (0, 16))  # fmt: skip
        scales = np.exp2(rng.uniform(-4, 4, grid)).astype(np.float32)
        if self.zeros:
            zeros = rng.integers(0, high - low, grid).astype(np.uint8)
            part = Affine(rng.integers(0, high - low, (rows, cols)).astype(np.uint8), scales, zeros)
        else:
            codes = rng.integers(low, high, (rows, cols)).astype(np.int8 if low else np.uint8)
            if self.form == "fp8":
                codes[codes & 0x7F == 0x7F] = 0  # NaN codes become 0
            elif self.form == "mxfp4":
                scales = rng.integers(123, 132, grid).astype(np.uint8)
            part = Quantized(codes, scales)
            if self.form in WITH_MINIMA:
                scales = scales.astype(np.float16).astype(np.float32)  # a product with a code must be exact
                part = CodesWithMinima(codes, scales, -scales * rng.integers(low, high, grid).astype(np.float32))
        codes = Codes(self.form, group, self.zeros, bytes=0, parts=lambda: iter([part]))
        return Tensor((rows, cols), FLOAT32, lambda: dequantized(codes, (rows, cols)), codes), part


EVERY = [
    *(("int8", False, group) for group in (0, 32, 64, 1024)),
    *(("int4", False, group) for group in (0, 32, 64, 128)),
    *((form, False, group) for form in ("int8", "int4", "int8_min", "int4_min") for group in (16, 256)),
    *((form, False, 32) for form in ("int8_min", "int5_min", "int5", "int4_min", "iq4_nl")),
    ("int6", False, 16),
    *((form, True, group) for form in ("int8", "int4") for group in (0, 64)),
    *(("nf4", False, 64), ("fp4", False, 64), ("fp8", False, 0), ("fp8", False, 128), ("mxfp4", False, 32)),
]
matrices = st.builds(lambda kind, seed: Matrix(*kind, seed=seed), st.sampled_from(EVERY), seeds)
# Whole blocks, a short last group, less than one group, and rows that do not fill a block of 256.
shapes = st.sampled_from([(5, 512), (3, 172), (2, 24), (4, 832)])
MANY = products.MOST_ONE_BY_ONE + 1
FORMS = {
    "dot": (dot, 1),
    "dot of many": (dot, 3),
    "cpu": (cpu_product, 1),
    "cpu, few": (cpu_product, 2),
    "cpu, many": (cpu_product, MANY),
}


def placed(tensor: Tensor) -> QuantizedMatrix:
    """Load the tensor as a model's head, and return the resulting matrix on the device."""
    checkpoint = random_checkpoint(replace(SMALL, vocab=tensor.shape[0], dim=tensor.shape[1]), seed=0)
    tensors = {**checkpoint.tensors, "lm_head.weight": tensor}
    head = load_params(replace(checkpoint, tensors=tensors), dtype=FLOAT32, positions=1).head
    assert isinstance(head, QuantizedMatrix)
    return head


@given(matrix=matrices, shape=shapes, form=st.sampled_from(sorted(FORMS)), noise=noises, dtype=dtypes)
def test_a_product_is_within_its_bound(matrix, shape, form, noise, dtype):
    """A product is within the error bound of a sum of `cols` products in any order, times a scale, plus minima."""
    product, tokens = FORMS[form]
    tensor, part = matrix(*shape)
    x = noise(1, tokens, shape[1], dtype=dtype)
    assert_product(jax.jit(product)(x, placed(tensor)), x, tensor, part)


@pytest.mark.sampled(10)  # 28 cases, 6 s
@pytest.mark.parametrize("kind", EVERY, ids=str)
def test_every_kind_is_multiplied_as_one_token_needs_it(kind):
    """`cpu_product` of one token (used in decoding) is within its bound for every kind of quantized matrix."""
    tensor, part = Matrix(*kind, seed=5)(5, 512)
    x = Noise(seed=6)(1, 1, 512)
    assert_product(jax.jit(cpu_product)(x, placed(tensor)), x, tensor, part)


def assert_product(y: jax.Array, x: np.ndarray, tensor: Tensor, part: Part):
    assert tensor.codes
    cols = x.shape[-1]
    exact, wide = exact_weights(tensor.codes, part), np.abs(x.astype(np.float64))
    assert y.dtype == FLOAT32
    size = np.abs(exact)
    if isinstance(part, CodesWithMinima):  # |code * scale| and |minimum| are added, since the weight itself may cancel
        halves = (part._replace(minima=0 * part.minima), part._replace(scales=0 * part.scales))
        size = np.sum([np.abs(exact_weights(tensor.codes, half)) for half in halves], axis=0)
    bound = gamma(cols + 1 + isinstance(part, CodesWithMinima)) * (wide @ size.T)
    largest = np.max(size)  # of a level and of a weight: a scale may be below or above 1
    bound = bound + np.sum(flushed(wide, 480.0, 16.0 + largest), axis=-1, keepdims=True) + cols * TINY
    assert_within(y, x.astype(np.float64) @ exact.T, bound)


@given(matrix=matrices, shape=shapes)
def test_the_weights_of_a_matrix_are_those_of_its_codes(matrix, shape):
    """Each weight on the device is the exact weight, rounded once. Padding is finite, because it is multiplied by 0."""
    tensor, part = matrix(*shape)
    assert tensor.codes
    exact = exact_weights(tensor.codes, part)
    weights = np.asarray(jax.jit(QuantizedMatrix.weights)(placed(tensor)))
    np.testing.assert_array_equal(weights[:, : shape[1]], exact.astype(np.float32))
    np.testing.assert_array_equal(weights[:, : shape[1]], tensor.read())
    assert np.isfinite(weights).all()


@pytest.mark.parametrize(
    "kind",
    [("int8", False, 64), ("int4", True, 64), ("int4", False, 16), ("int4_min", False, 16), ("mxfp4", False, 32)],
    ids=str,
)
def test_the_parts_of_a_matrix_have_the_columns_that_split_takes(kind):
    matrix = placed(Matrix(*kind, seed=9)(2, 512)[0])
    columns = [np.asarray(own, np.int32) for own in matrix.split(jnp.arange(matrix.cols, dtype=jnp.float32))]
    for part, own in zip(matrix.parts(), columns, strict=True):
        np.testing.assert_array_equal(part, matrix.weights()[:, own])
    assert sorted(np.concatenate(columns)) == list(range(matrix.cols))


def test_every_form_has_a_kind():
    assert {form: kind.form for form, kind in CLASS_OF_FORM.items()} == {form: form for form in CLASS_OF_FORM}


def test_groups_that_cannot_run_are_dequantized():
    tensor, _ = Matrix("int8", False, 24, seed=1)(4, 96)
    assert tensor.codes and not can_multiply(tensor.codes, 96)
    checkpoint = random_checkpoint(replace(SMALL, vocab=4, dim=96), seed=0)
    tensors = {**checkpoint.tensors, "lm_head.weight": tensor}
    head = load_params(replace(checkpoint, tensors=tensors), dtype=FLOAT32, positions=1).head
    np.testing.assert_array_equal(np.asarray(head), tensor.read())


def test_matrices_that_are_stacked_stay_quantized_only_together():
    dim, ffn = SMALL.dim, SMALL.ffn
    gate, up, third = (Matrix(form, False, 0, seed=1)(ffn, dim)[0] for form in ("int8", "int8", "fp8"))
    checkpoint = random_checkpoint(replace(SMALL, layers=1), seed=0)

    def gate_up(first: Tensor, second: Tensor) -> Linear:
        mlp = {"model.layers.0.mlp.gate_proj.weight": first, "model.layers.0.mlp.up_proj.weight": second}
        changed = replace(checkpoint, tensors={**checkpoint.tensors, **mlp})
        params = load_params(changed, dtype=FLOAT32, positions=1)
        abstract = abstract_params(changed.config, dtype=FLOAT32, positions=1, tensors=changed.tensors)
        assert [(a.shape, a.dtype) for a in jax.tree.leaves(params)] == [
            (a.shape, a.dtype) for a in jax.tree.leaves(abstract)
        ]
        assert weight_bytes(params) == weight_bytes(abstract)
        feed_forward = params.layers[0].ffn
        assert isinstance(feed_forward, FeedForward)
        return feed_forward.gate_up

    assert isinstance(gate_up(gate, up).weight, QuantizedMatrix)
    np.testing.assert_array_equal(gate_up(gate, third).weight, np.concatenate([gate.read(), third.read()]))


@pytest.mark.parametrize(("name", "at_once"), [("dot", 16), ("cpu", 24)])
def test_a_large_matrix_is_decoded_in_blocks_of_rows(monkeypatch, name, at_once):
    """A prompt's product decodes a large matrix in blocks of rows, so that the whole matrix is never in float32."""
    monkeypatch.setattr(products, "MOST_DECODED", 16 * 192)
    tensor, part = Matrix("int4", False, 64, seed=3)(48, 172)
    x = Noise(seed=4)(1, MANY, 172)
    product = jax.jit(partial(FORMS[name][0]))  # a fresh function: other tests compiled theirs for another limit
    assert_product(product(x, placed(tensor)), x, tensor, part)
    text = product.lower(x, placed(tensor)).compile().as_text()
    assert text is not None
    width = 192 if name == "dot" else 96  # a CPU keeps the low and high halves of bytes apart
    assert f"f32[{at_once},{width}]" in text
    assert not any(f"f32[48,{cols}]" in text for cols in (96, 192))


GROUPED: list[tuple[Form | None, int]] = [
    (form, {"int8": 64, "int4": 64, "nf4": 64, "fp4": 64, "fp8": 0}.get(form, 32)) for form in CLASS_OF_FORM
]


@pytest.mark.parametrize("limit", [products.MOST_KEPT, 64 * 512], ids=["one block", "blocks"])
def test_products_of_few_vectors_do_not_depend_on_neighbors(monkeypatch, limit):
    """A vector's product does not depend on the other vectors of the batch.

    The product decodes the matrix in blocks of rows. With a single block, the product also equals the product of the
    vector in a batch of one. With several blocks it need not, because XLA compiles a loop over blocks differently. The
    memory suffices for one vector's product and one block of codes, so no second block is decoded ahead.
    """
    monkeypatch.setattr(products, "MOST_KEPT", limit)
    tensor, _ = Matrix("int8", False, 64, seed=7)(256, 512)
    matrix, x = placed(tensor), Noise(seed=8)(products.MOST_ONE_BY_ONE, 1, 512)
    product = jax.jit(partial(cpu_product)).lower(x, matrix).compile(compiler_options("cpu"))
    single = jax.jit(cpu_product).lower(x[:1], matrix).compile(compiler_options("cpu"))
    actual = np.asarray(product(x, matrix))
    for i in range(len(x)):
        neighbors = np.array(Noise(seed=9)(*x.shape))
        neighbors[i] = x[i]
        np.testing.assert_array_equal(product(neighbors, matrix)[i], actual[i])
        if limit >= 256 * 512:
            np.testing.assert_array_equal(single(x[i : i + 1], matrix)[0], actual[i])
    few, single_memory = product.memory_analysis(), single.memory_analysis()
    assert few and single_memory
    block = limit if limit < 256 * 512 else 0  # bytes of its codes
    assert (
        few.temp_size_in_bytes
        <= single_memory.temp_size_in_bytes + 4 * 2 * x.size + 4 * 2 * len(x) * 256 + 1024 + block
    )


@pytest.mark.parametrize("count", [2, 8, 20])
@pytest.mark.parametrize("form", [None, "int8"])
def test_products_of_many_vectors_do_not_depend_on_neighbors(form: Form | None, count: int):
    """A vector's product has the same bits at every place in the batch, and does not depend on the other vectors.

    The matrix is the first operand of the dot, because XLA does not copy the first operand.
    """
    tensor, _ = Matrix("int8", False, 64, seed=9)(96, 512)
    weight = placed(tensor) if form else jnp.asarray(Noise(seed=9)(1, 96, 512)[0])
    x = Noise(seed=10)(count, 1, 512)
    product = jax.jit(partial(cpu_product)).lower(x, weight).compile(compiler_options("cpu"))
    y = np.asarray(product(x, weight))
    for place in range(1, count, 3):
        neighbors = Noise(seed=11)(count, 1, 512)
        neighbors[place] = x[0]
        np.testing.assert_array_equal(product(neighbors, weight)[place], y[0])
    if count > products.MOST_ONE_BY_ONE or not form:
        assert re.search(rf"= f32\[\d+,{count}\]\S* dot\(", product.as_text() or "")


@pytest.mark.parametrize("count", [8, 20, 65])
def test_products_of_many_bfloat16_vectors_are_bounded_and_independent(count: int):
    """Products of bfloat16 vectors are within the bound, and do not depend on the other vectors of the batch.

    Some batches are padded to a multiple of a register's width.
    """
    bfloat16 = np.dtype(jnp.bfloat16)
    weight, x = Noise(seed=9)(1, 96, 512, dtype=bfloat16)[0], Noise(seed=10)(count, 1, 512, dtype=bfloat16)
    product = jax.jit(partial(cpu_product)).lower(x, weight).compile(compiler_options("cpu"))
    y = np.asarray(product(x, weight))
    exact, wide = weight.astype(np.float64), x.astype(np.float64)
    size = np.abs(wide) @ np.abs(exact).T
    subnormal = np.sum(flushed(np.abs(wide), np.max(np.abs(exact))), axis=-1, keepdims=True)
    assert_within(y, wide @ exact.T, gamma(512) * size + subnormal)
    for place in range(1, count, 6):
        neighbors = Noise(seed=11)(count, 1, 512, dtype=bfloat16)
        neighbors[place] = x[0]
        np.testing.assert_array_equal(product(neighbors, weight)[place], y[0])
    dot_shape = re.search(r"= f32\[([\d,]+)\]\S* dot\(", product.as_text() or "")
    assert dot_shape and dot_shape[1] == ("96,32" if count in products.NARROW_BY_ROWS else f"{count},96")


@pytest.mark.sampled(8)  # 24 cases, 9 s
@pytest.mark.parametrize("shape", [(3072, 2048), (20_480, 4096)], ids=["small", "large"])
@pytest.mark.parametrize(("form", "group"), [*GROUPED, ("nf4", 128), ("int8", 0), (None, 0)])
def test_a_cpu_product_writes_only_partial_sums(form: Form | None, group: int, shape):
    """A product on a CPU writes only the partial sums that the memory plan counts, no float32 weights or copied codes.

    The partial sums take at most half a byte per weight, as much as NF4 codes. In matrices of 10,000 rows or more, each
    partial sum covers twice as many columns, so the sums take at most a quarter of a byte per weight.
    """
    rows, cols = shape
    weight: Any = jax.ShapeDtypeStruct(shape, FLOAT32)
    if form:
        weight = CLASS_OF_FORM[form].shapes(
            rows, cols, Codes(form, group or cols, zeros=False, bytes=0, parts=lambda: iter(()))
        )
    x = jax.ShapeDtypeStruct((1, 1, cols), FLOAT32)
    compiled = jax.jit(cpu_product).lower(x, weight).compile(compiler_options("cpu"))
    analysis = compiled.memory_analysis()
    assert analysis
    temporary = analysis.temp_size_in_bytes
    assert abs(temporary - 4 * partial_sums(weight)) <= 4 * 2 * (rows + cols)  # plus x, and the sums of rows
    assert temporary <= rows * cols / (2 if shape[0] < 10_000 else 4) + 8 * (rows + cols)
