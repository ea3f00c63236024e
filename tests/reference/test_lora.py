"""LoRA's definition: the adapted product equals the product with the merged matrix, and its gradient is right."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaspec.reference.lora import lora, lora_backward, lora_merged
from tests.support.strategies import seeds, share_of

SCALE = 0.75


def drawn(seed: int, rank: int) -> tuple[np.ndarray, ...]:
    """Draw x [2, 3, 5], W [4, 5], A [rank, 5], B [4, rank] and dy [2, 3, 4]."""
    draw = np.random.default_rng(seed).normal
    return draw(size=(2, 3, 5)), draw(size=(4, 5)), draw(size=(rank, 5)), draw(size=(4, rank)), draw(size=(2, 3, 4))


@given(seed=seeds, rank=st.integers(1, 3))
def test_merged_equals_applied(seed, rank):
    x, w, a, b, _ = drawn(seed, rank)
    np.testing.assert_allclose(lora(x, w, a, b, scale=SCALE), x @ lora_merged(w, a, b, scale=SCALE).T, atol=1e-12)


@settings(max_examples=share_of(20, part=10))
@given(seed=seeds, rank=st.sampled_from([1, 3]))
def test_the_gradient_equals_jax_and_central_differences(seed, rank):
    x, w, a, b, dy = drawn(seed, rank)
    slopes = lora_backward(x, w, a, b, dy, scale=SCALE)
    with jax.enable_x64(True):
        back = jax.vjp(lambda x, a, b: x @ w.T + SCALE * (x @ a.T) @ b.T, *map(jnp.asarray, (x, a, b)))[1]
        expected = [np.asarray(slope) for slope in back(jnp.asarray(dy))]
    for slope, exact in zip(slopes, expected, strict=True):
        assert slope.shape == exact.shape and slope.dtype == np.float64
        np.testing.assert_allclose(slope, exact, rtol=1e-12, atol=1e-12)

    # Each entry of y is linear in x, in A and in B, so a central difference has no error but rounding.
    step = 2.0**-10
    for i, slope in enumerate(slopes):
        direction = np.random.default_rng(seed + i).normal(size=slope.shape)
        moved = []
        for side in (1, -1):
            inputs = {"x": x, "a": a, "b": b}
            inputs["xab"[i]] = inputs["xab"[i]] + side * step * direction
            moved.append(lora(inputs["x"], w, inputs["a"], inputs["b"], scale=SCALE))
        difference = np.sum(dy * (moved[0] - moved[1])) / (2 * step)
        assert abs(np.sum(slope * direction) - difference) <= 1e-6 * max(1, abs(difference))
