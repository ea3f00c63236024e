"""Writes Hugging Face's directory: config.json, generation_config.json and model.safetensors."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from model.checkpoints.checkpoint import Checkpoint, Shifted, Tensor, refused
from model.checkpoints.checks import check_finite
from model.checkpoints.codes import is_matrix
from model.checkpoints.huggingface.bitsandbytes import BitsAndBytes, format_bitsandbytes
from model.checkpoints.huggingface.compressed import FORMS, CompressedTensors, format_compressed_tensors, rule_for
from model.checkpoints.huggingface.write_config import format_config, format_tokens
from model.checkpoints.recognize import leads_out
from model.checkpoints.safetensors_header import format_header
from model.checkpoints.staging import new_directory
from reference.quantizers.affine import Affine

Written = CompressedTensors | BitsAndBytes

# Files that belong to a model beside its weights: they say how it reads and writes text.
COMPANIONS = (
    "tokenizer.json", "tokenizer.model", "tokenizer.bin", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip


def write_huggingface(
    checkpoint: Checkpoint,
    directory: str | Path,
    *,
    files: Mapping[str, bytes] | None = None,
    int8_activations: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> list[str]:
    """Write `checkpoint` to a new directory, tensor by tensor, each in its own dtype, bit for bit.

    Quantized matrices get the layout of compressed-tensors, NF4 that of bitsandbytes, with scales in float32 unless
    they are exponents. Matrices of a GGUF file that fit no layout together become float32. `int8_activations` tells
    readers to multiply matrices of int8 by activations of int8 (SmoothQuant).
    The tokenizer files and chat template in or beside the source, under their usual names, are copied, unless `files`
    gives others by name. A link that leads out of the source's folder is not followed: it could publish any file of
    this machine. `progress` is called with each tensor's name and bytes. Returns a line for each file that was left
    out. Raises `CheckpointError`, and leaves nothing behind, where the
    directory exists, the disk is full, a weight is not finite, no family that transformers knows is this model,
    or neither can hold its codes.
    """
    checkpoint = _held(checkpoint)
    rule = _rule(checkpoint, int8_activations=int8_activations)
    entries = [entry for name, tensor in checkpoint.tensors.items() for entry in _entries(name, tensor, rule)]
    # Wider elements come first, so that every tensor is aligned; otherwise the order of use stays.
    stored = dict(sorted(entries, key=lambda entry: -entry[1][0].itemsize))
    dtype = _dtype(checkpoint, rule)
    config = format_config(checkpoint, dtype=dtype)
    if rule:
        config["quantization_config"] = _format(rule, plain=_plain_modules(checkpoint))
    tokens = {key: value for key, value in format_tokens(checkpoint).items() if value is not None}
    header = format_header(stored)
    place, end = {}, len(header)  # where the next bytes of each tensor go
    for part, (kind, shape) in stored.items():
        place[part], end = end, end + math.prod(shape) * kind.itemsize
    companions, notes = ([], []) if files else _companions(Path(checkpoint.path))
    with new_directory(directory) as staged:
        (staged / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (staged / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n")
        for name, data in (files or {}).items():
            (staged / name).write_bytes(data)
        for companion in companions:
            shutil.copyfile(companion, staged / companion.name)
        with open(staged / "model.safetensors", "wb") as file:
            file.write(header)
            for name, tensor in checkpoint.tensors.items():
                for part, array in _arrays(name, tensor, rule, path=checkpoint.path):
                    file.seek(place[part])
                    place[part] += file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                    checkpoint.release()
                if progress:
                    progress(name, tensor.bytes)
    return notes


def _dtype(checkpoint: Checkpoint, rule: Written | None) -> str:
    """The type that transformers runs in. It rounds scales to it, and decodes mxfp4 to bfloat16 exactly."""
    if rule:
        return "bfloat16" if rule.form == "mxfp4" else "float32"
    return checkpoint.tensors["model.embed_tokens.weight"].dtype.name


def _held(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without codes that no layout holds.

    These are the codes of an embedding, of groups of one, and of a GGUF file whose types differ or have no form in
    compressed-tensors.
    """
    matrices = [tensor for name, tensor in checkpoint.tensors.items() if is_matrix(name)]
    theirs = {(tensor.codes.form, tensor.codes.group) for tensor in matrices if tensor.codes and tensor.type}
    keep = len(theirs) < 2 and all(form in FORMS for form, _ in theirs)

    def tensor(name: str, stored: Tensor) -> Tensor:
        kept = is_matrix(name) and (keep or not stored.type) and (not stored.codes or stored.codes.group > 1)
        return stored if kept else stored._replace(codes=None)

    return replace(checkpoint, tensors={name: tensor(name, stored) for name, stored in checkpoint.tensors.items()})


def _rule(checkpoint: Checkpoint, *, int8_activations: bool) -> Written | None:
    """The layout of all quantized matrices; None where there are none. Raises `CheckpointError` for mixed ones."""
    matrices = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.codes}
    each = [tensor.codes for tensor in matrices.values() if tensor.codes]
    if not each:
        return None
    layout = "bitsandbytes" if each[0].form == "nf4" else "compressed-tensors"
    # A block of bitsandbytes may continue from one row to the next.
    grouped = any(one.codes.group < one.shape[1] or one.codes.form == "nf4" for one in matrices.values() if one.codes)
    for name, tensor in matrices.items():
        codes = tensor.codes
        assert codes
        if (codes.form, codes.zeros) != (each[0].form, each[0].zeros) or (grouped and codes.group != each[0].group):
            what = f"{name} is quantized in another way than the matrices before it, which no standard layout allows"
            raise refused(checkpoint.path, what)
        if grouped and tensor.shape[1] % codes.group:
            what = f"{name} has rows of {tensor.shape[1]} weights, which are no whole groups of {codes.group}"
            raise refused(checkpoint.path, f"{what}: {layout} cannot hold it (q8_row and fp8 have no groups)")
    if each[0].form == "nf4":
        return BitsAndBytes()
    try:
        return rule_for(each[0], rows_grouped=grouped, int8_activations=int8_activations)
    except ValueError as error:
        raise refused(checkpoint.path, str(error)) from error


def _format(rule: Written, *, plain: list[str]) -> dict[str, Any]:
    if isinstance(rule, BitsAndBytes):
        return format_bitsandbytes(plain=plain)
    return format_compressed_tensors(rule, plain=plain)


def _plain_modules(checkpoint: Checkpoint) -> list[str]:
    """The names of linear modules, in transformers' sense, that are not quantized."""
    plain = [
        name.removesuffix(".weight")
        for name, tensor in checkpoint.tensors.items()
        if tensor.codes is None and (is_matrix(name) or name.endswith(".gate.weight"))
    ]
    return [*plain, "lm_head"] if checkpoint.config.tied else plain


def _entries(name: str, tensor: Tensor, rule: Written | None) -> Iterator[tuple[str, tuple[np.dtype, tuple[int, ...]]]]:
    """The stored tensors that a tensor becomes, with their dtypes and shapes."""
    if rule is None or tensor.codes is None:
        yield name, (tensor.dtype, tensor.shape)
        return
    rows, cols = tensor.shape
    for part, stored in rule.stored(rows, cols).items():
        yield f"{name.removesuffix('.weight')}.{part}", (np.dtype(stored.dtypes[0]), stored.shape)


def _arrays(name: str, tensor: Tensor, rule: Written | None, *, path: str) -> Iterator[tuple[str, np.ndarray]]:
    """Each stored tensor in runs of rows, in order."""
    if rule is None or tensor.codes is None:
        array = tensor.read()
        check_finite(name, array, path=path)
        yield name, array
        return
    module, zeros = name.removesuffix(".weight"), []
    for part in tensor.codes.parts():
        assert not isinstance(part, Shifted)  # These have no format here.
        if part.scales.dtype == np.float32:
            check_finite(f"{module}'s scales", part.scales, path=path)
        if isinstance(part, Affine):
            zeros.append(part.zeros)
        for stored, array in rule.pack(part).items():
            yield f"{module}.{stored}", array
    if zeros:
        assert isinstance(rule, CompressedTensors)  # bitsandbytes has no zero points.
        for stored, array in rule.pack_zeros(np.concatenate(zeros)).items():
            yield f"{module}.{stored}", array
    rows, cols = tensor.shape
    for stored, array in rule.constants(rows, cols).items():
        yield f"{module}.{stored}", array


def _companions(source: Path) -> tuple[list[Path], list[str]]:
    """The files to copy, and a line for each that is left out."""
    folder = source if source.is_dir() else source.parent
    copied, notes = [], []
    for path in (folder / name for name in COMPANIONS if (folder / name).is_file()):
        if outside := leads_out(path):
            notes.append(f"{path} is not copied: it is a link to {outside}, outside the model's folder")
        else:
            copied.append(path)
    return copied, notes
