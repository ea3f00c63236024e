"""NF4, FP4 and double quantization agree with bitsandbytes (goldens/quantizers), and obey their laws."""

import base64
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.quantizers import double_quantization, nf4
from llamaspec.reference.quantizers.blocks import spread
from llamaspec.reference.quantizers.nf4 import FP4, NF4
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.support.goldens import read_golden
from tests.support.strategies import assert_within, roundoff

GOLDENS = read_golden("quantizers/bitsandbytes")
U32 = roundoff(np.float32)

codebooks = st.sampled_from([NF4, FP4])
weights = st.builds(
    Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-140, 127)
)


def read(text: str, dtype: str = "<f4") -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype)


def golden_weights(key: str) -> np.ndarray:
    kind, seed, exponent = key.split()
    return Weights(kind, int(seed), int(exponent))(*GOLDENS["shape"])


def test_levels_of_nf4_are_quantiles():
    """NF4's levels, from the table in the paper's appendix E, are normal quantiles computed in float32."""
    quantile = NormalDist().inv_cdf
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    below = [-quantile(p) for p in np.linspace(outermost, 0.5, 8)]
    above = [quantile(p) for p in np.linspace(outermost, 0.5, 9)]
    levels = np.sort(np.array([*below[:-1], *above])) / quantile(outermost)
    assert_within(NF4.levels, levels, 2.0**-22)
    np.testing.assert_array_equal(NF4.levels[[0, 7, 15]], [-1, 0, 1])


@pytest.mark.parametrize("case", sorted(GOLDENS["tensors"]))
@pytest.mark.parametrize(("name", "codebook"), [("nf4", NF4), ("fp4", FP4)])
def test_tensors_are_those_of_bitsandbytes(name, codebook, case):
    golden = GOLDENS["tensors"][case][name]
    w = golden_weights(case)
    q = codebook.quantize(w, group=GOLDENS["group"])
    np.testing.assert_array_equal(q.scales.ravel(), read(golden["scales"]))
    packed = read(golden["packed"], "u1").reshape(len(w), -1)
    if name == "nf4":
        np.testing.assert_array_equal(nf4.pack(q.codes), packed)
    np.testing.assert_array_equal(codebook.levels[q.codes], codebook.levels[nf4.unpack(packed)])  # 0 is -0
    np.testing.assert_array_equal(codebook.dequantize(q).astype(np.float32), read(golden["weights"]).reshape(w.shape))


def gaps(codebook: nf4.Codebook, x: np.ndarray) -> np.ndarray:
    """Return the distance between the codebook's two levels around each `x`."""
    levels = np.unique(codebook.levels.astype(np.float64))
    above = np.clip(np.searchsorted(levels, x), 1, len(levels) - 1)
    return levels[above] - levels[above - 1]


@given(codebook=codebooks, weights=weights, group=st.sampled_from([32, 64]))
def test_the_error_is_bounded(codebook, weights, group):
    w = weights(2, 64)
    q = codebook.quantize(w, group=group)
    tops = spread(q.scales.astype(np.float64), w.shape)
    # If float32's roundings move a weight across the midpoint of two levels, it is within three roundings of it.
    bound = tops * gaps(codebook, w / np.where(tops == 0, 1, tops)) / 2 + 3 * 2 * U32 * tops
    assert_within(codebook.dequantize(q), w, np.where(tops < 1e-38, tops, bound))


def test_the_widest_gaps_are_those_of_the_docstrings():
    """The docstrings state the widest gaps between weight levels and between scale levels."""
    assert np.max(np.diff(NF4.levels.astype(np.float64))).round(3) == 0.304
    assert_within(np.max(np.diff(np.unique(FP4.levels.astype(np.float64)))), 1 / 3, 2 * U32)
    levels = double_quantization.dynamic_levels().astype(np.float64)
    assert 0.007 < np.max(np.diff(levels)) / 2 <= 0.0071 and 1 + levels[0] <= 0.0071
    assert levels[0].round(3) == -0.993


@given(codebook=codebooks, weights=weights)
def test_laws(codebook, weights):
    w = weights(2, 64)
    q = codebook.quantize(w, group=32)
    if np.all(q.scales > 2.0**-126):
        again = codebook.quantize(codebook.dequantize(q), group=32)
        np.testing.assert_array_equal(again.codes, q.codes)
        np.testing.assert_array_equal(again.scales, q.scales)
    np.testing.assert_array_equal(codebook.dequantize(q)[w == 0], 0)
    at = np.abs(w) == spread(q.scales, w.shape)
    if np.all(q.scales > 1e-38):
        np.testing.assert_array_equal(codebook.dequantize(q)[at], w[at])


@given(codebook=codebooks, seed=st.integers(0, 2**32 - 1), power=st.integers(-60, 60))
def test_powers_of_two_pass_into_the_scale(codebook, seed, power):
    w = Weights("student", seed)(2, 64)
    q, scaled = (codebook.quantize(a, group=64) for a in (w, w * np.float32(2.0**power)))
    np.testing.assert_array_equal(scaled.codes, q.codes)
    np.testing.assert_array_equal(scaled.scales, q.scales * 2.0**power)


def test_a_weight_between_two_levels_gets_the_lower():
    """A weight halfway between two levels gets the lower level, at all midpoints that float32 represents."""
    for codebook in (NF4, FP4):
        levels = np.unique(codebook.levels)
        middle = (levels[1:] + levels[:-1]) / np.float32(2)
        exact = levels[1:].astype(np.float64) + levels[:-1] == 2 * middle.astype(np.float64)
        w = np.concatenate([middle, [1.0]]).astype(np.float32)[None]
        assert exact.sum() >= 2
        np.testing.assert_array_equal(
            codebook.levels[codebook.quantize(w, group=w.size).codes[0, :-1]][exact], levels[:-1][exact]
        )


def test_nf4_is_better_than_fp4_for_normal_weights():
    w = Weights("normal", seed=9)(64, 64)
    nf4_error, fp4_error = (np.mean((c.dequantize(c.quantize(w, group=64)) - w) ** 2) for c in (NF4, FP4))
    assert nf4_error < fp4_error


def test_every_byte_comes_back():
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(nf4.pack(nf4.unpack(every)), every)
    with pytest.raises(ValueError, match=r"\b3 codes.*\b4 bits"):
        nf4.pack(np.zeros(3, np.uint8))


@pytest.mark.parametrize("codebook", [NF4, FP4])
def test_refusals(codebook):
    with pytest.raises(ValueError, match="must be finite"):
        codebook.quantize(np.array([[np.nan, 1.0]]), group=2)
    with pytest.raises(ValueError, match=r"\(1, 64\).*\(2, 96\)"):
        codebook.quantize(np.zeros((2, 96)), group=64)


def test_levels_of_scales_are_those_of_bitsandbytes():
    """The levels of scales equal bitsandbytes' levels, which are interval means computed and rounded in float32."""
    levels = double_quantization.dynamic_levels()
    assert_within(read(GOLDENS["scales"]["levels"]), levels, 4 * U32 * np.abs(levels))
    assert len(levels) == 256


def test_scales_are_those_of_bitsandbytes():
    golden = GOLDENS["scales"]
    scales = np.abs(Weights("student", seed=7)(*golden["shape"]))
    q = double_quantization.quantize(scales)
    # The mean of n numbers, summed in float32 in any order: n roundings of at most their sum, and one of the quotient.
    offset = read(golden["offset"])
    assert_within(offset, q.offset[None], len(scales) * U32 * np.mean(scales))
    moved = np.abs(offset - q.offset)
    assert_within(read(golden["tops"]), q.tops, moved + 2 * U32 * q.tops)
    codes = read(golden["codes"], "u1")
    near = np.abs(codes.astype(int) - q.codes) <= 1
    assert np.all(near) and np.mean(codes == q.codes) > 0.95
    equal = codes == q.codes
    bound = 4 * moved + 4 * U32 * (np.abs(scales) + q.offset + np.repeat(q.tops, 256)[: len(scales)])
    assert_within(read(golden["scales"])[equal], double_quantization.dequantize(q)[equal], bound[equal])


@given(weights=weights, count=st.sampled_from([1, 2, 255, 256, 257, 600]))
def test_the_error_of_scales_is_bounded(weights, count):
    scales = np.abs(weights(count)) / np.float32(2)  # a difference from the mean must not overflow
    q = double_quantization.quantize(scales)
    tops = np.repeat(q.tops.astype(np.float64), 256)[:count]
    x = (scales.astype(np.float64) - q.offset) / np.where(tops == 0, 1, tops)
    levels = double_quantization.dynamic_levels().astype(np.float64)
    above = np.clip(np.searchsorted(levels, x), 1, 255)
    # -1 is not a level: a scale that far below the mean is rounded to -0.993.
    gap = np.maximum((levels[above] - levels[above - 1]) / 2, levels[0] - x)
    bound = tops * gap + 2.0**-22 * (scales.astype(np.float64) + np.abs(q.offset) + tops) + 2.0**-149
    bound = np.where(tops < 1e-38, tops + 2.0**-149, bound)
    assert_within(double_quantization.dequantize(q), scales, bound)


def test_equal_scales_come_back():
    np.testing.assert_array_equal(
        double_quantization.dequantize(double_quantization.quantize(np.full((3, 100), 0.3, np.float32))),
        np.full((3, 100), np.float32(0.3)),
    )


def test_scales_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="scales must be finite"):
        double_quantization.quantize(np.array([1, np.inf], np.float32))
