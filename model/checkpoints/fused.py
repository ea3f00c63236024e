"""Matrices that a file stores as one."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from llamaspec.model.checkpoints.checkpoint import refused


@runtime_checkable
class Location(Protocol):
    """The location of a tensor in its file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def _replace(self, **fields: Any) -> Any: ...


def taken_apart[E: Location](path: str, name: str, entry: E, rows: Sequence[int], *, by: str) -> list[E]:
    """Locate the parts of a matrix; `rows` are the rows of each. Raises `CheckpointError` if they do not fit.

    `by` names what says how many rows there are.
    """
    if len(entry.shape) != 2 or entry.shape[0] != sum(rows):
        raise refused(path, f"{name} has shape {list(entry.shape)}, but {by} it {sum(rows)} rows")
    parts, start = [], entry.offset
    for count in rows:
        parts.append(entry._replace(shape=(count, entry.shape[1]), offset=start))
        start += parts[-1].bytes
    return parts
