"""Rows cut into pieces: the pieces cover every element, overlaps are marked, and every vector load is aligned."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.pallas_kernels.parts.compat import THREADS
from llamaspec.pallas_kernels.parts.spans import Span, Spans, as_rows, check_rows
from llamaspec.pallas_kernels.softmax import MAX_SCORES, spans_of
from tests.support.strategies import dtypes


def pieces(spans: Spans) -> list[Span]:
    full_spans = [Span(block * spans.size, spans.size, spans.step) for block in range(spans.count)]
    return full_spans if spans.tail is None else [*full_spans, spans.tail]


@given(length=st.integers(THREADS, 10_000), size=st.integers(1, 5000), dtype=dtypes)
def test_pieces_cover_a_row_once(length, size, dtype):
    spans = Spans.of(length, dtype, size=size)
    ranges = [np.arange(span.start, span.start + span.size) for span in pieces(spans)]
    new = [positions[span.overlap :] for positions, span in zip(ranges, pieces(spans), strict=True)]
    np.testing.assert_array_equal(np.concatenate(new), np.arange(length))
    assert len(ranges) == spans.pieces
    if spans.tail is not None:  # one block holds the overlap
        assert spans.tail.start >= pieces(spans)[-2].start


@given(length=st.integers(THREADS, 10_000), size=st.integers(1, 5000), dtype=dtypes)
def test_every_vector_of_every_row_is_aligned(length, size, dtype):
    spans = Spans.of(length, dtype, size=size)
    vector = spans.step // THREADS
    assert vector * dtype.itemsize in (2, 4, 8, 16)
    assert length % vector == 0
    for span in pieces(spans):
        assert span.start % vector == 0
        assert span.size % spans.step == 0


@given(rows=st.integers(1, 64), length=st.integers(THREADS, MAX_SCORES), dtype=dtypes)
def test_a_row_has_no_more_pieces_than_a_thread_block_has_threads(rows, length, dtype):
    assert spans_of(rows, length, dtype).pieces <= THREADS


@pytest.mark.parametrize("length", [1, THREADS - 1, THREADS, THREADS + 1])
def test_short_rows_are_padded(length):
    rows = as_rows(jnp.ones((2, 3, length)), pad=-1.0)
    assert rows.shape == (6, max(length, THREADS))
    assert np.all(np.asarray(rows)[:, length:] == -1)


def test_rows_that_no_kernel_supports_are_refused():
    with pytest.raises(ValueError, match=r"op.*float32.*bfloat16.*float16"):
        check_rows("op", jnp.ones(4, jnp.float16))
    for shape in ((), (0,), (3, 0)):
        with pytest.raises(ValueError, match="op takes rows of at least one element"):
            check_rows("op", jnp.ones(shape))
    check_rows("op", jnp.ones((0, 3)))
    with pytest.raises(ValueError, match=r"op.*\b3\b.*\b4\b"):
        check_rows("op", jnp.ones((2, 4)), most=3)
