import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.qk_norm import qk_norm
from tests.support.strategies import U, assert_within, noises, sizes

dims = sizes(4)


@given(noise=noises, dim=dims, heads=st.integers(1, 4), kv_heads=st.integers(1, 3), eps=st.sampled_from([1e-6, 0.5]))
def test_every_head_is_normalized_on_its_own(noise, dim, heads, kv_heads, eps):
    q, k = noise(2, 3, heads, dim), noise(2, 3, kv_heads, dim)
    q_weight, k_weight = noise(dim), noise(dim)
    for x, weight, y in zip((q, k), (q_weight, k_weight), qk_norm(q, k, q_weight, k_weight, eps=eps), strict=True):
        assert y.dtype == np.float64
        for place in np.ndindex(x.shape[:-1]):
            head = x[place].astype(np.float64)
            exact = weight * head / np.sqrt(head @ head / dim + eps)
            assert_within(y[place], exact, np.abs(exact) * (dim + 8) * U)


@given(noise=noises, dim=dims)
def test_scores_cannot_grow(noise, dim):
    noise.blank = False
    q, k = noise(5, 2, dim), noise(5, 2, dim)
    q, k = qk_norm(q, k, np.ones(dim), np.ones(dim), eps=0.0)
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(dim)
    assert np.all(np.abs(scores) <= np.sqrt(dim) * (1 + (2 * dim + 8) * U))  # Cauchy-Schwarz: both have length sqrt(d)


@given(noise=noises)
def test_weights_are_not_confused(noise):
    q, k = noise(3, 2, 4), noise(3, 1, 4)
    q_normed, k_normed = qk_norm(q, k, np.zeros(4), np.ones(4), eps=1e-6)
    assert not q_normed.any()
    assert k_normed.any() == k.any()
