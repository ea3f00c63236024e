"""Reads llama2.c's checkpoints: versions 0 and 1 in float32, version 2 in int8, which becomes float32 as it is read."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
from jaxtyping import Float32

from model.checkpoints import llama2c_layout as layout
from model.checkpoints.checkpoint import Checkpoint, Tensor, refused
from model.checkpoints.checks import check_model
from model.checkpoints.mapped import MappedFile
from reference.config import Config
from reference.rope import interleaved_to_halves

FLOAT32 = np.dtype("<f4")


def open_llama2c(file: MappedFile) -> Checkpoint:
    """Open a file of any version. Raises `CheckpointError` unless its header explains its size exactly."""
    version, config, group = _read_header(file)
    check_model(file.path, config, bos=layout.BOS, stops=layout.STOPS)
    if version == 2:
        _check_groups(file, config, group)
    size = layout.file_bytes(config, version=version, group=group)
    if size != file.size:
        problem = "truncated" if file.size < size else "too long"
        raise refused(
            file.path, f"{problem}: {file.size} bytes, but the header says {size} (llama2.c version {version})"
        )

    tensors = {}
    offset = layout.HEADER_BYTES[version]
    for tensor in layout.stored_tensors(config, version=version, group=group):
        if tensor.name != layout.ROPE_TABLES:
            heads = _interleaved_heads(tensor.name, config)
            read = partial(_read, file, tensor.shape, offset, group=tensor.group, heads=heads)
            tensors[tensor.name] = Tensor(tensor.shape, FLOAT32, read)
        offset += tensor.bytes
    return Checkpoint(
        file.path, f"llama2c-v{version}", config, tensors, bos=layout.BOS, stops=layout.STOPS, release=file.release
    )


def _read_header(file: MappedFile) -> tuple[int, Config, int]:
    """The version, the hyperparameters and the group size (0 where nothing is quantised)."""
    version, group, start = 0, 0, file.bytes(0, 256)
    if not start.startswith(layout.MAGIC):
        if len(start) < layout.LEGACY_HEADER.size:
            raise refused(file.path, f"{file.size} bytes, too short for any checkpoint")
        dim, ffn, layers, heads, kv_heads, vocab, context = layout.LEGACY_HEADER.unpack_from(start)
        tied, vocab = vocab > 0, abs(vocab)
    else:
        if len(start) < layout.HEADER_BYTES[1]:
            raise refused(file.path, f"truncated: {file.size} bytes, fewer than llama2.c's header")
        _, version, dim, ffn, layers, heads, kv_heads, vocab, context, tied = layout.HEADER.unpack_from(start)
        if version not in (1, 2):
            raise refused(file.path, f"llama2.c version {version} is not read (only 0, 1 and 2)")
        if tied > 1:
            raise refused(file.path, f"the flag for a shared classifier is {tied}, neither 0 nor 1")
        if version == 2:
            group = int.from_bytes(start[layout.HEADER.size :][:4], "little", signed=True)
    if heads < 1 or dim % heads:
        raise refused(file.path, f"not a checkpoint: dim {dim} and {heads} heads, if it were one of llama2.c's")
    config = Config(
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim // heads,
        ffn=ffn,
        vocab=vocab,
        context=context,
        eps=layout.EPS,
        theta=layout.THETA,
        tied=bool(tied),
    )
    return version, config, group


def _check_groups(file: MappedFile, config: Config, group: int) -> None:
    if group < 1:
        raise refused(file.path, f"groups of {group} values")
    for tensor in layout.stored_tensors(replace(config, layers=1), version=2, group=group):
        if tensor.group and math.prod(tensor.shape) % group:
            raise refused(file.path, f"groups of {group} values do not divide a tensor of shape {list(tensor.shape)}")


def _interleaved_heads(name: str, config: Config) -> int:
    """How many heads of interleaved pairs the rows of a tensor are; 0: none."""
    if name.endswith("self_attn.q_proj.weight"):
        return config.heads
    return config.kv_heads if name.endswith("self_attn.k_proj.weight") else 0


def _read(
    file: MappedFile, shape: tuple[int, ...], offset: int, *, group: int, heads: int
) -> Float32[np.ndarray, "..."]:
    if group:
        array = _dequantised(file, shape, offset, group=group)
    else:
        array = file.array(FLOAT32, shape, offset)
    return interleaved_to_halves(array, heads=heads) if heads else array


def _dequantised(
    file: MappedFile, shape: tuple[int, ...], offset: int, *, group: int
) -> Float32[np.ndarray, "rows cols"]:
    """Code times scale, rounded once to float32, as runq.c has it; a group may span rows."""
    groups = math.prod(shape) // group
    codes = file.array(np.dtype("i1"), (groups, group), offset)
    scales = file.array(FLOAT32, (groups, 1), offset + groups * group)
    return np.multiply(codes, scales, dtype=np.float32).reshape(shape)
