"""Reads GGUF files of the models that `model.families` describes."""

from collections import Counter
from functools import partial

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from llamaspec.model.checkpoints.checkpoint import Checkpoint, Tensor, quoted, refused
from llamaspec.model.checkpoints.checks import check_model
from llamaspec.model.checkpoints.fused import taken_apart
from llamaspec.model.checkpoints.gguf import blocks, layout
from llamaspec.model.checkpoints.gguf.config import architecture_of, read_config, read_tokens
from llamaspec.model.checkpoints.gguf.file import GGUFEntry, Metadata, read_header
from llamaspec.model.checkpoints.gguf.split import Located, locate
from llamaspec.model.checkpoints.mapped import MappedFile, release_all, scattered_in_all
from llamaspec.model.family import Architecture
from llamaspec.model.tensors import QUANTIZABLE, Role, Weight, fused_rows
from llamaspec.reference.config import Config
from llamaspec.reference.rope import interleaved_to_halves

DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}

Entries = dict[str, GGUFEntry]


def open_gguf(file: MappedFile) -> Checkpoint:
    """Open a GGUF file of version 2 or 3.

    Raises `CheckpointError` if a tensor that the keys imply is missing, if an unknown tensor is present, or if a shape
    is wrong.
    """
    header = read_header(file)
    metadata, located = header.metadata, locate(file, header)
    architecture = architecture_of(metadata)
    config = _config(metadata, architecture, located)
    located = _split_fused(config, architecture, located)
    entries = {name: place.entry for name, place in located.items()}
    bos, stops = read_tokens(metadata, vocab=config.vocab)
    check_model(file.path, config, bos=bos, stops=stops)
    places = _places(file.path, config, architecture, entries)
    tensors = {weight.name: _tensor(*located[place.name], weight, place) for weight, place in places.items()}
    files = list({part.path: part for part, _ in located.values()}.values())
    reading = {"release": partial(release_all, files), "scattered": partial(scattered_in_all, files)}
    return Checkpoint(file.path, f"gguf-v{header.version}", config, tensors, bos=bos, stops=stops, **reading)


def _config(metadata: Metadata, architecture: Architecture, located: dict[str, Located]) -> Config:
    embedding = located.get(layout.EMBEDDING)
    few, many, factors = (
        _factors(located.get(name), name) for name in (*layout.LONG_ROPE_FACTORS, layout.ROPE_FACTORS)
    )
    if embedding is None:
        raise metadata.refused(f"lacks the tensor {layout.EMBEDDING}")
    return read_config(
        metadata,
        architecture,
        located,
        vocab=embedding.entry.shape[0],
        factors=factors,
        long_factors=None if few is None or many is None else (few, many),
    )


def _factors(place: Located | None, name: str) -> np.ndarray | None:
    """Read the tensor `name`, which holds factors of RoPE's frequencies; None if `place` is None."""
    if place is None:
        return None
    file, entry = place
    if entry.type != "F32" or len(entry.shape) != 1:
        what = f"the tensor {name} has type {entry.type} and {len(entry.shape)} axes, expected F32 and 1 axis"
        raise refused(file.path, what)
    return file.array(DTYPES["F32"], entry.shape, entry.offset)


def _split_fused(config: Config, architecture: Architecture, located: dict[str, Located]) -> dict[str, Located]:
    """Replace each fused matrix by its parts; each part is a range of consecutive rows."""
    apart = dict(located)
    for name, parts, rows in fused_rows(config, architecture.fused, architecture.names):
        if place := apart.pop(f"{name}.weight", None):  # `_places` refuses a file that lacks the fused matrix.
            pieces = taken_apart(place.file.path, f"{name}.weight", place.entry, rows, source="the file's keys")
            apart |= {f"{part}.weight": place._replace(entry=piece) for part, piece in zip(parts, pieces, strict=True)}
    return apart


def _places(
    path: str, config: Config, architecture: Architecture, entries: Entries
) -> dict[Weight, layout.WeightPlace]:
    """Locate each weight. Raises `CheckpointError` unless the file has exactly the tensors of `config`."""
    if config.layers > len(entries):  # checked before we make a name for each tensor
        raise refused(path, f"the file has {len(entries)} tensors, too few for the {config.layers} layers in its keys")
    if config.experts and (old := f"{layout.FIRST_EXPERT}.weight") in entries:
        what = f"has one tensor per expert ({old}), a layout from before April 2024 that is not supported"
        raise refused(path, f"{what}: use a newer file, or convert the model's safetensors files with --to gguf")
    gates = f"{architecture.names['expert_gate'].format(layer=0)}.weight"
    if config.experts and gates in entries and (count := entries[gates].shape[0]) != config.experts:
        what = f"the tensor {gates} has {count} experts"
        raise refused(path, f"{what}, but the file's metadata states {config.experts} experts")
    for part, heads in (("head_q_norm", config.heads), ("head_k_norm", config.kv_heads)) if config.head_qk_norm else ():
        norms = f"{architecture.names[part].format(layer=0)}.weight"
        if (count := entries[norms].shape[0] if norms in entries else 0) != heads:
            what = f"the tensor {norms} has norms for {count} heads"
            raise refused(path, f"{what}, but the file's metadata states {heads} heads")
    places = layout.places(config, architecture)
    counts = Counter(place.name for place in places.values())
    for weight, place in places.items():
        if place.name not in entries:
            raise refused(path, f"lacks the tensor {place.name}")
        expected = layout.stored_shape(weight) if place.at is None else (counts[place.name], *weight.shape)
        if (shape := entries[place.name].shape) != expected:
            what = f"expected {list(expected)} according to the file's keys"
            raise refused(path, f"the tensor {place.name} has shape {list(shape)}, {what}")
    known = {place.name for place in places.values()} | {layout.ROPE_FACTORS, *layout.LONG_ROPE_FACTORS}
    for name in entries:
        if name not in known:
            raise refused(path, f"tensor {quoted(name)} is unexpected: a model with the file's keys does not have it")
    return places


def _tensor(file: MappedFile, entry: GGUFEntry, weight: Weight, place: layout.WeightPlace) -> Tensor:
    if weight.axes[0] == "one":  # llama.cpp stores a matrix of one row as a vector
        entry = entry._replace(shape=weight.shape)
    if place.at is not None:
        part = entry._replace(shape=weight.shape)
        entry = part._replace(offset=entry.offset + place.at * part.bytes)
    read = partial(_read, file, entry, heads=place.heads)
    in_codes = weight.role in (*QUANTIZABLE, Role.EMBEDDING)
    codes = blocks.codes_of(file, entry, heads=place.heads) if in_codes else None
    return Tensor(weight.shape, DTYPES.get(entry.type, DTYPES["F32"]), read, codes, entry.type)


def _read(file: MappedFile, entry: GGUFEntry, *, heads: int) -> Shaped[np.ndarray, "..."]:
    if entry.type in DTYPES:
        array = file.array(DTYPES[entry.type], entry.shape, entry.offset)
    else:
        array = blocks.dequantized(file, entry)
    return interleaved_to_halves(array, heads=heads) if heads else array
