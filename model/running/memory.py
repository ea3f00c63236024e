"""The memory that a model needs, planned and checked before we allocate any of it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import numpy as np

from llamaspec.model.cache import cache_bytes, cache_rows
from llamaspec.model.ops.attention import SPANS
from llamaspec.model.ops.cpu import PROMPT_SPANS
from llamaspec.model.ops.products import MOST_CPU_DECODED, MOST_DECODED, partial_sums
from llamaspec.model.running.process import MOST
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.params import Params, weight_bytes
from llamaspec.reference.config import Config

# On a CPU a process contains the interpreter and JAX, and needs memory for the compiler while both programs are
# compiled. Some of that memory is never returned. `python -m llamaspec.benchmarks.audits.process_memory` measures it
# for models of 2, 8 and 24 layers. These constants are within 50 MB of benchmarks/results/process-memory.md (jax
# 0.12.0.1, Linux).
PROCESS = 180_000_000
COMPILING = (280_000_000, 4_000_000)  # bytes for a model, and for each of its layers
PROGRAMS = (100_000_000, 4_000_000)
CONTEXT = 1 << 30  # bytes; CUDA itself needs less than this in a process
CUDA = 600 << 20  # bytes of a GPU's memory that CUDA itself takes in a process with compiled programs
# While a matrix is quantized or unpacked on a GPU, its copy from the file and temporary arrays take this many bytes for
# each weight: 2 for bfloat16, and about 1 for the rest.
BEING_QUANTIZED = 3
READERS = 8  # number of threads that read weights for a GPU; each loads one array at a time


class Memory(NamedTuple):
    """The bytes that each part of a running model needs."""

    weights: int
    cache: int  # the KV cache and the table of RoPE angles
    activations: int
    logits: int
    process: int  # interpreter, JAX and programs on a CPU; 0 on a GPU, where we count only arrays
    compiling: int  # the peak while compiling, before weights and cache are allocated

    @property
    def running(self) -> int:
        """The bytes in use at the same time while a token is computed."""
        return self.process + self.weights + self.cache + self.activations + self.logits

    @property
    def peak(self) -> int:
        """The largest number of bytes in use at the same time."""
        return max(self.running, self.compiling)

    @property
    def process_bytes(self) -> int:
        """The bytes that the process uses before it loads a model. Free memory no longer includes these bytes."""
        return PROCESS if self.process else 0

    def fits(self, free: int | float) -> bool:
        """Return whether the plan fits in a process that has already started JAX, if `free` bytes are free.

        >>> Memory(60_000_000, 10_000_000, 0, 0, process=285_000_000, compiling=0).fits(175_000_000)
        True
        """
        return self.peak - self.process_bytes <= free


def memory_of(
    params: Params,
    config: Config,
    *,
    batch: int,
    context: int,
    chunk: int,
    platform: str,
    cache_dtype: np.dtype,
    wide: int | None = None,
    drafts: int = 0,
) -> Memory:
    """Plan the memory for `batch` sequences of up to `context` tokens. `params` may be shapes only.

    We prefill a prompt in chunks of `chunk` tokens, or a long prompt in chunks of up to `wide` tokens. A step of
    decoding computes one token of each sequence, or with speculation, up to `drafts` more.
    """
    chunk = min(chunk, context)
    widest = wide or chunk
    capacity = cache_rows(context, chunk)
    layers = config.layers
    codes = _quantized(params)
    # With quantized matrices, the programs decode codes, so each layer needs more memory during compilation and
    # afterwards.
    compiling, decoding = (codes[0].compiler_bytes, codes[0].program_bytes) if codes else (0, 0)
    on_cpu = platform == "cpu"
    return Memory(
        weights=weight_bytes(params),
        cache=cache_bytes(config, batch=batch, capacity=capacity, dtype=cache_dtype),
        activations=_activations(
            params, config, tokens=batch * widest, batch=batch, capacity=capacity, drafts=drafts, on_cpu=on_cpu
        ),
        # logits, probabilities, filtered probabilities, and their sums; and with speculation, the logits of each draft
        logits=(4 * batch + drafts) * config.vocab * 4,
        process=PROCESS + PROGRAMS[0] + layers * (PROGRAMS[1] + decoding) if on_cpu else 0,
        compiling=PROCESS + COMPILING[0] + layers * (COMPILING[1] + compiling) if on_cpu else 0,
    )


def _activations(
    params: Params, config: Config, *, tokens: int, batch: int, capacity: int, drafts: int, on_cpu: bool
) -> int:
    """Count the bytes in use at once in the widest op of a prompt's chunk (attention or the feed-forward layer)."""
    longest, most = (PROMPT_SPANS.longest, MOST_CPU_DECODED) if on_cpu else (SPANS.longest, MOST_DECODED)

    def attention(queries: int, longest: int) -> int:
        span = min(capacity, longest)
        scores = 2 * queries * config.heads * span  # scores and probabilities
        return scores + 2 * batch * config.kv_heads * span * config.head_dim  # copies of keys and values from the cache

    matrices = _matrices([params.layers, params.head])
    # for the widest product of a decoding step
    sums = (1 + drafts) * max(map(partial_sums, matrices)) if on_cpu and batch == 1 else 0
    attended = max(attention(tokens, longest), attention(batch, SPANS.longest))  # for a prompt, and for a decoding step
    hidden = tokens * config.ffn * (3 * config.experts or 3)  # gate, up and their product
    largest = max((len(m.codes) * m.cols for m in _quantized(params)), default=0)
    # XLA holds decoded weights in float32 twice. Kernels decode a complete matrix into bfloat16, which needs half as
    # many bytes.
    decoded = 2 * min(largest, most) if on_cpu else max(2 * min(largest, most), largest // 2)
    stream = 4 * tokens * config.dim
    return 4 * (stream + max(attended, hidden + decoded, sums))


def _matrices(tree: Any) -> list[Any]:
    """Return all matrices in a tree: each `QuantizedMatrix`, and each array with two axes."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, QuantizedMatrix))
    return [leaf for leaf in leaves if isinstance(leaf, QuantizedMatrix) or leaf.ndim == 2]


def _quantized(params: Params) -> list[QuantizedMatrix]:
    """Return the quantized matrices of the layers."""
    return [leaf for leaf in _matrices(params.layers) if isinstance(leaf, QuantizedMatrix)]


def loading_peak(params: Params, *, readers: int = READERS) -> int:
    """Return the largest number of bytes in use on a GPU while `readers` threads load weights, largest arrays first."""
    arrays = {id(leaf): leaf for leaf in jax.tree.leaves(params)}
    matrices = {id(matrix.codes): matrix for matrix in _matrices(params) if isinstance(matrix, QuantizedMatrix)}
    parts = {id(leaf) for matrix in matrices.values() for leaf in jax.tree.leaves(matrix)}
    sizes = [(_bytes(leaf), 0) for key, leaf in arrays.items() if key not in parts]
    for matrix in matrices.values():
        sizes.append((sum(map(_bytes, jax.tree.leaves(matrix))), BEING_QUANTIZED * len(matrix.codes) * matrix.cols))
    sizes.sort(key=sum, reverse=True)
    loaded = accumulate((size for size, _ in sizes), initial=0)
    return max(
        before + sum(map(sum, sizes[i : i + readers])) for i, before in zip(range(len(sizes)), loaded, strict=False)
    )


def _bytes(array: Any) -> int:
    return array.size * array.dtype.itemsize


def allocated_on_gpu(peak: int, *, most: float) -> int:
    """Return how much GPU memory a process takes if its arrays take `peak` bytes at once; `most` is the GPU's memory.

    JAX takes memory in regions, each as large as all regions before. It keeps the regions until the process ends, and
    takes at most the share `MOST` of the GPU's memory. CUDA needs some memory, too.

    >>> [round(allocated_on_gpu(round(arrays * 2**30), most=131 * 2**30) / 2**30, 1) for arrays in (2.05, 8.2, 100)]
    [4.6, 16.6, 121.1]
    """
    return round(min(2 ** math.ceil(math.log2(peak)), float(MOST) * most)) + CUDA


def check_fits(memory: Memory, *, context: int, available: int, other_programs: int = 0) -> None:
    """Raise MemoryError if a plan does not fit in `available` bytes. The message lists the bytes at the peak.

    `other_programs` is the number of bytes that other programs hold, or 0 if unknown.
    """
    if memory.fits(available):
        return
    free = f"{gigabytes(available)} of free memory"
    if other_programs > CONTEXT:
        free += f": other programs use {gigabytes(other_programs)} on this device"
    if memory.compiling > memory.running:
        raise MemoryError(
            f"compiling needs up to {gigabytes(memory.compiling - memory.process_bytes)}, which does not fit in {free}"
        )
    remainder = memory.running - memory.process_bytes - memory.weights - memory.cache
    raise MemoryError(
        f"{gigabytes(memory.weights)} of weights, {gigabytes(memory.cache)} of KV cache for a context of {context} "
        "tokens "
        f"and {gigabytes(remainder)} for computing do not fit in {free}"
    )


@contextmanager
def shortage_named(what: str) -> Iterator[None]:
    """Turn JAX's error about a full device into a one-line MemoryError, which says that `what` did not fit.

    JAX may raise this error although a plan fits, if another program takes memory after the check.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(
            f"the device has too little free memory for {what}: another program may be using it"
        ) from error


def gigabytes(count: int) -> str:
    """Format a number of bytes in gigabytes.

    >>> gigabytes(44_000_000_000), gigabytes(372_000_000)
    ('44.0 GB', '0.37 GB')
    """
    return f"{count / 1e9:,.{1 if count >= 10e9 else 2}f} GB"
