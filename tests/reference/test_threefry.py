"""Threefry gives the bits of `jax.random`, for 10,000 keys."""

import jax
import jax.numpy as jnp
import numpy as np

from llamaspec.model.sampling import random_key, uniform
from llamaspec.reference import threefry

KEYS = np.random.default_rng(0).integers(2**32, size=(10_000, 2), dtype=np.uint32)
KEYS[:4] = [[0, 0], [0, 1], [1, 0], [2**32 - 1, 2**32 - 1]]


def test_bits_and_uniform_numbers_of_ten_thousand_keys_are_those_of_jax():
    keys = jax.random.wrap_key_data(jnp.asarray(KEYS), impl="threefry2x32")
    bits = threefry.random_bits(KEYS, 5)
    assert np.array_equal(bits, jax.jit(jax.vmap(lambda key: jax.random.bits(key, (5,))))(keys))
    assert np.array_equal(threefry.uniform(bits), jax.jit(jax.vmap(lambda key: jax.random.uniform(key, (5,))))(keys))


def test_a_key_and_a_position_make_the_key_that_jax_makes():
    keys = jax.random.wrap_key_data(jnp.asarray(KEYS), impl="threefry2x32")
    for position in (0, 1, 4095):
        folded = jax.jit(jax.vmap(lambda key: jax.random.fold_in(key, position)))(keys)  # noqa: B023
        assert np.array_equal(threefry.fold_in(KEYS, position), jax.random.key_data(folded))


def test_the_model_draws_the_numbers_of_this_page():
    for seed in (0, 7, 2**40 + 3):
        assert np.array_equal(threefry.key_of(seed), np.asarray(random_key(seed)))
        for position in (0, 9):
            bits = threefry.random_bits(threefry.fold_in(threefry.key_of(seed), position), 1)
            assert threefry.uniform(bits)[0] == uniform(jnp.asarray(random_key(seed)), jnp.int32(position))


def test_published_vectors():
    """Threefry 2x32 with 20 rounds gives the known answers in kat_vectors, a file of Random123."""
    ones = np.full(2, 2**32 - 1, np.uint32)
    assert [hex(word) for word in threefry.threefry(ones, ones)] == ["0x1cb996fc", "0xbb002be7"]
    key, counter = np.array([[0x13198A2E, 0x03707344], [0x243F6A88, 0x85A308D3]], np.uint32)
    assert [hex(word) for word in threefry.threefry(key, counter)] == ["0xc4923a9c", "0x483df7a0"]
