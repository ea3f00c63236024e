from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaspec.pallas_kernels.attention_decode import attention_decode
from llamaspec.pallas_kernels.parts.attention_parts import keys_of_a_tile, ring_stages
from llamaspec.pallas_kernels.parts.attention_split_float32 import ROWS
from llamaspec.pallas_kernels.parts.card import H200
from llamaspec.pallas_kernels.parts.compat import Target, current_target, interpreter, use_target
from llamaspec.pallas_kernels.parts.key_ring import TILE
from tests.kernels.attention_oracle import BFLOAT16, assert_attends, pointed
from tests.support.strategies import DENORMAL, Noise, noises, share_of


class Shape(NamedTuple):
    kv_heads: int
    group: int
    head_dim: int
    capacity: int
    window: int | None = None
    splits: int = 1
    dtype: Any = BFLOAT16


SHAPES = [
    Shape(1, 4, 128, 136, splits=4),
    Shape(1, 8, 64, 200, window=65),
    Shape(2, 3, 64, 72),
    Shape(1, 7, 64, 264, window=100, splits=4),
    Shape(2, 1, 128, 64),
    Shape(1, 16, 64, 128),
    Shape(1, 8, 64, 136, window=65, dtype=np.float32),
    Shape(2, 2, 128, 200, splits=4, dtype=np.float32),
    Shape(1, 8, 64, 2056, splits=4),
    Shape(2, 3, 64, 2304, window=2100),
]
IN_TILES_OF_128 = SHAPES[-2:]


def tile_of(shape: Shape, *, sequences: int = 1) -> int:
    """Return how many keys the decode attention kernel reads in one tile."""
    seen = min(shape.capacity, shape.window or shape.capacity)
    heads, card = sequences * shape.kv_heads, current_target().card
    return keys_of_a_tile(heads, shape.group, shape.head_dim, np.dtype(shape.dtype), seen, card)


def attend(noise: Noise, shape: Shape, lengths: list[int], *, scores: float = 1.0) -> None:
    """Run decode attention and check its error bound. Rows of the cache that the kernel must not read hold NaN.

    `scores` multiplies the queries and the keys.
    """
    heads = shape.kv_heads * shape.group
    q = noise(len(lengths), heads, shape.head_dim, dtype=shape.dtype) * np.asarray(scores, shape.dtype)
    cache = [noise(len(lengths), shape.kv_heads, shape.capacity, shape.head_dim, dtype=shape.dtype) for _ in "kv"]
    cache[0] *= np.asarray(scores, shape.dtype)
    stops = np.clip(lengths, 0, shape.capacity)
    for row, stop in enumerate(stops):
        for array in cache:
            array[row, :, stop:] = np.nan
            array[row, :, : max(0, stop - (shape.window or stop))] = np.nan
    arrays = [jnp.asarray(a) for a in (q, *cache, np.array(lengths, np.int32))]
    with interpreter():
        o = np.asarray(attention_decode(*arrays, window=shape.window, splits=shape.splits))
    assert o.dtype == shape.dtype
    keys = tile_of(shape, sequences=len(lengths))
    tile = ROWS if shape.dtype == np.float32 else keys  # keys between two rescalings
    for row, stop in enumerate(stops):
        k, v = (array[row] for array in cache)
        at = {"offset": int(stop) - 1, "stop": int(stop), "window": shape.window}
        assert_attends(o[row : row + 1], q[row : row + 1], k, v, **at, tile=tile)


@settings(max_examples=share_of(4))
@given(noise=noises, shape=st.sampled_from(SHAPES), data=st.data())
def test_attention_is_within_its_bound(noise, shape, data):
    around = {edge + step for edge in (0, TILE, 2 * TILE, shape.capacity) for step in (-1, 0, 1)}
    lengths = data.draw(st.lists(st.sampled_from(sorted(around)), min_size=2, max_size=2), label="lengths")
    attend(noise, shape, lengths)


def test_some_shapes_are_in_tiles_of_128():
    with use_target(Target(card=H200)):
        assert [shape for shape in SHAPES if tile_of(shape, sequences=2) == 2 * TILE] == IN_TILES_OF_128


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_around_a_tile(shape):
    attend(Noise(seed=0), shape, [min(TILE + 1, shape.capacity), shape.capacity])


@pytest.mark.sampled(1)  # 1 s each
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[7]])
@pytest.mark.parametrize("lengths", [[1, 63, 64, 65], [0, 2**31 - 1, -(2**31), 1]])
def test_every_length_that_is_an_edge(shape, lengths):
    """With a length beyond the capacity, a query attends to all keys of its own sequence, and to none of the next one.

    With length 0, the result is 0. Keys that must not be read are NaN.
    """
    attend(Noise(seed=3), shape, lengths)


@pytest.mark.sampled(1)  # 1 s each
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[6]])
@pytest.mark.parametrize(
    ("noise", "scores"), [(Noise(seed=0), 2.0**DENORMAL), (Noise(seed=1, peak=True), 1.0)], ids=["denormals", "outlier"]
)
def test_extremes(shape, noise, scores):
    attend(noise, shape, [shape.capacity - 1], scores=scores)


@pytest.mark.sampled(1)  # 1 s each
@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 2, 128, 7 * TILE),
        Shape(1, 2, 64, 13 * TILE),
        Shape(1, 8, 64, 41 * TILE, splits=4),
        Shape(1, 2, 64, 7 * TILE, dtype=np.float32),
        Shape(1, 1, 128, 5 * TILE, dtype=np.float32),
    ],
)
def test_a_ring_that_wraps_twice(shape):
    keys = tile_of(shape)
    tiles = shape.capacity // (keys * shape.splits)  # tiles of one block, rounded down
    assert tiles > 2 * ring_stages(keys, shape.head_dim, np.dtype(shape.dtype))
    attend(Noise(seed=1), shape, [shape.capacity - 1])


@pytest.mark.sampled(1)  # 1 s each
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[6]])
def test_large_scores(shape):
    heads, keys = shape.kv_heads * shape.group, 70
    first = max(0, keys - (shape.window or keys))
    one_q, one_k = pointed(heads, keys - first, shape.head_dim, dtype=shape.dtype)
    k = np.zeros((2, shape.kv_heads, shape.capacity, shape.head_dim), shape.dtype)
    k[:, :, first:keys] = one_k
    v = Noise(seed=0)(*k.shape, dtype=shape.dtype)
    q = np.stack([one_q, one_q])
    with interpreter():
        arrays = (jnp.asarray(a) for a in (q, k, v, np.full(2, keys, np.int32)))
        o = np.asarray(attention_decode(*arrays, window=shape.window, splits=1)).reshape(q.shape)
    likes = np.where(np.arange(heads) % 2, first, keys - 1)
    np.testing.assert_array_equal(o, v[:, np.arange(heads) // shape.group, likes])


def test_a_visible_nan_reaches_the_result():
    shape = SHAPES[2]
    q = np.ones((2, shape.kv_heads * shape.group, shape.head_dim), BFLOAT16)
    k = np.ones((2, shape.kv_heads, shape.capacity, shape.head_dim), BFLOAT16)
    k[0, 0, 3] = np.nan
    lengths = jnp.full(2, 70, jnp.int32)
    with interpreter():
        o = attention_decode(jnp.asarray(q), jnp.asarray(k), jnp.ones_like(k), lengths, splits=1)
    is_nan = np.isnan(np.asarray(o, np.float32)).reshape(2, shape.kv_heads, -1)
    np.testing.assert_array_equal(is_nan.all(axis=-1), [[True, False], [False, False]])
    np.testing.assert_array_equal(is_nan.any(axis=-1), [[True, False], [False, False]])


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"q": (2, 4, 64, 1)}, {}, r"q \[batch, heads, head_dim\]"),
        ({"q": (3, 4, 64), "lengths": (3,)}, {}, r"k with one sequence per query \(3\), got k"),
        ({"q": (0, 4, 64)}, {}, "got"),
        ({"q": (2, 3, 64)}, {}, "a multiple of the key heads"),
        ({"q": (2, 18, 64)}, {}, "1 to 8 query heads per key head"),
        ({"k": (2, 2, 100, 64), "v": (2, 2, 100, 64)}, {}, "multiples of 8"),
        ({"q": (2, 4, 48), "k": (2, 2, 96, 48), "v": (2, 2, 96, 48)}, {}, "a head_dim of 64 or 128"),
        ({"v": (2, 2, 104, 64)}, {}, "of equal shapes"),
        ({"lengths": (2, 1)}, {}, r"lengths \[2\]"),
        ({}, {"window": 0}, "window of 1"),
        ({}, {"splits": 3}, "multiple of 4"),
        ({}, {"splits": 0}, "multiple of 4"),
        ({}, {"dtypes": ["float32", BFLOAT16, BFLOAT16, np.int32]}, "all in bfloat16"),
        ({}, {"dtypes": ["float16", "float16", "float16", np.int32]}, "in float32"),
        ({}, {"dtypes": [BFLOAT16, BFLOAT16, BFLOAT16, "uint8"]}, "int32"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_is_refused(changes, options, words):
    shapes = {"q": (2, 4, 64), "k": (2, 2, 96, 64), "v": (2, 2, 96, 64), "lengths": (2,)} | changes
    dtypes = options.pop("dtypes", [BFLOAT16] * 3 + [np.int32])
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes.values(), dtypes, strict=True)]
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(partial(attention_decode, **options), *arrays)
