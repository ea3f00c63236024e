"""Reads directories in Hugging Face's layout: config.json, generation_config.json, and weights in .safetensors files.

We ignore tensors that the model does not have, such as a value head, or layers beyond the number in config.json.
transformers 5.24 does the same (modeling_utils.py, unexpected keys). A line in `Checkpoint.notes` lists these tensors.
But we refuse an unexpected tensor in a layer or module that we compute, such as a bias that config.json does not
mention: the trained model used this tensor, so our logits would be wrong without it.

Files that the user names, and config.json, may be symbolic links. The index (model.safetensors.index.json) names the
shards, but we do not trust the index: a shard must be in the directory. In the Hub's cache, a shard in
snapshots/<revision> may also be a link into the folder blobs.
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

BASE = "model."  # prefix of the names of all tensors except the head
WRAPPERS = {"_orig_mod.": "torch.compile", "module.": "DistributedDataParallel"}  # prefix of names: who adds it
LAYER = re.compile(r"(?:.*\.)?layers\.\d+(?=\.)")  # the beginning of the name of a tensor in a layer
# Buffers that some programs store with the weights, and that every reader computes: RoPE's frequencies, causal masks.
BUFFER = re.compile(r"(?:.*\.)?(?:rotary_emb\..+|masked_bias|attn\.bias)")
MOST_NAMED = 3  # number of tensors that the note about ignored tensors lists by name
COMPARED = 4 << 20  # number of bytes of two tensors that we compare at a time


class Description(NamedTuple):
    """The description of a model in the file `path` next to its weights, such as config.json."""

    path: Path
    values: dict[str, Any]  # the keys and values of the file
    family: Family
    stem: str = "model"  # files of weights have names that begin with this
    format: str = "safetensors"


def open_huggingface(directory: Path, weights: MappedFile | None = None, *, tied: bool | None = None) -> Checkpoint:
    """Open a directory in Hugging Face's layout; with `weights`, read tensors only from this file of the directory.

    `tied` overrides tie_word_embeddings of config.json. Raises `CheckpointError` if we cannot read the model.
    """
    path = directory / "config.json"
    with os_errors(directory):
        if not path.exists():
            what = "the folder of this file has no config.json" if weights else "has no config.json"
            raise refused(weights.path if weights else directory, what)
    values = read_object(path) | ({} if tied is None else {"tie_word_embeddings": tied})
    return open_described(directory, weights, Description(path, values, family_of(Fields(values, path))))


def open_described(directory: Path, weights: MappedFile | None, description: Description) -> Checkpoint:
    """Open the model that `description` describes, with tensors from `weights`, or else from files of `directory`.

    Raises `CheckpointError` if we cannot read the model.
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
    located, config, without_head = _with_causal_names(located, config, family, weights or directory)
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
    return Checkpoint(path, form, config, tensors, bos=bos, stops=stops, notes=(*without_head, *notes), **reading)


def _with_causal_names(
    located: Located, config: Config, family: Family, path: Path | MappedFile
) -> tuple[Located, Config, tuple[str, ...]]:
    """Rename the tensors of a model that was saved without its head, as models of embeddings are.

    Names in such files lack the prefix "model.". If the head is not the embedding, its tensor is missing. Then we use
    the embedding in its place, because only logits need a head, and return a note that says this. Other files are
    returned unchanged.
    """
    embedding, head = (f"{family.names[part]}.weight" for part in ("embedding", "head"))
    bare = embedding.removeprefix(BASE)
    if embedding in located or bare == embedding or bare not in located:
        return located, config, ()
    renamed = {name if name == head else f"{BASE}{name}": place for name, place in located.items()}
    if head in located or config.tied:
        return renamed, config, ()
    what = f"has no {head}, so only its embeddings are right, and its texts have no meaning"
    place = path.path if isinstance(path, MappedFile) else path
    return renamed, replace(config, tied=True), (str(refused(place, what)),)


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
    """Return a tensor in float32; `read` reads it in float64.

    A number that is too large for float32 becomes infinite, and readers refuse it later.
    """
    with np.errstate(over="ignore"):
        return read().astype(np.float32)


def _split_fused(path: str, config: Config, family: Family, located: Located, kinds: Sequence[str]) -> Located:
    """Replace each fused matrix by its parts; each part is a range of consecutive rows.

    We do this for the tensors with names that end in one of `kinds`, such as "weight".
    """
    apart = dict(located)
    for name, parts, rows in fused_rows(config, family.fused, family.names):
        for kind in kinds:
            if place := apart.pop(f"{name}.{kind}", None):  # `_check_tensors` refuses a file that lacks the matrix.
                file, entry = place
                pieces = taken_apart(path, f"{name}.{kind}", entry, rows, source="config.json")
                apart |= {f"{part}.{kind}": (file, piece) for part, piece in zip(parts, pieces, strict=True)}
    return apart


def _locate(file: MappedFile) -> Located:
    return {name: (file, entry) for name, entry in read_header(file).items()}


def _locate_all(directory: Path, stem: str) -> Located:
    """Locate the tensors of a directory: in {stem}.safetensors if it exists, else in the shards of the index."""
    single, index_path = directory / f"{stem}.safetensors", directory / f"{stem}.safetensors.index.json"
    with os_errors(directory):
        if single.is_symlink() or single.exists():
            return _locate(weights_file(single))
        if not index_path.exists():
            if shards := sorted(path.name for path in directory.glob(f"{stem}-*-of-*.safetensors"))[:2]:
                what = f"has shards, such as {shards[0]}, but not their index, {index_path.name}"
                raise refused(directory, f"{what}: download the index from the place where you got the shards")
            has_pickles = any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
            hint = f"; we never read .bin and .pth files (Python pickles): {TO_SAFETENSORS}" if has_pickles else ""
            raise refused(directory, f"has neither {single.name} nor {index_path.name}{hint}")

    weight_map = read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise refused(index_path, "lacks the key weight_map, or it is not an object with names of tensors")
    located: Located = {}
    shards = dict.fromkeys(_shard_name(index_path, *entry) for entry in weight_map.items())
    paths = {shard: _shard_path(directory, index_path, shard) for shard in shards}  # checked before we read any shard
    for shard, path in paths.items():
        for name, place in _locate(weights_file(path)).items():
            if weight_map.get(name) != shard:  # so no tensor is in two shards
                what = f"the index names {short(weight_map.get(name))} for it"
                raise refused(index_path, f"tensor {quoted(name)} is in the shard {shard}, but {what}")
            located[name] = place
    for name, shard in weight_map.items():
        if name not in located:
            raise refused(index_path, f"tensor {quoted(name)} is not in the shard that the index names ({shard})")
    return located


def _shard_name(index_path: Path, tensor: str, name: object) -> str:
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\0" in name:
        what = f"names {short(name)} as the shard of tensor {quoted(tensor)}"
        raise refused(index_path, f"{what}, expected the name of a file in this directory")
    return name


def _shard_path(directory: Path, index_path: Path, name: str) -> Path:
    with os_errors(index_path):
        try:
            home, target = directory.resolve(), (directory / name).resolve()
        except (RuntimeError, UnicodeError) as error:  # a loop of links, or an invalid character
            raise refused(
                index_path, f"names the shard {short(name)}, which is not a file of this directory"
            ) from error
        cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
        if target.parent != home and not cached:
            raise refused(index_path, f"names the shard {short(name)}, which is a link out of this directory")
        if not target.exists():
            raise refused(index_path, f"names the shard {short(name)}, which is missing")
    return directory / name


def _check_number(path: str, config: Config, located: Located) -> None:
    heads = config.heads if config.head_qk_norm else 0  # each head has a norm
    if config.layers * max(1, config.experts, heads) > len(located):  # checked before we make a name for each tensor
        per_layer = f"{heads} heads with norms" if heads else f"{config.experts} experts"
        what = f"too few for {config.layers} layers with {per_layer} each"
        raise refused(path, f"has {len(located)} tensors, {what}")


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

    `by` is the name of the file that determines the expected tensors, for error messages.
    """
    head, embedding = f"{names['head']}.weight", f"{names['embedding']}.weight"
    for name, shape in expected.items():
        if name not in located:
            raise refused(path, f"lacks the tensor {name}{_hint(name, head, located)}")
        if located[name][1].shape != shape:
            what = f"expected {list(shape)} according to {by}"
            raise refused(path, f"the tensor {name} has shape {list(located[name][1].shape)}, {what}")
        if (dtype := located[name][1].dtype.name) not in FLOATS:
            what = f"expected floats, since {by} has no quantization_config for it"
            raise refused(path, f"the tensor {name} has dtype {dtype}, {what}")
    if config.tied and head in located and not (embedding in located and _equal(located[head], located[embedding])):
        # transformers 4 would use the embedding, transformers 5 the head.
        raise refused(path, f"tie_word_embeddings is true, but {head} differs from {embedding}")


def _notes_on_extra(path: str, located: Located, expected: Collection[str], head: str, *, by: str) -> tuple[str, ...]:
    """Return a tuple with one note, which lists the tensors that we ignore. If there are none, the tuple is empty.

    `expected` has the names of the model's tensors, `head` is the name of its output module, and `by` is the name of
    the file that describes the model. Raises `CheckpointError` for an unexpected tensor in a layer or module that we
    compute.
    """
    computed = {name.rpartition(".")[0] for name in expected} | {head}
    computed |= {match[0] for name in expected if (match := LAYER.match(name))}
    extra = [name for name in located if name not in expected and name != f"{head}.weight"]
    for name in extra:
        owners = {name[: dot.start()] for dot in re.finditer(r"\.", name)}
        if computed & owners and not BUFFER.fullmatch(name):
            raise refused(path, f"tensor {quoted(name)} is unexpected: a model with this {by} does not have it")
    if not extra:
        return ()
    more = f" and {len(extra) - MOST_NAMED} more" if len(extra) > MOST_NAMED else ""
    names = ", ".join(map(quoted, extra[:MOST_NAMED]))
    count = f"{len(extra)} tensor{'s are' if len(extra) > 1 else ' is'}"
    return (str(refused(path, f"{count} ignored, since a model with this {by} does not have them: {names}{more}")),)


def _hint(missing: str, head: str, located: Located) -> str:
    """Return a hint for an error message: why the tensor `missing` may be missing; "" if we know no reason."""
    if missing == head:
        return '; if the embedding is also the output matrix, config.json needs "tie_word_embeddings": true'
    for name in located:
        for prefix in WRAPPERS:
            if name.startswith(prefix):
                what = f"the file's names have the prefix {prefix!r}, which {WRAPPERS[prefix]} adds"
                return f"; {what}: save the model without {WRAPPERS[prefix]}"
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
