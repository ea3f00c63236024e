"""The keys and values that a thread block reads while decoding, without a ring: threads load them to registers.

Keys are divided into tiles, and tiles among thread blocks, as in `key_ring`. A tile consists of runs of 8 to 64 rows
that are adjacent in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import lax

from llamaspec.pallas_kernels.parts.compat import Target
from llamaspec.pallas_kernels.parts.key_ring import KeyTiles

OCTET = 8  # rows: the least run

# A function that finds adjacent rows, given an array of keys or values, the first key and the number of rows. For keys
# beyond the capacity it returns other rows of the array.
RowsAt = Callable[[Any, Any, int], Any]


@dataclass(frozen=True)
class KeyRows(KeyTiles):
    """The tiles of a thread block, in memory."""

    refs: dict[str, Any]  # "k" and "v": the arrays of keys and values
    rows_at: RowsAt
    run: int  # rows of a run
    target: Target

    def rows(self, name: str, step) -> list[Any]:
        """List the runs of rows of this step's tile of K or V."""
        first = self.first_key(step)
        return [self.rows_at(self.refs[name], first + at, self.run) for at in range(0, self.tile, self.run)]

    def octet(self, name: str, turn) -> Any:
        """Return 8 rows of K or V. Consecutive turns go through the rows of all tiles."""
        turns = self.tile // OCTET  # of a tile
        first = self.first_key(lax.div(turn, turns)) + lax.rem(turn, turns) * OCTET
        return self.rows_at(self.refs[name], first, OCTET)
