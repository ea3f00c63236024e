"""How much memory a model takes, and whether it is there, before any of it is allocated."""

from typing import Any, NamedTuple

import jax
import numpy as np

from model.cache import cache_bytes
from model.ops.block import LONGEST_CPU_SPAN, LONGEST_SPAN, MOST_CPU_DECODED, MOST_DECODED, partial_sums
from model.weights.codes import QuantizedMatrix
from model.weights.params import Params, weight_bytes
from reference.config import Config

# On a CPU a process of its own holds the interpreter and JAX; while both programs are compiled, the compiler's memory,
# of which some is never given back. `python -m benchmarks.process_memory` measures them, for models of 2, 8 and 24
# layers; what they make of each is within 50 MB of benchmarks/results/process-memory.md (jax 0.12.0.1, Linux).
PROCESS = 180_000_000
COMPILING = (280_000_000, 4_000_000)  # for a model, and for each of its layers
PROGRAMS = (100_000_000, 4_000_000)
# For each layer more where matrices are quantized, since what decodes them is code, too: while compiling, and after.
DECODING = {"int8": (1_000_000, 3_500_000), "nf4": (3_000_000, 6_000_000), "mxfp4": (5_000_000, 5_000_000)}


class Memory(NamedTuple):
    """Bytes that a generation takes, by part."""

    weights: int
    cache: int  # and the table of RoPE's angles
    activations: int
    logits: int
    process: int  # what is beside them on a CPU; 0 on a GPU, whose memory only arrays are counted of
    compiling: int  # what compiling takes at most, before any of the others but `process` is there

    @property
    def running(self) -> int:
        """What is in use at once while a token is computed."""
        return self.process + self.weights + self.cache + self.activations + self.logits

    @property
    def peak(self) -> int:
        """The most that is in use at once."""
        return max(self.running, self.compiling)

    @property
    def held(self) -> int:
        """What of it a process holds before any model is loaded: not to be found among what is free."""
        return PROCESS if self.process else 0

    def fits(self, free: int | float) -> bool:
        """Whether a process that JAX has started in finds enough, with so many bytes free.

        >>> Memory(60_000_000, 10_000_000, 0, 0, process=285_000_000, compiling=0).fits(175_000_000)
        True
        """
        return self.peak - self.held <= free


def memory_of(
    params: Params, config: Config, *, batch: int, context: int, chunk: int, platform: str, cache_dtype: np.dtype
) -> Memory:
    """Plan for `batch` sequences of up to `context` tokens, read `chunk` at a time. `params` may be only shapes."""
    chunk = min(chunk, context)
    capacity = context + chunk  # the last chunk of a prompt is padded
    layers = config.layers
    codes = _quantized(params)
    compiling, held = DECODING.get(codes[0].form, DECODING["int8"]) if codes else (0, 0)
    on_cpu = platform == "cpu"
    return Memory(
        weights=weight_bytes(params),
        cache=cache_bytes(config, batch=batch, capacity=capacity, dtype=cache_dtype),
        activations=_activations(params, config, tokens=batch * chunk, batch=batch, capacity=capacity, on_cpu=on_cpu),
        logits=4 * batch * config.vocab * 4,  # logits, probabilities, those that filters leave, and their sums
        process=PROCESS + PROGRAMS[0] + layers * (PROGRAMS[1] + held) if on_cpu else 0,
        compiling=PROCESS + COMPILING[0] + layers * (COMPILING[1] + compiling) if on_cpu else 0,
    )


def _activations(params: Params, config: Config, *, tokens: int, batch: int, capacity: int, on_cpu: bool) -> int:
    """What is alive at once in the widest op of a prompt's chunk, in float32: attention, or the feed-forward layer."""
    longest, most = (LONGEST_CPU_SPAN, MOST_CPU_DECODED) if on_cpu else (LONGEST_SPAN, MOST_DECODED)

    def attention(queries: int, longest: int) -> int:
        span = min(capacity, longest)
        scores = 2 * queries * config.heads * span  # and probabilities
        return scores + 2 * batch * config.kv_heads * span * config.head_dim  # keys and values, cut out of the cache

    matrices = _matrices([params.layers, params.head])
    sums = max(map(partial_sums, matrices)) if on_cpu and batch == 1 else 0  # of a step's widest product
    attended = max(attention(tokens, longest), attention(batch, LONGEST_SPAN))  # of a prompt, of a step
    hidden = tokens * config.ffn * (3 * config.experts or 3)  # gate, up and what they make
    largest = max((len(m.codes) * m.cols for m in _quantized(params)), default=0)
    # In float32, twice; by kernels all of it in bfloat16, half as much.
    decoded = 2 * min(largest, most) if on_cpu else max(2 * min(largest, most), largest // 2)
    stream = 4 * tokens * config.dim
    return 4 * (stream + max(attended, hidden + decoded, sums))


def _matrices(tree: Any) -> list[Any]:
    """All in the tree, also those in what emulates activations: `QuantizedMatrix`, or of two axes."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, QuantizedMatrix))
    return [leaf for leaf in leaves if isinstance(leaf, QuantizedMatrix) or leaf.ndim == 2]


def _quantized(params: Params) -> list[QuantizedMatrix]:
    """The matrices of the layers that are."""
    return [leaf for leaf in _matrices(params.layers) if isinstance(leaf, QuantizedMatrix)]


def check_fits(memory: Memory, *, context: int, available: int) -> None:
    """Raise MemoryError if what is planned does not fit, with the sums of when most is in use in the message."""
    if memory.fits(available):
        return
    free = f"the {gigabytes(available)} of memory that are free"
    if memory.compiling > memory.running:
        raise MemoryError(
            f"compiling takes up to {gigabytes(memory.compiling - memory.held)} and does not fit in {free}"
        )
    rest = memory.running - memory.held - memory.weights - memory.cache
    raise MemoryError(
        f"{gigabytes(memory.weights)} of weights, {gigabytes(memory.cache)} of cache for a context of {context} tokens "
        f"and {gigabytes(rest)} beside them do not fit in {free}"
    )


def gigabytes(count: int) -> str:
    """
    >>> gigabytes(44_000_000_000), gigabytes(372_000_000)
    ('44.0 GB', '0.37 GB')
    """
    return f"{count / 1e9:,.{1 if count >= 10e9 else 2}f} GB"
