"""Reads and writes experts in gpt-oss's layout: one tensor has the gate and up matrices of all experts of a layer.

    gate_up_proj          [experts, dim, 2 ffn]             floats, transposed: a column is a row of gate or up
    gate_up_proj_bias     [experts, 2 ffn]

or, for MXFP4 (see `reference.quantizers.mx`), instead of gate_up_proj:

    gate_up_proj_blocks   [experts, 2 ffn, dim / 32, 16]    codes in e2m1, two per byte, the first in the low half
    gate_up_proj_scales   [experts, 2 ffn, dim / 32]        exponents of the scales

Rows of gate and up alternate. down_proj has the same layout, with ffn instead of dim, and dim instead of 2 ffn.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from llamaspec.model.checkpoints.checkpoint import Checkpoint, Codes, Tensor, refused
from llamaspec.model.checkpoints.codes import dequantized
from llamaspec.model.checkpoints.huggingface.rule import FLOATS, nibbles, pack_nibbles
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.safetensors_header import HeaderEntry
from llamaspec.model.family import Family
from llamaspec.model.tensors import Role, Weight, by_layer
from llamaspec.model.tensors import weights as weights_of
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.reference.quantizers.mx import BLOCK

METHOD = "mxfp4"  # the quant_method in config.json for experts in MXFP4
BYTE = np.dtype(np.uint8)
Located = dict[str, tuple[MappedFile, HeaderEntry]]


class RowSlice(NamedTuple):
    """The rows of one expert matrix in the stacked tensor `matrix`: every `step`-th row, from row `first` on."""

    matrix: str
    first: int
    step: int

    @property
    def slice(self) -> slice:
        return slice(self.first, None, self.step)


PARTS = {
    "expert_gate": RowSlice("gate_up_proj", 0, 2),
    "expert_up": RowSlice("gate_up_proj", 1, 2),
    "expert_down": RowSlice("down_proj", 0, 1),
}


def check_experts(path: str, config: Config, family: Family, located: Located) -> None:
    """Raise `CheckpointError` if a layer does not have `config.experts` experts.

    We check this before we create a name for each expert, since a damaged config.json could state a huge number of
    experts.
    """
    for layer in range(config.layers):
        name = f"{family.stacked_experts.format(layer=layer)}.down_proj_bias"
        shape = located[name][1].shape if name in located else (0,)
        if shape != (config.experts, config.dim):
            what = f"expected {[config.experts, config.dim]} according to config.json"
            raise refused(path, f"the tensor {name} has shape {list(shape)}, {what}")


def take_experts(expected: dict[str, Weight], located: Located, config: Config, family: Family, path: str):
    """Build a `Tensor` for each weight and bias of the experts, and return them by their names in `expected`.

    We remove the names of the experts' weights from `expected`, and the stacked tensors from `located`. Raises
    `CheckpointError` if a stacked tensor is missing, or has the wrong shape or dtype.
    """
    source = _Source(located, config.experts, path)
    experts = {name: weight for name, weight in expected.items() if weight.expert is not None}
    tensors = {}
    for name, weight in experts.items():
        rows = PARTS[weight.part]
        tensors[name] = source.tensor(
            f"{family.stacked_experts.format(layer=weight.layer)}.{rows.matrix}", weight, rows
        )
        del expected[name]
    for name in source.used:
        del located[name]
    return tensors


class _Source:
    """The stacked tensors of a checkpoint; `used` has the names of the tensors that we have used."""

    def __init__(self, located: Located, experts: int, path: str):
        self.used: dict[str, None] = {}
        self._located, self._experts, self._path = located, experts, path

    def tensor(self, stem: str, weight: Weight, rows: RowSlice) -> Tensor:
        """Build the `Tensor` of one expert's weight from the stacked tensors with names that begin with `stem`."""
        assert weight.expert is not None
        count = rows.step * weight.shape[0]
        if weight.role is Role.BIAS:
            dtype, read = self._part(f"{stem}_bias", (count,), FLOATS, weight.expert)
            return Tensor(weight.shape, dtype, lambda: np.ascontiguousarray(read()[rows.slice]))
        cols = weight.shape[1]
        if f"{stem}_blocks" not in self._located:
            dtype, read = self._part(stem, (cols, count), FLOATS, weight.expert)
            return Tensor(weight.shape, dtype, lambda: np.ascontiguousarray(read()[:, rows.slice].T))
        if cols % BLOCK:
            what = f"rows of {stem}_blocks have {cols} weights, expected a multiple of {BLOCK}"
            raise refused(self._path, what)
        groups = cols // BLOCK
        _, blocks = self._part(f"{stem}_blocks", (count, groups, BLOCK // 2), ("uint8",), weight.expert)
        _, scales = self._part(f"{stem}_scales", (count, groups), ("uint8",), weight.expert)

        def parts() -> Iterator[Quantized]:
            codes = nibbles(blocks()[rows.slice].reshape(weight.shape[0], -1))
            yield Quantized(codes, np.ascontiguousarray(scales()[rows.slice]))

        size = weight.shape[0] * groups * (BLOCK // 2 + 1)
        codes = Codes("mxfp4", BLOCK, zeros=False, bytes=size, parts=parts)
        return Tensor(weight.shape, np.dtype(np.float32), partial(dequantized, codes, weight.shape), codes)

    def _part(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], expert: int
    ) -> tuple[np.dtype, Callable[[], np.ndarray]]:
        """Return the dtype of the stacked tensor `name`, and a function that reads one expert's part of the tensor."""
        if name not in self._located:
            raise refused(self._path, f"lacks the tensor {name}")
        file, entry = self._located[name]
        if name not in self.used:
            expected = (self._experts, *shape)
            if entry.shape != expected or entry.dtype.name not in dtypes:
                actual, expected_form = f"{entry.dtype} {list(entry.shape)}", f"{' or '.join(dtypes)} {list(expected)}"
                what = f"expected {expected_form} according to config.json"
                raise refused(self._path, f"the tensor {name} is {actual}, {what}")
            self.used[name] = None
        part = entry._replace(shape=shape)
        return entry.dtype, partial(file.array, entry.dtype, shape, entry.offset + expert * part.bytes)


def with_stacked_experts(checkpoint: Checkpoint, family: Family) -> tuple[dict[str, Tensor], bool]:
    """Return the checkpoint's tensors with the experts of each layer stacked, and whether the experts are in MXFP4.

    Stacked tensors have the names of Hugging Face's file. The experts stay in MXFP4 if all of them are in MXFP4, else
    they become floats. In MXFP4, reading a tensor raises `CheckpointError` if an exponent is NaN.
    """
    expert_names = {weight.name for weight in weights_of(checkpoint.config) if weight.expert is not None}
    in_mxfp4 = all(
        (codes := checkpoint.tensors[weight.name].codes) and (codes.form, codes.group) == ("mxfp4", BLOCK)
        for weight in weights_of(checkpoint.config)
        if weight.role is Role.EXPERT
    )
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in expert_names}
    for layer, parts in by_layer(checkpoint.config).items():
        for matrix in dict.fromkeys(rows.matrix for rows in PARTS.values()) if layer is not None else ():
            stem = f"{family.stacked_experts.format(layer=layer)}.{matrix}"
            stacked = _Stack(checkpoint, {part: parts[part] for part, rows in PARTS.items() if rows.matrix == matrix})
            tensors |= {f"{stem}{end}": tensor for end, tensor in stacked.tensors(in_mxfp4=in_mxfp4).items()}
    return tensors, in_mxfp4


class _Stack:
    """The matrices of all experts of a layer, which we write as one stacked tensor."""

    def __init__(self, checkpoint: Checkpoint, parts: Mapping[str, list[Weight]]):
        self._checkpoint, self._parts = checkpoint, parts
        first = next(iter(parts.values()))
        self._experts, (rows, self._cols) = len(first), first[0].shape
        self._rows = rows * len(parts)

    def tensors(self, *, in_mxfp4: bool) -> dict[str, Tensor]:
        """Return the stacked tensors. A key is the end of a tensor's name, such as "_blocks"."""
        stack_shape, cols = (self._experts, self._rows), self._cols
        bias = Tensor(
            stack_shape, self._dtype(_bias), partial(self._filled, stack_shape, self._dtype(_bias), _bias, self._read)
        )
        if not in_mxfp4:
            shape, dtype = (self._experts, cols, self._rows), self._dtype(_matrix)
            dense = partial(self._filled, (*stack_shape, cols), dtype, _matrix, self._read)
            return {"": Tensor(shape, dtype, lambda: np.ascontiguousarray(dense().swapaxes(1, 2))), "_bias": bias}
        blocks, scales = (*stack_shape, cols // BLOCK, BLOCK // 2), (*stack_shape, cols // BLOCK)
        return {
            "_blocks": Tensor(blocks, BYTE, partial(self._filled, blocks, BYTE, _matrix, self._blocks)),
            "_scales": Tensor(scales, BYTE, partial(self._filled, scales, BYTE, _matrix, self._scales)),
            "_bias": bias,
        }

    def _dtype(self, name: Callable[[Weight], str]) -> np.dtype:
        dtypes = {self._checkpoint.tensors[name(weight)].dtype for part in self._parts.values() for weight in part}
        return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)

    def _filled(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        name: Callable[[Weight], str],
        read: Callable[[str], np.ndarray],
    ) -> np.ndarray:
        array = np.empty(shape, dtype)
        for part, weights in self._parts.items():
            for expert, weight in enumerate(weights):
                array[expert, PARTS[part].slice] = read(name(weight)).reshape(-1, *shape[2:])
                self._checkpoint.release()
        return array

    def _read(self, name: str) -> np.ndarray:
        return self._checkpoint.tensors[name].read()

    def _coded(self, name: str) -> list[Any]:
        codes = self._checkpoint.tensors[name].codes
        assert codes
        return list(codes.parts())

    def _blocks(self, name: str) -> np.ndarray:
        return np.concatenate([pack_nibbles(part.codes.astype(np.uint8)) for part in self._coded(name)])

    def _scales(self, name: str) -> np.ndarray:
        scales = np.concatenate([part.scales for part in self._coded(name)])
        if (scales == 255).any():
            raise refused(self._checkpoint.path, f"{name} has a scale that is NaN")
        return scales


def _matrix(weight: Weight) -> str:
    return weight.name


def _bias(weight: Weight) -> str:
    return weight.name.removesuffix("weight") + "bias"
