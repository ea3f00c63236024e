"""A checkpoint with one device's share of a model. It reads only this share from the files.

Consecutive rows of a matrix are contiguous in a file. Columns are not, so we read a device's part of each row
separately. We turn off the system's read-ahead (`Checkpoint.scattered`), which would read megabytes of other devices'
parts.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np
from jaxtyping import UInt8

from llamaspec.model.checkpoints.checkpoint import Blocks, Checkpoint, Codes, LowRank, Part, Tensor, refused
from llamaspec.model.parallel.share import Cut, cut, share, weights_on
from llamaspec.model.tensors import EMBEDDING, HEAD
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers.ggml import READABLE


def share_of(checkpoint: Checkpoint, *, device: int, devices: int) -> Checkpoint:
    """Return a checkpoint with the share of device number `device` out of `devices`. Reads no weight yet.

    `share` makes the configuration, and `cut` finds the part of each tensor. Raises ValueError as `share` does, and
    CheckpointError if a cut would split a group of quantized columns.
    """
    if devices == 1:
        return checkpoint
    config = share(checkpoint.config, devices)
    untied = replace(checkpoint.config, tied=False)
    head = {HEAD: checkpoint.tensors[EMBEDDING]} if checkpoint.config.tied else {}
    tensors = {
        name: _part(weight.name, tensor, part, checkpoint)
        for name, weight in weights_on(untied, device=device, devices=devices)
        for tensor in [head.get(weight.name) or checkpoint.tensors[weight.name]]
        for part in [cut(weight, untied, device=device, devices=devices)]
    }
    return replace(checkpoint, config=config, tensors=tensors)


def empty_share(config: Config, devices: int, dtype: np.dtype) -> dict[str, Tensor]:
    """Make the tensors of one device's share without a checkpoint. They have shapes but no values or codes."""
    untied = replace(config, tied=False) if devices > 1 else config
    return {
        name: Tensor(_shape(weight.shape, part), dtype, lambda: np.empty(0))
        for name, weight in weights_on(untied, device=0, devices=devices)
        for part in [cut(weight, untied, device=0, devices=devices)]
    }


def _shape(shape: tuple[int, ...], part: Cut | None) -> tuple[int, ...]:
    return shape if part is None else (*shape[: part.axis], part.size, *shape[part.axis + 1 :])


def _part(name: str, tensor: Tensor, part: Cut | None, checkpoint: Checkpoint) -> Tensor:
    def read() -> np.ndarray:
        with checkpoint.scattered() as read_at_once:
            if part and part.axis:
                return np.ascontiguousarray(tensor.read()[:, part.start : part.stop])
            view = tensor.read()[part.start : part.stop] if part else tensor.read()
            read_at_once(view)
            rows = np.array(view)
        return _padded(rows, part.size) if part else rows

    if tensor.adapter:
        base = _part(name, tensor.adapter.base, part, checkpoint)
        return replace(tensor.adapter, base=base, pair=_pair_part(tensor.adapter.pair, part)).tensor()
    if part is None:
        return tensor._replace(read=read)
    codes, shape = tensor.codes, _shape(tensor.shape, part)
    if codes:
        if part.axis == 1 and codes.group < tensor.shape[1] and part.size % codes.group:
            columns = f"{tensor.shape[1]} columns in groups of {codes.group}"
            raise refused(
                checkpoint.path,
                f"{name} has {columns}, which cannot be divided over {_times(tensor, part)} devices without "
                "splitting a group",
            )
        codes = _codes_part(codes, tensor.shape[1], part, prod(shape) / prod(tensor.shape))
    return tensor._replace(shape=shape, read=read, codes=codes)


def _pair_part(pair: LowRank, part: Cut | None) -> LowRank:
    """Return the part of an adapter for a part of its weight: columns of A, or rows of B."""
    if part is None:
        return pair
    span = slice(part.start, part.stop)
    if part.axis:
        return LowRank(np.ascontiguousarray(pair.a[:, span]), pair.b)
    return LowRank(pair.a, _padded(pair.b[span], part.size))


def _times(tensor: Tensor, part: Cut) -> int:
    return tensor.shape[1] // part.size


def _codes_part(codes: Codes, cols: int, part: Cut, fraction: float) -> Codes:
    def rows() -> Iterator[Part]:
        start, yielded = 0, 0
        for part_of_codes in codes.parts():
            stop = start + len(part_of_codes.codes)
            span = slice(max(part.start - start, 0), max(min(part.stop, stop) - start, 0))
            if span.start < span.stop:
                yielded += span.stop - span.start
                missing = part.size - yielded if stop >= part.stop else 0
                yield part_of_codes._make(
                    a[span] if not missing else _add_rows(a[span], missing) for a in part_of_codes
                )
            start = stop
            if start >= part.stop:
                break

    def columns() -> Iterator[Part]:
        grouped = codes.group < cols
        groups = slice(part.start // codes.group, part.stop // codes.group) if grouped else slice(None)
        for part_of_codes in codes.parts():
            values, *scales_and_more = part_of_codes
            yield part_of_codes._make((values[:, part.start : part.stop], *(a[:, groups] for a in scales_and_more)))

    # `source` is None, so that we cut a share from the codes of the complete matrix: a scale may belong to a complete
    # row.
    cut = columns if part.axis else rows
    blocks = codes.blocks and _blocks_part(codes.blocks, part)
    return codes._replace(parts=cut, bytes=round(codes.bytes * fraction), scheme="", source=None, blocks=blocks)


def _blocks_part(blocks: Blocks, part: Cut) -> Blocks | None:
    """Cut a part out of a matrix in the bytes of its file; None if the part has padding, or would split a block."""
    kind = READABLE[blocks.type]
    if part.stop - part.start < part.size or (part.axis and (part.start % kind.weights or part.stop % kind.weights)):
        return None

    def rows() -> Iterator[UInt8[np.ndarray, "rows row_bytes"]]:
        start = 0
        for packed in blocks.rows():
            own = packed[max(part.start - start, 0) : max(part.stop - start, 0)]
            start += len(packed)
            if len(own):
                yield own

    def columns() -> Iterator[UInt8[np.ndarray, "rows row_bytes"]]:
        first, last = (column // kind.weights * kind.bytes for column in (part.start, part.stop))
        return (packed[:, first:last] for packed in blocks.rows())

    if not part.axis:
        return blocks._replace(rows=rows)
    return blocks._replace(rows=columns, row_bytes=part.size // kind.weights * kind.bytes)


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    return rows if len(rows) == size else _add_rows(rows, size - len(rows))


def _add_rows(rows: np.ndarray, count: int) -> np.ndarray:
    return np.concatenate([rows, np.zeros((count, *rows.shape[1:]), rows.dtype)])
