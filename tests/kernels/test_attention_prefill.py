from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention_prefill import BLOCK, ROWS, TILE, attention_prefill
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
    Shape(BLOCK + 1, 1, 2, 64, 2 * TILE + 8, window=65),
    Shape(64, 2, 2, 64, 264),
    Shape(1, 1, 2, 128, 72, window=64),
]


def attend(noise: Noise, shape: Shape, offsets: Sequence[int], *, loud: int | None = None) -> None:
    """Run the kernel with NaN wherever no query has anything to look for, and hold it to its bound.

    A `loud` key's value is so large that whoever sees it shows it.
    """
    seq, kv_heads, group, head_dim, capacity, window = shape
    q = noise(len(offsets), seq, kv_heads * group, head_dim, dtype=BFLOAT16)
    cache = [noise(len(offsets), kv_heads, capacity, head_dim, dtype=BFLOAT16) for _ in "kv"]
    if loud is not None:
        cache[1][:, :, loud] *= 64
    stops = [max(0, min(offset + seq, capacity)) for offset in offsets]
    for row, (offset, stop) in enumerate(zip(offsets, stops, strict=True)):
        for array in cache:
            array[row, :, stop:] = np.nan
            array[row, :, : max(0, offset - (window or capacity + seq) + 1)] = np.nan
    arrays = [jnp.asarray(a) for a in (q, *cache, np.array(offsets, np.int32))]
    with interpreter():
        o = np.asarray(attention_prefill(*arrays, window=window))
    assert o.dtype == BFLOAT16
    for row, (offset, stop) in enumerate(zip(offsets, stops, strict=True)):
        k, v = (array[row] for array in cache)
        assert_attends(o[row], q[row], k, v, offset, stop=stop, window=window, tile=TILE)


@settings(max_examples=3)
@given(noise=noises, shape=st.sampled_from(SHAPES), data=st.data())
def test_attends_to_the_keys_that_are_there(noise, shape, data):
    noise.exponent = min(noise.exponent, 4)  # scores of 2^31 and more overflow: their differences are rounded to them
    offsets = st.integers(-2, shape.capacity - shape.seq + 2)
    attend(noise, shape, data.draw(st.tuples(offsets, offsets), label="offsets"))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_at_the_end_of_the_cache(shape):
    room = shape.capacity - shape.seq
    attend(Noise(seed=0), shape, [room, room // 2])


@pytest.mark.parametrize(
    ("shape", "offsets", "edge"),
    [
        # All but the first query see all of the first tile; all do.
        (Shape(ROWS, 1, 1, 64, 2 * TILE), (TILE - 2, TILE - 1), TILE - 1),
        # All but the last see all of it; all do.
        (Shape(ROWS, 1, 1, 64, 328, window=320), (257, 256), 0),
    ],
)
def test_the_edge_of_what_needs_no_mask(shape, offsets, edge):
    attend(Noise(seed=2), shape, offsets, loud=edge)


@pytest.mark.parametrize("shape", [Shape(BLOCK, 1, 1, 128, 6 * TILE), Shape(BLOCK, 1, 1, 64, 10 * TILE)])
def test_a_ring_that_wraps_twice(shape):
    attend(Noise(seed=1), shape, [shape.capacity - shape.seq])


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
