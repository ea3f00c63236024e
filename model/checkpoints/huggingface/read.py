"""Read Hugging Face's directories: config.json, generation_config.json, and weights in .safetensors files.

Tensors that the model does not have, such as a value head or more layers than config.json, are left out, as in
transformers 5.24 (modeling_utils.py, unexpected keys). A line in `Checkpoint.notes` names them. We refuse tensors that
lie in a layer or module that we compute, such as a bias that config.json does not mention: without such a tensor, the
logits would not be those of the model that was trained.

Files that the user names, and config.json, may be symbolic links. The index, which is not trusted, names the shards:
each must lie in the directory or, in snapshots/<revision> of a hub cache, link into its blobs.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llamaspec.model.checkpoints.checkpoint import Checkpoint, Tensor, os_errors, quoted, refused
from llamaspec.model.checkpoints.fused import taken_apart
from llamaspec.model.checkpoints.huggingface.config import Fields, family_of, read_config, read_tokens
from llamaspec.model.checkpoints.huggingface.mlx import expert_names, has_joined_experts, with_experts_apart
from llamaspec.model.checkpoints.huggingface.quantized import Located, read_rule, read_rule_beside, take_quantized
from llamaspec.model.checkpoints.huggingface.rule import FLOATS
from llamaspec.model.checkpoints.huggingface.stacked_experts import check_experts, take_experts
from llamaspec.model.checkpoints.mapped import MappedFile, release_all, scattered_in_all
from llamaspec.model.checkpoints.recognize import TO_SAFETENSORS, weights_file
from llamaspec.model.checkpoints.safetensors_header import HeaderEntry, read_header
from llamaspec.model.checkpoints.strict_json import read_object, short
from llamaspec.model.family import Family
from llamaspec.model.tensors import Role, Weight, fused_rows, rotated_heads
from llamaspec.model.tensors import weights as weights_of
from llamaspec.reference.config import Config
from llamaspec.reference.rope import interleaved_to_halves

WRAPPERS = {"_orig_mod.": "torch.compile", "module.": "DistributedDataParallel"}  # that put a prefix before names
LAYER = re.compile(r"(?:.*\.)?layers\.\d+(?=\.)")  # at the start of a tensor's name
# Buffers that some programs store with the weights, and that every reader computes: RoPE's frequencies, causal masks.
BUFFER = re.compile(r"(?:.*\.)?(?:rotary_emb\..+|masked_bias|attn\.bias)")
MOST_NAMED = 3  # tensors that the note about tensors left out names
COMPARED = 4 << 20  # bytes of two tensors compared at a time


class Description(NamedTuple):
    """A model as described by a file next to its weights."""

    path: Path  # of the file
    values: dict[str, Any]
    family: Family
    stem: str = "model"  # of the names of the files of weights
    format: str = "safetensors"


def open_huggingface(directory: Path, weights: MappedFile | None = None, *, tied: bool | None = None) -> Checkpoint:
    """Open a directory, or only its file `weights`. Raises `CheckpointError`.

    `tied` replaces tie_word_embeddings of config.json.
    """
    path = directory / "config.json"
    with os_errors(directory):
        if not path.exists():
            raise refused(weights.path if weights else directory, "no config.json is there")
    values = read_object(path) | ({} if tied is None else {"tie_word_embeddings": tied})
    return open_described(directory, weights, Description(path, values, family_of(Fields(values, path))))


def open_described(directory: Path, weights: MappedFile | None, description: Description) -> Checkpoint:
    """Open a directory, or only its file `weights`; `description` says which model these are.

    Raises `CheckpointError`.
    """
    config_path, values, family, stem, form = description
    generation_path = directory / "generation_config.json"
    config = read_config(values, config_path, family)
    with os_errors(directory):
        has_generation = generation_path.exists()
    generation: dict[str, Any] = read_object(generation_path) if has_generation else {}
    bos, stops = read_tokens(values, config_path, generation, generation_path, vocab=config.vocab, family=family)
    rule = read_rule(values, config_path)

    located = _locate(weights) if weights else _locate_all(directory, stem)
    if rule is None and any(entry.dtype.name not in FLOATS for _, entry in located.values()):
        rule = read_rule_beside(directory)
    files = {file.path: file for file, _ in located.values()}
    path = weights.path if weights else str(directory)
    located = {name: place for name, place in located.items() if not name.startswith(family.beside)}
    joined: dict[str, str] = {}  # modules, and the module of the file that holds the matrix of each
    if has_joined_experts(config, family, located):
        located = with_experts_apart(path, config, family, located)
        for layer in range(config.layers):
            for joint, own_names in expert_names(config, family, layer).items():
                joined |= dict.fromkeys(own_names, joint)
        family = replace(family, stacked_experts="")
    _check_number(path, replace(config, experts=0) if family.stacked_experts else config, located)
    if family.stacked_experts:
        check_experts(path, config, family, located)
    names = family.names
    for fused, parts, _ in fused_rows(config, family.fused, names):
        joined |= dict.fromkeys(parts, fused)
    located = _split_fused(path, config, family, located, ("weight", *(rule.row_parts if rule else ())))
    expected = {weight.named(names): weight for weight in weights_of(config)}
    every = list(expected.items())
    stacked = take_experts(expected, located, config, family, path) if family.stacked_experts else {}
    quantized = stacked | (take_quantized(rule, expected, located, path, joined) if rule else {})
    plain = {name: weight.shape for name, weight in expected.items() if name not in quantized}
    _check_tensors(path, config, plain, located, names, by=config_path.name)
    notes = _notes_on_extra(path, located, expected, names["head"], by=config_path.name)
    tensors = {
        weight.name: quantized[name] if name in quantized else _tensor(located[name], weight, family, config)
        for name, weight in every
    }
    mapped = list(files.values())
    reading = {"release": partial(release_all, mapped), "scattered": partial(scattered_in_all, mapped)}
    return Checkpoint(path, form, config, tensors, bos=bos, stops=stops, notes=notes, **reading)


def _tensor(place: tuple[MappedFile, HeaderEntry], weight: Weight, family: Family, config: Config) -> Tensor:
    (file, entry), shape = place, weight.shape
    read, dtype = partial(file.array, entry.dtype, shape, entry.offset), entry.dtype
    if dtype == np.float64:
        read, dtype = partial(_in_float32, read), np.dtype(np.float32)
    if family.interleaved and (heads := rotated_heads(weight, config)):
        return Tensor(shape, dtype, lambda: interleaved_to_halves(read(), heads=heads))
    if weight.role is Role.NORM and family.norm_offset:
        offset = np.float32(family.norm_offset)
        return Tensor(shape, np.dtype(np.float32), lambda: read().astype(np.float32) + offset)
    return Tensor(shape, dtype, read)


def _in_float32(read: Callable[[], np.ndarray]) -> np.ndarray:
    """Round a tensor that is stored in float64. A number that float32 cannot hold becomes infinite, and is refused."""
    with np.errstate(over="ignore"):
        return read().astype(np.float32)


def _split_fused(path: str, config: Config, family: Family, located: Located, kinds: Sequence[str]) -> Located:
    """Replace each fused matrix by its parts, which are consecutive rows of it.

    `kinds` are the endings of the names of tensors that have these rows.
    """
    apart = dict(located)
    for name, parts, rows in fused_rows(config, family.fused, family.names):
        for kind in kinds:
            if place := apart.pop(f"{name}.{kind}", None):  # `_check_tensors` names it.
                file, entry = place
                pieces = taken_apart(path, f"{name}.{kind}", entry, rows, by="config.json makes")
                apart |= {f"{part}.{kind}": (file, piece) for part, piece in zip(parts, pieces, strict=True)}
    return apart


def _locate(file: MappedFile) -> Located:
    return {name: (file, entry) for name, entry in read_header(file).items()}


def _locate_all(directory: Path, stem: str) -> Located:
    """Locate every tensor of a directory, in {stem}.safetensors if present, else in the shards of the index."""
    single, index_path = directory / f"{stem}.safetensors", directory / f"{stem}.safetensors.index.json"
    with os_errors(directory):
        if single.is_symlink() or single.exists():
            return _locate(weights_file(single))
        if not index_path.exists():
            if shards := sorted(path.name for path in directory.glob(f"{stem}-*-of-*.safetensors"))[:2]:
                here = f"shards are here, such as {shards[0]}, but not {index_path.name}, which says what is in them"
                raise refused(directory, f"{here}: copy it from where the shards came from")
            has_pickles = any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
            hint = f"; .bin and .pth files, Python pickles, are never read: {TO_SAFETENSORS}" if has_pickles else ""
            raise refused(directory, f"no {single.name} and no {index_path.name}{hint}")

    weight_map = read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise refused(index_path, "lacks a weight_map")
    located: Located = {}
    shards = dict.fromkeys(_shard_name(index_path, *entry) for entry in weight_map.items())
    paths = {shard: _shard_path(directory, index_path, shard) for shard in shards}  # before any is read
    for shard, path in paths.items():
        for name, place in _locate(weights_file(path)).items():
            if weight_map.get(name) != shard:  # no tensor is in two shards
                raise refused(index_path, f"puts tensor {quoted(name)} in {short(weight_map.get(name))}, not {shard}")
            located[name] = place
    for name, shard in weight_map.items():
        if name not in located:
            raise refused(index_path, f"tensor {quoted(name)} is not in {shard}, where the index has it")
    return located


def _shard_name(index_path: Path, tensor: str, name: object) -> str:
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\0" in name:
        raise refused(index_path, f"puts tensor {quoted(tensor)} in {short(name)}, not in a file of this directory")
    return name


def _shard_path(directory: Path, index_path: Path, name: str) -> Path:
    with os_errors(index_path):
        try:
            home, target = directory.resolve(), (directory / name).resolve()
        except (RuntimeError, UnicodeError) as error:  # a loop of links; an invalid character
            raise refused(index_path, f"names a shard {short(name)}, which is not a file of this directory") from error
        cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
        if target.parent != home and not cached:
            raise refused(index_path, f"names a shard {short(name)}, a link out of this directory")
        if not target.exists():
            raise refused(index_path, f"names a shard {short(name)}, which is missing")
    return directory / name


def _check_number(path: str, config: Config, located: Located) -> None:
    heads = config.heads if config.head_qk_norm else 0  # each head has a norm
    if config.layers * max(1, config.experts, heads) > len(located):  # checked before a name is made for each tensor
        per_layer = f"{heads} heads with norms" if heads else f"{config.experts} experts"
        raise refused(path, f"{len(located)} tensors, too few for {config.layers} layers ({per_layer})")


def _check_tensors(
    path: str,
    config: Config,
    expected: dict[str, tuple[int, ...]],
    located: Located,
    names: Mapping[str, str],
    *,
    by: str,
) -> None:
    """Raise `CheckpointError` unless `located` has the `expected` tensors, with their shapes.

    `by` is the name of the file that prescribes them, for messages.
    """
    head, embedding = f"{names['head']}.weight", f"{names['embedding']}.weight"
    for name, shape in expected.items():
        if name not in located:
            raise refused(path, f"lacks tensor {name}{_hint(name, head, located)}")
        if located[name][1].shape != shape:
            raise refused(path, f"{name} has shape {list(located[name][1].shape)}, but {by} makes it {list(shape)}")
        if (dtype := located[name][1].dtype.name) not in FLOATS:
            raise refused(path, f"{name} holds {dtype}, which {by} has no quantization_config for")
    if config.tied and head in located and not (embedding in located and _equal(located[head], located[embedding])):
        # transformers 4 would take the embedding, transformers 5 the head.
        raise refused(path, f"tie_word_embeddings is true, but {head} differs from {embedding}")


def _notes_on_extra(path: str, located: Located, expected: Collection[str], head: str, *, by: str) -> tuple[str, ...]:
    """Name the tensors that are left out in one line; return no line if the files have only tensors of the model.

    `expected` are the tensors of the model that `by` describes, and `head` is the module of its head. Raises
    `CheckpointError` for an extra tensor in a layer or module that we compute.
    """
    computed = {name.rpartition(".")[0] for name in expected} | {head}
    computed |= {match[0] for name in expected if (match := LAYER.match(name))}
    extra = [name for name in located if name not in expected and name != f"{head}.weight"]
    for name in extra:
        owners = {name[: dot.start()] for dot in re.finditer(r"\.", name)}
        if computed & owners and not BUFFER.fullmatch(name):
            raise refused(path, f"tensor {quoted(name)} is not part of a model with this {by}")
    if not extra:
        return ()
    more = f" and {len(extra) - MOST_NAMED} more" if len(extra) > MOST_NAMED else ""
    names = ", ".join(map(quoted, extra[:MOST_NAMED]))
    count = f"{len(extra)} tensor{'s are' if len(extra) > 1 else ' is'}"
    return (str(refused(path, f"{count} left out, since the model of {by} has no place for them: {names}{more}")),)


def _hint(missing: str, head: str, located: Located) -> str:
    """Guess why a tensor is missing, for the end of an error message."""
    if missing == head:
        return '; if the model shares it with the embedding, config.json needs "tie_word_embeddings": true'
    for name in located:
        for prefix in WRAPPERS:
            if name.startswith(prefix):
                by = f"the names begin with {prefix!r}, as {WRAPPERS[prefix]} saves them"
                return f"; {by}: save the model without it"
    return ""


def _equal(a: tuple[MappedFile, HeaderEntry], b: tuple[MappedFile, HeaderEntry]) -> bool:
    if a[1].dtype != b[1].dtype or a[1].shape != b[1].shape:
        return False
    for begin in range(0, a[1].bytes, COMPARED):
        size = min(COMPARED, a[1].bytes - begin)
        first_bytes, second_bytes = (
            file.array(np.dtype("u1"), (size,), entry.offset + begin) for file, entry in (a, b)
        )
        if not np.array_equal(first_bytes, second_bytes):
            return False
        a[0].release()
        b[0].release()
    return True
