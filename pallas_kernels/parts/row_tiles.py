"""The outer loop of matrix-vector kernels: which rows of W a thread block has, and in which order it copies them.

W is divided into tiles of a few rows, and a tile into steps of some columns. If the GPU can run a thread block for each
tile at once, a block has one tile. Otherwise a block has every `blocks`-th tile, and prepares the vectors once for all
of its tiles. (The matrix of a large output head is an exception: it always has one block per tile, so that a slow SM
gets fewer tiles.) The steps of a block's tiles pass through a ring in shared memory. Asynchronous copies (TMA) fill the
ring, also across the borders of tiles.

Between two kernels, memory would be idle for 1 to 2 us. So the next kernel may start as soon as all blocks of this
kernel run. The next kernel's blocks start on any SM that has room, fill their rings, and wait. Without a limit, some
SMs would get four of these blocks and others one, and the SMs with four would finish last. So we make each block's ring
so long that an SM has room only for an even share of the blocks (`even_share`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from llamaspec.pallas_kernels.parts.card import Card
from llamaspec.pallas_kernels.parts.compat import Target
from llamaspec.pallas_kernels.parts.staging import finish_reads

BLOCK_MEMORY = 1024  # bytes of an SM's shared memory that the system takes per block
SUMS_MEMORY = 1536  # bytes per block for sums over threads and barriers
MOST_STAGES = 32  # stages of a ring: Mosaic's limit of barriers in a group
MOST_AT_ONCE = 4  # blocks per SM, so that each thread has 128 registers


@dataclass(frozen=True)
class RowTiles:
    """The tiles of a matrix, divided between thread blocks."""

    tiles: int
    blocks: int
    steps: int  # steps of a tile
    stages: int  # stages of the ring, or steps with weights on their way to registers
    few: int = 0  # for a single tile with up to this many steps, wait for all of them at once, without a loop

    def walk(
        self,
        block: Any,
        *,
        fetch: Callable[[Any, Any, Any], None],
        prepare: Callable[[], None],
        begin: Callable[[], Any],
        ahead: Callable[[Any], Any],
        wait: Callable[[Any], None],
        step: Callable[[Any, Any, Any], Any],
        finish: Callable[[Any, Any, Any], None],
        target: Target,
    ) -> None:
        """Do all the work of a block, with these functions of the kernel:

        fetch(tile, step, slot)    starts the copy of a step to a slot of the ring
        prepare()                  waits for the previous kernel, and stages data for all tiles
        begin()                    returns the initial sums of a tile
        ahead(tile)                reads values for `finish`, before the first step of a tile
        wait(slot)                 waits until the copy to a slot has ended
        step(step, slot, sums)     returns the sums plus the products of the slot
        finish(tile, sums, read)   stores the results of a tile; `read` is what `ahead` returned
        """
        single_tile = self.blocks == self.tiles
        count = 1 if single_tile else lax.div(self.tiles - block + self.blocks - 1, self.blocks)
        steps = count * self.steps

        for slot in range(self.stages):
            tile, first = divmod(slot, self.steps)

            def begun(tile=tile, first=first, slot=slot):
                fetch(block + tile * self.blocks, first, slot)

            if tile:
                pl.when(tile < count)(begun)
            else:  # a tile that every block has
                begun()
        target.let_next_start()
        prepare()

        def walk_tile(i, slot):
            def walk_step(j, state):
                slot, sums = state
                wait(slot)
                sums = step(j, slot, sums)

                @pl.when(i * self.steps + j + self.stages < steps)
                def _():
                    finish_reads(target)
                    if single_tile:
                        fetch(block, j + self.stages, slot)
                    else:
                        tiles, offset = divmod(self.stages, self.steps)
                        beyond = (j + offset >= self.steps).astype(jnp.int32)
                        fetch(block + (i + tiles + beyond) * self.blocks, j + offset - beyond * self.steps, slot)

                # A wrapping counter takes fewer instructions than the remainder of a count.
                return jnp.where(slot == self.stages - 1, 0, slot + 1), sums

            tile = block + i * self.blocks
            read, sums = ahead(tile), begin()
            if single_tile and self.stages == self.steps <= self.few:
                for own_step in range(self.steps):
                    wait(own_step)
                for own_step in range(self.steps):
                    sums = step(own_step, own_step, sums)
            else:
                slot, sums = lax.fori_loop(0, self.steps, walk_step, (slot, sums))
            finish(tile, sums, read)
            return slot

        if single_tile:
            walk_tile(0, jnp.int32(0))
        else:
            lax.fori_loop(0, count, walk_tile, jnp.int32(0))

    def walk_in_registers(
        self,
        tile: Any,
        *,
        load: Callable[[Any, Any], Any],
        prepare: Callable[[], None],
        begin: Callable[[], Any],
        ahead: Callable[[Any], Any],
        step: Callable[[Any, Any, Any], Any],
        finish: Callable[[Any, Any, Any], None],
        target: Target,
    ) -> None:
        """Do all the work of a block with one tile, without a ring. The arguments are those of `walk`, except for two:

        load(tile, step)           starts loads of a step's weights to registers, and returns these weights
        step(step, weights, sums)  returns the sums plus the products of the weights

        While a step is multiplied, the weights of the next `stages` steps are in flight.

        A turn of the loop has `stages` + 1 steps, so that every step's weights are in the same registers in each turn.
        Otherwise the compiler moves weights between registers at the end of a turn. A move waits for the load.
        """
        depth = min(self.stages, self.steps)
        in_flight = [load(tile, i) for i in range(depth)]
        target.let_next_start()
        prepare()

        def walk_steps(first, count, state):
            in_flight, sums = state
            for nth in range(count):
                in_flight = [*in_flight, load(tile, first + nth + depth)]
                sums = step(first + nth, in_flight[0], sums)
                in_flight = in_flight[1:]
            return in_flight, sums

        read, state, size = ahead(tile), (in_flight, begin()), depth + 1
        turns, remainder = divmod(self.steps - depth, size)
        state = lax.fori_loop(0, turns, lambda i, state: walk_steps(i * size, size, state), state)
        in_flight, sums = walk_steps(turns * size, remainder, state)
        for nth, weights in enumerate(in_flight):
            sums = step(self.steps - depth + nth, weights, sums)
        finish(tile, sums, read)


def even_share(blocks: int, card: Card) -> int:
    """Return the bytes of shared memory per block that make `blocks` blocks spread evenly over the GPU's SMs.

    Blocks that start while others run fill any free room. So we leave an SM room for only its share of the blocks, but
    for at least two, so that the next kernel's blocks also fit.

    >>> from llamaspec.pallas_kernels.parts.card import H200
    >>> even_share(528, H200), even_share(300, H200), even_share(100, H200)
    (45671, 57345, 76801)
    """
    most = max(2, pl.cdiv(blocks, card.processors))
    return card.shared // (most + 1) - BLOCK_MEMORY + 1


def all_fit(blocks: int, shared: int, card: Card) -> bool:
    """Tell whether `blocks` blocks with `shared` bytes of shared memory each run at once, at most four per SM.

    >>> from llamaspec.pallas_kernels.parts.card import H200
    >>> all_fit(384, 70_000, H200), all_fit(384, 76_000, H200)
    (True, False)
    """
    room = card.shared // (shared + SUMS_MEMORY + BLOCK_MEMORY)
    return room >= min(pl.cdiv(blocks, card.processors), MOST_AT_ONCE)


def blocks_for(tiles: int, card: Card, *, shared: int, at_once: int, requested: int | None = None) -> int:
    """Choose the number of blocks for `tiles` tiles, each with at least `shared` bytes of shared memory.

    If all tiles fit at once, each tile gets a block. Otherwise the number is `requested`, or `at_once` per SM,
    but no more than fit at once. `requested` may also be the number of tiles; then new blocks start when others end.

    >>> from llamaspec.pallas_kernels.parts.card import H200
    >>> blocks_for(400, H200, shared=40_000, at_once=2), blocks_for(1792, H200, shared=40_000, at_once=2)
    (400, 264)
    >>> [blocks_for(1792, H200, shared=some, at_once=2, requested=200) for some in (120_000, 40_000)]
    [132, 200]
    >>> blocks_for(1792, H200, shared=120_000, at_once=2, requested=1792)
    1792
    """
    if tiles <= MOST_AT_ONCE * card.processors or requested == tiles:
        return min(tiles, requested or tiles)
    room = card.shared // (shared + SUMS_MEMORY + BLOCK_MEMORY)
    at_once = max(1, min(room, MOST_AT_ONCE if requested else at_once))
    return min(at_once * card.processors, requested or tiles)
