import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.quantizers import affine, symmetric
from llamaspec.reference.quantizers.blocks import FLOAT32_MAX, join, split, spread
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.support.goldens import read_golden
from tests.support.strategies import assert_within, roundoff

GOLDENS = read_golden("quantizers/methods")
U32 = roundoff(np.float32)
HALF_DENORMAL = 2.0**-150

shapes_and_blocks = st.sampled_from(
    [((4, 6), (4, 6)), ((4, 6), (1, 6)), ((4, 6), (1, 3)), ((4, 6), (2, 2)), ((7,), (7,)), ((2, 3, 8), (1, 1, 4))]
)
weights = st.builds(
    Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-140, 127)
)
bits = st.integers(2, 8)


def both_steps(q, shape) -> np.ndarray:
    return spread(q.scales.astype(np.float64), shape)


def symmetric_bound(q: symmetric.Quantized, *, bits: int) -> np.ndarray:
    steps = both_steps(q, q.codes.shape)
    return np.maximum(steps / 2, symmetric.largest_code(bits) * HALF_DENORMAL)


def affine_bound(q: affine.Affine, *, bits: int) -> np.ndarray:
    steps = both_steps(q, q.codes.shape)
    return steps / 2 + (2**bits - 1) * (2 * U32 * steps + HALF_DENORMAL)


@given(weights=weights, shape_and_block=shapes_and_blocks, bits=bits)
def test_the_error_is_bounded(weights, shape_and_block, bits):
    shape, block = shape_and_block
    w = weights(*shape)
    q = symmetric.quantize(w, bits=bits, block=block)
    assert_within(symmetric.dequantize(q), w, symmetric_bound(q, bits=bits))
    q = affine.quantize(w, bits=bits, block=block)
    assert_within(affine.dequantize(q), w, affine_bound(q, bits=bits))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_error_is_bounded_for_every_small_denormal(bits):
    """The error bound also holds if a block's largest weight is a small multiple of float32's smallest denormal.

    Random draws rarely reach such weights.
    """
    tops = np.arange(1, 4097)[:, None] * 2.0**-149
    fractions = np.array([1, -1, 0.5, 0.25, -0.7, 0.99])
    w = (np.floor(tops / 2.0**-149 * fractions) * 2.0**-149).astype(np.float32)
    q = symmetric.quantize(w, bits=bits, block=(1, 6))
    assert_within(symmetric.dequantize(q), w, symmetric_bound(q, bits=bits))
    worst = np.max(np.abs(symmetric.dequantize(q) - w)[q.scales[:, 0] == 0], initial=0)
    assert worst == (symmetric.largest_code(bits) // 2) * 2.0**-149  # an underflowing weight is lost entirely
    q = affine.quantize(w, bits=bits, block=(1, 6))
    assert_within(affine.dequantize(q), w, affine_bound(q, bits=bits))


def test_the_largest_numbers():
    w = np.array([[FLOAT32_MAX, -FLOAT32_MAX, 0.0, 1.0]], np.float32)
    q = symmetric.quantize(w, bits=8, block=(1, 4))
    np.testing.assert_array_equal(q.codes, [[127, -127, 0, 0]])
    assert_within(symmetric.dequantize(q), w, symmetric_bound(q, bits=8))
    q = affine.quantize(w, bits=2, block=(1, 4))
    assert_within(affine.dequantize(q), w, affine_bound(q, bits=2))


@pytest.mark.parametrize("quantize", [symmetric.quantize, affine.quantize])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros(quantize, zero):
    q = quantize(np.full((2, 4), zero, np.float32), bits=4, block=(1, 4))
    assert not q.codes.any() and not q.scales.any()
    w = np.array([[zero, 3.0, -1.0, zero]], np.float32)
    dequantize = symmetric.dequantize if quantize is symmetric.quantize else affine.dequantize
    np.testing.assert_array_equal(dequantize(quantize(w, bits=4, block=(1, 4)))[w == 0], 0)


def test_ties_go_to_the_even_code():
    w = np.array([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.5]])
    np.testing.assert_array_equal(
        symmetric.quantize(w, bits=4, block=(1, 8)).codes, [[7, 0, 2, 2, 0, -2, -2, 6]], strict=False
    )
    q = affine.quantize(w + 8, bits=4, block=(1, 8))  # lo is widened to 0
    np.testing.assert_array_equal(q.zeros, [[0]])
    np.testing.assert_array_equal(q.scales, [[1]])
    np.testing.assert_array_equal(q.codes, np.rint(w + 8))


@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-100, 100))
def test_float64_does_not_mistake_a_neighbor_for_a_tie(seed, exponent):
    """Float32 numbers on either side of a tie (k + 1/2) s are rounded to their own side."""
    scale = np.float32(np.random.RandomState(seed).uniform(1, 2) * 2.0**exponent)
    ties = (np.arange(-126, 127) + 0.5) * np.float64(scale)
    near = ties.astype(np.float32)
    near = np.where(np.float64(near) == ties, np.nextafter(near, np.float32(np.inf)), near)
    above = np.float64(near) > ties
    w = np.concatenate([[127 * np.float64(scale)], near])
    q = symmetric.quantize(w, bits=8, block=w.shape)
    assert q.scales == scale
    np.testing.assert_array_equal(q.codes[1:], np.where(above, np.arange(-125, 128), np.arange(-126, 127)))


@given(weights=weights, bits=bits)
def test_a_float32_quotient_gives_the_same_codes_except_near_ties(weights, bits):
    """Codes computed with a float32 quotient, as kernels do, equal the reference's codes except near rounding ties."""
    w = weights(4, 16)
    for scheme, lowest in ((symmetric, -(2 ** (bits - 1)) + 1), (affine, 0)):
        q = scheme.quantize(w, bits=bits, block=(1, 16))
        zeros = spread(q.zeros, w.shape).astype(np.float32) if isinstance(q, affine.Affine) else np.float32(0)
        highest = 2**bits - 1 if isinstance(q, affine.Affine) else -lowest
        scales = spread(q.scales, w.shape)
        alive = scales >= 2.0**-126  # with a denormal scale, a quotient may be off by many steps
        divisors = np.where(alive, scales, np.float32(np.inf))
        float32_codes = np.clip(np.rint(w / divisors) + zeros, lowest, highest)
        exact = w.astype(np.float64) / divisors
        near = np.abs(np.abs(exact - np.trunc(exact)) - 0.5) <= U32 * np.abs(exact)
        np.testing.assert_array_equal(float32_codes[alive & ~near], q.codes[alive & ~near])
        assert np.all(np.abs(float32_codes - q.codes)[alive] <= 1)


@given(weights=weights, shape_and_block=shapes_and_blocks, bits=bits)
def test_quantized_weights_are_a_fixed_point(weights, shape_and_block, bits):
    shape, block = shape_and_block
    w = weights(*shape) / np.float32(2)  # otherwise the rounding of s may make Q s exceed the largest float32
    q = symmetric.quantize(w, bits=bits, block=block)
    if np.any((q.scales > 0) & (q.scales < 2.0**-126)):
        return  # denormal scales are rounded too coarsely
    again = symmetric.quantize(symmetric.dequantize(q), bits=bits, block=block)
    np.testing.assert_array_equal(again.codes, q.codes)
    np.testing.assert_array_equal(again.scales, q.scales)


@given(weights=weights, shape_and_block=shapes_and_blocks, bits=bits)
def test_symmetric_is_odd(weights, shape_and_block, bits):
    shape, block = shape_and_block
    q = symmetric.quantize(weights(*shape), bits=bits, block=block)
    negative = symmetric.quantize(-weights(*shape), bits=bits, block=block)
    np.testing.assert_array_equal(negative.codes, -q.codes)
    np.testing.assert_array_equal(negative.scales, q.scales)


@given(
    kind=st.sampled_from(["normal", "student", "outliers", "equal", "lonely"]),
    seed=st.integers(0, 2**32 - 1),
    power=st.integers(-60, 60),
    shape_and_block=shapes_and_blocks,
    bits=bits,
)
def test_powers_of_two_pass_into_the_scale(kind, seed, power, shape_and_block, bits):
    shape, block = shape_and_block
    w = Weights(kind, seed)(*shape)
    for scheme in (symmetric, affine):
        q, scaled = (scheme.quantize(a, bits=bits, block=block) for a in (w, w * np.float32(2.0**power)))
        np.testing.assert_array_equal(scaled.codes, q.codes)
        np.testing.assert_array_equal(scaled.scales, q.scales * 2.0**power)


@given(weights=weights, bits=bits)
def test_blocks_are_independent(weights, bits):
    w = weights(4, 6)
    for scheme in (symmetric, affine):
        full = scheme.quantize(w, bits=bits, block=(2, 3))
        part = scheme.quantize(w[2:, 3:], bits=bits, block=(2, 3))
        np.testing.assert_array_equal(full.codes[2:, 3:], part.codes)
        np.testing.assert_array_equal(full.scales[1:, 1:], part.scales)


@given(shape_and_block=shapes_and_blocks)
def test_join_undoes_split(shape_and_block):
    shape, block = shape_and_block
    w = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(join(split(w, block), block), w)
    grid = np.arange(np.prod(split(w, block).shape[:-1])).reshape(split(w, block).shape[:-1])
    members = np.repeat(grid[..., None], np.prod(block), axis=-1)
    np.testing.assert_array_equal(spread(grid, shape), join(members, block))


@pytest.mark.parametrize("case", GOLDENS["compressed_tensors"]["cases"], ids=str)
def test_codes_are_those_of_compressed_tensors(case):
    """With our scales, codes equal compressed-tensors' codes.

    compressed-tensors subtracts half of the number of codes from each code, and packs several codes in an int32.
    """
    w = Weights("student", seed=21)(*GOLDENS["compressed_tensors"]["shape"])
    scheme = symmetric if case["symmetric"] else affine
    q = scheme.quantize(w, bits=case["bits"], block=(1, case["group"]))
    offset = 0 if case["symmetric"] else 2 ** (case["bits"] - 1)
    np.testing.assert_array_equal(np.array(case["codes"]) + offset, q.codes)
    unsigned = (np.array(case["codes"]) + 2 ** (case["bits"] - 1)).astype(np.uint8)
    packed = np.array(case["packed"], "<i4").view(np.uint8)
    np.testing.assert_array_equal(affine.pack(unsigned, bits=case["bits"]), packed)


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_byte_comes_back(bits):
    every = np.tile(np.arange(256, dtype=np.uint8), bits).reshape(2, -1)
    np.testing.assert_array_equal(affine.pack(affine.unpack(every, bits=bits), bits=bits), every)
    np.testing.assert_array_equal(symmetric.pack(symmetric.unpack(every, bits=bits), bits=bits), every)


@given(seed=st.integers(0, 2**32 - 1), bits=bits)
def test_every_code_comes_back(seed, bits):
    random = np.random.RandomState(seed)
    codes = random.randint(0, 2**bits, (3, 16)).astype(np.uint8)
    np.testing.assert_array_equal(affine.unpack(affine.pack(codes, bits=bits), bits=bits), codes)
    codes = random.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, 16)).astype(np.int8)
    np.testing.assert_array_equal(symmetric.unpack(symmetric.pack(codes, bits=bits), bits=bits), codes)


@pytest.mark.parametrize("quantize", [symmetric.quantize, affine.quantize])
@pytest.mark.parametrize(
    ("w", "block", "bits", "message"),
    [
        (np.full((2, 4), np.nan), (1, 4), 8, r"the weight at \(0, 0\) is nan"),
        (np.array([[0.0, np.inf]]), (1, 2), 8, r"the weight at \(0, 1\) is inf"),
        (np.array([[0.0, -1e39]]), (1, 2), 8, r"the weight at \(0, 1\) is -1e\+39"),
        (np.zeros((0, 4)), (1, 4), 8, "has no weights"),
        (np.zeros((2, 4)), (1, 3), 8, r"blocks of \(1, 3\) do not divide a tensor of shape \(2, 4\)"),
        (np.zeros((2, 4)), (4,), 8, r"blocks of \(4,\) do not divide"),
        (np.zeros((2, 4)), (1, 0), 8, r"blocks of \(1, 0\) do not divide"),
        (np.zeros((2, 4)), (1, 4), 1, "2 to 8 bits, got 1"),
        (np.zeros((2, 4)), (1, 4), 9, "2 to 8 bits, got 9"),
    ],
)
def test_refusals(quantize, w, block, bits, message):
    with pytest.raises(ValueError, match=message):
        quantize(w, bits=bits, block=block)


@pytest.mark.parametrize(
    ("codes", "bits", "message"),
    [
        ([1, 2, 3], 4, "3 codes of 4 bits do not fill runs of 1 bytes"),
        ([16, 0], 4, "codes from 0 to 16 do not fit 4 bits"),
        ([-9, 0], 4, "codes from -9 to 0 do not fit 4 bits"),
        ([0, 0], 3, "2 codes of 3 bits do not fill runs of 1 bytes"),
    ],
)
def test_packing_refuses(codes, bits, message):
    with pytest.raises(ValueError, match=message):
        affine.pack(np.array(codes), bits=bits)


def test_unpacking_refuses():
    with pytest.raises(ValueError, match=r"\b4 bytes.*\b3 bits"):
        affine.unpack(np.zeros(4, np.uint8), bits=3)
