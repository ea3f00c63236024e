"""Write llama2.c's files: version 0 in float32, which run.c and everything else reads, and version 2 in int8."""

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

ROPE_POSITIONS = 4096  # rows of the RoPE tables made at a time


def write_llama2c(
    checkpoint: Checkpoint,
    path: str | Path,
    *,
    int8: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> None:
    """Write `checkpoint` to a new file `path`, tensor by tensor; `progress` is called with the name and bytes of each.

    Weights of other dtypes become float32, exactly. With `int8`, all weights except norms are quantized as in
    export.py, but in groups that divide every row (see `reference.quantizers.llama2c`). Raises `CheckpointError`, and
    leaves no file behind, if the file exists, the disk is full, a weight is not finite, or the format cannot hold a
    part of the model.
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
    """Format a header of version 2 if there are groups, else of version 0."""
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
        "RoPE rescaling": config.scaling is not None,
        "sliding windows": config.windows is not None and any(config.windows),
        "experts": config.experts > 0,
        "biases": config.qkv_bias or config.o_bias or config.ffn_bias,
        "norms of q and k": config.qk_norm,
        "switches that no Llama has": config.beyond_llama() != (),
        f"heads {config.head_dim} wide (only dim / heads)": config.head_dim * config.heads != config.dim,
        f"texts that begin with token {checkpoint.bos} (only {layout.BOS})": checkpoint.bos not in (None, layout.BOS),
        "texts that end with other tokens than 1 and 2": not checkpoint.stops <= layout.STOPS,
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
    """Write cosines, then sines, correctly rounded to float32.

    Their angles are rounded to float32 before, as in export.py.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = 1 / np.float32(layout.THETA) ** exponents  # [pairs]
    for function in (np.cos, np.sin):
        for begin in range(0, config.context, ROPE_POSITIONS):
            positions = np.arange(begin, min(begin + ROPE_POSITIONS, config.context), dtype=np.float32)
            angles = np.outer(positions, frequencies)  # [positions, pairs]
            file.write(function(angles.astype(np.float64)).astype("<f4").data)
