import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.quantizers import hqq
from llamaspec.reference.quantizers.blocks import spread
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.support.goldens import read_golden
from tests.support.strategies import U, assert_within, roundoff

GOLDENS = read_golden("quantizers/methods")["hqq"]
U32 = roundoff(np.float32)

weights = st.builds(Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-60, 60))


def plain(w: np.ndarray, *, bits: int, group: int) -> hqq.Hqq:
    """Quantize to the nearest codes, where HQQ's iteration starts."""
    groups = w.astype(np.float64).reshape(len(w), -1, group)
    lo = np.min(groups, axis=-1)
    scales = ((np.max(groups, axis=-1) - lo) / (2**bits - 1)).astype(np.float32)
    scales = np.where(scales == 0, np.float32(1), scales)
    zeros = (-lo / scales).astype(np.float32)
    codes = np.rint(groups / scales[..., None].astype(np.float64) + zeros[..., None]).clip(0, 2**bits - 1)
    return hqq.Hqq(codes.astype(np.uint8).reshape(w.shape), scales, zeros)


def sums(w: np.ndarray, q: hqq.Hqq, group: int) -> np.ndarray:
    errors = np.abs(w - hqq.dequantize(q)) ** hqq.P
    return np.sum(errors.reshape(len(w), -1, group), axis=-1)


def test_the_sum_is_no_larger_than_hqqs():
    w = Weights("student", seed=21)(*GOLDENS["shape"])
    own_sum = np.sum(sums(w, hqq.quantize(w, bits=GOLDENS["bits"], group=GOLDENS["group"]), GOLDENS["group"]))
    assert own_sum <= GOLDENS["fitted"] < GOLDENS["plain"]


def test_a_step_is_hqqs():
    """One step of the iteration gives the hqq library's zero points, within float32's rounding."""
    groups = 4 * Weights("normal", seed=20)(4, 64).astype(np.float64)
    start = plain(groups, bits=2, group=64)
    zeros = hqq.refit(groups, start.scales[:, 0], start.zeros[:, 0], bits=2, beta=hqq.BETA)
    bound = 2 * 64 * U32 * 4  # a mean of 64 numbers up to 4, twice
    assert_within(np.array(GOLDENS["zeros"]), zeros, bound)
    q, _ = hqq.nearest(groups, start.scales[:, 0], start.zeros[:, 0], bits=2)
    without = np.mean(q - groups / start.scales.astype(np.float64), axis=-1)
    assert np.all(np.abs(zeros - without) > bound)  # the step removes some errors


@given(weights=weights, bits=st.integers(1, 8), group=st.sampled_from([8, 32]))
def test_the_sum_is_no_larger_than_at_the_start(weights, bits, group):
    w = weights(2, 32)
    q = hqq.quantize(w, bits=bits, group=group)
    before, after = sums(w, plain(w, bits=bits, group=group), group), sums(w, q, group)
    # An error that is only a rounding of its weight does not shrink: it is float64's rounding, to the power p.
    slack = group * (8 * U * np.max(np.abs(w.astype(np.float64)))) ** hqq.P
    assert np.all(after <= before * (1 + 8 * group * U) + slack)


@given(weights=weights, bits=st.integers(1, 4))
def test_codes_are_nearest(weights, bits):
    w = weights(2, 32)
    q = hqq.quantize(w, bits=bits, group=16)
    distances = [np.abs(w - hqq.dequantize(q._replace(codes=np.full_like(q.codes, code)))) for code in range(2**bits)]
    errors = np.abs(w - hqq.dequantize(q))
    scales, zeros = (spread(a.astype(np.float64), w.shape) for a in (q.scales, q.zeros))
    assert_within(errors, np.min(distances, axis=0), 8 * U * (np.abs(w) + scales * (np.abs(zeros) + 2**bits)))
    first, last = scales * (0 - zeros), scales * (2**bits - 1 - zeros)
    inside = (first <= w) & (w <= last)
    assert np.all(errors[inside] <= (scales / 2 + 8 * U * (np.abs(w) + scales * np.abs(zeros)))[inside])


@given(weights=weights)
def test_equal_weights_are_exact(weights):
    w = np.repeat(weights(3, 1), 8, axis=1)
    np.testing.assert_array_equal(hqq.dequantize(hqq.quantize(w, bits=4, group=8)), w)


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_byte_comes_back(bits):
    every = np.tile(np.arange(256, dtype=np.uint8), bits)
    np.testing.assert_array_equal(hqq.pack(hqq.unpack(every, bits=bits), bits=bits), every)


@pytest.mark.parametrize(
    ("w", "bits", "group", "message"),
    [
        (np.full((1, 8), np.nan), 4, 8, "must be finite"),
        (np.ones((1, 8)), 4, 3, r"blocks of \(1, 3\) do not divide"),
        (np.ones((1, 8)), 0, 8, "1 to 8 bits, got 0"),
    ],
)
def test_refusals(w, bits, group, message):
    with pytest.raises(ValueError, match=message):
        hqq.quantize(w, bits=bits, group=group)
