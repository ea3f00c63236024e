from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaspec.pallas_kernels.attention_paged import attention_paged
from llamaspec.pallas_kernels.parts.attention_parts import ring_stages
from llamaspec.pallas_kernels.parts.compat import interpreter
from llamaspec.pallas_kernels.parts.key_ring import TILE
from tests.kernels.attention_oracle import BFLOAT16, assert_attends, pointed
from tests.support.strategies import DENORMAL, Noise, noises, share_of


class Shape(NamedTuple):
    page: int
    max_pages: int
    kv_heads: int = 1
    group: int = 2
    head_dim: int = 64
    window: int | None = None
    splits: int = 1


SHAPES = [
    Shape(page=16, max_pages=9, group=4, head_dim=128, splits=4),
    Shape(page=64, max_pages=3, kv_heads=2, group=3),
    Shape(page=128, max_pages=2, group=8, window=100),
    Shape(page=8, max_pages=9, group=1),
]


def attend(noise: Noise, shape: Shape, lengths: list[int], *, scores: float = 1.0) -> None:
    """Run paged attention over shuffled pages and check its error bound.

    Invisible rows hold NaN, and unused table entries are invalid page numbers. `scores` multiplies the queries and the
    keys.
    """
    page, max_pages, kv_heads, group, head_dim, window, splits = shape
    capacity = page * max_pages
    pages = len(lengths) * max_pages + 2
    q = noise(len(lengths), kv_heads * group, head_dim, dtype=BFLOAT16) * BFLOAT16(scores)
    cache = [noise(pages, kv_heads, page, head_dim, dtype=BFLOAT16) for _ in "kv"]
    cache[0] *= BFLOAT16(scores)
    table = noise.rng.permutation(pages)[: len(lengths) * max_pages].reshape(-1, max_pages).astype(np.int32)
    stops = np.clip(lengths, 0, capacity)
    seen = np.zeros((pages, page), bool)
    for numbers, stop in zip(table, stops, strict=True):
        positions = np.arange(max(0, stop - (window or stop)), stop)
        seen[numbers[positions // page], positions % page] = True
    for array in cache:
        array[~seen[:, None].repeat(kv_heads, axis=1)] = np.nan
    rows = [[array[numbers].swapaxes(0, 1).reshape(kv_heads, -1, head_dim) for array in cache] for numbers in table]
    for numbers, stop in zip(table, stops, strict=True):
        numbers[-(-stop // page) :] = noise.rng.choice([-1, pages, 2**31 - 1, -(2**31)])
    # The kernel clamps invalid page numbers, so these stand for the first and the last page.
    table = np.where(table == 0, -3, np.where(table == pages - 1, pages + 5, table))
    arrays = [jnp.asarray(a) for a in (q, *cache, table, np.array(lengths, np.int32))]
    with interpreter():
        o = np.asarray(attention_paged(*arrays, window=window, splits=splits))
    for i, stop in enumerate(stops):
        at = {"offset": int(stop) - 1, "stop": int(stop), "window": window}
        k, v = rows[i]
        assert_attends(o[i : i + 1], q[i : i + 1], k, v, **at, tile=TILE)


@settings(max_examples=share_of(3))
@given(noise=noises, shape=st.sampled_from(SHAPES), data=st.data())
def test_attends_to_the_pages_of_the_table(noise, shape, data):
    around = {edge + step for edge in (0, shape.page, TILE, shape.page * shape.max_pages) for step in (-1, 0, 1)}
    attend(noise, shape, data.draw(st.lists(st.sampled_from(sorted(around)), min_size=2, max_size=2), label="lengths"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_page_size(shape):
    attend(Noise(seed=0), shape, [shape.page * shape.max_pages, TILE + 1])


@pytest.mark.parametrize("lengths", [[1, 63, 64, 65], [0, 2**31 - 1, -(2**31), 1]])
def test_every_length_that_is_an_edge(lengths):
    """With a length beyond the page table, a query attends to all pages of its own sequence and reads no NaN.

    With length 0, the result is 0.
    """
    attend(Noise(seed=3), Shape(page=32, max_pages=3, kv_heads=2, group=3), lengths)


@pytest.mark.parametrize(
    ("noise", "scores"), [(Noise(seed=0), 2.0**DENORMAL), (Noise(seed=1, peak=True), 1.0)], ids=["denormals", "outlier"]
)
def test_extremes(noise, scores):
    attend(noise, SHAPES[1], [3 * 64 - 1], scores=scores)


def test_large_scores():
    """With scores up to 2e4, attention over three shuffled pages stays within its error bound."""
    shape, keys = SHAPES[1], 70
    heads = shape.kv_heads * shape.group
    q, rows = pointed(heads, keys, shape.head_dim)
    table = np.array([[2, 0, 1]], np.int32)
    k = np.zeros((3, shape.kv_heads, shape.page, shape.head_dim), BFLOAT16)
    v = Noise(seed=0)(*k.shape, dtype=BFLOAT16)
    at = np.arange(keys)
    k[table[0, at // shape.page], :, at % shape.page] = rows[:, None]
    with interpreter():
        arrays = (jnp.asarray(a) for a in (q[None], k, v, table, np.array([keys], np.int32)))
        o = np.asarray(attention_paged(*arrays, splits=1)).reshape(q.shape)
    likes = np.where(np.arange(heads) % 2, 0, keys - 1)
    expected = v[table[0, likes // shape.page], np.arange(heads) // shape.group, likes % shape.page]
    np.testing.assert_array_equal(o, expected)


@pytest.mark.sampled(1)  # 1 s each
@pytest.mark.parametrize("page", [128, 32])
def test_a_ring_that_wraps_twice(page):
    """Attention is within its bound if the ring buffer of tiles in shared memory is filled more than twice.

    A tile is one page that one copy loads, or several pages with one copy each.
    """
    assert 7 > 2 * ring_stages(TILE, 128, np.dtype(BFLOAT16))
    attend(Noise(seed=1), Shape(page=page, max_pages=8 * TILE // page, group=1, head_dim=128), [7 * TILE])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": (5, 2, 24, 64), "v": (5, 2, 24, 64)}, "rows per page"),
        ({"k": (5, 2, 0, 64), "v": (5, 2, 0, 64)}, "rows per page"),
        ({"table": (2, 4)}, r"table \[3, max_pages\]"),
        ({"table": (3, 0)}, r"table \[3, max_pages\]"),
        ({"lengths": (1,)}, r"lengths \[3\]"),
        ({"v": (5, 2, 16, 128)}, "of equal shapes"),
        ({"q": (3, 4, 128)}, "of equal shapes"),
        ({"q": (3, 5, 64)}, "a multiple of the key heads"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_is_refused(changes, words):
    shapes = {"q": (3, 4, 64), "k": (5, 2, 16, 64), "v": (5, 2, 16, 64), "table": (3, 4), "lengths": (3,)} | changes
    dtypes = [BFLOAT16] * 3 + [np.int32] * 2
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes.values(), dtypes, strict=True)]
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(attention_paged, *arrays)
