"""Packed documents attend as separate documents do, forward and backward."""

import numpy as np
import pytest

from llamaspec.reference.attention import attention, causal_mask
from llamaspec.reference.backward.attention import attention_backward
from llamaspec.reference.packing import packed_mask, packed_positions, packed_weights


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("lengths", [[4], [1, 3, 2]])
def test_packed_attention_is_each_documents_own(lengths, window):
    draw, seq = np.random.default_rng(0).normal, sum(lengths)
    q, k, v, dy = (draw(size=(seq, heads, 4)) for heads in (4, 2, 2, 4))
    mask = packed_mask(lengths, window=window)
    y, slopes = attention(q, k, v, mask), attention_backward(q, k, v, mask, dy)
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        own = slice(end - length, end)
        alone = causal_mask(length, length, window=window)
        np.testing.assert_allclose(y[own], attention(q[own], k[own], v[own], alone), rtol=1e-12)
        expected = attention_backward(q[own], k[own], v[own], alone, dy[own])
        for slope, exact in zip(slopes, expected, strict=True):
            np.testing.assert_allclose(slope[own], exact, rtol=1e-12, atol=1e-15)


def test_positions_and_weights_begin_anew_in_each_document():
    assert packed_positions([2, 1, 3]).tolist() == [0, 1, 0, 0, 1, 2]
    assert packed_weights([[1.0, 1.0], [5.0], [1.0, 0.0, 2.0]]).tolist() == [0, 1, 0, 0, 0, 2]
    assert packed_positions([]).size == packed_weights([]).size == 0
