"""The KV cache: keys and values of every position so far, in arrays of a fixed capacity.

The shape of a cache never changes, so no program is compiled again. The number of positions in use, `lengths`, is a
run-time value. Rows after `lengths` contain old values, which attention masks out.

A server keeps the keys and values of many sequences in pages instead. A page holds consecutive positions of one
sequence, and a table lists the pages of each sequence in order. A token at position -1 is padding or belongs to an idle
row: its key and value are not written, and it attends to nothing. Table entry 0 means "no page", so page 0 is never
written.

An int8 cache follows `reference.quantizers.kv_cache`: each key and each value has its own scale. The head_dim codes of
a key or value are followed by the four bytes of their scale, so codes and scales are one array.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int8

from llamaspec.reference.config import Config

SCALE = 4  # bytes of a float32 scale
LARGEST = 127  # largest int8 code
ALIGNED = 8  # the GPU's attention kernels need a multiple of this many positions


Rows = Float[Array, "batch kv_heads capacity head_dim"] | Int8[Array, "batch kv_heads capacity bytes"]


class LayerCache(NamedTuple):
    k: Rows  # keys after RoPE
    v: Rows


class LayerPages(NamedTuple):
    k: Float[Array, "pages kv_heads page head_dim"] | Int8[Array, "pages kv_heads page bytes"]
    v: Float[Array, "pages kv_heads page head_dim"] | Int8[Array, "pages kv_heads page bytes"]
    table: Int[Array, "batch blocks"]  # pages of each row, in order; 0: no page


class Pages(NamedTuple):
    """The number and size of the pages of a cache."""

    number: int  # number of pages, including page 0
    size: int  # positions per page


LayerStore = LayerCache | LayerPages  # keys and values of a layer


class Cache(NamedTuple):
    layers: Sequence[LayerStore]
    lengths: Int[Array, " batch"]  # number of positions in use, for each row


def cache_rows(context: int, chunk: int) -> int:
    """Return the length of a cache for `context` tokens and one padded chunk, rounded up to a multiple of `ALIGNED`.

    The last chunk of a prompt is padded to `chunk` tokens, so it may end past the context.

    >>> cache_rows(1024, 256), cache_rows(300, 256)
    (1280, 560)
    """
    return -(-(context + chunk) // ALIGNED) * ALIGNED


def empty_cache(config: Config, *, batch: int, capacity: int, dtype: np.dtype) -> Cache:
    """Make an empty cache with room for `capacity` positions. `dtype` is a float dtype or int8."""
    shape, arrays = (batch, config.kv_heads, capacity, _width(config, dtype)), 2 * config.layers
    if jax.default_backend() == "cpu":  # NumPy's zeros use no memory until they are written
        zeros = [jax.device_put(np.zeros(shape, dtype)) for _ in range(arrays)]
    else:
        zeros = _zeros(shape, np.dtype(dtype), arrays)
    layers = [LayerCache(k, v) for k, v in zip(zeros[::2], zeros[1::2], strict=True)]
    return Cache(layers, jax.device_put(np.zeros(batch, np.int32)))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: tuple[int, ...], dtype: np.dtype, arrays: int) -> list[Array]:
    """Make `arrays` arrays of zeros on the device, with one program.

    Sending 2.2 GB of zeros from the host takes 92 ms, and 44 calls of `jnp.zeros` take 11 ms. This program takes 0.3
    ms.
    """
    return [jnp.zeros(shape, dtype) for _ in range(arrays)]


def empty_pages(config: Config, *, pages: int, page: int, dtype: np.dtype) -> list[tuple[Array, Array]]:
    """Make zeroed keys and values for each layer: `pages` pages with `page` positions each, without a table."""
    shape = (pages, config.kv_heads, page, _width(config, dtype))
    # The pages may take most of a GPU's memory, so we make them on the device.
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.layers)]


def cache_bytes(config: Config, *, batch: int, capacity: int, dtype: np.dtype) -> int:
    """Count the bytes of an `empty_cache` and of the table of RoPE angles, which has `capacity` rows."""
    return batch * capacity * position_bytes(config, dtype=dtype) + capacity * config.head_dim * 4


def position_bytes(config: Config, *, dtype: np.dtype) -> int:
    """Count the bytes of the keys and values of one position, in all layers."""
    return 2 * config.layers * config.kv_heads * _width(config, dtype) * dtype.itemsize


def _width(config: Config, dtype: np.dtype) -> int:
    return config.head_dim + (SCALE if dtype == np.int8 else 0)


def extended(
    cache: LayerStore,
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    at: Int[Array, "batch seq"],
) -> LayerStore:
    """Return the cache with new keys and values at the positions `at`, which are consecutive along seq.

    If the cache is in pages, two rows of the batch must not write to the same page.
    """
    if isinstance(cache, LayerPages):
        return LayerPages(_write(cache.k, k, cache.table, at), _write(cache.v, v, cache.table, at), cache.table)
    start = at[:, 0]
    return LayerCache(append(cache.k, k, start), append(cache.v, v, start))


def _write(pages: Array, new: Array, table: Array, at: Array) -> Array:
    new = to_int8(new) if pages.dtype == jnp.int8 else new.astype(pages.dtype)
    page = pages.shape[2]
    numbers = jnp.take_along_axis(table, at // page, axis=1, mode="fill", fill_value=0)
    # XLA drops writes with an index past the last page, so tokens without a page get such an index. Each token gets a
    # different one, because with unique indices XLA simply stores. With repeated indices, its GPU code retries an
    # atomic swap of two bytes for each of the hundreds of tokens that pad a chunk.
    nowhere = len(pages) + jnp.arange(at.size, dtype=numbers.dtype).reshape(at.shape)
    numbers = jnp.where((at < 0) | (numbers == 0), nowhere, numbers)
    return pages.at[numbers, :, at % page].set(new, mode="drop", unique_indices=True)


def append(rows: Rows, new: Float[Array, "batch seq kv_heads head_dim"], starts: Int[Array, " batch"]) -> Rows:
    """Return `rows` with `new` keys or values written at consecutive positions, in the dtype of `rows`.

    `starts` has the first of these positions for each sequence.
    """
    new = new.swapaxes(1, 2)  # [batch, kv_heads, seq, head_dim]
    new = to_int8(new) if rows.dtype == jnp.int8 else new.astype(rows.dtype)
    return jax.vmap(lambda old, new, start: lax.dynamic_update_slice(old, new, (0, start, 0)))(rows, new, starts)


def to_int8(x: Float[Array, "*batch head_dim"]) -> Int8[Array, "*batch bytes"]:
    """Quantize as `reference.quantizers.kv_cache` does, in float32.

    Returns the codes, followed by the bytes of their scale.
    """
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / LARGEST
    codes = jnp.rint(x / jnp.where(scales == 0, jnp.inf, scales)).clip(-LARGEST, LARGEST).astype(jnp.int8)
    return jnp.concatenate([codes, lax.bitcast_convert_type(scales[..., 0], jnp.int8)], axis=-1)


def from_int8(
    rows: Int8[Array, "*batch bytes"],
) -> tuple[Float32[Array, "*batch head_dim"], Float32[Array, " *batch"]]:
    """Split int8 rows into their codes, as float32, and their scales."""
    return rows[..., :-SCALE].astype(jnp.float32), lax.bitcast_convert_type(rows[..., -SCALE:], jnp.float32)
