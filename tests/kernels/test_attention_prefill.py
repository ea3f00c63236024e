from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention_prefill import BLOCK, TILE, attention_prefill
from pallas_kernels.compat import interpreter
from tests.kernels.attention_oracle import BFLOAT16, assert_attends
from tests.strategies import Noise, noises


class Shape(NamedTuple):
    seq: int
    kv_heads: int
    group: int
    head_dim: int
    capacity: int
    window: int | None = None


SHAPES = [
    Shape(BLOCK, 1, 1, 128, 3 * TILE),
    Shape(BLOCK + 1, 1, 3, 64, 2 * TILE + 8, window=65),
    Shape(64, 2, 1, 64, 264),
    Shape(1, 1, 2, 128, 72, window=64),
]


def attend(noise: Noise, shape: Shape, offset: int) -> None:
    """Run the kernel with NaN wherever no query has anything to look for, and hold it to its bound."""
    seq, kv_heads, group, head_dim, capacity, window = shape
    q = noise(1, seq, kv_heads * group, head_dim, dtype=BFLOAT16)
    cache = [noise(1, kv_heads, capacity, head_dim, dtype=BFLOAT16) for _ in "kv"]
    stop = max(0, min(offset + seq, capacity))
    for array in cache:
        array[:, :, stop:] = np.nan
        array[:, :, : max(0, offset - (window or capacity + seq) + 1)] = np.nan
    arrays = [jnp.asarray(a) for a in (q, *cache, np.array([offset], np.int32))]
    with interpreter():
        o = np.asarray(attention_prefill(*arrays, window=window))
    assert o.dtype == BFLOAT16
    k, v = (array[0] for array in cache)
    assert_attends(o[0], q[0], k, v, offset, stop=stop, window=window, tile=TILE)


@settings(max_examples=5)
@given(noise=noises, shape=st.sampled_from(SHAPES), data=st.data())
def test_attends_to_the_keys_that_are_there(noise, shape, data):
    noise.exponent = min(noise.exponent, 4)
    attend(noise, shape, data.draw(st.integers(-2, shape.capacity - shape.seq + 2), label="offset"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("end", [0, 1])
def test_every_shape_at_the_end_of_the_cache(shape, end):
    attend(Noise(seed=end), shape, shape.capacity - shape.seq - end)


@pytest.mark.parametrize("shape", [Shape(BLOCK, 1, 1, 128, 6 * TILE), Shape(BLOCK, 1, 1, 64, 10 * TILE)])
def test_a_ring_that_wraps_twice(shape):
    attend(Noise(seed=1), shape, shape.capacity - shape.seq)


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"q": (2, 4, 64)}, {}, r"q \[batch, seq, heads, head_dim\]"),
        ({"q": (3, 7, 4, 64)}, {}, "got"),
        ({"q": (2, 0, 4, 64)}, {}, "got"),
        ({"q": (2, 7, 3, 64)}, {}, "multiples of the key heads"),
        ({"k": (2, 2, 100, 64), "v": (2, 2, 100, 64)}, {}, "multiples of 8"),
        ({"q": (2, 7, 4, 48), "k": (2, 2, 96, 48), "v": (2, 2, 96, 48)}, {}, "heads of 64 or 128"),
        ({"v": (2, 2, 104, 64)}, {}, "got"),
        ({"offsets": (2, 1)}, {}, r"offsets \[2\]"),
        ({}, {"window": 0}, "window of 1"),
        ({}, {"dtype": np.float32}, "in bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(changes, options, words):
    shapes = {"q": (2, 7, 4, 64), "k": (2, 2, 96, 64), "v": (2, 2, 96, 64), "offsets": (2,)} | changes
    dtype = options.pop("dtype", BFLOAT16)
    *arrays, offsets = shapes.values()
    arrays = [*(jax.ShapeDtypeStruct(shape, dtype) for shape in arrays), jax.ShapeDtypeStruct(offsets, np.int32)]
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(partial(attention_prefill, **options), *arrays)
