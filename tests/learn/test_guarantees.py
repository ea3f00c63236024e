"""Each scheme's quantization errors stay within its guarantee, and the largest error exceeds half of the guarantee."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.learn.quantizers.schemes import SCHEMES
from llamaspec.reference.quantizers.ggml_codebooks import IQ4_NL_LEVELS
from tests.support.strategies import noises

UNGUARANTEED = {"binary"}  # no guarantee for a single weight


@given(noise=noises, name=st.sampled_from(list(SCHEMES)), cols=st.integers(1, 200))
def test_errors_stay_within_the_guarantee(noise, name, cols):
    w = noise(2, cols).astype(np.float32).astype(np.float64)
    result = SCHEMES[name].store(w)
    np.testing.assert_array_equal(result.restored, SCHEMES[name].rounded(w))
    assert result.restored.shape == w.shape and all(part is None or part.shape == w.shape for part in result.details)
    assert (result.details.within is None) == (name in UNGUARANTEED)
    if result.details.within is not None:
        assert (np.abs(result.restored - w) <= result.details.within).all()


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in UNGUARANTEED])
def test_the_largest_error_exceeds_half_of_the_guarantee(name):
    w = np.random.default_rng(7).standard_normal((16, 1024)).astype(np.float32).astype(np.float64)
    result = SCHEMES[name].store(w)
    assert result.details.within is not None
    share = np.abs(result.restored - w) / np.where(result.details.within == 0, 1, result.details.within)
    assert 0.5 < share.max() <= 1


WITH_STEPS = [
    "q4",
    "q8",
    "BitNet b1.58",
    *(name for name in SCHEMES if name.startswith("GGUF") and name != "GGUF MXFP4"),
]


@pytest.mark.parametrize("name", WITH_STEPS)
def test_decoded_weights_have_constant_offsets_within_a_block(name):
    w = np.random.default_rng(7).standard_normal((2, 512)).astype(np.float32).astype(np.float64)
    restored, (codes, scales, _) = SCHEMES[name].store(w)
    assert codes is not None and scales is not None
    levels = IQ4_NL_LEVELS[codes] if name == "GGUF IQ4_NL" else codes.astype(np.float64)
    zeros = (restored - levels * scales).reshape(2, -1, 16 if name.endswith("K") else 32)
    np.testing.assert_allclose(np.ptp(zeros, axis=-1), 0, atol=1e-12)
