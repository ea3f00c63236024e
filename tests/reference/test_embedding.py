import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.embedding import embedding
from tests.support.strategies import dtypes, noises

VOCAB, DIM = 7, 3
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=6, max_size=6).map(np.array)


@given(noise=noises, tokens=tokens, dtype=dtypes, shape=st.sampled_from([(6,), (2, 3), (1, 6), (3, 1, 2)]))
def test_is_the_product_with_unit_vectors(noise, tokens, dtype, shape):
    table = noise(VOCAB, DIM, dtype=dtype)
    x = embedding(tokens.reshape(shape), table)
    assert x.dtype == np.float64
    one_hot = np.eye(VOCAB)[tokens].reshape(*shape, VOCAB)
    np.testing.assert_array_equal(x, one_hot @ table.astype(np.float64))


@given(noise=noises)
def test_every_row_is_its_own_tokens(noise):
    table = noise(VOCAB, DIM)
    np.testing.assert_array_equal(embedding(np.arange(VOCAB), table), table)


@pytest.mark.parametrize("token", [-1, -VOCAB, VOCAB, 2**40, -(2**40)])
@pytest.mark.parametrize("valid_tokens", [[], [0, VOCAB - 1]])
def test_refuses_ids_outside_the_vocabulary(token, valid_tokens):
    with pytest.raises(IndexError, match=rf"0\.\.{VOCAB - 1}, got .*{token}"):
        embedding(np.array([*valid_tokens, token]), np.zeros((VOCAB, DIM)))


def test_no_tokens_are_no_rows():
    assert embedding(np.zeros(0, np.int64), np.zeros((VOCAB, DIM))).shape == (0, DIM)


def test_rows_are_copies():
    table = np.zeros((VOCAB, DIM))
    embedding(np.array([1]), table)[:] = 1
    assert not table.any()
