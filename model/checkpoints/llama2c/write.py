"""Writes llama2.c's files: version 0 in float32, which all programs for such files read, or version 2 in int8."""

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from llamaspec.model.checkpoints.checkpoint import Checkpoint, refused
from llamaspec.model.checkpoints.checks import check_finite
from llamaspec.model.checkpoints.llama2c import layout
from llamaspec.model.checkpoints.staging import new_file
from llamaspec.model.tensors import Weight, rotated_heads
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers import llama2c
from llamaspec.reference.rope import halves_to_interleaved

ROPE_POSITIONS = 4096  # number of rows of the RoPE tables that we compute at a time


def write_llama2c(
    checkpoint: Checkpoint,
    path: str | Path,
    *,
    int8: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> None:
    """Write `checkpoint` to the new file `path`, tensor by tensor.

    Without `int8`, all weights are written in float32, without rounding. With `int8`, we quantize all weights except
    norms as llama2.c's export.py does, but always with a group size that divides every row (see
    `reference.quantizers.llama2c`). After each tensor, we call `progress` with its name and its number of bytes.

    Raises `CheckpointError`, and leaves no file behind, if the file exists, if the disk is full, if a weight is not
    finite, or if the format cannot hold a part of the model.
    """
    _refuse_unsayable(checkpoint)
    config = checkpoint.config
    with new_file(path) as staged, open(staged, "wb") as file:
        group = llama2c.group_size(config.dim, config.ffn) if int8 else 0
        file.write(_header(config, group))
        for stored in layout.stored_tensors(config, version=2 if int8 else 0, group=group):
            if stored.weight is None:
                _write_rope_tables(file, config)
            elif stored.group:
                file.write(llama2c.pack(llama2c.quantize(_values(checkpoint, stored.weight), group=group)).data)
                checkpoint.release()
            else:
                file.write(_values(checkpoint, stored.weight).reshape(-1).view(np.uint8).data)
                checkpoint.release()
            if progress:
                progress(stored.weight.name if stored.weight else layout.ROPE_TABLES, stored.bytes)


def _header(config: Config, group: int) -> bytes:
    """Format the header of version 2 with the group size `group`, or the header of version 0 if `group` is 0."""
    sizes = config.dim, config.ffn, config.layers, config.heads, config.kv_heads
    if group:
        header = layout.HEADER.pack(layout.MAGIC, 2, *sizes, config.vocab, config.context, config.tied)
        return (header + group.to_bytes(4, "little")).ljust(layout.HEADER_BYTES[2], b"\0")
    return layout.LEGACY_HEADER.pack(*sizes, config.vocab if config.tied else -config.vocab, config.context)


def _refuse_unsayable(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    reasons = {
        f"theta {config.theta:g} (only {layout.THETA:g})": config.theta != layout.THETA,
        f"eps {config.eps:g} (only {layout.EPS:g})": config.eps != layout.EPS,
        "a rescaling of RoPE": config.scaling is not None,
        "sliding windows": config.windows is not None and any(config.windows),
        "experts": config.experts > 0,
        "biases": config.qkv_bias or config.o_bias or config.ffn_bias,
        "norms of q and k": config.qk_norm,
        "a feature that Llama models do not have": config.beyond_llama() != (),
        f"heads of width {config.head_dim} (only dim / heads)": config.head_dim * config.heads != config.dim,
        f"the begin token {checkpoint.bos} (only {layout.BOS})": checkpoint.bos not in (None, layout.BOS),
        f"the end tokens {sorted(checkpoint.stops)} (only 1 and 2)": not checkpoint.stops <= layout.STOPS,
    }
    for reason, applies in reasons.items():
        if applies:
            raise refused(checkpoint.path, f"llama2.c's format cannot hold {reason}")


def _values(checkpoint: Checkpoint, weight: Weight) -> np.ndarray:
    array = checkpoint.tensors[weight.name].read()
    check_finite(weight.name, array, path=checkpoint.path)
    array = np.ascontiguousarray(array, "<f4")
    heads = rotated_heads(weight, checkpoint.config)
    return halves_to_interleaved(array, heads=heads) if heads else array


def _write_rope_tables(file: BinaryIO, config: Config) -> None:
    """Write a table of cosines, then a table of sines, correctly rounded to float32.

    As in llama2.c's export.py, we first round the angles to float32.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = 1 / np.float32(layout.THETA) ** exponents  # [pairs]
    for function in (np.cos, np.sin):
        for begin in range(0, config.context, ROPE_POSITIONS):
            positions = np.arange(begin, min(begin + ROPE_POSITIONS, config.context), dtype=np.float32)
            angles = np.outer(positions, frequencies)  # [positions, pairs]
            file.write(function(angles.astype(np.float64)).astype("<f4").data)
