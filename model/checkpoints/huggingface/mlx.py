"""Reads matrices in the layouts of MLX (https://github.com/ml-explore/mlx), as mlx-lm saves them.

In config.json, the object `quantization` has the mode, the number of bits and the group size of all modules. It may
also have settings for a single module under the module's name, or false if that module is not quantized. Each row of a
matrix has its own codes, scales and biases:

    mode     weight                            scales             biases    a weight
    affine   codes of 2, 3, 4, 5, 6 or 8 bits  floats             floats    code * scale + bias
    mxfp4    e2m1                              e8m0, for 32       none      code * scale
    mxfp8    e4m3                              e8m0, for 32       none      code * scale
    nvfp4    e2m1                              e4m3, for 16       none      code * scale

The codes of a row are a stream of bits in uint32 words, the lowest bits first: see `reference.quantizers.mlx`. Scales
e8m0 and e4m3 are bytes. MLX also quantizes embeddings and the routers of experts. Routers run in float32.

One tensor joins the matrices of all experts of a layer: mlp.switch_mlp.gate_proj contains mlp.experts.0.gate_proj,
mlp.experts.1.gate_proj and so on. Models that are not quantized also have such tensors.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from llamaspec.model.checkpoints.checkpoint import CodesWithMinima, refused
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.nvfp4 import TWICE
from llamaspec.model.checkpoints.huggingface.rule import (
    FLOATS,
    Arrays,
    Rule,
    StoredArray,
    check_whole_groups,
    nibbles,
    powers_of_two,
)
from llamaspec.model.checkpoints.huggingface.stacked_experts import Located
from llamaspec.model.checkpoints.huggingface.targets import EVERY, ByTarget, check_target
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.model.family import Family
from llamaspec.model.tensors import QUANTIZABLE, Role
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers import mlx, mx, nvfp4
from llamaspec.reference.quantizers.blocks import Quantized

KEY = "quantization"  # key in config.json
SIZES = {"affine": (64, 4), "mxfp4": (mx.BLOCK, 4), "mxfp8": (mx.BLOCK, 8), "nvfp4": (nvfp4.BLOCK, 4)}  # group, bits
GROUPS = (32, 64, 128)  # group sizes of the mode affine
WORDS, BYTES = ("uint32",), ("uint8",)
MOST_EXPERTS = 100_000  # of all layers together; the largest models have 16,000
GRID = ("scales", "biases")  # tensors of a module that have one row for each row of the module's weight


class _Layout(Rule):
    """A layout of MLX, with codes in uint32 words, and a scale for each group of columns in a row."""

    zeros = False
    scales: tuple[str, ...] = BYTES

    def __init__(self, bits: int, group: int):
        self.bits, self.group = bits, group

    def group_of(self, cols: int) -> int:
        del cols
        return self.group

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        return {
            "weight": StoredArray((rows, -(-cols * self.bits // 32)), WORDS),
            "scales": StoredArray((rows, -(-cols // self.group)), self.scales),
        }

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        del arrays, rows
        check_whole_groups(cols, self.group)


class Affine(_Layout):
    """The layout of the mode affine."""

    scales = FLOATS

    def __init__(self, bits: int, group: int):
        super().__init__(bits, group)
        self.form = "int4_min" if bits <= 4 else "int5_min" if bits == 5 else "int8_min"
        self.middle = 128 if bits == 8 else 0  # number that we subtract from codes, so that they fit int8

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        stored = super().stored(rows, cols)
        return {**stored, "biases": stored["scales"]}

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> CodesWithMinima:
        codes = mlx.unpack(arrays["weight"][start:stop], bits=self.bits)[:, :cols]
        scales, biases = (arrays[name][start:stop].astype(np.float32) for name in ("scales", "biases"))
        if not self.middle:
            return CodesWithMinima(codes.view(np.int8) if self.bits > 5 else codes, scales, biases)
        with np.errstate(over="ignore", invalid="ignore"):  # readers refuse weights that are not finite
            return CodesWithMinima((codes ^ np.uint8(self.middle)).view(np.int8), scales, biases + self.middle * scales)


class MXFP4(_Layout):
    """The layout of the mode mxfp4."""

    form = "mxfp4"

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized:
        return Quantized(_nibbles(arrays, start, stop)[:, :cols], arrays["scales"][start:stop])


class MXFP8(_Layout):
    """The layout of the mode mxfp8."""

    form = "fp8"

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized:
        return Quantized(_bytes(arrays, start, stop)[:, :cols], powers_of_two(arrays["scales"][start:stop]))


class NVFP4(_Layout):
    """The layout of the mode nvfp4.

    All e2m1 codes are multiples of 1/2. So we convert them to int8 by doubling them, and halve the scales.
    """

    form = "int8"

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized:
        scales = arrays["scales"][start:stop].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return Quantized(TWICE[_nibbles(arrays, start, stop)[:, :cols]], scales / 2)


LAYOUTS: dict[str, type[_Layout]] = {"affine": Affine, "mxfp4": MXFP4, "mxfp8": MXFP8, "nvfp4": NVFP4}


def _bytes(arrays: Arrays, start: int, stop: int) -> np.ndarray:
    return np.ascontiguousarray(arrays["weight"][start:stop]).astype("<u4").view(np.uint8)


def _nibbles(arrays: Arrays, start: int, stop: int) -> np.ndarray:
    return nibbles(_bytes(arrays, start, stop))


class MLX(ByTarget):
    """Several layouts: one for all modules, and others for the modules that config.json names."""

    roles = (*QUANTIZABLE, Role.EMBEDDING, Role.ROUTER)
    row_parts = GRID


def is_mlx(values: Mapping[str, Any]) -> bool:
    """Tell whether the object `values` in config.json has MLX's settings: group_size and bits, but no quant_method."""
    return "quant_method" not in values and {"group_size", "bits"} <= values.keys()


def read_mlx(fields: Fields) -> Rule:
    """Read the layouts from the object `quantization`. Raises `CheckpointError` if a layout is not supported."""
    modules = {
        name: _read_layout(Fields(setting, fields.path)) if setting else None
        for name, setting in fields.values.items()
        if isinstance(setting, dict) or setting is False
    }
    for name in modules:
        check_target(name, fields, patterns=False)
    return MLX([([EVERY], _read_layout(fields)), *(([name], layout) for name, layout in modules.items())])


def _read_layout(fields: Fields) -> _Layout:
    mode = fields.values.get("mode", "affine")
    if not isinstance(mode, str) or mode not in LAYOUTS:
        raise refused(fields.path, f"{KEY}: mode {short(mode)} is not supported (only {', '.join(LAYOUTS)})")
    group, bits = (fields.integer(key, size) for key, size in zip(("group_size", "bits"), SIZES[mode], strict=True))
    if mode == "affine" and (bits not in mlx.BITS or group not in GROUPS):
        sizes = f"only {', '.join(map(str, mlx.BITS))} bits in groups of {', '.join(map(str, GROUPS))}"
        raise refused(fields.path, f"{KEY}: {bits} bits in groups of {group} are not supported ({sizes})")
    if mode != "affine" and (group, bits) != SIZES[mode]:
        sizes = f"only {SIZES[mode][1]} bits in groups of {SIZES[mode][0]}"
        what = f"{mode} with {bits} bits in groups of {group} is not supported"
        raise refused(fields.path, f"{KEY}: {what} ({sizes})")
    return LAYOUTS[mode](bits, group)


def expert_names(config: Config, family: Family, layer: int) -> dict[str, list[str]]:
    """Map the name of each joined tensor of a layer's experts to the names of the experts' own matrices.

    The names do not end in ".weight".
    """
    names = {}
    for part, ending in {"expert_gate": "gate_proj", "expert_up": "up_proj", "expert_down": "down_proj"}.items():
        own = family.names[part]
        stem = own.partition(".experts.")[0]
        joined = f"{stem}.{'experts' if family.stacked_experts else 'switch_mlp'}.{ending}"
        experts = range(config.experts)
        names[joined.format(layer=layer)] = [own.format(layer=layer, expert=expert) for expert in experts]
    return names


def has_joined_experts(config: Config, family: Family, located: Located) -> bool:
    """Tell whether the file has joined tensors of experts, as MLX writes them."""
    return config.experts > 0 and f"{next(iter(expert_names(config, family, 0)))}.weight" in located


def with_experts_apart(path: str, config: Config, family: Family, located: Located) -> Located:
    """Replace each joined tensor of a layer's experts with one tensor per expert.

    Raises `CheckpointError` if a joined tensor does not have one matrix per expert.
    """
    if config.layers * config.experts > MOST_EXPERTS:  # checked before we make a name for each
        what = f"{config.layers} layers of {config.experts} experts are more than {MOST_EXPERTS} experts"
        raise refused(path, f"config.json: {what}, the most that we read from joined tensors")
    apart = dict(located)
    for layer in range(config.layers):
        for joined, names in expert_names(config, family, layer).items():
            for part in ("weight", *GRID, "bias"):
                if place := apart.pop(f"{joined}.{part}", None):
                    file, entry = place
                    if entry.shape[:1] != (config.experts,) or entry.bytes < config.experts:
                        what = f"the tensor {joined}.{part} has shape {list(entry.shape)}"
                        raise refused(path, f"{what}, expected {config.experts} matrices, one per expert")
                    matrix = entry._replace(shape=entry.shape[1:])
                    for expert, name in enumerate(names):
                        offset = entry.offset + expert * matrix.bytes
                        apart[f"{name}.{part}"] = file, matrix._replace(offset=offset)
    return apart
