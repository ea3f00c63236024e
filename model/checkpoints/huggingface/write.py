"""Write Hugging Face's directory: config.json, generation_config.json and model.safetensors."""

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
from llamaspec.model.family import Family, nearest_family
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
    """Write `checkpoint` to a new directory, tensor by tensor, each in its own dtype, bit for bit.

    Quantized matrices are written in the layouts of compressed-tensors; NF4 and FP4 in the layout of bitsandbytes;
    gpt-oss's experts in MXFP4 in the layout of its release. Scales are float32 unless they are exponents. Matrices of a
    GGUF file become float32 if no layout fits them all. `int8_activations` tells readers to multiply int8 matrices by
    int8 activations (SmoothQuant).

    The tokenizer files and the chat template next to the source are copied, unless `files` replaces them. We do not
    follow a link that leads out of the source's folder, since the copy could publish any file of this machine.
    `progress` is called with each tensor's name and bytes. Returns a line for each file that was left out.

    Raises `CheckpointError`, and leaves nothing behind, if the directory exists, the disk is full, a weight is not
    finite, or no family of transformers or no layout fits the model.
    """
    checkpoint = _storable(checkpoint)
    family, in_mxfp4 = nearest_family(checkpoint.config), False
    if family.stacked_experts:
        tensors, in_mxfp4 = with_stacked_experts(checkpoint, family)
        checkpoint = replace(checkpoint, tensors=tensors)
    rule = _rule(checkpoint, int8_activations=int8_activations)
    if rule and (family.fused or family.stacked_experts):
        raise refused(checkpoint.path, f"quantized matrices of {family.name} are stored as one, and are not written")
    fused = fused_rows(checkpoint.config, family.fused, family.names)
    together = {f"{part}.weight": f"{name}.weight" for name, parts, _ in fused for part in parts}
    named = {weight.name: weight.named(family.names) for weight in weights(checkpoint.config)}
    names = {name: together.get(released_name, released_name) for name, released_name in named.items()}
    names |= {name: name for name in checkpoint.tensors if name not in names}  # stacked experts
    norms = {weight.name for weight in weights(checkpoint.config) if weight.role is Role.NORM}
    entries = [entry for name, tensor in checkpoint.tensors.items() for entry in _entries(names[name], tensor, rule)]
    # We put wider elements first, so that every tensor is aligned, and keep the order of use otherwise.
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
    place, end = {}, len(header)  # where the next bytes of each tensor go
    for part, (kind, shape) in stored.items():
        place[part], end = end, end + math.prod(shape) * kind.itemsize
    source = Path(checkpoint.path)
    folder = source if source.is_dir() else source.parent
    copied, notes = ([], []) if files else companions(folder)
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


def _joined(
    entries: list[tuple[str, tuple[np.dtype, tuple[int, ...]]]], path: str
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Join the entries with the same name: the parts of a fused matrix, one below the other."""
    joined: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for name, (dtype, shape) in entries:
        if name in joined:
            if joined[name][0] != dtype:
                raise refused(path, f"{name} would hold matrices of two dtypes: convert to one first")
            shape = (joined[name][1][0] + shape[0], *shape[1:])
        joined[name] = dtype, shape
    return joined


def _dtype(checkpoint: Checkpoint, rule: Written | None) -> str:
    """Return the dtype that transformers will run in.

    transformers also rounds scales to this dtype, so it is float32 for a quantized model. mxfp4 is an exception, since
    bfloat16 decodes it exactly.
    """
    if rule:
        return "bfloat16" if rule.form == "mxfp4" else "float32"
    return checkpoint.tensors[EMBEDDING].dtype.name


def _storable(checkpoint: Checkpoint) -> Checkpoint:
    """Drop the codes that no layout can hold, so that these weights are written as floats.

    These are the codes of embeddings, codes with minima, groups of one column, and GGUF files of several types.
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
    """Choose one layout for all quantized matrices; None if there are none."""
    matrices = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.codes}
    all_codes = [tensor.codes for tensor in matrices.values() if tensor.codes]
    if not all_codes:
        return None
    layout = "bitsandbytes" if all_codes[0].form in CODEBOOKS else "compressed-tensors"
    # bitsandbytes continues blocks from row to row.
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
            what = f"{name} is quantized in another way than the matrices before it, which no standard layout allows"
            raise refused(checkpoint.path, what)
        if grouped and tensor.shape[1] % codes.group:
            what = f"{name} has rows of {tensor.shape[1]} weights, which are no whole groups of {codes.group}"
            raise refused(checkpoint.path, f"{what}: {layout} cannot hold it (q8_row and fp8 have no groups)")
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
    """List the linear modules of transformers that are not quantized."""
    plain = [
        weight.named(family.names).removesuffix(".weight")
        for weight in weights(checkpoint.config)
        if checkpoint.tensors[weight.name].codes is None and weight.role in (*QUANTIZABLE, Role.ROUTER)
    ]
    return [*plain, HEAD.removesuffix(".weight")] if checkpoint.config.tied else plain


def _entries(name: str, tensor: Tensor, rule: Written | None) -> Iterator[tuple[str, tuple[np.dtype, tuple[int, ...]]]]:
    """Yield the stored tensors of a weight, with their dtypes and shapes."""
    if rule is None or tensor.codes is None:
        yield name, (tensor.dtype, tensor.shape)
        return
    rows, cols = tensor.shape
    for part, stored in rule.stored(rows, cols).items():
        if not stored.optional:
            yield f"{name.removesuffix('.weight')}.{part}", (np.dtype(stored.dtypes[0]), stored.shape)


def _arrays(name: str, tensor: Tensor, rule: Written | None, *, path: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield consecutive rows of each stored tensor."""
    if rule is None or tensor.codes is None:
        array = tensor.read()
        if array.dtype.name in FLOATS:
            check_finite(name, array, path=path)
        yield name, array
        return
    module, zeros = name.removesuffix(".weight"), []
    for part in tensor.codes.parts():
        assert not isinstance(part, CodesWithMinima)  # no format holds them
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
