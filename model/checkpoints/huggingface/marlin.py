"""Reads matrices in the layout of Marlin, a kernel of AutoGPTQ that stores GPTQ's codes in a different order.

    B           int32 [cols / 16, 2 rows]: codes of 4 bits plus 8, eight per word, the first in the lowest bits
    s           scales [groups, rows]
    workspace   scratch space of the kernel

See https://github.com/IST-DASLab/marlin. A tile has 16 rows and 16 columns of the matrix. Marlin stores four
neighboring tiles (64 rows) together, in the order of the threads of a warp. In a tile, a thread has two rows (one in
each half of the rows) and four columns (two adjacent columns in each half of the columns). If each group has a scale,
the scales of 64 rows are stored as a transposed 8 x 8 square. If each row has one scale, Marlin reorders 32 scales at a
time.
"""

import numpy as np

from llamaspec.model.checkpoints.huggingface.rule import FLOATS, INT32, Arrays, Rule, StoredArray, unpack_words
from llamaspec.reference.quantizers.blocks import Quantized

TILE, TOGETHER = 16, 64  # number of columns, and number of rows, that Marlin stores together


class Marlin(Rule):
    """The layout of Marlin: codes of 4 bits, without zero points."""

    form, zeros = "int4", False

    def __init__(self, group: int | None):
        self.group = group

    def group_of(self, cols: int) -> int:
        return self.group or cols

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        return {
            "B": StoredArray((cols // TILE, rows * TILE // 8), INT32),
            "s": StoredArray((-(-cols // self.group_of(cols)), rows), FLOATS),
            "workspace": StoredArray((1,), INT32, optional=True, any_length=True),
        }

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        del arrays
        if rows % TOGETHER or cols % TILE or cols % self.group_of(cols):
            what = f"a multiple of {TOGETHER} rows, and of {TILE} and {self.group_of(cols)} columns"
            raise ValueError(f"the matrix has {rows} rows and {cols} columns, but marlin needs {what}")

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized:
        first, end = start // TOGETHER, -(-stop // TOGETHER)
        own = slice(start - first * TOGETHER, stop - first * TOGETHER)
        width = TOGETHER * TILE // 8  # number of words in four tiles
        words = np.ascontiguousarray(arrays["B"][:, first * width : end * width])
        # The axes of a tile's rows are (half, row), and the axes of its columns are (half, pair, number within a pair).
        codes = unpack_words(words, 4).reshape(len(words), end - first, 8, 4, 4, 2, 2, 2)
        blocks, row, pair, tile, within, half, second_half = range(1, 8)
        codes = codes.transpose(blocks, tile, half, row, 0, second_half, pair, within).reshape(-1, cols)
        scales = arrays["s"][:, first * TOGETHER : end * TOGETHER].astype(np.float32)
        square = (8, 8, 1) if self.group_of(cols) < cols else (4, 4, 2)
        scales = scales.reshape(len(scales), -1, *square).swapaxes(2, 3).reshape(len(scales), -1)
        return Quantized(codes[own].view(np.int8) - np.int8(8), np.ascontiguousarray(scales[:, own].T))
