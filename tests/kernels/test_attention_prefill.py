from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaspec.pallas_kernels.attention_prefill import BLOCK, ROWS, TILE, attention_prefill
from llamaspec.pallas_kernels.parts.compat import interpreter
from tests.kernels.attention_oracle import BFLOAT16, assert_attends, pointed
from tests.support.strategies import DENORMAL, Noise, noises, share_of


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


def attend(noise: Noise, shape: Shape, offsets: Sequence[int], *, loud: int | None = None, scores: float = 1.0) -> None:
    """Run prefill attention and check its error bound. Rows of the cache that no query may read hold NaN.

    The value vector of key number `loud` is multiplied by 64, so that a query's result clearly shows whether it saw
    this key. `scores` multiplies the queries and the keys.
    """
    seq, kv_heads, group, head_dim, capacity, window = shape
    q = noise(len(offsets), seq, kv_heads * group, head_dim, dtype=BFLOAT16) * BFLOAT16(scores)
    cache = [noise(len(offsets), kv_heads, capacity, head_dim, dtype=BFLOAT16) for _ in "kv"]
    cache[0] *= BFLOAT16(scores)
    if loud is not None:
        cache[1][:, :, loud] *= 64
    unclamped, offsets = offsets, [max(-seq, min(offset, capacity)) for offset in offsets]
    stops = [max(0, min(offset + seq, capacity)) for offset in offsets]
    for row, (offset, stop) in enumerate(zip(offsets, stops, strict=True)):
        for array in cache:
            array[row, :, stop:] = np.nan
            array[row, :, : max(0, offset - (window or capacity + seq) + 1)] = np.nan
    arrays = [jnp.asarray(a) for a in (q, *cache, np.array(unclamped, np.int32))]
    with interpreter():
        o = np.asarray(attention_prefill(*arrays, window=window))
    assert o.dtype == BFLOAT16
    for row, (offset, stop) in enumerate(zip(offsets, stops, strict=True)):
        k, v = (array[row] for array in cache)
        assert_attends(o[row], q[row], k, v, offset, stop=stop, window=window, tile=TILE)


@settings(max_examples=share_of(3))
@given(noise=noises, shape=st.sampled_from(SHAPES), data=st.data())
def test_attention_is_within_its_bound(noise, shape, data):
    noise.exponent = min(noise.exponent, 4)  # larger scores overflow or lose their differences to rounding
    offsets = st.integers(-2, shape.capacity - shape.seq + 2)
    attend(noise, shape, data.draw(st.tuples(offsets, offsets), label="offsets"))


@pytest.mark.sampled(1)  # 3 to 5 s each
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_at_the_end_of_the_cache(shape):
    room = shape.capacity - shape.seq
    attend(Noise(seed=0), shape, [room, room // 2])


@pytest.mark.sampled(1)  # 1 to 2 s each
@pytest.mark.parametrize(
    ("shape", "offsets", "edge"),
    [
        # At first all queries but one see the whole first tile, then all queries see it.
        (Shape(ROWS, 1, 1, 64, 2 * TILE), (TILE - 2, TILE - 1), TILE - 1),
        # At first all queries but the last see the whole tile, then all queries see it.
        (Shape(ROWS, 1, 1, 64, 328, window=320), (257, 256), 0),
    ],
)
def test_the_edge_between_masked_and_unmasked_tiles(shape, offsets, edge):
    attend(Noise(seed=2), shape, offsets, loud=edge)


@pytest.mark.sampled(1)  # 2 s each
@pytest.mark.parametrize("seq", [1, 7, ROWS - 1, ROWS + 1])
def test_partially_filled_thread_blocks(seq):
    """Prefill attention stays within its bound if a thread block has unused rows, with 3 query heads per key head."""
    attend(Noise(seed=3), Shape(seq, 1, 3, 64, TILE + ROWS + 8), [TILE - seq])


@pytest.mark.sampled(1)  # 1 s each
@pytest.mark.parametrize("beyond", [73, 2**31 - 9, 2**31 - 1])
def test_an_offset_outside_of_the_cache_is_clamped(beyond):
    """An offset beyond the cache is clamped to the cache's end. With an offset far below 0, a query sees no key."""
    attend(Noise(seed=4), Shape(8, 1, 1, 64, 72, window=64), [beyond, -(2**31)])


@pytest.mark.sampled(1)  # 1 s each
@pytest.mark.parametrize(
    ("noise", "scores"), [(Noise(seed=0), 2.0**DENORMAL), (Noise(seed=1, peak=True), 1.0)], ids=["denormals", "outlier"]
)
def test_extremes(noise, scores):
    attend(noise, Shape(8, 1, 2, 64, 136), [120], scores=scores)


def test_large_scores():
    """With scores up to 2e4, attention stays within its bound.

    The largest score is at the newest or at the first key.
    """
    seq, keys, head_dim = 9, 70, 64
    query, k = pointed(2, keys, head_dim)
    q = np.repeat(query[None], seq, axis=0)
    k = np.concatenate([k, np.full((2, head_dim), np.nan, BFLOAT16)])[None, None]
    v = Noise(seed=0)(*k.shape, dtype=BFLOAT16)
    with interpreter():
        arrays = (jnp.asarray(a) for a in (q[None], k, v, np.array([keys - seq], np.int32)))
        o = np.asarray(attention_prefill(*arrays)).reshape(seq, 2, head_dim)
    np.testing.assert_array_equal(o[:, 0], v[0, 0, keys - seq : keys])
    np.testing.assert_array_equal(o[:, 1], np.repeat(v[0, 0, :1], seq, axis=0))


@pytest.mark.sampled(1)  # 2 s each
@pytest.mark.parametrize("shape", [Shape(BLOCK, 1, 1, 128, 6 * TILE), Shape(BLOCK, 1, 1, 64, 10 * TILE)])
def test_a_ring_that_wraps_twice(shape):
    attend(Noise(seed=1), shape, [shape.capacity - shape.seq])


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"q": (2, 4, 64)}, {}, r"q \[batch, seq, heads, head_dim\]"),
        ({"q": (3, 7, 4, 64)}, {}, "got"),
        ({"q": (2, 0, 4, 64)}, {}, "got"),
        ({"q": (2, 7, 3, 64)}, {}, "a multiple of the key heads"),
        ({"k": (2, 2, 100, 64), "v": (2, 2, 100, 64)}, {}, "multiples of 8"),
        ({"q": (2, 7, 4, 48), "k": (2, 2, 96, 48), "v": (2, 2, 96, 48)}, {}, "a head_dim of 64 or 128"),
        ({"v": (2, 2, 104, 64)}, {}, "got"),
        ({"offsets": (2, 1)}, {}, r"offsets \[2\]"),
        ({}, {"window": 0}, "window of 1"),
        ({}, {"dtype": np.float32}, "in bfloat16"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_is_refused(changes, options, words):
    shapes = {"q": (2, 7, 4, 64), "k": (2, 2, 96, 64), "v": (2, 2, 96, 64), "offsets": (2,)} | changes
    dtype = options.pop("dtype", BFLOAT16)
    *arrays, offsets = shapes.values()
    arrays = [*(jax.ShapeDtypeStruct(shape, dtype) for shape in arrays), jax.ShapeDtypeStruct(offsets, np.int32)]
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(partial(attention_prefill, **options), *arrays)
