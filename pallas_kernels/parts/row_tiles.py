"""Which rows of W a thread block multiplies, and when what of them is copied: the frame of every matrix-vector kernel.

W is cut into tiles of a few rows, a tile into steps of some columns. A thread block has one tile, or, where there are
so many that blocks would come and go, every `blocks`-th: what it does once before the first tile then pays for all of
them. (Of a head of a gigabyte blocks do come and go: a slow processor then has fewer.) It walks along the steps of its
tiles, one tile after the other, through a ring in shared memory, which the copy engine keeps filled across their
borders.

Between two kernels memory would rest for 1 to 2 us, while the last blocks of one end and the first of the other are
started and ask for something. So the next kernel may start as soon as this one's blocks have: where a processor has
room for a block of it, that fills its ring and waits. Such blocks do not spread evenly but go where room is, and a
processor with four is slower than one with one. So rings are as long as leaves room for a processor's part of the
blocks and for no more (`even_share`), where a tile has as many steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.parts.compat import PROCESSORS, Target
from pallas_kernels.parts.staging import finish_reads

PROCESSOR_MEMORY, BLOCK_MEMORY = 228 * 1024, 1024  # bytes of shared memory: all, and what a block takes beside its own
SUMS_MEMORY = 1536  # bytes of its own for sums over threads and barriers
MOST_STAGES = 32  # of a ring: Mosaic has no more barriers in a group
MOST_AT_ONCE = 4  # blocks on a processor: more registers than 128 a thread there are not for them


@dataclass(frozen=True)
class RowTiles:
    """The tiles of a matrix, and the blocks that they are shared out among."""

    tiles: int
    blocks: int
    steps: int  # of a tile
    stages: int  # of the ring
    few: int = 0  # steps of a block's only tile that are waited for at once and written out, in a ring that holds them

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
        """All that a block does.

        `fetch(tile, step, slot)` has a step copied to a slot of the ring; `prepare()` waits for the kernel before and
        makes ready what all tiles use; `begin()` gives the sums that a tile begins with, `wait(slot)` waits for a slot,
        `step(step, slot, sums)` adds what is in it. `finish(tile, sums, read)` stores the results; what it adds to them
        `ahead(tile)` reads before the first step.
        """
        alone = self.blocks == self.tiles
        count = 1 if alone else lax.div(self.tiles - block + self.blocks - 1, self.blocks)
        steps = count * self.steps

        for slot in range(self.stages):
            tile, first = divmod(slot, self.steps)

            def begun(tile=tile, first=first, slot=slot):
                fetch(block + tile * self.blocks, first, slot)

            if tile:
                pl.when(tile < count)(begun)
            else:  # which every block has
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
                    if alone:
                        fetch(block, j + self.stages, slot)
                    else:
                        tiles, rest = divmod(self.stages, self.steps)
                        beyond = (j + rest >= self.steps).astype(jnp.int32)
                        fetch(block + (i + tiles + beyond) * self.blocks, j + rest - beyond * self.steps, slot)

                # Not the remainder of a count, which takes some more instructions.
                return jnp.where(slot == self.stages - 1, 0, slot + 1), sums

            tile = block + i * self.blocks
            read, sums = ahead(tile), begin()
            if alone and self.stages == self.steps <= self.few:
                for mine in range(self.steps):
                    wait(mine)
                for mine in range(self.steps):
                    sums = step(mine, mine, sums)
            else:
                slot, sums = lax.fori_loop(0, self.steps, one, (slot, sums))
            finish(tile, sums, read)
            return slot

        if alone:
            walk_tile(0, jnp.int32(0))
        else:
            lax.fori_loop(0, count, walk_tile, jnp.int32(0))


def even_share(blocks: int) -> int:
    """Bytes of shared memory with which so many blocks are spread evenly: a processor has room for its part of them.

    Blocks that start while others still run come to where there is room, as many as there is room for. For two a
    processor at least, so that the next kernel's blocks fit beside them.

    >>> even_share(528), even_share(300), even_share(100)
    (45671, 57345, 76801)
    """
    most = max(2, pl.cdiv(blocks, PROCESSORS))
    return PROCESSOR_MEMORY // (most + 1) - BLOCK_MEMORY + 1


def blocks_for(tiles: int, *, shared: int, at_once: int, asked: int | None = None) -> int:
    """Blocks for so many tiles, each of at least `shared` bytes of shared memory: one for each, or, where blocks would
    come and go, `at_once` on each processor, or `asked`; fewer where a processor has no room for as many, but where a
    block for each tile is asked for, they come and go.

    >>> blocks_for(400, shared=40_000, at_once=2), blocks_for(1792, shared=40_000, at_once=2)
    (400, 264)
    >>> [blocks_for(1792, shared=some, at_once=2, asked=asked) for some, asked in ((120_000, 200), (40_000, 200))]
    [132, 200]
    >>> blocks_for(1792, shared=120_000, at_once=2, asked=1792)
    1792
    """
    if tiles <= MOST_AT_ONCE * PROCESSORS or asked == tiles:
        return min(tiles, asked or tiles)
    room = PROCESSOR_MEMORY // (shared + SUMS_MEMORY + BLOCK_MEMORY)
    at_once = max(1, min(room, MOST_AT_ONCE if asked else at_once))
    return min(at_once * PROCESSORS, asked or tiles)
