"""The gemv kernel with quantized weights against float64: each column uses its own code and scale."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from llamaspec.benchmarks.common.kernel_cases import exact
from llamaspec.model.weights.forms.table import LEVELS
from llamaspec.pallas_kernels.gemv import gemv
from llamaspec.pallas_kernels.parts import int4
from llamaspec.pallas_kernels.parts.card import H200
from llamaspec.pallas_kernels.parts.compat import Target, current_target, interpreter, use_target
from llamaspec.pallas_kernels.parts.levels import Levels
from llamaspec.pallas_kernels.parts.matrix import ScaledCodes, product_of
from llamaspec.pallas_kernels.parts.tile import Tile
from llamaspec.pallas_kernels.unsupported import Unsupported
from llamaspec.verify.bounds.running_error import Approx, added
from tests.support.strategies import Noise, assert_within, at_extremes, dtypes, noises, share_of

# Bits, columns per scale, and the extra data: minima per group, or the levels that the codes index.
INTEGERS = [(8, None), *((bits, group) for bits in (8, 4) for group in (16, 32, 64, 128)), (6, 16), (5, 32)]
FORMS = [
    *((bits, group, None) for bits, group in INTEGERS),
    *((bits, group, "minima") for bits, group in INTEGERS if group),
    *((4, levels.group, name) for name, levels in LEVELS.items()),
]
LARGEST = {8: 127, 6: 31, 5: 15, 4: 7}


@dataclass
class Weight:
    """Quantized weights in the kernel's layout, and their codes, scales, and optional minima or levels in float64."""

    codes: np.ndarray  # int8 [rows, cols]
    scales: np.ndarray
    bits: int
    minima: np.ndarray | None = None
    levels: Levels | None = None

    @property
    def stored(self) -> ScaledCodes:
        minima = None if self.minima is None else jnp.asarray(self.minima)
        w = ScaledCodes(jnp.asarray(self.codes), jnp.asarray(self.scales), minima, self.levels)
        if self.bits == 8:
            return w
        order = int4.order_of(self.codes.shape[1] // self.scales.shape[1], levels=self.levels is not None)
        if self.bits == 4:
            return replace(w, codes=jnp.asarray(int4.pack(self.codes & 15, order, lowest=0)))
        words, low_bits = int4.packed_apart(self._unsigned.astype(np.uint8), order, bits=self.bits)
        return replace(w, codes=jnp.asarray(words.view(np.int32)), low_bits=jnp.asarray(low_bits.view(np.int32)))

    @property
    def _unsigned(self) -> np.ndarray:
        return self.codes & (1 << self.bits) - 1

    @property
    def weights(self) -> np.ndarray:
        """Compute the exact weights in float64, [rows, cols]."""
        codes = self.codes.astype(np.float64)
        if self.levels is not None:
            codes = np.array(self.levels.integers)[self._unsigned] * self.levels.unit
        elif self.bits < 8 and self.minima is not None:
            codes = self._unsigned.astype(np.float64)
        weights = codes * self._spread(self.scales)
        return weights if self.minima is None else weights + self._spread(self.minima)

    def _spread(self, numbers) -> np.ndarray:
        """Repeat each group's number for every column of the group."""
        numbers = numbers.astype(np.float64).reshape(len(self.codes), -1)
        return np.repeat(numbers, self.codes.shape[1] // numbers.shape[1], axis=1)


def draw(noise: Noise, rows: int, cols: int, *, bits: int, group: int | None, form: str | None = None) -> Weight:
    codes = noise.rng.integers(-LARGEST[bits] - 1, LARGEST[bits] + 1, (rows, cols)).astype(np.int8)
    scales = np.abs(noise(rows) if group is None else noise(rows, cols // group))
    minima = 8 * noise(rows, cols // group) if form == "minima" and group else None
    return Weight(codes, scales, bits, minima, LEVELS.get(form or ""))


def multiply(w: Weight, x, **options) -> np.ndarray:
    with interpreter():
        placed: dict[str, Any] = {n: jnp.asarray(a) if isinstance(a, np.ndarray) else a for n, a in options.items()}
        return np.asarray(gemv(w.stored, jnp.asarray(x), **placed))


def exactly(w: Weight, x, **options) -> Approx:
    return exact.gemv(jax.tree.map(np.asarray, w.stored), x, **options)


@pytest.mark.slow  # 18 s
@settings(max_examples=share_of(8))
@given(
    noise=noises,
    scheme=st.sampled_from(FORMS),
    cols=st.sampled_from([1024, 1536, 2048, 2560, 5 * 1024, 5 * 1024 + 512]),
    batch=st.integers(1, 3),
    tile=st.sampled_from([Tile(8, 1), Tile(8, 2), Tile(16, 2), Tile(8, 3, 1), Tile(8, 2, 4), Tile(40, 2), Tile(64, 2)]),
    dtype=dtypes,
)
@example(noise=Noise(0), scheme=(8, None, None), cols=1152, batch=1, tile=Tile(8, 2), dtype=np.dtype("float32"))
@example(noise=Noise(1), scheme=(4, 32, None), cols=8192 + 256, batch=1, tile=Tile(8, 4), dtype=np.dtype("float32"))
@example(
    noise=Noise(2, outliers=True), scheme=(4, 128, None), cols=5632, batch=1, tile=Tile(8, 2), dtype=np.dtype("float32")
)
@example(noise=Noise(3), scheme=(8, 64, None), cols=1024, batch=8, tile=Tile(8, 4), dtype=np.dtype("bfloat16"))
@example(noise=Noise(4), scheme=(8, 64, None), cols=2048, batch=1, tile=Tile(8, 5, 4), dtype=np.dtype("bfloat16"))
@example(noise=Noise(5), scheme=(4, 64, None), cols=1536, batch=2, tile=Tile(8, 3, 1), dtype=np.dtype("float32"))
@example(noise=Noise(6), scheme=(8, None, None), cols=1152, batch=1, tile=Tile(16, 4, 1), dtype=np.dtype("float32"))
@example(noise=Noise(7), scheme=(8, 64, None), cols=2048, batch=1, tile=Tile(8, 2, 1), dtype=np.dtype("bfloat16"))
@example(noise=Noise(8), scheme=(4, 64, None), cols=4096, batch=2, tile=Tile(8, 4), dtype=np.dtype("bfloat16"))
@example(
    noise=Noise(9), scheme=(4, 64, None), cols=5 * 1024 + 512, batch=2, tile=Tile(40, 2), dtype=np.dtype("bfloat16")
)
@example(noise=Noise(10), scheme=(8, 64, None), cols=5 * 1024, batch=1, tile=Tile(64, 2, 1), dtype=np.dtype("bfloat16"))
@example(noise=Noise(11), scheme=(4, 32, "minima"), cols=5632, batch=2, tile=Tile(16, 2), dtype=np.dtype("bfloat16"))
@example(noise=Noise(12), scheme=(8, 16, None), cols=5632, batch=1, tile=Tile(16, 2), dtype=np.dtype("float32"))
@example(noise=Noise(13), scheme=(4, 16, "minima"), cols=1536, batch=3, tile=Tile(8, 2), dtype=np.dtype("float32"))
@example(noise=Noise(15), scheme=(6, 16, None), cols=5632, batch=2, tile=Tile(16, 2), dtype=np.dtype("float32"))
@example(noise=Noise(16), scheme=(5, 32, "minima"), cols=5632, batch=3, tile=Tile(8, 2), dtype=np.dtype("bfloat16"))
@example(noise=Noise(17), scheme=(5, 32, None), cols=2048, batch=1, tile=Tile(8, 2, 1), dtype=np.dtype("float32"))
@example(noise=Noise(14), scheme=(4, 64, "nf4"), cols=2048, batch=2, tile=Tile(16, 2), dtype=np.dtype("float32"))
@at_extremes(scheme=(4, 32, "minima"), cols=1024, batch=1, tile=Tile(8, 2), dtype=np.dtype("float32"))
@at_extremes(scheme=(8, None, None), cols=1024, batch=1, tile=Tile(8, 2), dtype=np.dtype("float32"))
@at_extremes(scheme=(4, 64, None), cols=1024, batch=1, tile=Tile(8, 2), dtype=np.dtype("bfloat16"))
def test_product(noise, scheme, cols, batch, tile, dtype):
    """The product is within its error bound, even if a thread block computes several tiles."""
    bits, group, form = scheme
    w = draw(noise, max(48, 3 * tile.rows), cols, bits=bits, group=group, form=form)
    x = noise(batch, cols, dtype=dtype)
    try:
        y = multiply(w, x, out=jnp.float32, tile=tile)
    except Unsupported as error:  # the largest tile with three long float32 vectors
        assert "bytes of shared memory" in str(error) and tile.rows == 64 and batch == 3
        reject()
    expected = exactly(w, x, out=np.float32)
    assert_within(y, expected.value, expected.error)


@pytest.mark.slow  # 10 s
@settings(max_examples=share_of(3))
@given(noise=noises, scheme=st.sampled_from(FORMS), dtype=dtypes, eps=st.sampled_from([1e-6, 0.5]))
@example(noise=Noise(0), scheme=(4, 64, None), dtype=np.dtype("float32"), eps=1e-5)
@example(noise=Noise(0), scheme=(8, 128, None), dtype=np.dtype("bfloat16"), eps=1e-5)
@example(
    noise=Noise(0, exponent=-100), scheme=(8, 128, None), dtype=np.dtype("float32"), eps=1e-6
)  # the bound must allow for flushed subnormals
@example(noise=Noise(0, exponent=-60), scheme=(4, 64, None), dtype=np.dtype("float32"), eps=1e-6)
def test_norm_bias_and_residual(noise, scheme, dtype, eps):
    bits, group, form = scheme
    rows, cols, batch = 8, 5632 if group else 1280, 2
    w = draw(noise, rows, cols, bits=bits, group=group, form=form)
    x, norm, bias, residual = (noise(*shape, dtype=dtype) for shape in ((batch, cols), (cols,), (rows,), (batch, rows)))
    options = {"norm": norm, "eps": eps, "bias": bias, "residual": residual}
    y = multiply(w, x, **options, tile=Tile(8, 2))
    assert y.dtype == dtype
    expected = exactly(w, x, **options)
    assert_within(y, expected.value, expected.error)


@pytest.mark.sampled(1)  # 2 to 3 s each
@pytest.mark.parametrize(("bits", "group", "form"), FORMS)
def test_a_unit_vector_gives_a_column_and_its_scales(bits, group, form):
    """A product with a one-hot vector gives one column of the weights, rounded once.

    For NF4 and FP4 weights, and for weights with minima, the error may be larger: at most 2^-22 (|weight| + 2
    |minimum|).
    """
    w = draw(Noise(0), 8, 2560, bits=bits, group=group, form=form)
    columns = np.array([5, 31, 1024, 2559])
    x = np.zeros((4, 2560), np.float32)
    x[np.arange(4), columns] = 1
    y, weights = multiply(w, x, tile=Tile(8, 2)), w.weights[:, columns].T
    if form in (None, "iq4_nl", "mxfp4"):
        np.testing.assert_array_equal(y, weights.astype(np.float32))  # rounded once
    else:
        size = np.abs(weights) + (0 if w.minima is None else 2 * np.abs(w._spread(w.minima)[:, columns].T))
        assert_within(y, weights, 4 * 2.0**-24 * size)


def test_a_group_with_scale_0_contributes_0():
    w = draw(Noise(0), 8, 1024, bits=4, group=128)
    w.scales[:, 1] = 0
    x = np.zeros((1, 1024), np.float32)
    x[0, 128:256] = Noise(1)(128)
    np.testing.assert_array_equal(multiply(w, x), np.zeros((1, 8)))


def test_two_runs_of_rows_in_a_block():
    """One thread block multiplies rows of gate and rows of up by the same x, as the fused kernels do."""
    w = draw(Noise(0), 16, 2048, bits=4, group=64)
    x = Noise(1)(1, 2048)

    def pairs(*refs, staged, smem):
        *weight, x_ref, y_ref = refs

        def starts(tile):
            return [pl.multiple_of(tile + at, 8) for at in (0, 8)]

        def finish(_, dots, read):
            assert read == "read"
            ((first, second),) = dots
            smem[...] = first - second
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, y_ref)
            plgpu.wait_smem_to_gmem(0)

        block = lax.axis_index("block")
        ends = {"ahead": lambda _: "read", "finish": finish}
        product.run(block, weight, starts, x_ref, None, staged, current_target(), eps=0.0, **ends)

    product = product_of("pairs", w.stored, jnp.asarray(x), normed=False, tile=Tile(16, 1), runs=2)
    with interpreter():
        kernel = current_target().kernel(
            pairs,
            out_type=jax.ShapeDtypeStruct((8,), jnp.float32),
            grid=(1,),
            grid_names=("block",),
            scratch_types={"staged": product.scratch(normed=False), "smem": plgpu.SMEM((8,), jnp.float32)},
        )
        y = jax.jit(kernel)(*product.operands(w.stored), product.view(jnp.asarray(x)))
    a, b = (exactly(w, x).map(lambda part, half=half: np.split(part[0], 2)[half]) for half in (0, 1))
    difference = added(a, b.map(np.negative)._replace(error=b.error))
    assert_within(y, difference.value, difference.error)


def refused(codes=(8, 1024), scales=(8, 16), x=(1, 1024), *, kind="int8", dtype="float32", **options):
    def call() -> jax.Array:  # builds arrays only when called, because every pytest worker collects all cases
        w = ScaledCodes(jnp.zeros(codes, kind), jnp.zeros(scales, jnp.float32))
        return gemv(w, jnp.zeros(x, dtype), **options)

    return call


def in_parts(low_bits: tuple[int, int], *, kind="int32", codes="int32", groups=64):
    """Return a function that calls gemv with six-bit codes.

    `low_bits` is the shape of the array that stores the two lowest bits of each code.
    """

    def call() -> jax.Array:
        words = jnp.zeros((8, 128 if codes == "int32" else 1024), codes)
        w = ScaledCodes(words, jnp.zeros((8, groups), jnp.float32), low_bits=jnp.zeros(low_bits, kind))
        return gemv(w, jnp.zeros((1, 1024), "float32"))

    return call


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (refused(kind="uint8"), "codes int8 .* got uint8"),
        (refused(codes=(8, 2, 512)), r"codes \[rows, cols\]"),
        (refused(x=(1024,)), r"x \[batch, 1024\]"),
        (refused(x=(1, 1025)), r"x \[batch, 1024\]"),
        (refused(dtype="float16"), "float32 or bfloat16, got float16"),
        (refused(kind="int32", x=(1, 1024)), r"x \[batch, 8192\]"),
        (refused(x=(0, 1024)), "1 to 8 vectors, got 0"),
        (refused(x=(9, 1024)), "1 to 8 vectors, got 9"),
        (refused(scales=(8, 128)), "a scale for each 16, 32, 64, 128 columns or each row"),
        (refused(scales=(8, 0)), "a scale for each"),
        (refused(codes=(8, 128), kind="int32", scales=(8,)), r"16, 32, 64, 128 columns, got scales \(8,\)"),
        (refused(scales=(7, 16)), r"scales \[8, 16\] in float32"),
        (in_parts(low_bits=(8, 48)), r"low bits \[8, 32\] in int32, got \[8, 48\]"),
        (in_parts(low_bits=(8, 64), kind="int8"), r"low bits \[8, 64\] in int32, got \[8, 64\] in int8"),
        (in_parts(low_bits=(8, 64), groups=16), "in groups of 16 or 32 columns, got 64"),
        (in_parts(low_bits=(8, 64), codes="int8"), "5 and 6 bits in words"),
        (refused(scales=(7,)), r"scales \[8\] in float32"),
        (refused(codes=(12, 1024), scales=(12, 16)), "rows of W in multiples of 8, got 12"),
        (refused(codes=(0, 1024), scales=(0, 16)), "rows of W"),
        (refused(tile=Tile(8, chunks=2)), "codes need a tile without chunks in .*, got 2"),
        (refused(tile=Tile(12, 1)), "rows of W in multiples of 12, got 8"),
        (
            refused(codes=(8, 512), scales=(8, 8), x=(1, 512)),
            "at least 1024 columns of W, in multiples of 256, got 512",
        ),
        (refused(codes=(8, 1152), scales=(8, 18), x=(1, 1152)), "columns of W, in multiples of 256, got 1152"),
        (
            refused(codes=(8, 144), kind="int32", scales=(8, 36), x=(1, 1152)),
            "at least 1024 columns of W, in multiples of 256, got 1152",
        ),
        (refused(codes=(8, 28672), scales=(8,), x=(3, 28672)), "bytes of shared memory for 3 vectors of 28672"),
        (refused(norm=np.zeros(1024, jnp.bfloat16)), r"norm \[1024\] in float32"),
        (refused(bias=np.zeros(9, np.float32)), r"bias \[8\]"),
        (refused(residual=np.zeros((2, 8), np.float32)), r"residual \[1, 8\]"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_it_cannot_do_is_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(0, 3), blocks=st.integers(0, 3))
def test_int4_packing_is_a_bijection(seed, rows, blocks):
    rng = np.random.default_rng(seed)
    codes = rng.integers(-8, 8, (rows, int4.BLOCK * blocks)).astype(np.int8)
    np.testing.assert_array_equal(int4.unpack(int4.pack(codes)), codes)
    words = rng.integers(-(2**31), 2**31, (rows, int4.BLOCK // int4.WORD * blocks)).astype(np.int32)
    np.testing.assert_array_equal(int4.pack(int4.unpack(words)), words)


@given(seed=st.integers(0, 2**32 - 1), bits=st.sampled_from([5, 6]), order=st.sampled_from(["bytes", "halves"]))
def test_codes_with_a_rest_are_those_that_were_packed(seed, bits, order):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (3, 2 * int4.WIDE_BLOCK)).astype(np.uint8)
    words, low_bits = (part.view(np.int32) for part in int4.packed_apart(codes, order, bits=bits))
    assert (words.shape, low_bits.shape) == ((3, 64), (3, 512 * (bits - 4) // 32))
    np.testing.assert_array_equal(int4.unpacked(words, order, low_bits), codes)


def test_int4_codes_are_bytes_in_place():
    """A byte holds two int4 codes. Read as int8, its upper half with zeros below it is 16 times one code.

    Its lower half, shifted left by 4, is 16 times the other code.
    """
    codes = np.resize(np.arange(-8, 8, dtype=np.int8), (1, 128))
    words = int4.pack(codes).view(np.uint32)[0].reshape(4, 4)  # words of the four lanes, each with all runs
    for run, of_lanes in enumerate(words.T):
        lower, upper = ((half & np.uint32(0xF0F0F0F0)).view(np.int8) for half in (of_lanes << 4, of_lanes))
        run_codes = codes[0, 32 * run : 32 * run + 32].reshape(4, 2, 4)
        np.testing.assert_array_equal(lower.reshape(4, 4), 16 * run_codes[:, 0])
        np.testing.assert_array_equal(upper.reshape(4, 4), 16 * run_codes[:, 1])


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        (np.zeros((1, 96), np.int8), "columns in multiples of 128, got 96"),
        (np.full((1, 128), 8, np.int8), "-8 to 7, got 8"),
    ],
)
def test_int4_packing_refuses_invalid_codes(codes, words):
    with pytest.raises(ValueError, match=words):
        int4.pack(codes)


def test_levels_take_no_more_rows_than_registers_hold():
    rows, cols = 8192, 28_672
    codes = jax.ShapeDtypeStruct((rows, cols // 8), jnp.int32)
    scales = jax.ShapeDtypeStruct((rows, cols // 64), jnp.float32)
    x = jax.ShapeDtypeStruct((1, cols), jnp.bfloat16)
    matrices = [ScaledCodes(codes, scales, levels=levels) for levels in (None, LEVELS["nf4"])]
    with use_target(Target(card=H200)):  # its measured tile has 64 rows
        assert [product_of("gemv", w, x, normed=False).rows for w in matrices] == [64, 16]
