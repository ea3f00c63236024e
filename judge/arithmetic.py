r"""Measures how far rounding may move an engine's log-probabilities from the exact ones.

A bound that is proven op by op (`verify --model`) grows with every layer, and soon says nothing about a whole model. So
we measure: we run the definition itself in the arithmetic that an engine claims, several times, and round the result of
each operation at random to one of the two nearest numbers (Monte Carlo arithmetic: Parker, 1997; Forsythe, 1959). A sum
of products also gets the error of a sequential sum in float32. The arithmetic explains errors as large as the root mean
square of the differences from the exact log-probabilities.

    fl(x)      = x rounded up or down at random, so that the mean is x       |fl(x) - x| < 2 u |x|
    fl(a . b)  = fl(a . b + u32 z sum_i |a_i b_i|)                           z normal, u32 = 2^-24

Weights are rounded to the nearest number, as engines do when they load them. RoPE's frequencies have float32's
rounding in every arithmetic.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float

from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.ops.emulated import RoundingArray
from llamaspec.model.running.reference_backend import CHUNK, LazyLayers, load_reference_params
from llamaspec.model.tensors import weight_count
from llamaspec.reference.config import Config, for_sequences
from llamaspec.reference.llama import LayerCache, Params, empty_cache, hidden_states, map_arrays, unembed
from llamaspec.reference.logsumexp import logsumexp
from llamaspec.reference.quantizers import kv_cache
from llamaspec.reference.quantizers.ggml_activations import ROUNDING_OF
from llamaspec.reference.rope import Rotation

U32 = 2.0**-24  # largest relative error of a rounding to float32
UNITS = {"float32": U32, "float16": 2.0**-11, "bfloat16": 2.0**-8}
EXACT = (np.negative, np.absolute, np.maximum, np.minimum, np.isneginf, np.isfinite)  # these ufuncs round nothing
KEPT = 200_000_000  # weights; the layers of a larger model are read again for each pass


class Arithmetic(NamedTuple):
    """The arithmetic that an engine claims to compute with."""

    name: str
    dtype: str  # of weights and of every result
    cache: str  # dtype of keys and values
    ggml: bool = False  # activations are rounded before products with quantized matrices, as llama.cpp does

    def __str__(self) -> str:
        plain = "float16" if self.ggml else self.dtype
        return self.name if self.cache == plain else f"{self.name} with a KV cache in {self.cache}"


NAMES = (*UNITS, "ggml")
CACHES = (*UNITS, "int8")


def arithmetic(name: str, cache: str | None = None) -> Arithmetic:
    """Make an arithmetic from its name, and from the dtype of its KV cache if that differs.

    >>> str(arithmetic("bfloat16", "int8")), str(arithmetic("ggml"))
    ('bfloat16 with a KV cache in int8', 'ggml')
    """
    if name == "ggml":  # llama.cpp computes in float32, and keeps keys and values in float16
        return Arithmetic(name, "float32", cache or "float16", ggml=True)
    return Arithmetic(name, name, cache or name)


def stored_arithmetic(checkpoint: Checkpoint) -> str:
    """Choose the arithmetic that engines usually run a checkpoint in: ggml for GGUF files, else the stored dtype."""
    if checkpoint.format.startswith("gguf"):
        return "ggml"
    dtypes = {tensor.dtype.name for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2}
    return next((name for name in ("bfloat16", "float16") if name in dtypes), "float32")


class Rounded(np.ndarray):
    """An array with operations that round their results at random. Of two operands, the larger `unit` counts."""

    unit: float
    rng: np.random.Generator | None

    @classmethod
    def of(cls, array: np.ndarray, unit: float, rng: np.random.Generator) -> "Rounded":
        rounded = np.asarray(array, np.float64).view(cls)
        rounded.unit, rounded.rng = unit, rng
        return rounded

    def __array_finalize__(self, source: Any) -> None:
        self.unit, self.rng = getattr(source, "unit", U32), getattr(source, "rng", None)

    def __array_function__(self, function: Callable[..., Any], types: Any, arguments: Any, options: Any) -> Any:
        result = super().__array_function__(function, types, arguments, options)
        if self.rng and isinstance(result, np.ndarray) and result.dtype == np.float64:
            return Rounded.of(result, self.unit, self.rng)  # np.concatenate, for example, returns a plain array
        return result

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        operands = [np.asarray(operand) if isinstance(operand, Rounded) else operand for operand in inputs]
        options.pop("out", None)  # the callers in the definition use the result
        result = getattr(ufunc, method)(*operands, **options)
        if not isinstance(result, np.ndarray | np.floating) or result.dtype != np.float64:
            return result
        result = np.asarray(result)
        rounded = [operand for operand in inputs if isinstance(operand, Rounded)]
        unit, rng = max(operand.unit for operand in rounded), next(o.rng for o in rounded if o.rng is not None)
        if ufunc is np.matmul:
            sizes = np.abs(np.asarray(operands[0])) @ np.abs(np.asarray(operands[1]))
            result = result + U32 * rng.standard_normal(sizes.shape) * sizes
        elif ufunc is np.add and method == "reduce":
            result = result + U32 * np.abs(result) * rng.standard_normal(np.shape(result))
        if ufunc not in EXACT:
            result = at_random(result, unit, rng)
        return Rounded.of(result, unit, rng)


def at_random(x: np.ndarray, unit: float, rng: np.random.Generator) -> np.ndarray:
    """Round each number at random, up or down, so that the mean is exact. `unit` is the spacing of mantissas.

    >>> sorted(set(at_random(np.full(99, 1.25), 0.5, np.random.default_rng(0)).tolist()))
    [1.0, 2.0]
    """
    with np.errstate(invalid="ignore"):
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.floor(mantissa / unit + rng.random(np.shape(x))) * unit, exponent)


@dataclass(frozen=True)
class RoundedConfig(Config):
    """A config that rounds the frequencies and the angles of RoPE to float32 at random."""

    rng: Any = None

    def rotation(self, layer: int | None = None) -> Rotation:
        """Return RoPE's rotation like `Config.rotation`."""
        frequencies, magnitude = super().rotation(layer)
        return Rotation(Rounded.of(at_random(frequencies, U32, self.rng), U32, self.rng), magnitude)


def cache_class(dtype: str, *, ggml: bool = False) -> type[LayerCache]:
    """Make the class of a layer's cache that stores keys and values in `dtype`, with random rounding.

    When ggml multiplies a tensor by the cache, it rounds the tensor to the cache's dtype, too. We round the result
    instead.
    """

    class RoundedCache(LayerCache):
        def append(self, k: np.ndarray, v: np.ndarray) -> LayerCache:
            return RoundedCache(np.concatenate([self.k, stored(k)]), np.concatenate([self.v, stored(v)]))

    def stored(x: np.ndarray) -> Rounded:
        assert isinstance(x, Rounded) and x.rng
        if dtype == "int8":
            return Rounded.of(kv_cache.dequantize(kv_cache.quantize(np.asarray(x))), x.unit, x.rng)
        rounded = at_random(np.asarray(x), max(UNITS[dtype], x.unit), x.rng)
        return Rounded.of(rounded, max(UNITS[dtype], x.unit) if ggml else x.unit, x.rng)

    return RoundedCache


@dataclass(frozen=True, eq=False)
class Definition:
    """The definition of a checkpoint's model, with the weights rounded as an engine claims to round them."""

    params: Params  # exact
    config: Config
    rounded: Params  # in the dtype of `arithmetic`, with the roundings of activations in ggml
    arithmetic: Arithmetic

    def log_probabilities(self, ids: Sequence[int], start: int) -> Float[np.ndarray, "positions vocab"]:
        """Compute the log-probabilities of the tokens from position `start` on, given all tokens before them."""
        return _log_probabilities(self.params, self._config(ids), ids, start, LayerCache)

    def samples(self, ids: Sequence[int], start: int, *, count: int) -> Iterator[Float[np.ndarray, "positions vocab"]]:
        """Yield `count` samples of `log_probabilities` in rounded arithmetic."""
        unit = UNITS[self.arithmetic.dtype]
        cache = cache_class(self.arithmetic.cache, ggml=self.arithmetic.ggml)
        for seed in range(count):
            rng = np.random.default_rng(seed)

            def sampled(weights: np.ndarray, rng: np.random.Generator = rng) -> np.ndarray:
                return weights if isinstance(weights, RoundingArray) else Rounded.of(weights, unit, rng)

            values = {field.name: getattr(self._config(ids), field.name) for field in fields(Config)}
            rows = _log_probabilities(
                mapped(self.rounded, sampled), RoundedConfig(**values, rng=rng), ids, start, cache
            )
            yield at_random(np.asarray(rows), U32, rng)  # a server reports float32 numbers

    def _config(self, ids: Sequence[int]) -> Config:
        return for_sequences(self.config, len(ids))


def define(checkpoint: Checkpoint, arithmetic: Arithmetic) -> Definition:
    """Read the weights of a checkpoint, for an engine that computes in `arithmetic`."""
    lazily = weight_count(checkpoint.config) > KEPT
    matrices = {name: tensor.type for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
    types = {name: ROUNDING_OF[type] for name, type in matrices.items() if arithmetic.ggml and type in ROUNDING_OF}
    params = load_reference_params(checkpoint, lazily=lazily)
    activations = load_reference_params(checkpoint, types, lazily=lazily) if types else params
    dtype = np.dtype(getattr(ml_dtypes, arithmetic.dtype, arithmetic.dtype))

    def nearest(weights: np.ndarray) -> np.ndarray:
        return weights if isinstance(weights, RoundingArray) else weights.astype(dtype).astype(np.float64)

    return Definition(params, checkpoint.config, mapped(activations, nearest), arithmetic)


def mapped(params: Params, function: Callable[[np.ndarray], np.ndarray]) -> Params:
    """Apply a function to all weights. A large model's layers are read and mapped again each time they are used."""
    layers, outside = params.layers, map_arrays(params._replace(layers=()), function)
    if isinstance(layers, LazyLayers):
        return outside._replace(layers=LazyLayers(len(layers), lambda i: map_arrays(layers[i], function)))
    return outside._replace(layers=[map_arrays(layer, function) for layer in layers])


def _log_probabilities(
    params: Params, config: Config, ids: Sequence[int], start: int, cache_type: type[LayerCache]
) -> Float[np.ndarray, "positions vocab"]:
    rows, cache = [], [cache_type(*layer) for layer in empty_cache(config)]
    for first in range(0, len(ids) - 1, CHUNK):
        chunk = np.array(ids[first : min(first + CHUNK, len(ids) - 1)])
        x, cache = hidden_states(params, chunk, cache, config=config)
        if first + len(chunk) >= start:
            logits = np.asarray(unembed(params, x[max(start - 1 - first, 0) :], config=config))
            rows.append(logits - logsumexp(logits)[:, None])
    return np.concatenate(rows)
