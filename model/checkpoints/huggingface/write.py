"""Writes a directory in Hugging Face's layout: config.json, generation_config.json and model.safetensors."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llamaspec.model.checkpoints.checkpoint import Checkpoint, CodesWithMinima, Tensor, refused
from llamaspec.model.checkpoints.checks import check_finite
from llamaspec.model.checkpoints.codes import WITH_MINIMA, in_whole_bytes
from llamaspec.model.checkpoints.huggingface.bitsandbytes import CODEBOOKS, BitsAndBytes, format_bitsandbytes
from llamaspec.model.checkpoints.huggingface.companions import companions
from llamaspec.model.checkpoints.huggingface.compressed import (
    FORMS,
    CompressedTensors,
    format_compressed_tensors,
    rule_for,
)
from llamaspec.model.checkpoints.huggingface.rule import FLOATS
from llamaspec.model.checkpoints.huggingface.stacked_experts import METHOD, with_stacked_experts
from llamaspec.model.checkpoints.huggingface.write_config import format_config, format_tokens
from llamaspec.model.checkpoints.safetensors_header import format_header
from llamaspec.model.checkpoints.staging import new_directory
from llamaspec.model.checkpoints.strict_json import read_object
from llamaspec.model.family import Family, nearest_family
from llamaspec.model.options import SAMPLING
from llamaspec.model.tensors import EMBEDDING, HEAD, QUANTIZABLE, Role, fused_rows, quantizable, weights
from llamaspec.reference.quantizers.affine import Affine

Written = CompressedTensors | BitsAndBytes


def write_huggingface(
    checkpoint: Checkpoint,
    directory: str | Path,
    *,
    files: Mapping[str, bytes] | None = None,
    int8_activations: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> list[str]:
    """Write `checkpoint` to a new directory, tensor by tensor; tensors of floats keep their dtype and all bits.

    We write quantized matrices in the layouts of compressed-tensors, except NF4 and FP4 (in the layout of bitsandbytes)
    and gpt-oss's experts in MXFP4 (in the layout of gpt-oss's release). Scales are float32 unless they are exponents.
    Matrices of a GGUF file become float32 if no single layout fits them all. `int8_activations` makes readers multiply
    int8 matrices by int8 activations (SmoothQuant).

    We copy the keys of the source's generation_config.json that control sampling, such as temperature.

    We copy the tokenizer files and the chat template from the source's folder, or write `files` (contents by path)
    instead. We do not copy a link that leads out of the source's folder, since a copy could publish a private file of
    this machine. After each tensor, we call `progress` with its name and its number of bytes. Returns a message for
    each file that we did not copy.

    Raises `CheckpointError`, and leaves nothing behind, if the directory exists, if the disk is full, if a weight is
    not finite, or if no family of transformers or no layout fits the model.
    """
    checkpoint = _storable(checkpoint)
    family, in_mxfp4 = nearest_family(checkpoint.config), False
    if family.stacked_experts:
        tensors, in_mxfp4 = with_stacked_experts(checkpoint, family)
        checkpoint = replace(checkpoint, tensors=tensors)
    rule = _rule(checkpoint, int8_activations=int8_activations)
    if rule and (family.fused or family.stacked_experts):
        what = f"cannot write quantized matrices of {family.name}, since this family fuses or stacks matrices"
        raise refused(checkpoint.path, what)
    fused = fused_rows(checkpoint.config, family.fused, family.names)
    together = {f"{part}.weight": f"{name}.weight" for name, parts, _ in fused for part in parts}
    named = {weight.name: weight.named(family.names) for weight in weights(checkpoint.config)}
    names = {name: together.get(released_name, released_name) for name, released_name in named.items()}
    names |= {name: name for name in checkpoint.tensors if name not in names}  # stacked experts
    norms = {weight.name for weight in weights(checkpoint.config) if weight.role is Role.NORM}
    entries = [entry for name, tensor in checkpoint.tensors.items() for entry in _entries(names[name], tensor, rule)]
    # We put tensors with wider elements first, so that every tensor is aligned. Otherwise we keep the order of use.
    stored = dict(sorted(_joined(entries, checkpoint.path).items(), key=lambda entry: -entry[1][0].itemsize))
    dtype = _dtype(checkpoint, rule)
    config = format_config(checkpoint, dtype=dtype)
    if rule:
        config["quantization_config"] = _format(rule, plain=_plain_modules(checkpoint, family))
    elif in_mxfp4:
        plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"quant_method": METHOD, "modules_to_not_convert": plain}
    tokens = {key: value for key, value in format_tokens(checkpoint).items() if value is not None}
    header = format_header(stored)
    place, end = {}, len(header)  # `place` has the position at which we write the next bytes of each tensor
    for part, (kind, shape) in stored.items():
        place[part], end = end, end + math.prod(shape) * kind.itemsize
    source = Path(checkpoint.path)
    folder = source if source.is_dir() else source.parent
    copied, notes = ([], []) if files else companions(folder)
    tokens |= _sampling_keys(checkpoint, folder)
    with new_directory(directory) as staged:
        (staged / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (staged / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n")
        for name, data in (files or {}).items():
            (staged / name).parent.mkdir(exist_ok=True)
            (staged / name).write_bytes(data)
        for name in copied:
            (staged / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / name, staged / name)
        with open(staged / "model.safetensors", "wb") as file:
            file.write(header)
            for name, tensor in checkpoint.tensors.items():
                for part, array in _arrays(names[name], tensor, rule, path=checkpoint.path):
                    if name in norms and family.norm_offset:
                        array = (array - np.float32(family.norm_offset)).astype(tensor.dtype)
                    file.seek(place[part])
                    place[part] += file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                    checkpoint.release()
                if progress:
                    progress(name, tensor.bytes)
    return notes


def _sampling_keys(checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    """Return the keys of the source's generation_config.json that control sampling, such as temperature."""
    path = folder / "generation_config.json"
    in_folder = checkpoint.format in ("safetensors", "mistral")
    values = read_object(path) if in_folder and path.is_file() else {}
    return {key: values[key] for key in (*SAMPLING, "do_sample") if key in values}


def _joined(
    entries: list[tuple[str, tuple[np.dtype, tuple[int, ...]]]], path: str
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Join the parts of each fused matrix (entries with the same name) by adding their numbers of rows."""
    joined: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for name, (dtype, shape) in entries:
        if name in joined:
            if joined[name][0] != dtype:
                what = f"the fused matrix {name} would have parts in two dtypes, {joined[name][0]} and {dtype}"
                raise refused(path, f"{what}: convert the model to one dtype first")
            shape = (joined[name][1][0] + shape[0], *shape[1:])
        joined[name] = dtype, shape
    return joined


def _dtype(checkpoint: Checkpoint, rule: Written | None) -> str:
    """Return the dtype in which transformers will compute.

    transformers also rounds scales to this dtype, so we choose float32 for a quantized model. For mxfp4 we choose
    bfloat16, which holds the decoded weights exactly.
    """
    if rule:
        return "bfloat16" if rule.form == "mxfp4" else "float32"
    return checkpoint.tensors[EMBEDDING].dtype.name


def _storable(checkpoint: Checkpoint) -> Checkpoint:
    """Remove codes that no layout can hold, so that we write these weights as floats.

    No layout can hold the codes of embeddings, codes with minima, or codes in groups of one column. If a GGUF file has
    matrices of several types, we remove the codes of all its matrices.
    """
    matrices = quantizable(checkpoint.config)
    tensors = {
        name: tensor._replace(codes=in_whole_bytes(tensor.codes)) if tensor.codes else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    stored_so = [tensor for name, tensor in tensors.items() if name in matrices and tensor.type]
    forms = {(tensor.codes.form, tensor.codes.group) for tensor in stored_so if tensor.codes}
    keep = len(forms) < 2 and all(form in FORMS for form, _ in forms)

    def tensor(name: str, stored: Tensor) -> Tensor:
        writable = keep if stored.type else not stored.codes or stored.codes.form not in WITH_MINIMA
        in_codes = name in matrices and writable and (not stored.codes or stored.codes.group > 1)
        return stored if in_codes else stored._replace(codes=None)

    return replace(checkpoint, tensors={name: tensor(name, stored) for name, stored in tensors.items()})


def _rule(checkpoint: Checkpoint, *, int8_activations: bool) -> Written | None:
    """Choose one layout for all quantized matrices; None if no matrix is quantized."""
    matrices = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.codes}
    all_codes = [tensor.codes for tensor in matrices.values() if tensor.codes]
    if not all_codes:
        return None
    layout = "bitsandbytes" if all_codes[0].form in CODEBOOKS else "compressed-tensors"
    # In bitsandbytes, blocks may span two rows, so we require whole groups in each row.
    grouped = any(
        matrix.codes.group < matrix.shape[1] or matrix.codes.form in CODEBOOKS
        for matrix in matrices.values()
        if matrix.codes
    )
    for name, tensor in matrices.items():
        codes = tensor.codes
        assert codes
        if (codes.form, codes.zeros) != (all_codes[0].form, all_codes[0].zeros) or (
            grouped and codes.group != all_codes[0].group
        ):
            what = f"{name} has {codes.form} codes in groups of {codes.group}, but earlier matrices have other codes"
            raise refused(checkpoint.path, f"{what} or groups, which {layout} cannot hold in one model")
        if grouped and tensor.shape[1] % codes.group:
            what = f"rows of {name} have {tensor.shape[1]} weights, but in {layout} the number of weights in a row"
            needs = f"must be a multiple of the group size {codes.group} (the schemes q8_row and fp8 have no groups)"
            raise refused(checkpoint.path, f"{what} {needs}")
    if all_codes[0].form in CODEBOOKS:
        return BitsAndBytes(all_codes[0].form)
    try:
        return rule_for(all_codes[0], rows_grouped=grouped, int8_activations=int8_activations)
    except ValueError as error:
        raise refused(checkpoint.path, str(error)) from error


def _format(rule: Written, *, plain: list[str]) -> dict[str, Any]:
    if isinstance(rule, BitsAndBytes):
        return format_bitsandbytes(rule.form, plain=plain)
    return format_compressed_tensors(rule, plain=plain)


def _plain_modules(checkpoint: Checkpoint, family: Family) -> list[str]:
    """List the linear modules (by their names in transformers) that are not quantized."""
    plain = [
        weight.named(family.names).removesuffix(".weight")
        for weight in weights(checkpoint.config)
        if checkpoint.tensors[weight.name].codes is None and weight.role in (*QUANTIZABLE, Role.ROUTER)
    ]
    return [*plain, HEAD.removesuffix(".weight")] if checkpoint.config.tied else plain


def _entries(name: str, tensor: Tensor, rule: Written | None) -> Iterator[tuple[str, tuple[np.dtype, tuple[int, ...]]]]:
    """Yield the name, dtype and shape of each tensor that stores the weight `name`. A quantized weight has several."""
    if rule is None or tensor.codes is None:
        yield name, (tensor.dtype, tensor.shape)
        return
    rows, cols = tensor.shape
    for part, stored in rule.stored(rows, cols).items():
        if not stored.optional:
            yield f"{name.removesuffix('.weight')}.{part}", (np.dtype(stored.dtypes[0]), stored.shape)


def _arrays(name: str, tensor: Tensor, rule: Written | None, *, path: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors that store the weight `name`, with their names in the file, some rows at a time."""
    if rule is None or tensor.codes is None:
        array = tensor.read()
        if array.dtype.name in FLOATS:
            check_finite(name, array, path=path)
        yield name, array
        return
    module, zeros = name.removesuffix(".weight"), []
    for part in tensor.codes.parts():
        assert not isinstance(part, CodesWithMinima)  # `_storable` has removed codes with minima
        if part.scales.dtype == np.float32:
            check_finite(f"{module}'s scales", part.scales, path=path)
        if isinstance(part, Affine):
            zeros.append(part.zeros)
        for stored, array in rule.pack(part).items():
            yield f"{module}.{stored}", array
    if zeros:
        assert isinstance(rule, CompressedTensors)  # bitsandbytes has no zero points
        for stored, array in rule.pack_zeros(np.concatenate(zeros)).items():
            yield f"{module}.{stored}", array
    rows, cols = tensor.shape
    for stored, array in rule.constants(rows, cols).items():
        yield f"{module}.{stored}", array
