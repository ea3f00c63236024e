"""ggml's types agree with what ggml's C code wrote and read (goldens/quantizers), and obey the laws of each type."""

import base64
import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamaspec.reference.quantizers import ggml
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.reference.quantizers.ggml import TYPES
from llamaspec.reference.quantizers.ggml_blocks import Blocks, Shifted, Signed
from llamaspec.reference.quantizers.ggml_codebooks import IQ4_NL, IQ4_NL_LEVELS, MXFP4
from llamaspec.reference.quantizers.ggml_superblocks import Superblock, Superblocks
from tests.goldens.quantizers import make_ggml
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.support.goldens import read_golden
from tests.support.strategies import assert_within

GOLDENS = read_golden("quantizers/ggml")
LINEAR = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
TERNARY = ["TQ1_0", "TQ2_0"]
SUPERBLOCKS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
OVERFLOW = 2.0**-120  # largest error from the overflow of 1 / d

names = st.sampled_from(sorted(TYPES))
# Beyond 2^6 an outlier exceeds float16; below 2^-30 all scales underflow, and only MXFP4 can represent the weights.
weights = st.builds(Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-40, 6))


def read(text: str, dtype: str = "u1") -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype))


def golden_weights(key: str) -> np.ndarray:
    kind, seed, exponent = key.split(", ")
    return Weights(kind, int(seed), int(exponent))(1, GOLDENS["cols"])


def test_every_type_has_goldens():
    assert GOLDENS["quantized"].keys() == GOLDENS["dequantized"].keys() == TYPES.keys()


@pytest.mark.parametrize("name", sorted(TYPES))
def test_bytes_are_those_of_ggml(name):
    goldens = GOLDENS["quantized"][name]
    for key, text in goldens.items():
        if key not in too_large(name):
            np.testing.assert_array_equal(ggml.encode(golden_weights(key), name)[0], read(text), err_msg=key)
    assert {"one outlier, 1, 0", "normal, 3, -20", "normal, 3, 20"} <= goldens.keys()


@pytest.mark.parametrize("name", sorted(ggml.SEARCHED))
def test_bytes_with_importances_are_those_of_ggml(name):
    for case in make_ggml.WEIGHTED:
        w, importance = case(1, make_ggml.WEIGHTED_COLS), make_ggml.importance(make_ggml.WEIGHTED_COLS)
        actual, expected = ggml.encode(w, name, importance)[0], read(GOLDENS["weighted"][name][make_ggml.key(case)])
        np.testing.assert_array_equal(actual, expected, err_msg=case.kind)
        assert not np.array_equal(ggml.encode(w, name)[0], expected)


@pytest.mark.parametrize("name", sorted(set(TYPES) - set(ggml.SEARCHED)))
def test_importances_do_not_change_other_types(name):
    w = Weights("normal", seed=1)(1, 256)
    np.testing.assert_array_equal(ggml.encode(w, name, make_ggml.importance(256)), ggml.encode(w, name))


@pytest.mark.parametrize("name", sorted(ggml.SEARCHED))
@pytest.mark.parametrize("members", [1, 3])
def test_rows_do_not_depend_on_their_neighbors(name, members, monkeypatch):
    """Quantizing a row separately or among other rows gives the same bytes, with and without importances.

    `members` is the number of superblocks for which the encoder searches scales together.
    """
    monkeypatch.setattr("llamaspec.reference.quantizers.ggml_superblocks.AT_ONCE", members)
    w, importance = Weights("student", seed=5)(3, 512), make_ggml.importance(512)
    for c in (None, importance):
        rows = np.concatenate([ggml.encode(row[None], name, c) for row in w])
        np.testing.assert_array_equal(ggml.encode(w, name, c), rows)


def too_large(name: str) -> list[str]:
    """List the golden cases for which ggml's C code stored an infinite scale or minimum."""

    def finite(text: str) -> bool:
        with np.errstate(invalid="ignore"):
            return bool(np.isfinite(ggml.decode(read(text)[None], name)).all())

    return [key for key, text in GOLDENS["quantized"][name].items() if not finite(text)]


@pytest.mark.parametrize("name", sorted(TYPES))
def test_what_c_makes_infinite_is_refused(name):
    """We refuse weights for which C stores an infinite scale.

    Weights near 2^20 would need a scale or a minimum beyond 65504, the largest float16 number.
    """
    beyond = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", *TERNARY)
    assert too_large(name) == (["normal, 3, 20"] if name in beyond else [])
    for key in too_large(name):
        with pytest.raises(ValueError, match="the largest float16 is 65504"):
            ggml.encode(golden_weights(key), name)


@pytest.mark.parametrize("name", sorted(TYPES))
def test_weights_are_those_of_ggml(name):
    """ggml's float32 weights equal our exact weights, rounded once."""
    golden = GOLDENS["dequantized"][name]
    exact = ggml.decode(read(golden["blocks"])[None], name)[0]
    np.testing.assert_array_equal(exact.astype(np.float32), read(golden["weights"], "<f4"))


def test_every_power_of_mxfp4():
    """MXFP4 decodes all 256 exponents as ggml does.

    The exponent 255 means 2^128, which overflows float32; it does not mean NaN.
    """
    ones = np.full((256, 1, 32), 2, np.uint8)
    powers = MXFP4.dequantize(Quantized(ones, np.arange(256, dtype=np.uint8)[:, None]))[:, 0]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(powers.astype(np.float32), read(GOLDENS["e8m0"], "<f4"))
    assert powers[-1] == 2.0**128


@pytest.mark.parametrize("name", sorted(TYPES))
def test_every_block_comes_back(name):
    """Unpacking a stored block and packing it again gives the same bytes."""
    kind = TYPES[name]
    stored = read(GOLDENS["dequantized"][name]["blocks"]).reshape(-1, kind.bytes)
    if name == "TQ1_0":  # 13 of 256 byte values are not five trits, and a byte of four trits may hold a fifth
        stored = kind.pack(kind.unpack(stored))
    np.testing.assert_array_equal(kind.pack(kind.unpack(stored)), stored)


def test_every_ternary_byte_comes_back():
    kind = TYPES["TQ1_0"]
    digits = np.stack(np.meshgrid(*[[-1, 0, 1]] * 5, indexing="ij"), axis=-1).reshape(-1, 5)  # all 243
    for start in range(0, 243, 32):
        block = np.zeros((1, 256), np.int8)
        chosen = digits[start : start + 32]
        block[0, :160].reshape(5, 32)[:, : len(chosen)] = chosen.T
        q = TYPES["TQ1_0"].quantize(np.ones((1, 256)))._replace(codes=block[None])
        packed = kind.pack(q)
        assert np.unique(packed[..., : len(chosen)]).size == len(chosen)
        np.testing.assert_array_equal(kind.unpack(packed).codes, q.codes)


@given(name=names, weights=weights, rows=st.integers(1, 2), blocks=st.integers(1, 2))
def test_packing_keeps_everything(name, weights, rows, blocks):
    kind = TYPES[name]
    w = weights(rows, 256 * blocks)
    q = kind.quantize(w)
    packed = kind.pack(q)
    assert packed.shape == (rows, 256 * blocks // kind.weights, kind.bytes)
    for before, after in zip(q, kind.unpack(packed), strict=True):
        np.testing.assert_array_equal(before, after)
        assert before.dtype == after.dtype
    np.testing.assert_array_equal(ggml.decode(ggml.encode(w, name), name), kind.dequantize(q))


def scale_error(exact: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Return the error |d' - d| of stored scales d'. Asserts that rounding d to float16 explains the error."""
    error = np.abs(exact.astype(np.float64) - stored)
    assert np.all(error <= np.maximum(2.0**-11 * np.abs(exact.astype(np.float64)), 2.0**-25))
    return error[..., None]


@given(name=st.sampled_from(LINEAR), weights=weights)
@example(name="Q4_0", weights=Weights("equal", 1, -40))
def test_the_error_of_equal_steps_is_bounded(name, weights):
    kind = TYPES[name]
    w = weights(2, 64).reshape(2, 2, 32)
    q = kind.quantize(w.reshape(2, 64))
    assert isinstance(q, Blocks)
    m, opposite = np.zeros((2, 2, 1)), np.zeros(w.shape, bool)
    largest = np.take_along_axis(w, np.argmax(np.abs(w), axis=-1, keepdims=True), axis=-1)
    if isinstance(kind, Signed):
        d, codes = largest / np.float32(-kind.zero), q.codes.astype(float) - kind.zero
        opposite = w.astype(np.float64) / np.where(d == 0, 1, d) > kind.zero - 1
    elif isinstance(kind, Shifted):
        m = np.min(w, axis=-1, keepdims=True)
        d, codes = (np.max(w, axis=-1, keepdims=True) - m) / np.float32(2**kind.bits - 1), q.codes.astype(float)
    else:
        d, codes = np.abs(largest) / np.float32(127), q.codes.astype(float)
    step = (np.where(opposite, 1, 0.5) + 2.0**-14) * np.abs(d.astype(np.float64))
    stored = np.abs(codes) * scale_error(d[..., 0], q.scales) + scale_error(m[..., 0], q.minima)
    assert_within(kind.dequantize(q).reshape(w.shape), w, step + stored + OVERFLOW)


@given(name=st.sampled_from(TERNARY), weights=weights)
def test_the_error_of_trits_is_bounded(name, weights):
    w = weights(2, 512).reshape(2, 2, 256)
    q = TYPES[name].quantize(w.reshape(2, 512))
    d = np.max(np.abs(w), axis=-1)
    stored = np.abs(q.codes) * scale_error(d, q.scales)
    bound = (1 / 2 + 2.0**-20) * d[..., None].astype(np.float64) + stored + OVERFLOW
    assert_within(TYPES[name].dequantize(q).reshape(w.shape), w, bound)


@given(
    weights=st.builds(
        Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-149, 127)
    )
)
def test_the_error_of_mxfp4_is_bounded(weights):
    w = weights(2, 64)
    q = MXFP4.quantize(w)
    power = np.repeat(np.ldexp(1.0, q.scales.astype(int) - 127), 32, axis=-1).reshape(w.shape)
    assert np.all(np.abs(w) < 8 * power)
    assert_within(MXFP4.dequantize(q), w, np.maximum(np.abs(w.astype(np.float64)) / 4, power / 4))


@pytest.mark.parametrize("below", [1, 2, 8, 64])
@pytest.mark.parametrize("power", [-100, -3, 0, 1, 5, 60, 127])
def test_mxfp4_just_below_a_power_of_two(power, below):
    """The exponent of an MXFP4 block is right if the largest weight is just below a power of two.

    The largest weight is 2^power (1 - below * 2^-24). The exponent comes from its log2 in float32. If this log2 rounds
    up to `power`, the block gets the exponent of 2^power, otherwise the exponent below.
    """
    top = np.ldexp(1 - below * 2.0**-24, power)
    q = MXFP4.quantize(np.full((1, 32), top))
    exact = np.log2(top)
    rounded_up = np.float32(exact) == power
    assert rounded_up == (abs(exact - power) <= np.spacing(np.float32(max(abs(power) - 1, 0.5))) / 2)
    np.testing.assert_array_equal(q.scales, power + 125 - (not rounded_up))


@given(weights=weights)
def test_iq4_nl_takes_the_nearest_level(weights):
    w = weights(2, 64)
    q = IQ4_NL.quantize(w)
    d = np.repeat(q.scales.astype(np.float64), 32, axis=-1).reshape(w.shape)
    every = IQ4_NL_LEVELS * d[..., None]
    least = np.min(np.abs(every - w[..., None]), axis=-1)
    # Codes were chosen with d in float32, before it was rounded to the stored scale. So each level, the one nearest
    # then and the one nearest now, has moved by that rounding.
    moved = 127 * np.maximum(2.0**-11 * np.abs(d), 2.0**-25) * (1 + 2.0**-10)
    distance = np.abs(IQ4_NL.dequantize(q) - w)
    assert np.all(distance <= least + 2 * moved + np.abs(d) * 2.0**-14 + OVERFLOW)


@given(name=st.sampled_from(SUPERBLOCKS), weights=weights)
@example(name="Q4_K", weights=Weights("equal", seed=0))  # a negative minimum would fit them exactly
def test_superblocks_take_the_nearest_codes(name, weights):
    kind = TYPES[name]
    assert isinstance(kind, Superblock)
    w = weights(1, 512)
    q = kind.quantize(w)
    assert isinstance(q, Superblocks)
    assert np.all(q.e >= 0) and np.all(q.minima >= 0)
    distance = np.abs(kind.dequantize(q) - w)
    least = np.full(w.shape, np.inf)
    for code in range(kind.lowest, kind.highest + 1):
        decoded = kind.dequantize(q._replace(codes=np.full_like(q.codes, code)))
        least = np.minimum(least, np.abs(decoded - w))
    # float32 rounds d s, e m, their sum with w, and the quotient.
    rounding = 8 * 2.0**-24 * (np.abs(w) + np.abs(kind.dequantize(q)) + largest_floor(q))
    assert np.all(distance <= least + rounding)
    lowest, highest = (
        kind.dequantize(q._replace(codes=np.full_like(q.codes, code))) for code in (kind.lowest, kind.highest)
    )
    step = np.abs(highest - lowest) / (kind.highest - kind.lowest)
    inside = (np.minimum(lowest, highest) <= w) & (w <= np.maximum(lowest, highest))
    assert np.all(distance[inside] <= (step / 2 + rounding)[inside])


def largest_floor(q: Superblocks) -> float:
    return float(np.max(q.e.astype(np.float64)[..., None] * q.minima))


@settings(max_examples=5)
@given(kind=st.sampled_from(["normal", "uniform"]), seed=st.integers(0, 2**32 - 1))
def test_superblocks_get_better_with_bits(kind, seed):
    """Each K type has less than half of the mean squared error of the previous type.

    This is no theorem, since the types differ in more than the number of bits. If there are outliers, they dominate the
    error; for them, Q4_K is little better than Q3_K, which has smaller groups.
    """
    w = Weights(kind, seed)(8, 512)
    errors = [np.mean((ggml.decode(ggml.encode(w, name), name) - w) ** 2) for name in SUPERBLOCKS]
    assert all(after < before / 2 for before, after in itertools.pairwise(errors))


@given(name=st.sampled_from(["Q8_0", "Q4_0", "Q5_0", "MXFP4", *TERNARY]), weights=weights)
def test_fixed_points(name, weights):
    kind = TYPES[name]
    once = kind.quantize(weights(1, 256))
    again = kind.quantize(kind.dequantize(once))
    np.testing.assert_array_equal(kind.dequantize(again), kind.dequantize(once))


@given(
    name=names,
    kind=st.sampled_from(["normal", "student", "outliers"]),
    seed=st.integers(0, 2**32 - 1),
    power=st.integers(-4, 4),
)
@example(name="MXFP4", kind="student", seed=0, power=4)
def test_powers_of_two_pass_into_the_scale(name, kind, seed, power):
    """Multiplying weights by a power of two multiplies the decoded weights by it exactly.

    The test leaves out superblocks with a float16 scale so small that it could be denormal.
    """
    w = Weights(kind, seed)(1, 256) * np.float32(2.0**-4)
    w[0, ::16] += np.copysign(np.float32(2.0**-2), w[0, ::16])  # no group is small
    q = TYPES[name].quantize(w)
    if name in SUPERBLOCKS and (np.abs(q.d).min() < 2.0**-9 or 0 < q.e.max() < 2.0**-9):
        return
    scaled = TYPES[name].dequantize(TYPES[name].quantize(w * np.float32(2.0**power)))
    np.testing.assert_array_equal(scaled, TYPES[name].dequantize(q) * 2.0**power)


@given(name=st.sampled_from(["Q8_0", "MXFP4", "Q6_K", *TERNARY]), weights=weights)
def test_odd_types(name, weights):
    w = weights(1, 256)
    plus, minus = (TYPES[name].dequantize(TYPES[name].quantize(a)) for a in (w, -w))
    np.testing.assert_array_equal(minus, -plus)


@pytest.mark.parametrize("name", sorted(TYPES))
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_stay_zero(name, zero):
    np.testing.assert_array_equal(ggml.decode(ggml.encode(np.full((1, 256), zero), name), name), np.zeros((1, 256)))


@pytest.mark.parametrize("name", sorted(set(TYPES) - {"MXFP4"}))
def test_what_float16_cannot_hold_is_refused(name):
    with pytest.raises(ValueError, match="the largest float16 is 65504"):
        ggml.encode(np.linspace(-3e38, 3e38, 256)[None], name)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ggml.encode(np.full((1, 256), np.nan), "Q4_0"), "must be finite"),
        (lambda: ggml.encode(np.zeros((1, 48)), "Q8_0"), "rows of 48 weights do not fill blocks of 32"),
        (lambda: ggml.encode(np.zeros((1, 32)), "Q4_K"), "rows of 32 weights do not fill blocks of 256"),
        (lambda: ggml.encode(np.zeros((1, 32)), "Q9_0"), "no ggml type Q9_0: expected one of Q4_0, "),
        (lambda: ggml.decode(np.zeros((1, 35), np.uint8), "Q8_0"), "rows of 35 bytes do not fill blocks of Q8_0, 34"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
