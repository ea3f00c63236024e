"""Which rows of W a thread block multiplies, and when what of them is copied: the frame of every matrix-vector kernel.

W is cut into tiles of a few rows, a tile into steps of some columns. A thread block has one tile, or, where there are
so many that blocks would come and go, every `blocks`-th: what it does once before the first tile then pays for all of
them. It walks along the steps of its tiles, one tile after the other, through a ring in shared memory, which the copy
engine keeps filled across their borders; the first copies are under way before the kernel before this one has ended.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.compat import MAX_SHARED_MEMORY, PROCESSORS, Target

MOST_AT_ONCE = 4  # blocks on a processor: more registers than 128 a thread there are not for them
FEWEST_TILES = 4  # for each of a block: with fewer, some processors would have much less to do than others


@dataclass(frozen=True)
class RowTiles:
    """The tiles of a matrix, and the blocks that they are shared out among."""

    tiles: int
    blocks: int
    steps: int  # of a tile
    stages: int  # of the ring

    def walk(
        self,
        block: Any,
        *,
        fetch: Callable[[Any, Any, Any], None],
        prepare: Callable[[], None],
        begin: Callable[[], Any],
        step: Callable[[Any, Any, Any], Any],
        finish: Callable[[Any, Any], None],
        target: Target,
    ) -> None:
        """All that a block does.

        `fetch(tile, step, slot)` has a step copied to a slot of the ring; `prepare()` waits for the kernel before and
        makes ready what all tiles use; `begin()` gives the sums that a tile begins with, `step(step, slot, sums)` waits
        for a slot and adds what is in it, and `finish(tile, sums)` takes them where they belong.
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
        prepare()

        def walk_tile(i):
            def one(j, sums):
                index = i * self.steps + j
                slot = lax.rem(index, self.stages)
                sums = step(j, slot, sums)

                @pl.when(index + self.stages < steps)
                def _():
                    target.before_refill()
                    if alone:
                        fetch(block, j + self.stages, slot)
                    else:
                        tiles, rest = divmod(self.stages, self.steps)
                        beyond = (j + rest >= self.steps).astype(jnp.int32)
                        fetch(block + (i + tiles + beyond) * self.blocks, j + rest - beyond * self.steps, slot)

                return sums

            sums = lax.fori_loop(0, self.steps, one, begin())
            if alone:
                target.let_next_start()
            else:
                pl.when(i == count - 1)(target.let_next_start)
            finish(block + i * self.blocks, sums)

        if alone:
            walk_tile(0)
        else:
            pl.loop(0, count)(walk_tile)


def blocks_for(tiles: int, *, shared: int) -> int:
    """Blocks for so many tiles, where a block takes `shared` bytes of shared memory: one for each tile, or, of many
    tiles, as many blocks as run at once, each with as many tiles as the others, but for one.

    >>> blocks_for(400, shared=50_000), blocks_for(1792, shared=100_000), blocks_for(2000, shared=200_000)
    (400, 256, 125)
    """
    at_once = PROCESSORS * max(1, min(MOST_AT_ONCE, MAX_SHARED_MEMORY // shared))
    if tiles < FEWEST_TILES * at_once:
        return tiles
    return pl.cdiv(tiles, pl.cdiv(tiles, at_once))
