import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pallas_kernels.parts.compat import interpreter
from pallas_kernels.rope import rope
from tests.strategies import Noise, assert_within, at_extremes, dtypes, noises, roundoff
from verify.running_error import TINY, gamma

settings = hypothesis.settings(max_examples=8, deadline=None)  # an interpreted call takes half a second
# Padded; one load; a load and a tail; more than one block of heads, with and without a tail (of 64 wide).
heads = st.sampled_from([1, 3, 4, 5, 7, 8, 17, 64, 71])


def tables(rng: np.random.Generator, tokens: tuple[int, ...], head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    angles = rng.uniform(0, 1000, (*tokens, head_dim // 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@given(
    noise=noises,
    dtype=dtypes,
    tokens=st.sampled_from([(1, 1), (2, 3)]),
    heads=heads,
    head_dim=st.sampled_from([64, 128]),
)
@settings
@example(Noise(0), np.dtype(jnp.bfloat16), (1, 2), 71, 64)
@example(Noise(0), np.dtype("float32"), (1, 2), 9, 256)
@at_extremes(dtype=np.dtype("float32"), tokens=(1, 2), heads=5, head_dim=64)
def test_rope(noise, dtype, tokens, heads, head_dim):
    x = noise(*tokens, heads, head_dim, dtype=dtype)
    cos, sin = tables(noise.rng, tokens, head_dim)
    with interpreter():
        y = rope(jnp.asarray(x), jnp.asarray(cos), jnp.asarray(sin))
    assert y.dtype == dtype
    a, b = np.split(x.astype(np.float64), 2, axis=-1)
    c, s = (table.astype(np.float64)[..., None, :] for table in (cos, sin))  # [*tokens, 1, pairs]
    exact = np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
    size = np.concatenate([np.abs(a * c) + np.abs(b * s), np.abs(b * c) + np.abs(a * s)], axis=-1)
    off = gamma(2) * size  # two products and a sum
    assert_within(y, exact, off + (0 if dtype == np.float32 else roundoff(dtype)) * (np.abs(exact) + off) + 2 * TINY)


def test_tokens_do_not_know_of_each_other():
    x, (cos, sin) = Noise(0)(2, 5, 64), tables(np.random.default_rng(0), (2,), 64)
    x[0] = cos[0] = np.nan
    with interpreter():
        y = rope(jnp.asarray(x), jnp.asarray(cos), jnp.asarray(sin))
        alone = rope(jnp.asarray(x[1:]), jnp.asarray(cos[1:]), jnp.asarray(sin[1:]))
    np.testing.assert_array_equal(np.asarray(y)[1:], np.asarray(alone))


@pytest.mark.usefixtures("unchecked")
def test_bad_input():
    x, table = jnp.ones((2, 4, 64)), jnp.ones((2, 32))
    with pytest.raises(ValueError, match=r"rope takes \[..., heads, head_dim\] with heads of .* got \[2, 4, 48\]"):
        rope(x[..., :48], table, table)
    with pytest.raises(ValueError, match=r"rope takes sin \[2, 32\] in float32, got \[2, 31\] in float32"):
        rope(x, table, table[:, :31])
    with pytest.raises(ValueError, match=r"rope takes cos \[2, 32\] in float32, got \[2, 32\] in bfloat16"):
        rope(x, table.astype(jnp.bfloat16), table)
