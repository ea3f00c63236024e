"""Minifloats, and block formats made of them, agree with ml_dtypes, gfloat and torchao, and obey their laws."""

import base64

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.quantizers import minifloat, mx, nvfp4
from llamaspec.reference.quantizers.blocks import Quantized, spread
from llamaspec.reference.quantizers.minifloat import E2M1, E2M3, E3M2, E4M3, E5M2, Minifloat
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.support.goldens import read_golden
from tests.support.strategies import assert_within, roundoff

GOLDENS = read_golden("quantizers/minifloats")
FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "e2m3": E2M3, "e3m2": E3M2, "e2m1": E2M1}
DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
HALF_DENORMAL = 2.0**-150
U32 = roundoff(np.float32)

names = st.sampled_from(sorted(FORMATS))
formats = st.sampled_from(list(FORMATS.values()))
exponents = st.sampled_from([mx.floor_exponent, mx.ceil_exponent])
weights = st.builds(
    Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-149, 127)
)
blocks = st.sampled_from([(1, 16), (4, 64), (2, 1), (1, 64)])


def read(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.uint8)


def golden_weights(key: str) -> np.ndarray:
    kind, seed, exponent = key.split()
    return Weights(kind, int(seed), int(exponent))(*GOLDENS["shape"])


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_code(name):
    """Every code decodes to the value of ml_dtypes and gfloat, and encodes back to itself."""
    to = FORMATS[name]
    codes = np.arange(1 << to.bits, dtype=np.uint8)
    values = to.decode(codes)
    np.testing.assert_array_equal(values, codes.view(DTYPES[name]).astype(np.float64))
    np.testing.assert_array_equal(values, [float(x) for x in GOLDENS["values"][name]])
    np.testing.assert_array_equal(np.signbit(values[~np.isnan(values)]), (codes >> to.bits - 1 == 1)[~np.isnan(values)])
    finite = np.isfinite(values)
    assert np.max(values[finite]) == to.largest
    np.testing.assert_array_equal(to.encode(values[finite]), codes[finite])
    np.testing.assert_array_equal(minifloat.unpack(minifloat.pack(codes, to=to), to=to), codes)


def test_every_code_of_what_blocks_share():
    """All 256 e8m0 scales equal those of ml_dtypes and gfloat in each microscaling format; the last one is NaN."""
    exponents = np.arange(256, dtype=np.uint8)
    powers = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(powers, [float(x) for x in GOLDENS["values"]["e8m0"]])
    for to in FORMATS.values():
        ones = np.broadcast_to(to.encode(np.ones(1)), (256, mx.BLOCK))
        blocks = mx.dequantize(Quantized(ones, exponents[:, None]), to=to)
        np.testing.assert_array_equal(blocks, powers.repeat(mx.BLOCK).reshape(blocks.shape))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_tie_and_its_neighbors(name):
    """A number between two codes of one sign rounds to the nearer code, and a tie rounds to the even code."""
    to = FORMATS[name]
    codes = np.arange(1 << to.bits - 1, dtype=np.uint8)
    codes = codes[np.isfinite(to.decode(codes))]
    low, high = codes[:-1], codes[1:]
    middle = (to.decode(low) + to.decode(high)) / 2
    for sign, bit in ((1, 0), (-1, 1 << to.bits - 1)):
        np.testing.assert_array_equal(to.encode(sign * middle), np.where(low % 2 == 0, low, high) | bit)
        np.testing.assert_array_equal(to.encode(sign * np.nextafter(middle, 0)), low | bit)
        np.testing.assert_array_equal(to.encode(sign * np.nextafter(middle, np.inf)), high | bit)


@given(name=names, seed=st.integers(0, 2**32 - 1), exponent=st.integers(-30, 30))
def test_rounding_is_that_of_ml_dtypes(name, seed, exponent):
    """Codes equal those of ml_dtypes, which rounds once but does not saturate, so the test clips its input first."""
    to = FORMATS[name]
    x = Weights("normal", seed, exponent)(64)
    clipped = np.clip(x, -to.largest, to.largest).astype(np.float32)
    expected = clipped.astype(DTYPES[name]).view(np.uint8) & np.uint8((1 << to.bits) - 1)
    np.testing.assert_array_equal(to.encode(x.astype(np.float64)), expected)


@pytest.mark.parametrize("to", FORMATS.values())
def test_what_is_too_large_saturates(to):
    beyond = np.array([to.largest * 1.01, 464.0 if to is E4M3 else to.largest * 2, 3e38, 1e308])
    np.testing.assert_array_equal(to.decode(to.encode(beyond)), to.largest)
    np.testing.assert_array_equal(to.decode(to.encode(-beyond)), -to.largest)


@given(to=formats, weights=weights, block=blocks)
def test_the_error_of_scaled_blocks_is_bounded(to, weights, block):
    w = weights(4, 64)
    q = minifloat.quantize(w, to=to, block=block)
    step = spread(q.scales.astype(np.float64), w.shape) * 2.0 ** -(to.bias + to.mantissa_bits)
    relative = np.abs(w.astype(np.float64)) * 2.0 ** -(to.mantissa_bits + 1)
    assert_within(minifloat.dequantize(q, to=to), w, np.maximum(relative, step) + to.largest * HALF_DENORMAL)


@pytest.mark.parametrize("to", FORMATS.values())
def test_the_error_is_bounded_for_every_small_denormal(to):
    tops = np.arange(1, 4097)[:, None]
    w = (np.floor(tops * np.array([1, -1, 0.5, 0.25, -0.7, 0.99])) * 2.0**-149).astype(np.float32)
    q = minifloat.quantize(w, to=to, block=(1, 6))
    step = spread(q.scales.astype(np.float64), w.shape) * 2.0 ** -(to.bias + to.mantissa_bits)
    relative = np.abs(w.astype(np.float64)) * 2.0 ** -(to.mantissa_bits + 1)
    assert_within(minifloat.dequantize(q, to=to), w, np.maximum(relative, step) + to.largest * HALF_DENORMAL)


@given(to=formats, weights=weights, block=blocks)
def test_laws_of_scaled_blocks(to, weights, block):
    w = weights(4, 64) / np.float32(2)  # otherwise the rounding of s may make the largest weight exceed float32
    q = minifloat.quantize(w, to=to, block=block)
    minus = minifloat.quantize(-w, to=to, block=block)
    np.testing.assert_array_equal(minus.codes, q.codes ^ np.uint8(1 << to.bits - 1))
    if np.any((q.scales > 0) & (q.scales < 2.0**-126)):
        return
    again = minifloat.quantize(minifloat.dequantize(q, to=to), to=to, block=block)
    np.testing.assert_array_equal(again.codes, q.codes)
    np.testing.assert_array_equal(again.scales, q.scales)


def mx_bound(w: np.ndarray, q, to: Minifloat, exponent) -> np.ndarray:
    largest_exponent = np.floor(np.log2(to.largest))
    relative = 2.0 ** -(to.mantissa_bits + 1)
    if exponent is mx.floor_exponent:
        relative = max(relative, 1 - to.largest / 2 ** (largest_exponent + 1))
    power = np.repeat(np.ldexp(1.0, q.scales.astype(int) - 127), 32, axis=-1)
    return np.maximum(relative * np.abs(w.astype(np.float64)), power * 2.0 ** -(to.bias + to.mantissa_bits))


@given(to=formats, exponent=exponents, weights=weights)
def test_the_error_of_mx_is_bounded(to, exponent, weights):
    w = weights(2, 64)
    q = mx.quantize(w, to=to, exponent=exponent)
    assert_within(mx.dequantize(q, to=to), w, mx_bound(w, q, to, exponent))
    top = np.max(np.abs(w.astype(np.float64)).reshape(2, 2, 32), axis=-1)
    power = np.ldexp(1.0, q.scales.astype(int) - 127)
    inside = q.scales > 0
    if exponent is mx.ceil_exponent:
        assert np.all(top[inside] <= to.largest * power[inside])
        assert np.all(top[inside] > to.largest * power[inside] / 2)
    else:
        assert np.all(top[inside] / power[inside] < 2 ** (np.floor(np.log2(to.largest)) + 1))
        assert np.all(top[inside] / power[inside] >= 2 ** np.floor(np.log2(to.largest)))


@given(to=formats, weights=weights)
def test_laws_of_mx(to, weights):
    w = weights(2, 64)
    q = mx.quantize(w, to=to)
    again = mx.quantize(mx.dequantize(q, to=to), to=to)
    np.testing.assert_array_equal(mx.dequantize(again, to=to), mx.dequantize(q, to=to))
    np.testing.assert_array_equal(mx.quantize(-w, to=to).codes, q.codes ^ np.uint8(1 << to.bits - 1))
    if np.all(q.scales > 0):
        np.testing.assert_array_equal(again.scales, q.scales)


@given(to=formats, exponent=exponents, seed=st.integers(0, 2**32 - 1), power=st.integers(-60, 60))
def test_powers_of_two_pass_into_the_scale(to, exponent, seed, power):
    w = Weights("student", seed)(2, 64)
    scaled = w * np.float32(2.0**power)
    q, again = (mx.quantize(a, to=to, exponent=exponent) for a in (w, scaled))
    np.testing.assert_array_equal(again.codes, q.codes)
    np.testing.assert_array_equal(again.scales.astype(int), q.scales.astype(int) + power)
    q, again = (minifloat.quantize(a, to=to, block=(1, 64)) for a in (w, scaled))
    np.testing.assert_array_equal(again.codes, q.codes)
    np.testing.assert_array_equal(again.scales, q.scales * 2.0**power)
    q, again = (nvfp4.quantize(a) for a in (w, scaled))
    np.testing.assert_array_equal(again.codes, q.codes)
    np.testing.assert_array_equal(again.scales, q.scales)


@pytest.mark.parametrize("to", FORMATS.values())
@pytest.mark.parametrize("power", [-100, 0, 100])
def test_exponents_at_the_ends_of_a_format(to, power):
    """Exponents are right if a block's largest number just fits the format, or just exceeds it."""
    top = np.array([np.ldexp(to.largest, power)])
    beyond = np.nextafter(top, np.inf)
    np.testing.assert_array_equal([mx.ceil_exponent(a, to)[0] for a in (top, beyond)], [power, power + 1])
    binade = np.exp2(np.floor(np.log2(top)))
    ends = [mx.floor_exponent(a, to)[0] for a in (np.nextafter(binade, 0), binade, 2 * binade)]
    np.testing.assert_array_equal(ends, [power - 1, power, power + 1])


@pytest.mark.parametrize("case", sorted(GOLDENS["tensors"]))
@pytest.mark.parametrize("mode", ["FLOOR", "RCEIL"])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_mx_is_torchaos(name, mode, case):
    exponent = mx.floor_exponent if mode == "FLOOR" else mx.ceil_exponent
    q = mx.quantize(golden_weights(case), to=FORMATS[name], exponent=exponent)
    golden = GOLDENS["tensors"][case]["mx"][f"{name} {mode}"]
    # torchao has no exponents below -126 for blocks of zeros.
    values = FORMATS[name].decode(read(golden["codes"]).reshape(q.codes.shape))
    decoded = FORMATS[name].decode(q.codes)
    zero = np.repeat(~np.any(golden_weights(case).reshape(2, 2, 32), axis=-1), 32, axis=-1)
    np.testing.assert_array_equal(decoded[~zero], values[~zero])
    np.testing.assert_array_equal(decoded[zero], 0)
    present = np.any(golden_weights(case).reshape(2, 2, 32), axis=-1)
    np.testing.assert_array_equal(q.scales[present], read(golden["scales"]).reshape(q.scales.shape)[present])


@pytest.mark.parametrize("case", sorted(GOLDENS["tensors"]))
def test_nvfp4_is_torchaos(case):
    """NVFP4 codes and scales equal torchao's, except for blocks with a scale below 2^-6 (torchao's smallest scale)."""
    w = golden_weights(case)
    golden = GOLDENS["tensors"][case]["nvfp4"]
    q = nvfp4.quantize(w)
    assert float(q.scale) == golden["scale"]
    scales = read(golden["scales"]).reshape(q.scales.shape)
    compared = E4M3.decode(scales) > 2.0**-6
    np.testing.assert_array_equal(q.scales[compared], scales[compared])
    values = E2M1.decode(read(golden["codes"]).reshape(w.shape))
    exact = w / np.where(spread(compared, w.shape), spread(E4M3.decode(q.scales), w.shape) * np.float64(q.scale), 1)
    halves = np.abs(exact) * np.where(np.abs(exact) < 2, 4, np.where(np.abs(exact) < 4, 2, 1))
    odd = np.rint(halves) % 2 == 1  # in units of half a step, where ties are odd
    tie = odd & (np.abs(halves - np.rint(halves)) < 4 * U32 * halves)
    comparable = spread(compared, w.shape) & ~tie
    assert np.mean(comparable) > 0.9 or case.startswith("lonely")
    np.testing.assert_array_equal(E2M1.decode(q.codes)[comparable], values[comparable])


@given(weights=weights)
def test_the_error_of_nvfp4_is_bounded(weights):
    w = weights(2, 64)
    q = nvfp4.quantize(w)
    g = np.float64(q.scale)
    tops = np.max(np.abs(w.astype(np.float64)).reshape(2, 4, 16), axis=-1)
    ideal = tops / (6 * g) if g else np.zeros_like(tops)
    stored = E4M3.decode(q.scales)
    short = np.abs(stored - ideal)
    assert np.all(short <= np.maximum(2.0**-4 * ideal, 2.0**-10) + 448 * (2.0**-23 + HALF_DENORMAL / max(g, 2.0**-149)))
    assert not g or q.scales.max() == 0x7E or g < 2.0**-126
    step = np.maximum(np.abs(w.astype(np.float64)) / 5, spread(g * stored / 4, w.shape))
    assert_within(nvfp4.dequantize(q), w, step + spread(6 * g * short, w.shape) + 2688 * HALF_DENORMAL)
    np.testing.assert_array_equal(nvfp4.quantize(-w).codes, q.codes ^ np.uint8(8))


def test_finer_blocks_and_finer_scales_are_better():
    w = Weights("normal", seed=8)(16, 64)
    mxfp4 = mx.dequantize(mx.quantize(w, to=E2M1), to=E2M1)
    assert np.mean((nvfp4.dequantize(nvfp4.quantize(w)) - w) ** 2) < np.mean((mxfp4 - w) ** 2)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_stay_zero(zero):
    w = np.full((2, 32), zero)
    for to in FORMATS.values():
        np.testing.assert_array_equal(mx.dequantize(mx.quantize(w, to=to), to=to), w)
        np.testing.assert_array_equal(minifloat.dequantize(minifloat.quantize(w, to=to, block=(1, 4)), to=to), w)
    np.testing.assert_array_equal(nvfp4.dequantize(nvfp4.quantize(w)), w)


@pytest.mark.parametrize("to", [E2M1, E2M3, E4M3])
def test_every_byte_comes_back(to):
    every = np.arange(256, dtype=np.uint8)[: 255 if to is E2M3 else 256]  # three bytes are four codes
    np.testing.assert_array_equal(mx.pack(mx.unpack(every, to=to), to=to), every)
    np.testing.assert_array_equal(minifloat.pack(minifloat.unpack(every, to=to), to=to), every)
    np.testing.assert_array_equal(nvfp4.pack(nvfp4.unpack(every)), every)


def test_an_exponent_of_255_is_no_number():
    q = mx.quantize(np.ones((1, 32)), to=E4M3)
    assert np.isnan(mx.dequantize(q._replace(scales=np.array([[255]], np.uint8)), to=E4M3)).all()


@pytest.mark.parametrize("w", [np.full((1, 32), np.nan), np.full((1, 32), np.inf)])
def test_what_is_not_finite_is_refused(w):
    for quantize in (
        lambda: mx.quantize(w, to=E4M3),
        lambda: minifloat.quantize(w, to=E4M3, block=(1, 32)),
        lambda: nvfp4.quantize(w),
    ):
        with pytest.raises(ValueError, match=r"must be finite .* at \(0, 0\)"):
            quantize()


def test_rows_are_whole_blocks():
    with pytest.raises(ValueError, match=r"\(1, 32\).*\(2, 33\)"):
        mx.quantize(np.zeros((2, 33)), to=E4M3)
    with pytest.raises(ValueError, match=r"\(1, 16\)"):
        nvfp4.quantize(np.zeros((2, 33)))
