"""Computes how many columns share a scale in arrays on the device, from the groups in a file."""

from llamaspec.model.checkpoints.checkpoint import Codes

LANES = 16  # float32 numbers in an AVX-512 register; a byte holds the codes of columns i and i + 16
PAIR = 2 * LANES  # columns in 16 bytes of packed codes; a group has 16 columns, or a multiple of 32
LARGEST_GROUP = 128  # columns; we split a larger multiple into groups of this size, with copies of the scale
ROW = 64  # columns; we pad a row with one scale to a multiple of this number


def can_multiply(codes: Codes, cols: int) -> bool:
    """Tell whether products can read these codes of a matrix with `cols` columns.

    A group must be a whole row, or have 16 columns or a multiple of 32 columns.
    """
    return codes.group >= cols or _fits(codes.group)


def _fits(group: int) -> bool:
    return group == LANES or group % PAIR == 0


def repeats_of_scales(codes: Codes, cols: int) -> int:
    """Return how many copies of each scale of `codes` our arrays hold, for a matrix with `cols` columns.

    There are several copies if we split a group of the file (see `group_of`).
    """
    return group_of(codes, cols)[1]


def group_of(codes: Codes, cols: int) -> tuple[int, int]:
    """Return how many columns share a scale in our arrays (0: a whole row), and how many copies a scale has.

    If the size of a group in the file is a multiple of `LARGEST_GROUP`, we split the group into groups of this size.
    Each of them has a copy of the scale.
    """
    if codes.group >= cols and not (codes.group <= LARGEST_GROUP and _fits(codes.group)):
        return 0, 1
    columns = LARGEST_GROUP if codes.group % LARGEST_GROUP == 0 else codes.group
    return columns, codes.group // columns
