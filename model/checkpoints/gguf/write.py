"""Writes GGUF files for llama.cpp: weights keep their dtype, or get a new float dtype, a quantized type or a mixture.

The chosen type applies only to matrices. Vectors and routers are written as float32, since llama.cpp computes with them
in float32. `gguf.mixtures` chooses the types of a mixture as llama.cpp does, and importances of columns (see
`gguf.imatrix`) then improve the choice of scales.

For Q4_0 and MXFP4, the output matrix (or a tied embedding) is written as Q8_0, since every logit depends on this
matrix. For types that are not mixtures, a matrix keeps its stored dtype if its rows are not whole blocks of the type.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import batched
from pathlib import Path
from typing import BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Shaped, UInt8

from llamaspec.model.checkpoints.checkpoint import Checkpoint, refused
from llamaspec.model.checkpoints.checks import check_finite
from llamaspec.model.checkpoints.gguf import layout
from llamaspec.model.checkpoints.gguf.file import Value
from llamaspec.model.checkpoints.gguf.imatrix import ImportanceMatrix
from llamaspec.model.checkpoints.gguf.mixtures import MIXTURES, fitting_type, wanted_type
from llamaspec.model.checkpoints.gguf.rope import to_factors
from llamaspec.model.checkpoints.recognize import GGUF
from llamaspec.model.checkpoints.staging import new_file
from llamaspec.model.family import Architecture, nearest_family
from llamaspec.model.system import usable_cpus
from llamaspec.model.tensors import EMBEDDING, QUANTIZABLE, Role, Weight, fused_rows
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers import ggml
from llamaspec.reference.rope import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling, halves_to_interleaved

FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
QUANTIZED_TYPES = {"q8_0": "Q8_0", "q4_0": "Q4_0", "mxfp4": "MXFP4"}
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
FOUR_BITS = ("Q4_0", "MXFP4")
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32, "MXFP4": 38}  # general.file_type
QUANTIZATION = 2  # general.quantization_version: the version of the layouts of blocks
AT_ONCE = 1 << 20  # number of weights that a thread encodes at a time
THREADS = min(len(usable_cpus()), 16)  # each needs up to 80 MB
IMATRIX_ENTRIES = "quantize.imatrix.entries_count"


class Written(NamedTuple):
    """Facts about a written file that a user may want to know."""

    other_types: dict[str, str]  # types of matrices with rows that do not fill the blocks of the type they should have
    unweighted: list[str]  # matrices of blocks without importances, if others have some


class GGUFTensor(NamedTuple):
    """A tensor of the file, and the weights in the tensor.

    A tensor has several weights if it is a fused matrix or holds all experts of a layer.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    wanted: str  # the type that the tensor would have if its rows were whole blocks of this type
    weights: tuple[Weight, ...]
    heads: int

    @property
    def bytes(self) -> int:
        weights, size = layout.BLOCKS[self.type]
        return int(np.prod(self.shape, dtype=np.int64)) // weights * size


def write_gguf(
    checkpoint: Checkpoint,
    path: str | Path,
    *,
    to: str | None = None,
    vocabulary: Mapping[str, Value] | None = None,
    importances: ImportanceMatrix | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Written:
    """Write `checkpoint` to the new file `path`, tensor by tensor.

    `to` is a key of `FLOATS`, `QUANTIZED_TYPES` or `MIXTURES`; None keeps the stored dtype. `vocabulary` has the keys
    of the tokenizer and the chat template (see `model.tokenizers.gguf_writer`). `importances` improve the scales of a
    mixture. After each weight, we call `progress` with its name and its number of bytes.

    Raises `CheckpointError`, and leaves no file behind, if the file exists, if the disk is full, if a weight is not
    finite or too large for its type, if llama.cpp does not support a part of the model, or if the importances belong to
    a different model.
    """
    config, architecture = checkpoint.config, architecture_for(checkpoint)
    stored = list(_stored(checkpoint, architecture, to, weighted=importances is not None))
    searched = {tensor.name: tensor.shape for tensor in stored if tensor.type in ggml.SEARCHED}
    rows_by_name = importances.of_shapes(searched) if importances else {}
    keys = _keys(checkpoint, architecture, _file_type(checkpoint, to)) | dict(vocabulary or {})
    if importances:
        keys |= {"quantize.imatrix.file": Path(importances.path).name, IMATRIX_ENTRIES: len(importances.values)}
    factors = _factors(config)
    with new_file(path) as staged, open(staged, "wb") as file:
        _write_header(file, keys, stored, factors)
        for array in factors.values():
            _write_padded(file, array.tobytes())
        for tensor in stored:
            written, rows = 0, rows_by_name.get(tensor.name)
            for weight in tensor.weights:
                importance = None if rows is None else rows[weight.expert or 0]
                for part in _encoded(checkpoint, weight.name, tensor, importance):
                    file.write(part.data)
                    written += part.nbytes
                checkpoint.release()
                if progress:
                    progress(weight.name, checkpoint.tensors[weight.name].bytes)
            file.write(bytes(-written % layout.ALIGNMENT))
    return Written(
        {tensor.name: tensor.type for tensor in stored if tensor.wanted != tensor.type},
        [name for name in searched if name.startswith("blk.") and name not in rows_by_name] if importances else [],
    )


def architecture_for(checkpoint: Checkpoint) -> Architecture:
    """Return the llama.cpp architecture that can run this model. Raises `CheckpointError` if no architecture can."""
    architecture = nearest_family(checkpoint.config).gguf
    if lacking := architecture.lacks(checkpoint.config):
        raise refused(checkpoint.path, f"llama.cpp's architecture {architecture.name} does not support {lacking}")
    return architecture


def of_tensors(
    checkpoint: Checkpoint, importances: Mapping[str, Float32[np.ndarray, " cols"]]
) -> dict[str, Float32[np.ndarray, " values"]]:
    """Rename the entries of `importances`: from the names of `model.tensors` to the names of tensors in a GGUF file.

    A tensor that holds all experts gets the importances of all experts. A tensor that joins matrices, such as q, k and
    v, gets the importances of the first matrix, because the others have the same ones.
    """
    values = {}
    for tensor in _stored(checkpoint, architecture_for(checkpoint), None, weighted=True):
        weights = tensor.weights if tensor.weights[0].expert is not None else tensor.weights[:1]
        if all(weight.name in importances for weight in weights):
            values[tensor.name] = np.concatenate([importances[weight.name] for weight in weights])
    return values


def _type(to: str | None) -> str | None:
    if to is None:
        return None
    types = FLOATS | QUANTIZED_TYPES | {name: mixture.main for name, mixture in MIXTURES.items()}
    if to not in types:
        raise ValueError(f"type {to!r} is unknown, expected one of {', '.join(types)}")
    return types[to]


def _may_have_type(weight: Weight) -> bool:
    """Tell whether we may store a weight in the type that the user chose (`to` of `write_gguf`)."""
    return weight.role in (*QUANTIZABLE, Role.EMBEDDING)


def _stored(
    checkpoint: Checkpoint, architecture: Architecture, to: str | None, *, weighted: bool
) -> Iterator[GGUFTensor]:
    """Yield the tensors of the file, in the file's order."""
    weights_by_name: dict[str, list[Weight]] = {}
    places = layout.places(checkpoint.config, architecture)
    fused = fused_rows(checkpoint.config, architecture.fused, architecture.names)
    together = {f"{part}.weight": f"{name}.weight" for name, parts, _ in fused for part in parts}
    for weight, place in places.items():
        weights_by_name.setdefault(together.get(place.name, place.name), []).append(weight)
    head = Role.EMBEDDING if checkpoint.config.tied else Role.HEAD
    for name, weights in weights_by_name.items():
        first, place = weights[0], places[weights[0]]
        shape = layout.stored_shape(first) if place.at is None else (len(weights), *first.shape)
        if fused := [weight for weight in weights if place.at is None]:
            shape = (sum(layout.stored_shape(weight)[0] for weight in fused), *shape[1:])
        as_stored = FLOATS[checkpoint.tensors[first.name].dtype.name]
        if not _may_have_type(first):
            wanted = chosen = "F32"
        elif to in MIXTURES:
            facts = {"architecture": architecture.name, "config": checkpoint.config, "weighted": weighted}
            wanted = wanted_type(name, mixture=MIXTURES[to], **facts)
            chosen = fitting_type(wanted, shape[-1])
        else:
            wanted = _type(to) or as_stored
            wanted = "Q8_0" if wanted in FOUR_BITS and first.role is head else wanted
            chosen = as_stored if shape[-1] % layout.BLOCKS[wanted].weights else wanted
        yield GGUFTensor(name, shape, chosen, wanted, tuple(weights), place.heads)


def _file_type(checkpoint: Checkpoint, to: str | None) -> int:
    if to in MIXTURES:
        return MIXTURES[to].file_type
    return FILE_TYPES[_type(to) or FLOATS[checkpoint.tensors[EMBEDDING].dtype.name]]


def _keys(checkpoint: Checkpoint, architecture: Architecture, file_type: int) -> dict[str, Value]:
    config = checkpoint.config
    keys: dict[str, Value] = {
        "general.architecture": architecture.name,
        "general.name": Path(checkpoint.path).stem,
        "general.file_type": file_type,
        "general.quantization_version": QUANTIZATION,
    }
    own: dict[str, Value] = {"vocab_size": config.vocab}
    for name, key in architecture.keys.items():
        if config.experts or name not in ("experts", "experts_per_token"):
            if (value := getattr(config, name)) is None:
                continue
            own[key] = float(value) if Config.__annotations__[name] in (float, float | None) else value
        if name == "head_dim":
            own["attention.value_length"] = config.head_dim
        if name == "eps":
            own["rope.dimension_count"] = config.rotary_features
    own |= architecture.write(config)
    match config.scaling:
        case LinearScaling(factor):
            own |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}
        case Llama3Scaling(original_context=original):  # the other parameters are in rope_freqs.weight
            own |= {"rope.scaling.original_context_length": original}
        case YarnScaling(factor, original):
            own |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(factor)}
            own |= {"rope.scaling.original_context_length": original}
        case LongRopeScaling(_, _, original, magnitude):  # the other parameters are in LONG_ROPE_FACTORS
            own |= {"rope.scaling.attn_factor": float(magnitude)}
            own |= {"rope.scaling.original_context_length": original}
    return keys | {f"{architecture.name}.{key}": value for key, value in own.items()}


def _factors(config: Config) -> dict[str, np.ndarray]:
    """Return the tensors that hold factors of RoPE's frequencies, by name."""
    match config.scaling:
        case Llama3Scaling():
            tables = {layout.ROPE_FACTORS: to_factors(config.scaling, head_dim=config.head_dim, theta=config.theta)}
        case LongRopeScaling(few, many):
            tables = dict(zip(layout.LONG_ROPE_FACTORS, (np.array(few), np.array(many)), strict=True))
        case _:
            tables = {}
    return {name: factors.astype("<f4") for name, factors in tables.items()}


def _write_header(
    file: BinaryIO, keys: Mapping[str, Value], stored: list[GGUFTensor], factors: Mapping[str, np.ndarray]
) -> None:
    table = [(name, array.shape, "F32", array.nbytes) for name, array in factors.items()]
    table += [(tensor.name, tensor.shape, tensor.type, tensor.bytes) for tensor in stored]
    parts = [GGUF, struct.pack("<IQQ", 3, len(table), len(keys))]
    parts += [_text(key) + _value(value) for key, value in keys.items()]
    offset = 0
    for name, shape, kind, size in table:
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts.append(_text(name) + sizes + struct.pack("<IQ", layout.TYPE_CODES[kind], offset))
        offset += size + -size % layout.ALIGNMENT
    _write_padded(file, b"".join(parts))


def _write_padded(file: BinaryIO, raw: bytes) -> None:
    file.write(raw + bytes(-len(raw) % layout.ALIGNMENT))


def _text(text: str) -> bytes:
    raw = text.encode()
    return layout.LENGTH.pack(len(raw)) + raw


def _value(value: Value) -> bytes:
    """Encode the type of a value, then the value: integers in 32 bits, floats in float32."""
    match value:
        case bool():
            return struct.pack("<I?", layout.BOOL, value)
        case int():
            return struct.pack("<II", layout.UINT32, value)
        case float():
            return struct.pack("<If", layout.FLOAT32, value)
        case str():
            return struct.pack("<I", layout.STRING) + _text(value)
        case list():
            return struct.pack("<IIQ", layout.ARRAY, layout.STRING, len(value)) + b"".join(map(_text, value))
        case np.ndarray():
            kind, dtype = (layout.FLOAT32, "<f4") if value.dtype.kind == "f" else (layout.INT32, "<i4")
            return struct.pack("<IIQ", layout.ARRAY, kind, len(value)) + value.astype(dtype).tobytes()


def _encoded(
    checkpoint: Checkpoint, name: str, stored: GGUFTensor, importance: Float32[np.ndarray, " cols"] | None
) -> Iterator[UInt8[np.ndarray, " bytes"]]:
    """Yield the bytes of the weight `name`, encoded in the type of `stored`, some rows at a time.

    A thread for each processor encodes a part, since NumPy computes without Python's lock.
    """
    array = checkpoint.tensors[name].read()
    check_finite(name, array, path=checkpoint.path)
    if stored.heads:
        array = halves_to_interleaved(array, heads=stored.heads)
    rows = array.reshape(-1, array.shape[-1])
    step = max(1, AT_ONCE // rows.shape[1])

    def encoded(begin: int) -> UInt8[np.ndarray, " bytes"]:
        part = _as_type(checkpoint, name, rows[begin : begin + step], stored.type, importance)
        return np.ascontiguousarray(part).reshape(-1)

    with ThreadPoolExecutor(THREADS) as pool:
        for begins in batched(range(0, len(rows), step), THREADS):
            yield from pool.map(encoded, begins)


def _as_type(
    checkpoint: Checkpoint,
    name: str,
    rows: Shaped[np.ndarray, "rows cols"],
    kind: str,
    importance: Float32[np.ndarray, " cols"] | None,
) -> UInt8[np.ndarray, "rows bytes"]:
    if kind in DTYPES:
        with np.errstate(over="ignore"):
            converted = np.ascontiguousarray(rows).astype(DTYPES[kind])
        if not np.isfinite(converted.astype(np.float32)).all():
            raise refused(checkpoint.path, f"{name} contains {np.max(np.abs(rows))}, which is too large for {kind}")
        return converted.view(np.uint8)
    try:
        return ggml.encode(rows.astype(np.float32), kind, importance)
    except ValueError as error:
        raise refused(checkpoint.path, f"{name} cannot be written as {kind}: {error}") from error
