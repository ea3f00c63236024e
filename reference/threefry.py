r"""Threefry: random bits from a key and a counter (Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405).

An ordinary generator keeps a state, and its millionth number needs the 999,999 before it. Threefry has no state. It
scrambles a counter with a key, so every number can be computed without the others, anywhere and in any order:

    random number i of key k  =  threefry(k, i)

The key and the counter have two words of 32 bits each. We add a word of the key to each word of the counter, then four
rounds mix the two words, and so on:

    round:  x_0 <- x_0 + x_1        x_1 <- (x_1 rotated left by r bits) xor x_0        all modulo 2^32
    after rounds 4, 8, ..., 20:  x_0 <- x_0 + k_(i mod 3)        x_1 <- x_1 + k_(i + 1 mod 3) + i        i = 1, ..., 5

Here k_2 = k_0 xor k_1 xor 0x1BD11BDA, and x begins as the counter plus (k_0, k_1). The authors chose the rotations and
the number of rounds so that statistical tests find no pattern in the bits, even for keys and counters that differ in a
single bit. Nothing here is rounded: integers have one right answer. A test compares 10,000 keys with `jax.random`.

The generated text of a request depends on this page: token number i is drawn with the `uniform` number of the key
`fold_in(key_of(seed), i)`. So the same seed gives the same text on every machine, and in any batch.
"""

import numpy as np
from jaxtyping import Float32, UInt32

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # bits, in turns of four rounds
PARITY = np.uint32(0x1BD11BDA)


def threefry(
    key: UInt32[np.ndarray, "*#batch 2"], counter: UInt32[np.ndarray, "*#batch 2"]
) -> UInt32[np.ndarray, "*batch 2"]:
    """Scramble a counter with a key.

    >>> zero = np.zeros(2, np.uint32)
    >>> [hex(word) for word in threefry(zero, zero)]  # a published test vector
    ['0x6b200159', '0x99ba4efe']
    """
    first, second = key[..., :1], key[..., 1:]  # arrays, since NumPy warns of sums of single words beyond 2^32
    keys = (first, second, first ^ second ^ PARITY)
    x, y = counter[..., :1] + first, counter[..., 1:] + second
    for i in range(5):
        for bits in ROTATIONS[i % 2]:
            x = x + y
            y = (y << np.uint32(bits) | y >> np.uint32(32 - bits)) ^ x
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + np.uint32(i + 1)
    return np.concatenate([x, y], axis=-1)


def key_of(seed: int) -> UInt32[np.ndarray, "2"]:
    """Make the key of a seed below 2^64: its upper and its lower 32 bits.

    >>> key_of(2**32 + 5)
    array([1, 5], dtype=uint32)
    """
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def fold_in(key: UInt32[np.ndarray, "*batch 2"], number: int) -> UInt32[np.ndarray, "*batch 2"]:
    """Make a new key from a key and a number, such as the position of a token.

    >>> fold_in(key_of(0), 1)
    array([ 928981903, 3453687069], dtype=uint32)
    """
    return threefry(key, key_of(number))


def random_bits(key: UInt32[np.ndarray, "*batch 2"], count: int) -> UInt32[np.ndarray, "*batch count"]:
    """Return the first `count` random words of a key: both words of each scrambled counter, combined by xor.

    >>> random_bits(key_of(0), 2)
    array([4070199207, 4202968722], dtype=uint32)
    """
    counters = np.stack([np.zeros(count, np.uint32), np.arange(count, dtype=np.uint32)], axis=-1)
    words = threefry(key[..., None, :], counters)
    return words[..., 0] ^ words[..., 1]


def uniform(bits: UInt32[np.ndarray, "*batch"]) -> Float32[np.ndarray, "*batch"]:
    """Turn random words into float32 numbers in [0, 1): 23 bits become the digits after "1.", and we subtract 1.

    >>> uniform(np.array([0, 2**31, 2**32 - 1], np.uint32))
    array([0.       , 0.5      , 0.9999999], dtype=float32)
    """
    exponent = np.uint32(0x3F800000)  # the bits of 1.0: its last 23 bits, the digits, are 0
    return (bits >> np.uint32(9) | exponent).view(np.float32) - np.float32(1)
