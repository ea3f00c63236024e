"""Fused matrices: several matrices that a file stores as one, by joining their rows."""

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


def taken_apart[E: Location](path: str, name: str, entry: E, rows: Sequence[int], *, source: str) -> list[E]:
    """Locate the parts of the fused matrix `name` in its file; `rows` has the number of rows of each part.

    Raises `CheckpointError` if the matrix does not have as many rows as all parts together. The message names `source`
    (the file that determines the number of rows, such as "config.json").
    """
    if len(entry.shape) != 2 or entry.shape[0] != sum(rows):
        raise refused(path, f"{name} has shape {list(entry.shape)}, expected {sum(rows)} rows according to {source}")
    parts, start = [], entry.offset
    for count in rows:
        parts.append(entry._replace(shape=(count, entry.shape[1]), offset=start))
        start += parts[-1].bytes
    return parts
