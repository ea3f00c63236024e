"""Quantizes a model by AWQ, GPTQ or SmoothQuant, layer by layer, for the activations that a text produces.

`importances` measures the same activations for the quantizers of llama.cpp.

We split the text into windows of tokens, and pass the windows through the model once. AWQ and SmoothQuant multiply the
columns of a matrix by factors s before they round it, and divide the inputs of the matrix by s. An earlier norm or
matrix absorbs the division. A layer has four kinds of matrices, in the order of computation:

    matrices         their inputs           what absorbs 1 / s
    q, k, v          rmsnorm(x)             the norm's weight
    o                attention's outputs    the rows of v
    gate, up         rmsnorm(x)             the norm's weight
    down             silu(gate) * up        the rows of up

A router reads the same inputs as gate and up, so its columns are multiplied by s.

To get the inputs of a matrix, we run the text through all earlier layers and matrices, which are already quantized.
Matrices with the same inputs share s. In o, query heads that share a kv head also share s, since they read the same
values. To divide rows of v and up, we divide their scales, without changing their codes. SmoothQuant divides only
norms. We do not quantize embeddings and the head. For calibration, all experts get all tokens, since a rarely chosen
expert would otherwise see very few tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Int

from llamaspec.model.cache import LayerCache
from llamaspec.model.checkpoints.checkpoint import Checkpoint, Codes, Tensor, refused
from llamaspec.model.checkpoints.checks import check_finite
from llamaspec.model.checkpoints.codes import PART, dequantized
from llamaspec.model.ops.block import rmsnorm
from llamaspec.model.ops.table import Positions
from llamaspec.model.ops.xla import XLA
from llamaspec.model.quantize.methods import METHODS, Inputs, Method, observe
from llamaspec.model.tensors import EMBEDDING, QUANTIZABLE, Stack, Weight, stacks, weights
from llamaspec.model.text import read_text
from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.model.weights.loading import Progress, no_progress
from llamaspec.model.weights.params import Experts, FeedForward, Layer, Linear, rope_table
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers import smoothquant
from llamaspec.reference.quantizers.blocks import Quantized

WINDOW = 512  # tokens in a window, unless the model's context is shorter
WINDOWS = 128  # largest number of windows, which is the usual number for AWQ and GPTQ
BYTES = 1 << 20  # largest number of bytes to read of a file: with 4 bytes per token, four times as many as we need


def read_windows(path: str | Path, tokenizer: Tokenizer, *, context: int) -> Int[np.ndarray, "windows seq"]:
    """Read up to `WINDOWS` windows of tokens from the beginning of a text file in UTF-8.

    If the tokenizer has BOS, each window begins with BOS. Raises `CheckpointError` if `read_text` refuses the file, or
    if the text has fewer tokens than one window.
    """
    text = read_text(path, most=BYTES)
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    length = min(context, WINDOW) - len(begin)
    ids = tokenizer.encode(text)
    if len(ids) < length:
        raise refused(path, f"has {len(ids)} tokens, but calibration needs at least {length}")
    starts = range(0, len(ids) - length + 1, length)[:WINDOWS]
    return np.array([[*begin, *ids[start : start + length]] for start in starts], np.int32)


def calibrated(
    checkpoint: Checkpoint,
    windows: Int[np.ndarray, "windows seq"],
    *,
    method: str,
    progress: Progress = no_progress,
) -> Checkpoint:
    """Return a copy of `checkpoint` that quantizes the layers' matrices by `method`, for the tokens of `windows`.

    `method` is a key of `METHODS`. When a caller reads the first tensor of a layer, we quantize this layer and drop the
    previous layer. So callers should read tensors in order, as writers do: reading an earlier layer starts again from
    the first layer. We call `progress` with the number of the layer and the share of the layer that is done. Raises
    ValueError for an unknown method, and `CheckpointError` if the model is already quantized.
    """
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown: choose {', '.join(METHODS)}")
    checkpoint.config.check_llama("methods that calibrate")
    if any(tensor.codes for tensor in checkpoint.tensors.values()):
        raise refused(checkpoint.path, f"is already quantized, but {method} needs a model with weights in floats")
    walk = _Walk(checkpoint, windows, METHODS[method], progress)
    return replace(checkpoint, tensors={name: walk.tensor(name) for name in checkpoint.tensors})


def importances(
    checkpoint: Checkpoint, windows: Int[np.ndarray, "windows seq"], *, progress: Progress = no_progress
) -> dict[str, Float32[np.ndarray, " cols"]]:
    """Compute how important each column of a layer's matrices is, as llama.cpp's llama-imatrix does.

    Returns the importances by the names of the matrices. An importance is the mean square of a column's inputs over the
    tokens of `windows`. For an expert we count all tokens; llama.cpp counts only the tokens that the router sends to
    the expert.
    """
    checkpoint.config.check_llama("methods that calibrate")
    all_stacks, streams = stacks(checkpoint.config), _embedded(checkpoint, windows)
    squares: dict[str, Float32[np.ndarray, " cols"]] = {}
    for index in range(checkpoint.config.layers):
        layer = _ObservedLayer(checkpoint, index, all_stacks, progress)
        streams = layer.pass_through(streams)
        squares |= layer.squares
        checkpoint.release()
    return squares


class _Walk:
    """A pass through the layers. It keeps the residual streams of all windows at the input of the next layer."""

    def __init__(self, checkpoint: Checkpoint, windows: np.ndarray, method: Method, progress: Progress):
        self._checkpoint, self._windows, self._method, self._progress = checkpoint, windows, method, progress
        self._stacks = stacks(checkpoint.config)
        self._table = {weight.name: weight for weight in weights(checkpoint.config)}
        self._current, self._results = -1, {}
        self._streams: list[Array] = []

    def tensor(self, name: str) -> Tensor:
        """Return the tensor that replaces the tensor `name`; reading it computes its values."""
        stored, method, weight = self._checkpoint.tensors[name], self._method, self._table[name]
        if weight.layer is None:
            return stored
        layer = weight.layer

        def result() -> Any:
            return self._result(layer, name)

        if weight.role not in QUANTIZABLE:
            if method.factors is None:
                return stored
            return Tensor(stored.shape, np.dtype(np.float32), result)
        codes = _codes(method, stored.shape, lambda: _in_parts(result()))
        return Tensor(stored.shape, np.dtype(np.float32), lambda: dequantized(codes, stored.shape), codes)

    def _result(self, layer: int, name: str) -> Any:
        if layer < self._current or self._current < 0:
            self._streams, self._current = _embedded(self._checkpoint, self._windows), -1
        while self._current < layer:
            self._results = {}
            work = _QuantizedLayer(self._checkpoint, self._current + 1, self._stacks, self._progress, self._method)
            self._streams = work.pass_through(self._streams)
            self._current, self._results = self._current + 1, work.results()
            self._checkpoint.release()
        return self._results[name]


def _codes(method: Method, shape: tuple[int, ...], parts: Callable[[], Iterator[Quantized]]) -> Codes:
    rows, cols = shape
    group = method.group or cols
    bits = cols * method.bits + -(-cols // group) * 32
    return Codes(method.form, group, zeros=False, bytes=-(-rows * bits // 8), parts=parts)


def _in_parts(part: Quantized) -> Iterator[Quantized]:
    rows = max(1, PART // part.codes.shape[1])
    for start in range(0, len(part.codes), rows):
        yield Quantized(*(array[start : start + rows] for array in part))


def _embedded(checkpoint: Checkpoint, windows: Int[np.ndarray, "windows seq"]) -> list[Array]:
    embedding = checkpoint.tensors[EMBEDDING].read()
    return [jnp.asarray(embedding[row][None].astype(np.float32)) for row in windows]


class _Kind(NamedTuple):
    """Matrices of a layer with the same inputs, and the weights that compute these inputs: a norm or a matrix."""

    names: list[str]
    inputs: Callable[[Array, Layer], Array]  # of a residual stream, and the layer with its current weights
    norm: str | None = None  # the field of the norm
    rows: str | None = None  # the name of the matrix


class _Layer:
    """A layer with its current weights, which visits its kinds of matrices in the order of computation."""

    def __init__(self, checkpoint: Checkpoint, index: int, all_stacks: Sequence[Stack], progress: Progress):
        self._config, self._index, self._progress = checkpoint.config, index, progress
        self._path = checkpoint.path
        self._now: dict[str, np.ndarray] = {}  # float32, by name
        stacked = [stack for stack in all_stacks if stack.layer == index]
        for weight in (weight for stack in stacked for weight in (*stack.weights, *stack.biases)):
            values = checkpoint.tensors[weight.name].read()
            check_finite(weight.name, values, path=checkpoint.path)
            self._now[weight.name] = np.array(values, np.float32)
        self._fields = {stack.field: stack for stack in stacked if stack.expert is None}
        experts = [[stack for stack in stacked if stack.expert == e] for e in range(self._config.experts)]
        self._ffns = [{stack.field: stack for stack in expert} for expert in experts] or [self._fields]
        self._kinds_done = 0

    def _visit(self, kind: _Kind, streams: Sequence[Array]) -> None:
        """Process the matrices of `kind`, with the inputs that they get for the residual streams `streams`."""
        raise NotImplementedError

    def pass_through(self, streams: Sequence[Array]) -> list[Array]:
        """Visit all matrices for the residual streams `streams`; return the layer's outputs for these streams."""
        config, seq = self._config, streams[0].shape[1]
        table = rope_table(config, seq)
        positions = Positions(jnp.arange(seq)[None], table.cos[None], table.sin[None])
        attended = partial(_attended, positions=positions, window=config.window(self._index), config=config)

        qkv, o = (_names(self._fields[field]) for field in ("qkv", "o"))
        norm = "attention_norm"
        self._visit(_Kind(qkv, lambda x, layer: _rmsnorm(x, layer.attention_norm, eps=config.eps), norm=norm), streams)
        self._visit(_Kind(o, attended, rows=qkv[2]), streams)
        layer = self._layer()
        streams = [_projected(attended(x, layer), layer, x) for x in streams]

        entering = [name for ffn in self._ffns for name in _names(ffn["gate_up"])]
        norm = "ffn_norm"
        self._visit(_Kind(entering, lambda x, layer: _rmsnorm(x, layer.ffn_norm, eps=config.eps), norm=norm), streams)
        for e, ffn in enumerate(self._ffns):

            def gated(x: Array, layer: Layer, e: int = e) -> Array:
                ffn = layer.ffn.experts[e] if isinstance(layer.ffn, Experts) else layer.ffn
                return _gated(x, layer._replace(ffn=ffn), config=config)

            self._visit(_Kind(_names(ffn["down"]), gated, rows=_names(ffn["gate_up"])[1]), streams)
        layer = self._layer()
        return [_fed_forward(x, layer, config=config) for x in streams]

    def _seen(self, kind: _Kind, streams: Sequence[Array], *, gram: bool) -> Inputs:
        """Observe the inputs of the matrices of `kind`."""
        seen = observe(self._inputs(kind.inputs, streams), gram=gram)
        if not all(a is None or np.isfinite(a).all() for a in seen):
            raise refused(self._path, f"cannot calibrate: the inputs of {kind.names[0]} overflow float32")
        self._kinds_done += 1
        return seen

    def _inputs(self, inputs: Callable[[Array, Layer], Array], streams: Sequence[Array]) -> Iterator[Array]:
        layer, kinds = self._layer(), 3 + len(self._ffns)
        stage = f"layer {self._index + 1} of {self._config.layers}"
        for i, x in enumerate(streams):
            self._progress(stage, (self._kinds_done + i / len(streams)) / kinds)
            yield inputs(x, layer)

    def _layer(self) -> Layer:
        """Return the layer with its current weights, on the default device."""

        def array(weights: Sequence[Weight]) -> Array | None:
            return jnp.asarray(np.concatenate([self._now[weight.name] for weight in weights])) if weights else None

        def linear(stack: Stack) -> Linear:
            weight = array(stack.weights)
            assert weight is not None
            return Linear(weight, array(stack.biases))

        def vector(field: str) -> Any:
            return array(self._fields[field].weights) if field in self._fields else None

        ffns = [FeedForward(linear(ffn["gate_up"]), linear(ffn["down"])) for ffn in self._ffns]
        router = vector("router")
        return Layer(
            attention_norm=vector("attention_norm"),
            qkv=linear(self._fields["qkv"]),
            q_norm=vector("q_norm"),
            k_norm=vector("k_norm"),
            o=linear(self._fields["o"]),
            ffn_norm=vector("ffn_norm"),
            ffn=ffns[0] if router is None else Experts(router, ffns),
        )


class _QuantizedLayer(_Layer):
    """A layer during its quantization, with the codes of matrices that are already quantized."""

    def __init__(
        self, checkpoint: Checkpoint, index: int, all_stacks: Sequence[Stack], progress: Progress, method: Method
    ):
        super().__init__(checkpoint, index, all_stacks, progress)
        self._method = method
        self._parts: dict[str, Quantized] = {}  # by name

    def results(self) -> dict[str, Any]:
        """Return the codes of each matrix, and the new values of every other tensor, by name."""
        return {name: self._parts.get(name, values) for name, values in self._now.items()}

    def _visit(self, kind: _Kind, streams: Sequence[Array]) -> None:
        """Quantize the matrices of `kind` for their inputs; the norm or the matrix before them absorbs 1 / s."""
        method, names, norm, rows = self._method, kind.names, kind.norm, kind.rows
        seen = self._seen(kind, streams, gram=method.gram)
        s = np.ones(len(seen.means))
        if method.factors and (norm or method.into_matrices):
            if rows and len(self._now[rows]) < len(s):
                seen = seen._replace(means=_over_groups(seen.means, self._config))
            s = method.factors(np.concatenate([self._now[name] for name in names]).astype(np.float64), seen)
            if norm:
                self._divide_norm(norm, s)
            elif rows:
                self._divide_rows(rows, s)
        for name in names:
            part = method.quantize(self._now[name] * s, seen)
            self._take(name, part)

    def _divide_norm(self, field: str, s: Float64[np.ndarray, " cols"]) -> None:
        [norm] = _names(self._fields[field])
        self._now[norm] = smoothquant.fold(self._now[norm], s).astype(np.float32)
        if field == "ffn_norm" and "router" in self._fields:
            [router] = _names(self._fields["router"])
            self._now[router] = smoothquant.smooth(self._now[router], s).astype(np.float32)

    def _divide_rows(self, name: str, s: Float64[np.ndarray, " width"]) -> None:
        """Divide the rows of the quantized matrix `name` by `s`; heads that share a kv head have equal factors."""
        rows = len(self._now[name])
        if rows < len(s):
            s = s.reshape(self._config.kv_heads, -1, self._config.head_dim)[:, 0].reshape(-1)
        part = self._parts[name]
        self._take(name, part._replace(scales=(part.scales / s[:, None]).astype(np.float32)))
        bias = name.removesuffix("weight") + "bias"
        if bias in self._now:
            self._now[bias] = (self._now[bias] / s).astype(np.float32)

    def _take(self, name: str, part: Quantized) -> None:
        self._parts[name] = part
        shape = part.codes.shape
        self._now[name] = dequantized(_codes(self._method, shape, lambda: iter([part])), shape)


class _ObservedLayer(_Layer):
    """A layer that keeps its weights, and records the mean squares of the inputs of each matrix."""

    def __init__(self, checkpoint: Checkpoint, index: int, all_stacks: Sequence[Stack], progress: Progress):
        super().__init__(checkpoint, index, all_stacks, progress)
        self.squares: dict[str, Float32[np.ndarray, " cols"]] = {}  # by name

    def _visit(self, kind: _Kind, streams: Sequence[Array]) -> None:
        squares = self._seen(kind, streams, gram=False).squares.astype(np.float32)
        self.squares |= dict.fromkeys(kind.names, squares)


def _names(stack: Stack) -> list[str]:
    return [weight.name for weight in stack.weights]


@partial(jax.jit, static_argnames="eps")
def _rmsnorm(x: Float[Array, "1 seq dim"], weight: Float[Array, " dim"], *, eps: float) -> Float[Array, "1 seq dim"]:
    return rmsnorm(x, weight, eps=eps)


@partial(jax.jit, static_argnames=("window", "config"))
def _attended(
    x: Float[Array, "1 seq dim"], layer: Layer, *, positions: Positions, window: int | None, config: Config
) -> Float[Array, "1 seq width"]:
    empty = jnp.zeros((1, config.kv_heads, x.shape[1], config.head_dim))
    q, cache = XLA.norm_qkv(x, layer, LayerCache(empty, empty), positions, config=config)
    return XLA.attend(q, cache, positions, window=window, config=config)


@jax.jit
def _projected(h: Float[Array, "1 seq width"], layer: Layer, x: Float[Array, "1 seq dim"]) -> Float[Array, "1 seq dim"]:
    return XLA.project_add(h, layer, x)


@partial(jax.jit, static_argnames="config")
def _gated(x: Float[Array, "1 seq dim"], layer: Layer, *, config: Config) -> Float[Array, "1 seq ffn"]:
    return XLA.norm_gate_up(x, layer, config=config)


@partial(jax.jit, static_argnames="config")
def _fed_forward(x: Float[Array, "1 seq dim"], layer: Layer, *, config: Config) -> Float[Array, "1 seq dim"]:
    if config.experts:
        return XLA.moe_add(x, layer, config=config)
    return XLA.down_add(XLA.norm_gate_up(x, layer, config=config), layer, x)


def _over_groups(means: Float64[np.ndarray, " width"], config: Config) -> Float64[np.ndarray, " width"]:
    """Average the means of o's inputs over the query heads that share a kv head.

    Each of these heads gets the average.
    """
    by_head = means.reshape(config.kv_heads, -1, config.head_dim)
    return np.broadcast_to(by_head.mean(axis=1, keepdims=True), by_head.shape).reshape(-1)
