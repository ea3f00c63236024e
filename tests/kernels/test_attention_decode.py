from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention_decode import attention_decode
from pallas_kernels.attention_split_float32 import ROWS
from pallas_kernels.compat import interpreter
from pallas_kernels.key_ring import TILE
from tests.kernels.attention_oracle import BFLOAT16, assert_attends
from tests.strategies import Noise, noises


class Shape(NamedTuple):
    kv_heads: int
    group: int
    head_dim: int
    capacity: int
    window: int | None = None
    splits: int = 1
    dtype: Any = BFLOAT16


SHAPES = [
    Shape(2, 4, 128, 136, splits=4),
    Shape(1, 8, 64, 200, window=65),
    Shape(2, 3, 64, 72, splits=4),
    Shape(1, 7, 64, 264, window=100, splits=4),
    Shape(3, 1, 128, 64),
    Shape(1, 16, 64, 128),
    Shape(1, 8, 64, 136, window=65, dtype=np.float32),
    Shape(2, 3, 128, 200, splits=4, dtype=np.float32),
]


def attend(noise: Noise, shape: Shape, lengths: list[int]) -> None:
    """Run the kernel with NaN wherever it has nothing to look for, and hold it to its bound."""
    heads = shape.kv_heads * shape.group
    q = noise(len(lengths), heads, shape.head_dim, dtype=shape.dtype)
    cache = [noise(len(lengths), shape.kv_heads, shape.capacity, shape.head_dim, dtype=shape.dtype) for _ in "kv"]
    stops = np.clip(lengths, 0, shape.capacity)
    for row, stop in enumerate(stops):
        for array in cache:
            array[row, :, stop:] = np.nan
            array[row, :, : max(0, stop - (shape.window or stop))] = np.nan
    arrays = [jnp.asarray(a) for a in (q, *cache, np.array(lengths, np.int32))]
    with interpreter():
        o = np.asarray(attention_decode(*arrays, window=shape.window, splits=shape.splits))
    assert o.dtype == shape.dtype
    for row, stop in enumerate(stops):
        k, v = (array[row] for array in cache)
        at = {"offset": int(stop) - 1, "stop": int(stop), "window": shape.window}
        tile = ROWS if shape.dtype == np.float32 else TILE  # keys between two rescalings
        assert_attends(o[row : row + 1], q[row : row + 1], k, v, **at, tile=tile)


@settings(max_examples=6)
@given(noise=noises, shape=st.sampled_from(SHAPES), data=st.data())
def test_attends_to_the_keys_that_are_there(noise, shape, data):
    around = {edge + step for edge in (0, TILE, 2 * TILE, shape.capacity) for step in (-1, 0, 1)}
    lengths = data.draw(st.lists(st.sampled_from(sorted(around)), min_size=2, max_size=2), label="lengths")
    attend(noise, shape, lengths)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_around_a_tile(shape):
    attend(Noise(seed=0), shape, [min(TILE + 1, shape.capacity), shape.capacity])


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 2, 128, 7 * TILE),
        Shape(1, 2, 64, 13 * TILE),
        Shape(1, 1, 128, 28 * TILE, splits=4),
        Shape(1, 2, 64, 7 * TILE, dtype=np.float32),
    ],
)
def test_a_ring_that_wraps_twice(shape):
    attend(Noise(seed=1), shape, [shape.capacity - 1])
