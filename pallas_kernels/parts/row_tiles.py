"""The rows of W that a thread block multiplies, and the order of its copies: the frame of matrix-vector kernels.

W is cut into tiles of a few rows, and a tile into steps of some columns. A thread block has one tile. Where there are
more tiles than blocks fit at once, it has every `blocks`-th tile, and prepares the vectors once for all of them. (A
head of a gigabyte still has a block for each tile, because a slow processor then gets fewer.) A block walks along the
steps of its tiles through a ring in shared memory, which the copy engine keeps filled across the tiles' borders.

Between two kernels the memory would idle for 1 to 2 us, so the next kernel may start as soon as all blocks of this one
run: its blocks fill their rings wherever a processor has room, and wait. They do not spread evenly, and a processor
with four is slower than one with one, so rings are made long enough to leave room only for an even share
(`even_share`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from llamaspec.pallas_kernels.parts.compat import PROCESSORS, Target
from llamaspec.pallas_kernels.parts.staging import finish_reads

PROCESSOR_MEMORY = 228 * 1024  # bytes of shared memory of a processor
BLOCK_MEMORY = 1024  # bytes of it that each block takes beside its own
SUMS_MEMORY = 1536  # bytes of its own for sums over threads and barriers
MOST_STAGES = 32  # stages of a ring: Mosaic has no more barriers in a group
MOST_AT_ONCE = 4  # blocks on a processor, which leaves each thread 128 registers


@dataclass(frozen=True)
class RowTiles:
    """Tiles of a matrix, shared out among thread blocks."""

    tiles: int
    blocks: int
    steps: int  # steps of a tile
    stages: int  # stages of the ring
    few: int = 0  # steps of a block's only tile up to which they are waited for at once, without a loop

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
        """Do all the work of a block.

        `fetch(tile, step, slot)` starts the copy of a step to a slot of the ring. `prepare()` waits for the previous
        kernel and makes ready what all tiles use. `begin()` gives a tile's first sums, `wait(slot)` waits for a slot,
        and `step(step, slot, sums)` adds what is in it. `ahead(tile)` reads before the first step what `finish(tile,
        sums, read)` adds when it stores the results.
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
            def one(j, state):
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

                # A counter that wraps takes fewer instructions than the remainder of a count.
                return jnp.where(slot == self.stages - 1, 0, slot + 1), sums

            tile = block + i * self.blocks
            read, sums = ahead(tile), begin()
            if single_tile and self.stages == self.steps <= self.few:
                for own_step in range(self.steps):
                    wait(own_step)
                for own_step in range(self.steps):
                    sums = step(own_step, own_step, sums)
            else:
                slot, sums = lax.fori_loop(0, self.steps, one, (slot, sums))
            finish(tile, sums, read)
            return slot

        if single_tile:
            walk_tile(0, jnp.int32(0))
        else:
            lax.fori_loop(0, count, walk_tile, jnp.int32(0))


def even_share(blocks: int) -> int:
    """Give the bytes of shared memory of a block with which `blocks` blocks spread evenly over the processors.

    Blocks that start while others still run fill any room there is. A processor therefore gets room for its share only,
    but for two blocks at least, so that the next kernel's blocks fit too.

    >>> even_share(528), even_share(300), even_share(100)
    (45671, 57345, 76801)
    """
    most = max(2, pl.cdiv(blocks, PROCESSORS))
    return PROCESSOR_MEMORY // (most + 1) - BLOCK_MEMORY + 1


def all_fit(blocks: int, shared: int) -> bool:
    """Tell whether so many blocks, with `shared` bytes of shared memory each, run at once, four on a processor at most.

    >>> all_fit(384, 70_000), all_fit(384, 76_000)
    (True, False)
    """
    room = PROCESSOR_MEMORY // (shared + SUMS_MEMORY + BLOCK_MEMORY)
    return room >= min(pl.cdiv(blocks, PROCESSORS), MOST_AT_ONCE)


def blocks_for(tiles: int, *, shared: int, at_once: int, requested: int | None = None) -> int:
    """Choose the number of blocks for so many tiles, each with at least `shared` bytes of shared memory.

    Each tile has a block of its own if all of them fit at once. Otherwise there are `requested` blocks, or `at_once` on
    each processor, but no more than fit. `requested` may also be the number of tiles, and then blocks come and go.

    >>> blocks_for(400, shared=40_000, at_once=2), blocks_for(1792, shared=40_000, at_once=2)
    (400, 264)
    >>> [blocks_for(1792, shared=some, at_once=2, requested=200) for some in (120_000, 40_000)]
    [132, 200]
    >>> blocks_for(1792, shared=120_000, at_once=2, requested=1792)
    1792
    """
    if tiles <= MOST_AT_ONCE * PROCESSORS or requested == tiles:
        return min(tiles, requested or tiles)
    room = PROCESSOR_MEMORY // (shared + SUMS_MEMORY + BLOCK_MEMORY)
    at_once = max(1, min(room, MOST_AT_ONCE if requested else at_once))
    return min(at_once * PROCESSORS, requested or tiles)
