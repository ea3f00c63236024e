"""Reads llama2.c's checkpoints (versions 0 and 1 in float32, version 2 in int8) and KuiperLLama's int8 checkpoints."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from jaxtyping import Float32

from llamaspec.model.checkpoints.checkpoint import Checkpoint, Codes, Tensor, refused
from llamaspec.model.checkpoints.checks import check_model
from llamaspec.model.checkpoints.llama2c import layout
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.tensors import rotated_heads
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.reference.rope import interleaved_to_halves

FLOAT32 = np.dtype("<f4")
AT_ONCE = 4 << 20  # number of codes per part


def open_llama2c(file: MappedFile) -> Checkpoint:
    """Open a llama2.c file of any version. Raises `CheckpointError` if its header implies a different file size."""
    version, config, group = _read_header(file)
    check_model(file.path, config, bos=layout.BOS, stops=layout.STOPS)
    if version == 2 and (shape := _undivided(config, version, group)):
        what = f"the group size is {group}"
        reason = "expected at least 1" if group < 1 else f"which does not divide a tensor of shape {list(shape)}"
        raise refused(file.path, f"{what}, {reason}")
    size = layout.file_bytes(config, version=version, group=group)
    if version == 0 and size != file.size and (kuipers := _kuiper_group(file, config)):
        version, group, size = layout.KUIPER, kuipers, file.size
    if size != file.size:
        problem = "truncated" if file.size < size else "too long"
        what = f"the file has {file.size} bytes, but its header implies {size} (llama2.c version {version})"
        raise refused(file.path, f"{problem}: {what}")

    tensors = {}
    offset = layout.HEADER_BYTES[version]
    for tensor in layout.stored_tensors(config, version=version, group=group):
        if weight := tensor.weight:
            heads = rotated_heads(weight, config)
            read = partial(_read, file, tensor.shape, offset, group=tensor.group, heads=heads)
            codes = _codes(file, tensor, offset, heads=heads) if len(tensor.shape) == 2 else None
            tensors[weight.name] = Tensor(tensor.shape, FLOAT32, read, codes)
        offset += tensor.bytes
    name = "kuiper-int8" if version == layout.KUIPER else f"llama2c-v{version}"
    reading = {"release": file.release, "scattered": file.scattered}
    return Checkpoint(file.path, name, config, tensors, bos=layout.BOS, stops=layout.STOPS, **reading)


def _read_header(file: MappedFile) -> tuple[int, Config, int]:
    """Read the version, the hyperparameters and the group size (0 if the file has no quantized tensors)."""
    version, group, start = 0, 0, file.bytes(0, 256)
    if not start.startswith(layout.MAGIC):
        if len(start) < layout.LEGACY_HEADER.size:
            raise refused(file.path, f"has {file.size} bytes, too few for any checkpoint")
        dim, ffn, layers, heads, kv_heads, vocab, context = layout.LEGACY_HEADER.unpack_from(start)
        tied, vocab = vocab > 0, abs(vocab)
    else:
        if len(start) < layout.HEADER_BYTES[1]:
            what = f"truncated: the file has {file.size} bytes, but llama2.c's header needs {layout.HEADER_BYTES[1]}"
            raise refused(file.path, what)
        _, version, dim, ffn, layers, heads, kv_heads, vocab, context, tied = layout.HEADER.unpack_from(start)
        if version not in (1, 2):
            raise refused(file.path, f"llama2.c version {version} is not supported (only 0, 1 and 2)")
        if tied > 1:
            raise refused(file.path, f"the flag for a shared classifier is {tied}, expected 0 or 1")
        if version == 2:
            group = int.from_bytes(start[layout.HEADER.size :][:4], "little", signed=True)
    if heads < 1 or dim % heads:
        what = f"read as a llama2.c file, it would have dim {dim} and {heads} heads"
        raise refused(file.path, f"is not a checkpoint of any known format: {what}")
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


def _undivided(config: Config, version: int, group: int) -> tuple[int, ...] | None:
    """Return the shape of the first quantized tensor that does not consist of whole groups; None if all do.

    A group has `group` weights.
    """
    for tensor in layout.stored_tensors(replace(config, layers=1), version=version, group=group):
        if tensor.group and (group < 1 or math.prod(tensor.shape) % group):
            return tensor.shape
    return (group,) if group < 1 else None


def _kuiper_group(file: MappedFile, config: Config) -> int | None:
    """Return the group size of a KuiperLLama file; None if the file's size shows that it is no such file."""
    group = int.from_bytes(
        file.bytes(layout.LEGACY_HEADER.size, layout.HEADER_BYTES[layout.KUIPER]), "little", signed=True
    )
    if _undivided(config, layout.KUIPER, group):
        return None
    return group if layout.file_bytes(config, version=layout.KUIPER, group=group) == file.size else None


def _read(
    file: MappedFile, shape: tuple[int, ...], offset: int, *, group: int, heads: int
) -> Float32[np.ndarray, "..."]:
    if group:
        array = _dequantized(file, shape, offset, group=group)
    else:
        array = file.array(FLOAT32, shape, offset)
    return interleaved_to_halves(array, heads=heads) if heads else array


def _dequantized(
    file: MappedFile, shape: tuple[int, ...], offset: int, *, group: int
) -> Float32[np.ndarray, "rows cols"]:
    """Read an int8 tensor: multiply codes by scales, and round once to float32 as runq.c does.

    A group of weights may span two rows.
    """
    groups = math.prod(shape) // group
    codes = file.array(np.dtype("i1"), (groups, group), offset)
    scales = file.array(FLOAT32, (groups, 1), offset + groups * group)
    with np.errstate(over="ignore", invalid="ignore"):  # readers refuse weights that are not finite
        return np.multiply(codes, scales, dtype=np.float32).reshape(shape)


def _codes(file: MappedFile, stored: layout.StoredBlock, offset: int, *, heads: int) -> Codes | None:
    """Return the int8 codes of a matrix; None if it is float32, or if a group of weights spans two rows.

    If `heads` is positive, the matrix is a q or k projection, and we reorder the rows of each head from interleaved
    RoPE pairs to halves.
    """
    rows, cols = stored.shape
    if not stored.group or cols % stored.group:
        return None
    head_dim = rows // heads if heads else 1
    step = max(1, AT_ONCE // cols // head_dim) * head_dim  # whole heads

    def parts() -> Iterator[Quantized]:
        codes = file.array(np.dtype("i1"), (rows, cols), offset)
        scales = file.array(FLOAT32, (rows, cols // stored.group), offset + rows * cols)
        for begin in range(0, rows, step):
            part = Quantized(codes[begin : begin + step], scales[begin : begin + step])
            if heads:
                count = len(part.codes) // head_dim
                part = Quantized(*(interleaved_to_halves(array, heads=count) for array in part))
            yield part

    return Codes("int8", stored.group, zeros=False, bytes=stored.bytes, parts=parts)
