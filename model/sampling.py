"""Draws tokens on the device: `reference.sampling` for a batch, in float32, without a sort.

Top-k and top-p keep the tokens above a threshold of probability. The bits of positive floats have the same order as the
floats. So a CPU finds the threshold by halving a range of 31 bits, with 31 sums over the vocabulary. A sort would take
many times as long. On a GPU each sum is a few tiny kernels, so a GPU cuts the range into 16 parts instead: it computes
15 sums at once, 8 times.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from llamaspec.model.options import SAMPLING, SamplingOptions


class Sampling(NamedTuple):
    """`SamplingOptions` as arguments of a compiled program, so that a new value does not need a new program.

    Only `greedy` needs a separate program. Each field is a scalar, or [batch, 1] if each row has its own value.
    """

    temperature: Array | np.float32
    top_k: Array | np.int32
    top_p: Array | np.float32
    min_p: Array | np.float32
    repetition_penalty: Array | np.float32


def as_arrays(options: SamplingOptions) -> Sampling:
    """Turn the options into scalar arguments of a compiled program. A temperature beyond float32 becomes infinite."""
    kinds = {int: np.int32, float: np.float32}
    with np.errstate(over="ignore"):
        return Sampling(**{name: kinds[option.kind](getattr(options, name)) for name, option in SAMPLING.items()})


@jax.named_scope("sample")
def sample(
    logits: Float[Array, "batch vocab"],
    seen: Bool[Array, "batch vocab"],
    keys: UInt32[Array, "batch 2"],
    positions: Int[Array, " batch"],
    sampling: Sampling,
    *,
    greedy: bool,
) -> Int[Array, " batch"]:
    """Choose a token for each row: the likeliest one if `greedy`, otherwise a token drawn at a temperature above 0.

    The token at position m is drawn with the m-th random number of its row's key. If the logits of a row contain NaN,
    its result is `vocab`, which is not the id of any token.
    """
    penalized = penalize(logits.astype(jnp.float32), seen, sampling.repetition_penalty)
    if greedy:
        return largest(penalized)
    return draw(distribution(penalized, sampling), jax.vmap(uniform)(keys, positions))


def penalize(
    logits: Float[Array, "batch vocab"], seen: Bool[Array, "batch vocab"], penalty: Any
) -> Float[Array, "batch vocab"]:
    """Make the tokens that were `seen` less likely, as `reference.sampling.penalize` does.

    `penalty` is a scalar or [batch, 1].
    """
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


@jax.named_scope("sample")
def sample_by_row(
    logits: Float[Array, "batch vocab"],
    keys: UInt32[Array, "batch 2"],
    positions: Int[Array, " batch"],
    sampling: Sampling,
) -> Int[Array, " batch"]:
    """Choose a token for each row with the row's own options. At temperature 0, a row gets its likeliest token.

    Each field of `sampling` is [batch, 1]. The caller has already applied the repetition penalty to `logits`. A row's
    token does not depend, to the last bit, on the options of the other rows.
    """
    likeliest, draws = largest(logits), jnp.asarray(sampling.temperature) > 0

    def sampled_tokens() -> Array:
        tempered = sampling._replace(temperature=jnp.where(draws, sampling.temperature, 1))
        return draw(distribution(logits, tempered), jax.vmap(uniform)(keys, positions))

    return jnp.where(jnp.squeeze(draws, 1), lax.cond(jnp.any(draws), sampled_tokens, lambda: likeliest), likeliest)


def uniform(key: UInt32[Array, "2"], position: Int[Array, ""]) -> Float[Array, ""]:
    """Draw the number in [0, 1) that decides the token at `position`. `random_key` makes the key."""
    return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position))


def random_key(seed: int) -> np.ndarray:
    """Make the two uint32 of `jax.random.key(seed)` for any seed below 2^64, without running a program."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def largest(logits: Float[Array, "batch vocab"]) -> Int[Array, " batch"]:
    """Return the lowest id with the largest logit in each row, or `vocab` if a logit is NaN."""
    return lax.platform_dependent(logits, cpu=largest_in_two, default=largest_in_one)


def largest_in_two(logits: Float[Array, "batch vocab"]) -> Int[Array, " batch"]:
    """Compute `largest` with two plain reductions. On a CPU this is 7 times as fast as an argmax."""
    vocab = logits.shape[-1]
    most = lax.optimization_barrier(jnp.max(logits, axis=-1, keepdims=True))
    return jnp.min(jnp.where(logits == most, jnp.arange(vocab, dtype=jnp.int32), vocab), axis=-1)


def largest_in_one(logits: Float[Array, "batch vocab"]) -> Int[Array, " batch"]:
    """Compute `largest` with one reduction over pairs. On a GPU this needs half as many kernels."""

    def ahead(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        first = jnp.isnan(a[0]) | (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    vocab = logits.shape[-1]
    ids = jnp.where(jnp.isnan(logits), vocab, jnp.arange(vocab, dtype=jnp.int32))
    return lax.reduce((logits, ids), (jnp.array(-jnp.inf, logits.dtype), jnp.int32(vocab)), ahead, (1,))[1]


def distribution(logits: Float[Array, "batch vocab"], sampling: Sampling) -> Float[Array, "batch vocab"]:
    """Apply temperature, top-k, top-p and min-p as `reference.sampling` defines them. The temperature must not be 0."""
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    p = jax.nn.softmax(jnp.where(below == 0, 0, below / sampling.temperature))  # 0 / T is NaN for a denormal T
    p = _cut_tails(p, sampling)
    return _normalize(jnp.where(p >= sampling.min_p * jnp.max(p, axis=-1, keepdims=True), p, 0))


def log_probabilities(
    logits: Float[Array, "*batch vocab"], tokens: Int[Array, "*batch"], temperature: Any = 1.0
) -> Float[Array, "*batch"]:
    """Compute the log probability of each token at a temperature, before any tail is cut off."""
    scaled = logits if isinstance(temperature, float) and temperature == 1 else logits / temperature
    return jnp.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(scaled, axis=-1)


def draw(p: Float[Array, "batch vocab"], uniforms: Float[Array, " batch"]) -> Int[Array, " batch"]:
    """Choose the first id at which the cumulative distribution exceeds `uniforms`, in the order of the vocabulary."""
    vocab = p.shape[-1]
    ids = jnp.arange(vocab, dtype=jnp.int32)
    cumulative = jnp.cumsum(p, axis=-1)
    # A parallel sum may fail to grow at some step, so we exclude tokens of probability 0 explicitly.
    reached = (cumulative > uniforms[:, None] * cumulative[:, -1:]) & (p > 0)
    # One reduction finds the first token that is reached. If no token is reached, it finds the last one with a
    # probability above 0.
    order = jnp.where(reached, ids, jnp.where(p > 0, 2 * vocab - 1 - ids, 2 * vocab))
    least = jnp.min(order, axis=-1)
    finite = jnp.isfinite(cumulative[:, -1])
    return jnp.where(finite, jnp.where(least < vocab, least, 2 * vocab - 1 - least), vocab)


def _cut_tails(p: Float[Array, "batch vocab"], sampling: Sampling) -> Float[Array, "batch vocab"]:
    """Apply top-k and then top-p to the rows that use them. A filter that no row uses is not computed.

    Both filters keep the tokens with a probability of at least t. For top-k, t is the smallest probability with fewer
    than `top_k` tokens above it. For top-p, t is the smallest probability such that the tokens above it have less than
    `top_p` together. So the two filters are two iterations of one loop, which halves the code that a GPU's compiler
    gets.
    """
    by_k, by_p = (sampling.top_k > 0) & (sampling.top_k < p.shape[-1]), sampling.top_p < 1

    def cut(turn, p):
        first = turn == 0
        applies = jnp.where(first, by_k, by_p)
        most = jnp.where(first, jnp.float32(sampling.top_k), sampling.top_p)
        numbers = jnp.where(first, 1, p)
        bits = lax.bitcast_convert_type(p, jnp.int32)

        def is_below(t):
            # The float32 sum of ones is exact, because a vocabulary has fewer than 2^24 tokens.
            return jnp.sum(jnp.where(bits > t, numbers, 0), axis=-1, keepdims=True) < most

        low, high = jnp.full((*p.shape[:-1], 1), -1, jnp.int32), jnp.max(bits, axis=-1, keepdims=True)
        by_halves, by_sixteenths = (partial(smallest, is_below, ways=ways) for ways in (2, 16))
        t = lax.platform_dependent(low, high, cpu=by_halves, default=by_sixteenths)
        return jnp.where(applies, _normalize(jnp.where(bits >= t, p, 0)), p)

    first, last = jnp.where(jnp.any(by_k), 0, 1), jnp.where(jnp.any(by_p), 2, 1)
    return lax.fori_loop(first, last, cut, p)


def smallest(
    enough: Callable[[Int[Array, "*batch 1"]], Bool[Array, "*batch 1"]],
    low: Int[Array, "*batch 1"],
    high: Int[Array, "*batch 1"],
    *,
    ways: int,
) -> Int[Array, "*batch 1"]:
    """Find the smallest integer above `low` for which `enough` is true.

    `enough` must be true for `high`, and false for `low` unless `low` is -1. Each round cuts the range, which has up to
    31 bits, into `ways` parts (a power of 2), and continues with one of them, until its length is 1.
    """
    bits = ways.bit_length() - 1
    parts = jnp.arange(ways + 1, dtype=jnp.int32).reshape(-1, *(1 for _ in low.shape))

    def end(low, high, part):
        length = high - low
        return low + (length >> bits) * part + ((length & (ways - 1)) * part >> bits)

    def narrow(_, ends):
        low, high = ends[0], ends[-1]
        short = jnp.sum(~jax.vmap(enough)(ends[1:-1]), axis=0, dtype=jnp.int32)  # number of parts that end too low
        return end(end(low, high, short), end(low, high, short + 1), parts)

    # The state of the loop is one array with the ends of the parts. So on a GPU each round is the same three kernels,
    # which are compiled once.
    return lax.fori_loop(0, -(-31 // bits), narrow, end(low, high, parts), unroll=ways > 2)[-1]


def _normalize(p: Array) -> Array:
    return p / jnp.sum(p, axis=-1, keepdims=True)
