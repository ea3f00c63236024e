"""Reads and writes low-rank adapters (LoRA) in the files of Hugging Face's PEFT, and merges them into a checkpoint.

    DIR/adapter_config.json         rank r, alpha, and the modules that have an adapter
    DIR/adapter_model.safetensors   two matrices for each adapted matrix W: A [r, cols] and B [rows, r]

The adapted matrix is W + s B A with s = alpha / r, or alpha / sqrt(r) if `use_rslora` is true (`reference.lora`). The
names of the tensors contain the names of transformers' modules: A of the matrix NAME.weight is
base_model.model.NAME.lora_A.weight.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from safetensors.numpy import save_file

from llamaspec.model.checkpoints.checkpoint import Checkpoint, LowRank, Tensor, TensorAdapter, quoted, refused
from llamaspec.model.checkpoints.checks import check_finite
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.safetensors_header import HeaderEntry, read_header
from llamaspec.model.checkpoints.staging import new_file
from llamaspec.model.checkpoints.strict_json import read_object, short
from llamaspec.model.family import nearest_family
from llamaspec.model.tensors import Role, Weight, weights
from llamaspec.reference.config import Config

FLOAT32 = np.dtype(np.float32)
LARGEST = float(np.finfo(FLOAT32).max)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SUBFOLDER = "adapter"
PARTS = ("q", "k", "v", "o", "gate", "up", "down")  # parts of `model.tensors` that an adapter can change
PREFIX = "base_model.model."
# Keys of adapter_config.json that change the computation, and the values with which they do not change it.
UNDERSTOOD: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    # Other methods, such as pissa and olora, also change the weights of the base model.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter of a model."""

    rank: int
    alpha: float
    pairs: Mapping[str, LowRank] = field(repr=False)  # by the name of the weight in `model.tensors`
    rslora: bool = False
    base: str = ""  # the name of the model that the adapter changes, if the file has it

    @property
    def scale(self) -> float:
        """The factor s by which LoRA multiplies B A.

        >>> Adapter(4, 8.0, {}).scale, Adapter(4, 8.0, {}, rslora=True).scale
        (2.0, 4.0)
        """
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def digest(self) -> str:
        """Return a hash of everything in this adapter that changes a model's results."""
        hashed = hashlib.sha256(repr((self.rank, self.scale)).encode())
        for name, pair in sorted(self.pairs.items()):
            hashed.update(name.encode())
            for matrix in pair:
                hashed.update(np.ascontiguousarray(matrix, FLOAT32).data)
        return hashed.hexdigest()


def adaptable(config: Config, parts: Iterable[str] = PARTS) -> dict[str, Weight]:
    """Return, by name, the weights that an adapter for the matrices in `parts` changes.

    >>> config = Config(4, 1, 2, 1, 2, 8, vocab=10, context=8, eps=1e-5, theta=1e4)
    >>> [weight.part for weight in adaptable(config, ["q", "down"]).values()]
    ['q', 'down']
    """
    chosen = {*parts}
    return {
        weight.name: weight
        for weight in weights(config)
        if weight.part in chosen and weight.part in PARTS and weight.role is Role.MATRIX
    }


def read_adapter(folder: str | Path, config: Config) -> Adapter:
    """Read an adapter from PEFT's files in `folder`, for a model with the configuration `config`.

    The files may also be in the subfolder `adapter`. Raises CheckpointError if a file cannot be used, if the adapter is
    not a LoRA adapter, or if it does not fit the model.
    """
    folder = Path(folder)
    if (folder / SUBFOLDER / CONFIG).is_file() and not (folder / CONFIG).is_file():
        folder /= SUBFOLDER
    path = folder / CONFIG
    values = read_object(path)
    if (kind := values.get("peft_type")) != "LORA":
        raise refused(path, f"peft_type is {short(kind)}, expected LORA (only LoRA adapters are supported)")
    for key, plain in UNDERSTOOD.items():
        if key in values and values[key] not in plain:
            raise refused(path, f"{key} is {short(values[key])}, which is not supported (only {short(plain[0])})")
    rank, alpha, rslora = values.get("r"), values.get("lora_alpha"), values.get("use_rslora", False)
    if not isinstance(rank, int) or rank < 1:
        raise refused(path, f"r is {short(rank)}, expected a rank of at least 1")
    if not isinstance(alpha, int | float) or not abs(alpha) <= LARGEST:
        raise refused(path, f"lora_alpha is {short(alpha)}, expected a number that float32 can hold")
    if not isinstance(rslora, bool):
        raise refused(path, f"use_rslora is {short(rslora)}, expected true or false")
    base = values.get("base_model_name_or_path")
    pairs = _pairs(MappedFile(folder / WEIGHTS), config, rank)
    return Adapter(rank, float(alpha), pairs, rslora, base if isinstance(base, str) else "")


def _pairs(file: MappedFile, config: Config, rank: int) -> dict[str, LowRank]:
    """Read an adapter's matrices A and B for each weight. Returns them by the weight's name.

    transformers may fuse several weights into one module. The adapter then has one matrix A for all of these weights,
    and one matrix B with the rows of all of them. We return a part of B for each weight.
    """
    entries, pairs = read_header(file), {}
    modules = _modules(config)
    for name, entry in entries.items():
        module, _, letter = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
        if letter not in ("A", "B") or name != _stored(module, letter) or module not in modules:
            raise refused(file.path, f"tensor {quoted(name)} does not belong to a matrix that LoRA can change")
        members = modules[module]
        rows = sum(weight.shape[0] for weight in members)
        expected = (rank, members[0].shape[1]) if letter == "A" else (rows, rank)
        if entry.shape != expected:
            raise refused(
                file.path,
                f"tensor {quoted(name)} has shape {list(entry.shape)}, expected {list(expected)} with r {rank}",
            )
    for module, members in modules.items():
        stored = [_stored(module, letter) in entries for letter in "AB"]
        if not any(stored):
            continue
        if not all(stored):
            raise refused(file.path, f"{module} has only one of lora_A and lora_B, expected both")
        a, b = (_array(file, _stored(module, letter), entries) for letter in "AB")
        ends = np.cumsum([weight.shape[0] for weight in members])
        for weight, rows in zip(members, np.split(b, ends[:-1]), strict=True):
            pairs[weight.name] = LowRank(a, rows)
    if not pairs:
        raise refused(file.path, "does not contain an adapter")
    return pairs


def _array(file: MappedFile, name: str, entries: Mapping[str, HeaderEntry]) -> Float[np.ndarray, "rows cols"]:
    """Read a tensor in float32. Raises CheckpointError if a number is not finite."""
    entry = entries[name]
    array = file.array(entry.dtype, entry.shape, entry.offset).astype(np.float32)
    check_finite(name, array, path=file.path)
    return array


def _stored(module: str, letter: str) -> str:
    return f"{PREFIX}{module}.lora_{letter}.weight"


def _modules(config: Config) -> dict[str, list[Weight]]:
    """Map the name of each module in transformers to its weights: one weight, or several if the module is fused."""
    family = nearest_family(config)
    fused = {part: name for name, parts in family.fused.items() for part in parts}
    modules: dict[str, list[Weight]] = {}
    for weight in adaptable(config).values():
        name = fused[weight.part].format(layer=weight.layer) if weight.part in fused else None
        modules.setdefault(name or weight.named(family.names).removesuffix(".weight"), []).append(weight)
    return modules


def write_adapter(adapter: Adapter, folder: str | Path, config: Config, *, base: str) -> None:
    """Write an adapter as PEFT's two files into an existing folder; the configuration is written last.

    `base` is the name of the model that the adapter changes. transformers fuses some matrices into one module, for
    which PEFT has only one matrix A. Here each matrix has its own A, so we raise CheckpointError if the adapter changes
    a matrix of such a module.
    """
    modules = _modules(config)
    tensors, targets = {}, set()
    for module, members in modules.items():
        changed = [weight.name for weight in members if weight.name in adapter.pairs]
        if not changed:
            continue
        if len(members) > 1:
            what = f"transformers stores {' and '.join(weight.part for weight in members)} of this model as one matrix"
            raise refused(folder, f"{what}, so PEFT's files cannot hold a separate adapter for each")
        targets.add(module.rpartition(".")[2])
        for letter, array in zip("AB", adapter.pairs[changed[0]], strict=True):
            tensors[_stored(module, letter)] = np.ascontiguousarray(array, np.float32)
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "use_rslora": adapter.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    with new_file(Path(folder) / WEIGHTS, replace=True) as staged:
        save_file(tensors, staged, metadata={"format": "pt"})
    with new_file(Path(folder) / CONFIG, replace=True) as staged:
        staged.write_text(json.dumps(values, indent=2) + "\n")


def with_adapter(checkpoint: Checkpoint, folder: str | Path) -> Checkpoint:
    """Return a checkpoint that runs with the adapter in `folder`.

    Its notes have the lines of `adapter_notes`. Raises the errors of `read_adapter`.
    """
    adapter = read_adapter(folder, checkpoint.config)
    notes = (*checkpoint.notes, *adapter_notes(adapter, checkpoint, folder))
    return replace(adapted(checkpoint, adapter), notes=notes)


def adapter_notes(adapter: Adapter, checkpoint: Checkpoint, folder: str | Path) -> list[str]:
    """Return notes for the user if the adapter names a different base model or has its own chat template.

    We compare only the last part of a path or of owner/name. The name of the checkpoint's file may be longer, for
    example if it ends with the type of a GGUF file.
    """
    path = Path(checkpoint.path).absolute()
    own = path.parts[-3].rpartition("--")[2] if path.parent.name == "snapshots" else path.name
    base, notes = Path(adapter.base).name, []
    if base and own != base and not (path.is_file() and own.lower().startswith(base.lower())):
        notes.append(f"{folder} was made for {adapter.base}; we use it, because its shapes also fit {own}")
    for template in (Path(folder) / part / "chat_template.jinja" for part in ("", SUBFOLDER)):
        if template.is_file():
            notes.append(f"{folder} has its own chat template: --template {template} uses it")
    return notes


def joined(adapters: Sequence[Adapter]) -> Adapter:
    """Join adapters along the rank: matrices A by rows, matrices B by columns. B A is then the sum of all changes.

    The rank of every joined pair is the sum of all adapters' ranks. If an adapter does not change a weight, the pair
    for this weight has zeros at the adapter's ranks.

    >>> pair = LowRank(np.ones((1, 2), np.float32), np.ones((3, 1), np.float32))
    >>> one, two = Adapter(1, 5.0, {"w": pair}), Adapter(1, 1.0, {"w": pair, "v": pair})
    >>> joined([one, two]).pairs["v"].b.tolist()
    [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
    >>> joined([one, two]).pairs["w"].b.tolist()
    [[5.0, 1.0], [5.0, 1.0], [5.0, 1.0]]
    """
    shapes = {name: (len(b), a.shape[1]) for adapter in adapters for name, (a, b) in adapter.pairs.items()}
    pairs = {}
    for name, (rows, cols) in shapes.items():
        of_weight = [
            _scaled(adapter.pairs[name], adapter.scale)
            if name in adapter.pairs
            else LowRank(np.zeros((adapter.rank, cols), FLOAT32), np.zeros((rows, adapter.rank), FLOAT32))
            for adapter in adapters
        ]
        pairs[name] = LowRank(np.concatenate([pair.a for pair in of_weight]), np.hstack([pair.b for pair in of_weight]))
    rank = sum(adapter.rank for adapter in adapters)
    return Adapter(rank, float(rank), pairs)


def _scaled(pair: LowRank, scale: float) -> LowRank:
    """Return a pair in float32, with B multiplied by LoRA's factor s."""
    return LowRank(np.asarray(pair.a, FLOAT32), np.float32(scale) * np.asarray(pair.b, FLOAT32))


def adapted(checkpoint: Checkpoint, adapter: Adapter, *, merges: bool = True) -> Checkpoint:
    """Return a checkpoint in which each adapted matrix W is W + s B A.

    A matrix of floats runs as this sum, rounded once to the dtype in which the model runs. If W is quantized, or if
    `merges` is False, the model keeps W and adds the product with s B A.
    """
    tensors = dict(checkpoint.tensors)
    for name, pair in adapter.pairs.items():
        tensors[name] = TensorAdapter(tensors[name], _scaled(pair, adapter.scale), merges).tensor()
    return replace(checkpoint, tensors=tensors)


def merged(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint for a writer: it has the sum W + s B A in place of each matrix W and its adapter.

    The sum is rounded to the dtype of W. If W is quantized, the sum stays float32, because quantizing it again would
    lose most of a small change.
    """
    tensors = dict(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        if tensor.adapter:
            dtype = FLOAT32 if tensor.stored.codes else tensor.stored.dtype
            tensors[name] = Tensor(tensor.shape, dtype, rounded(tensor, dtype))
    return replace(checkpoint, tensors=tensors)


def rounded(tensor: Tensor, dtype: np.dtype) -> Callable[[], np.ndarray]:
    """Make a function that reads a tensor and rounds it to `dtype`."""
    return lambda: tensor.read().astype(dtype)
