"""`Checkpoint`, the class that represents an opened checkpoint of any format: hyperparameters and lazily read tensors.

For every file format, tensors have the names of `model.tensors` and Hugging Face's layout: matrices are `[out, in]`,
and the q and k projections keep the RoPE pairs in halves (see `reference.rope`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Integer, UInt8

from llamaspec.reference.config import Config
from llamaspec.reference.quantizers.affine import Affine
from llamaspec.reference.quantizers.blocks import Quantized


class CheckpointError(ValueError):
    """The error for a file that we cannot use. Its message is one line, which names the file and the fault."""


def refused(path: str | Path, what: str) -> CheckpointError:
    r"""Build a `CheckpointError` about the file `path`; its message is one line, even if a name contains line breaks.

    >>> print(refused("odd\nname.bin", "is empty"))
    odd\nname.bin: is empty
    """
    return CheckpointError("".join(c if c.isprintable() else repr(c)[1:-1] for c in f"{path}: {what}"))


def quoted(name: str) -> str:
    r"""Quote a name as Python's `repr` does, shortened to 120 characters, for use in an error message.

    >>> print(quoted("a\tb"), quoted("n" * 1000)[-6:])
    'a\tb' nnn...
    """
    text = repr(name)
    return text if len(text) <= 120 else f"{text[:117]}..."


Form = str  # a key of `model.weights.forms.table.CLASS_OF_FORM`


class CodesWithMinima(NamedTuple):
    """Codes of consecutive rows. Each group of columns has a scale and a minimum: weight = code x scale + minimum.

    float32 holds code x scale exactly, so only the addition of the minimum rounds.
    """

    codes: Integer[np.ndarray, "rows cols"]
    scales: Float32[np.ndarray, "rows groups"]
    minima: Float32[np.ndarray, "rows groups"]


Part = Quantized | Affine | CodesWithMinima


class Blocks(NamedTuple):
    """The bytes of a quantized matrix as a GGUF file stores them. A device can unpack these bytes itself.

    `rows` yields consecutive rows of the matrix, a few megabytes at a time; these may be read-only views of the file.
    """

    type: str  # ggml's name for the type of the blocks
    row_bytes: int
    rows: Callable[[], Iterator[UInt8[np.ndarray, "rows row_bytes"]]]
    are_finite: Callable[[UInt8[np.ndarray, "rows row_bytes"]], bool]  # whether all scales and minima are finite


class Codes(NamedTuple):
    """A quantized matrix: small codes, and a scale for each group of columns in a row.

    `form` says which numbers the codes represent (see `reference.quantizers.schemes`): integers of 8, 6, 5 or 4 bits
    (-128 to 127, -32 to 31, -16 to 15, -8 to 7), levels of NF4, FP4 or IQ4_NL, or floats e4m3 or e2m1. With zero points
    (see `reference.quantizers.affine`), 8-bit integers are 0 to 255 and 4-bit integers 0 to 15. In forms with minima
    (`_min`), 8-bit integers are -128 to 127, 5-bit integers 0 to 31 and 4-bit integers 0 to 15.
    """

    form: Form
    group: int  # columns that share a scale; the last group of a row may be shorter
    zeros: bool  # whether integers have zero points
    bytes: int  # size of the matrix in the file, with its scales
    # Yields parts of the matrix, each with consecutive rows of a few megabytes: codes [rows, cols], one per weight;
    # scales [rows, groups], float32 (for mxfp4, uint8 exponents); zero points [rows, groups], uint8.
    parts: Callable[[], Iterator[Part]]
    # If `parts` quantizes a tensor of floats when called: the name of the quantization scheme, and this tensor.
    scheme: str = ""
    source: "Tensor | None" = None
    # The same matrix as `parts`, in the file's own bytes; None if only `parts` can read it.
    blocks: Blocks | None = None


class LowRank(NamedTuple):
    """The matrices A and B of an adapter for one weight; B A has the shape of the weight.

    The arrays are NumPy or JAX arrays.
    """

    a: Any  # [rank, cols]
    b: Any  # [rows, rank]


def no_pair(rows: int, cols: int) -> LowRank:
    """Return a pair of rank 0, which changes nothing."""
    return LowRank(np.zeros((0, cols), np.float32), np.zeros((rows, 0), np.float32))


@dataclass(frozen=True, eq=False)
class TensorAdapter:
    """A tensor that an adapter changes, as two parts: the tensor before the change, and the change B A."""

    base: "Tensor"
    pair: LowRank  # the factor s of LoRA is part of `b`
    merges: bool  # whether the model runs the sum, if `base` has floats

    def tensor(self) -> "Tensor":
        """Return the tensor with the sum, which is computed in float32 each time it is read."""
        base, (a, b) = self.base, self.pair
        return Tensor(base.shape, np.dtype(np.float32), lambda: base.read().astype(np.float32) + b @ a, adapter=self)


class Tensor(NamedTuple):
    """A tensor in a file: its header entry, and the function that reads it.

    If an adapter changes the tensor W, `read` returns the sum W + s B A in float32, `codes` is None, and `adapter` has
    the parts of the sum.
    """

    shape: tuple[int, ...]
    dtype: np.dtype  # dtype of the array that `read` returns
    read: Callable[[], np.ndarray]  # may return a read-only view of the file; rounds quantized weights to float32
    codes: Codes | None = None  # None unless the tensor is a quantized matrix
    type: str | None = None  # for a GGUF file: ggml's name for the tensor's type
    adapter: TensorAdapter | None = None

    @property
    def bytes(self) -> int:
        if self.adapter:
            return self.adapter.base.bytes
        return self.codes.bytes if self.codes else math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored(self) -> "Tensor":
        """The tensor as the file stores it, without an adapter."""
        return self.adapter.base if self.adapter else self

    @property
    def applies(self) -> TensorAdapter | None:
        """The adapter, if a product with x must add B A x to the stored tensor's product.

        None if the adapter is merged into the tensor, or if there is no adapter.
        """
        adapter = self.adapter
        return adapter if adapter and (adapter.base.codes or not adapter.merges) else None


@dataclass(frozen=True)
class Checkpoint:
    """A model in a file or directory that we have opened and checked, without reading the weights."""

    path: str
    format: str  # "llama2c-v0" to "-v2", "kuiper-int8", "gguf-v2", "gguf-v3", "safetensors", "mistral"
    config: Config
    tensors: Mapping[str, Tensor] = field(repr=False)
    bos: int | None  # the id of the token that begins a text; None if the checkpoint names no such token
    stops: frozenset[int]  # ids of the tokens that end generation
    notes: tuple[str, ...] = ()  # lines for the user, such as a list of the tensors that we ignore
    release: Callable[[], None] = field(default=lambda: None, repr=False)  # drops file pages read so far from memory
    # Makes a context in which the operating system reads no pages ahead. The context's value is a function that takes a
    # view of the file, and asks the system to load all pages of the view.
    scattered: Callable[[], AbstractContextManager[Callable[[np.ndarray], object]]] = field(
        default=lambda: nullcontext(lambda view: None), repr=False
    )


@contextmanager
def os_errors(path: str | Path) -> Iterator[None]:
    """Convert any OSError in the block (missing file, no permission, full disk) to a `CheckpointError` about `path`."""
    try:
        yield
    except OSError as error:
        raise refused(path, error.strerror or str(error)) from error
