"""The keys and values that a thread block reads while decoding, and their ring in shared memory.

The keys of a sequence are divided into tiles. `splits` thread blocks work on the same key head, and each takes every
`splits`-th tile. So even a single sequence keeps the whole GPU busy. Its length may be any number, and is only known at
run time. Asynchronous copies (TMA) fill a ring some tiles ahead of the computation. K and V have separate rings,
because a tile of K is no longer needed earlier than the tile of V.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from llamaspec.pallas_kernels.parts.compat import Target
from llamaspec.pallas_kernels.parts.staging import finish_reads
from llamaspec.pallas_kernels.parts.wgmma import matrices

TILE = 64  # least number of keys in a tile

# A function that finds the pieces of a tile, given an array of keys or values and the tile's number.
Pieces = Callable[[Any, Any], Sequence[Any]]


@dataclass(frozen=True)
class KeyTiles:
    """The tiles of keys that a thread block reads."""

    tile: int  # keys
    splits: int  # number of thread blocks per key head
    split: Any  # the number of this block among the `splits` blocks
    start: Any  # the first visible key
    stop: Any  # the last visible key + 1

    @property
    def steps(self) -> Any:
        """The number of tiles of this block."""
        tiles = pl.cdiv(self.stop, self.tile) - self.start // self.tile
        return jnp.maximum(tiles - self.split + self.splits - 1, 0) // self.splits

    def first_key(self, step) -> Any:
        return self.number(step) * self.tile

    def number(self, step) -> Any:
        """Return the number of the tile of this step."""
        return self.start // self.tile + self.split + step * self.splits


@dataclass(frozen=True)
class KeyRing:
    head_dim: int
    dtype: np.dtype
    splits: int  # number of thread blocks per key head
    tile: int  # keys
    stages: int  # tiles of K, and of V, in flight at once
    pieces: int  # copies per tile

    def scratch(self) -> dict[str, Any]:
        """Declare the shared memory and barriers of an `OpenRing`, by name."""
        tiles = matrices(self.stages, self.tile, self.head_dim, dtype=self.dtype)
        filled = plgpu.Barrier(num_arrivals=self.pieces, num_barriers=self.stages)
        return {"k": tiles, "k_filled": filled, "v": tiles, "v_filled": filled}


@dataclass(frozen=True)
class OpenRing:
    """A ring in use: for each of `steps` tiles, `wait` for K and `release` it, then the same for V."""

    ring: KeyRing
    refs: dict[str, Any]  # "k" and "v": the arrays of keys and values
    pieces: Pieces
    split: Any  # the number of this block among the `splits` blocks
    start: Any  # the first visible key
    stop: Any  # the last visible key + 1
    staged: dict[str, Any]
    target: Target

    @property
    def tiles(self) -> KeyTiles:
        return KeyTiles(self.ring.tile, self.ring.splits, self.split, self.start, self.stop)

    @property
    def steps(self) -> Any:
        return self.tiles.steps

    def first_key(self, step) -> Any:
        return self.tiles.first_key(step)

    def ask_ahead(self) -> None:
        """Prefetch into the L2 cache the tiles that `fill` will copy."""
        for step in range(self.ring.stages):

            @pl.when(step < self.steps)
            def _(step=step):
                for ref in self.refs.values():
                    for piece in self.pieces(ref, self.tiles.number(step)):
                        plgpu.async_prefetch(piece)

    def fill(self) -> None:
        """Start the first copies."""
        for step in range(self.ring.stages):

            @pl.when(step < self.steps)
            def _(step=step):
                self._fetch("k", step)
                self._fetch("v", step)

    def wait(self, name: str, step) -> Any:
        """Wait until this step's tile of K or V is in shared memory."""
        slot = lax.rem(step, self.ring.stages)
        plgpu.barrier_wait(self.staged[f"{name}_filled"].at[slot])
        return self.staged[name].at[slot]

    def release(self, name: str, step) -> None:
        """Wait until all threads have read this step's tile.

        Then start to copy another tile into the slot: the one of the step `step + stages`.
        """

        @pl.when(step + self.ring.stages < self.steps)
        def _():
            finish_reads(self.target)
            self._fetch(name, step + self.ring.stages)

    def _fetch(self, name: str, step) -> None:
        slot = lax.rem(step, self.ring.stages)
        rows = self.ring.tile // self.ring.pieces
        for i, piece in enumerate(self.pieces(self.refs[name], self.tiles.number(step))):
            into = self.staged[name].at[slot, pl.ds(i * rows, rows)]
            plgpu.copy_gmem_to_smem(piece, into, self.staged[f"{name}_filled"].at[slot])


def visible_keys(length, capacity: int, window: int | None) -> tuple[Any, Any]:
    """Return the range (first, last + 1) of the keys that the newest of `length` positions sees.

    The length is clamped to the capacity of the cache.
    """
    stop = jnp.clip(length, 0, capacity)
    return (jnp.int32(0) if window is None else jnp.maximum(stop - window, 0)), stop
