"""Models as files and directories hold them: the codes of every matrix, in the shapes of any model, without weights."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from llamaspec.benchmarks.kernel_cases.case import BFLOAT16
from llamaspec.benchmarks.random_model import random_shapes
from llamaspec.model.checkpoints.checkpoint import Codes, Form, Part, Tensor
from llamaspec.model.checkpoints.gguf.blocks import FORMS
from llamaspec.model.tensors import EMBEDDING, HEAD, quantizable, tensor_shapes
from llamaspec.model.weights.gpu_codes import arranged
from llamaspec.model.weights.loading import abstract_params
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config


class Coded(NamedTuple):
    """Codes of a matrix; a group of None is a row."""

    form: Form
    group: int | None
    zeros: bool = False


# Directories of Hugging Face; their embedding and head are floats. AWQ and GPTQ with 4 bits are the same codes.
DIRECTORIES = {
    "AWQ or GPTQ": Coded("int4", 128, zeros=True),
    "GPTQ of 8 bits": Coded("int8", 128, zeros=True),
    "bitsandbytes NF4": Coded("nf4", 64),
    "FP8 a row": Coded("fp8", None),
    "MXFP4": Coded("mxfp4", 32),
}
# Files of GGUF, which hold the embedding in codes, too.
FILES = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_M", "IQ4_NL")
SCHEMES = ("q8", "q4", "mxfp4", "nf4", "fp8")  # of `--quantize`: with the head, without the embedding


def shapes_of(config: Config, kind: str | None, *, positions: int) -> Params:
    """Give the shapes of a model's weights in bfloat16, as they lie on the default device.

    `kind` is one of `DIRECTORIES`, `FILES` or `SCHEMES`, and None for floats.
    """
    if kind is None or kind in SCHEMES:
        shapes = random_shapes(config, dtype=BFLOAT16, positions=positions, quantize=kind)
        return jax.eval_shape(arranged, shapes)
    nothing = np.empty(0, np.float32)

    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        coded = _coded(name, kind, config)
        if coded is None:
            return Tensor(shape, nothing.dtype, lambda: nothing)
        codes = Codes(coded.form, coded.group or shape[-1], zeros=coded.zeros, bytes=0, parts=_no_parts)
        return Tensor(shape, nothing.dtype, lambda: nothing, codes)

    tensors = {name: tensor(name, shape) for name, shape in tensor_shapes(config).items()}
    shapes = abstract_params(config, dtype=BFLOAT16, positions=positions, tensors=tensors)
    return jax.eval_shape(arranged, shapes)


def _no_parts() -> Iterator[Part]:
    return iter(())


def _coded(name: str, kind: str, config: Config) -> Coded | None:
    if name != EMBEDDING and name not in quantizable(config):
        return None
    if kind in DIRECTORIES:
        return None if name in (EMBEDDING, HEAD) else DIRECTORIES[kind]
    return Coded(*FORMS[type_in_file(name, kind, config)])


def type_in_file(name: str, kind: str, config: Config) -> str:
    """Give the type that llama.cpp's quantizer chooses for a matrix of a file of `kind`.

    So it is without an importance matrix, for a model with four or more heads for each of k and v, and no experts.

    >>> from llamaspec.model.insight.shapes import SHAPES
    >>> name, config = "model.layers.{}.self_attn.v_proj.weight", SHAPES["llama-3.1-8b"]
    >>> [type_in_file(name.format(layer), "Q4_K_M", config) for layer in (0, 4, 6, 31)]
    ['Q6_K', 'Q4_K', 'Q6_K', 'Q6_K']
    """
    most = kind.removesuffix("_M")
    if name == HEAD or (name == EMBEDDING and config.tied):
        return "Q8_0" if most == "Q8_0" else "Q6_K"
    if name == EMBEDDING:
        return most
    layer, role, layers = int(name.split(".")[2]), name.split(".")[-2], config.layers
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    match kind, role:
        case "Q4_K_M" | "Q5_K_M", "v_proj" | "down_proj":
            return "Q6_K" if more else most
        case "Q3_K_M", "v_proj":
            return "Q5_K" if layer < 2 else "Q4_K"
        case "Q3_K_M", "down_proj":
            return "Q5_K" if layer < layers // 16 else "Q4_K"
        case ("Q3_K_M", "o_proj") | ("Q2_K", "v_proj"):
            return "Q4_K"
        case "Q2_K", "down_proj" | "o_proj":
            return "Q3_K"
        case "IQ4_NL", "v_proj":
            return "Q5_K"
        case "IQ4_NL", "down_proj":
            return "Q5_K" if layer < layers // 8 else most
    return most
