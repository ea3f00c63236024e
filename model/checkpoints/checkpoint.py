"""The common form of all checkpoint formats: hyperparameters, and tensors that are read one at a time.

Tensors have the names of `model.tensors` and Hugging Face's layout in every format: `[out, in]` matrices, and q and k
projections with RoPE's pairs in halves (see `reference.rope`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Integer

from llamaspec.reference.config import Config
from llamaspec.reference.quantizers.affine import Affine
from llamaspec.reference.quantizers.blocks import Quantized


class CheckpointError(ValueError):
    """Raised for a file that cannot be used; the message is one line that names the file and the fault."""


def refused(path: str | Path, what: str) -> CheckpointError:
    r"""Make the error to raise about a file: one line, even if a name holds line breaks.

    >>> print(refused("odd\nname.bin", "is empty"))
    odd\nname.bin: is empty
    """
    return CheckpointError("".join(c if c.isprintable() else repr(c)[1:-1] for c in f"{path}: {what}"))


def quoted(name: str) -> str:
    r"""Quote a name from a file as Python does, cut to fit an error's line.

    >>> print(quoted("a\tb"), quoted("n" * 1000)[-6:])
    'a\tb' nnn...
    """
    text = repr(name)
    return text if len(text) <= 120 else f"{text[:117]}..."


Form = str  # a key of `model.weights.forms.table.CLASS_OF_FORM`


class CodesWithMinima(NamedTuple):
    """Codes in groups with a scale and a minimum: weights are code x scale + minimum.

    float32 holds code x scale exactly, so a weight is rounded only once, in the sum.
    """

    codes: Integer[np.ndarray, "rows cols"]
    scales: Float32[np.ndarray, "rows groups"]
    minima: Float32[np.ndarray, "rows groups"]


Part = Quantized | Affine | CodesWithMinima


class Codes(NamedTuple):
    """A quantized matrix, in a file or as it will run: small codes, and a scale for each group of a row.

    `form` says which numbers the codes stand for (see `reference.quantizers.schemes`): integers of 8, 6, 5 or 4 bits
    (-128 to 127, -32 to 31, -16 to 15, -8 to 7), levels of NF4, FP4 or IQ4_NL, or floats e4m3 or e2m1. With zero points
    (see `reference.quantizers.affine`), integers of 8 or 4 bits are 0 to 255 or 0 to 15. In forms with minima (`_min`),
    integers of 8, 5 or 4 bits are -128 to 127, 0 to 31 or 0 to 15.
    """

    form: Form
    group: int  # columns that share a scale; the last group of a row may be shorter
    zeros: bool  # whether integers have zero points
    bytes: int  # in the file, scales included
    # Consecutive rows, a few megabytes at a time: codes [rows, cols], one per weight; scales [rows, groups], float32,
    # or uint8 exponents for mxfp4; zero points [rows, groups], uint8.
    parts: Callable[[], Iterator[Part]]
    # For codes that are computed as they are read: the name of the scheme, and the tensor of floats that we quantize.
    scheme: str = ""
    source: "Tensor | None" = None


class Tensor(NamedTuple):
    """A tensor in a file: its header entry, and how to read it."""

    shape: tuple[int, ...]
    dtype: np.dtype  # as `read` returns it
    read: Callable[[], np.ndarray]  # may be a read-only view of the file; quantized weights are rounded to float32
    codes: Codes | None = None  # of a quantized matrix
    type: str | None = None  # ggml's name of the type in a GGUF file

    @property
    def bytes(self) -> int:
        return self.codes.bytes if self.codes else math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Checkpoint:
    """A model in a file or directory. It was opened and checked, but its weights were not read."""

    path: str
    format: str  # "llama2c-v0" to "-v2", "kuiper-int8", "gguf-v2", "gguf-v3", "safetensors", "mistral"
    config: Config
    tensors: Mapping[str, Tensor] = field(repr=False)
    bos: int | None  # the id that begins a text, if the checkpoint has one
    stops: frozenset[int]  # ids that end a generated text
    notes: tuple[str, ...] = ()  # lines for the user, such as a list of tensors that were left out
    release: Callable[[], None] = field(default=lambda: None, repr=False)  # drops file pages read so far from memory
    # In this context, the system reads nothing ahead. Its value is a function that reads a view of the file at once.
    scattered: Callable[[], AbstractContextManager[Callable[[np.ndarray], object]]] = field(
        default=lambda: nullcontext(lambda view: None), repr=False
    )


@contextmanager
def os_errors(path: str | Path) -> Iterator[None]:
    """Turn errors of the operating system (missing, permission, full disk) into a `CheckpointError` about `path`."""
    try:
        yield
    except OSError as error:
        raise refused(path, error.strerror or str(error)) from error
