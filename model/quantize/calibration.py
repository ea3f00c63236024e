"""Quantizes a model by the activations that a text gives rise to: AWQ, GPTQ and SmoothQuant, layer after layer.

The text is cut into windows, whose residual streams pass through the model once. In a layer there are four kinds of
matrices, by their inputs, in the order in which those come about:

    q, k, v          rmsnorm(x)             1 / s goes into the norm's weight
    o                attention's outputs    1 / s goes into the rows of v
    gate, up         rmsnorm(x)             1 / s goes into the norm's weight, and s into a router's columns
    down             silu(gate) * up        1 / s goes into the rows of up

Each kind is quantized for what the layers and matrices before it, quantized already, make of the text. Matrices that
share inputs share s; so do the heads of a group, which read the same values, in o. Rows of v and up are divided by
dividing their scales, as their codes stay. SmoothQuant divides norms alone. Embeddings and head stay as they are. All
experts see all tokens, since one that the text seldom chooses would else be fitted to very few.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int

from model.cache import LayerCache
from model.checkpoints.checkpoint import Checkpoint, Codes, Tensor, refused
from model.checkpoints.checks import check_finite
from model.checkpoints.codes import PART, dequantized, is_matrix
from model.ops.block import rmsnorm
from model.ops.table import Positions
from model.ops.xla import XLA
from model.quantize.methods import METHODS, Method, observe
from model.text import read_text
from model.tokenizers.tokenizer import Tokenizer
from model.weights.params import Experts, FeedForward, Layer, Linear, Progress, no_progress, rope_table
from reference.config import Config
from reference.quantizers import smoothquant
from reference.quantizers.blocks import Quantized

EMBEDDING = "model.embed_tokens.weight"
WINDOW = 512  # tokens, or the context of a model that has less
WINDOWS = 128  # at most: as many as AWQ and GPTQ are usually given
BYTES = 1 << 20  # of a file: with 4 to a token, four times what these windows hold


def read_windows(path: str | Path, tokenizer: Tokenizer, *, context: int) -> Int[np.ndarray, "windows seq"]:
    """The first windows of a UTF-8 text, each with BOS in front where the model's convention has it.

    Raises CheckpointError for a file that `read_text` refuses, or that holds fewer tokens than one window.
    """
    text = read_text(path, most=BYTES)
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    length = min(context, WINDOW) - len(begin)
    ids = tokenizer.encode(text)
    if len(ids) < length:
        raise refused(path, f"holds {len(ids)} tokens, fewer than the {length} of one window to calibrate with")
    starts = range(0, len(ids) - length + 1, length)[:WINDOWS]
    return np.array([[*begin, *ids[start : start + length]] for start in starts], np.int32)


def calibrated(
    checkpoint: Checkpoint,
    windows: Int[np.ndarray, "windows seq"],
    *,
    method: str,
    progress: Progress = no_progress,
) -> Checkpoint:
    """`checkpoint` with its layers' matrices quantized by one of `METHODS` for the tokens of `windows`.

    A layer is computed when the first of its tensors is read, and forgotten when the next one is: read them in their
    order, as writers do; who goes back begins anew. `progress` is told of each layer. Raises ValueError for another
    method, CheckpointError for a model that is quantized already.
    """
    if method not in METHODS:
        raise ValueError(f"{method} is none of the methods {', '.join(METHODS)}")
    if any(tensor.codes for tensor in checkpoint.tensors.values()):
        raise refused(checkpoint.path, f"is quantized already, and {method} begins with weights that are not")
    walk = _Walk(checkpoint, windows, METHODS[method], progress)
    return replace(checkpoint, tensors={name: walk.tensor(name) for name in checkpoint.tensors})


class _Walk:
    """The residual streams of all windows, as they enter the layer that comes next."""

    def __init__(self, checkpoint: Checkpoint, windows: np.ndarray, method: Method, progress: Progress):
        self._checkpoint, self._windows, self._method, self._progress = checkpoint, windows, method, progress
        self._current, self._results = -1, {}
        self._streams: list[Array] = []

    def tensor(self, name: str) -> Tensor:
        """What becomes of a tensor: known now, computed when it is read."""
        stored, method = self._checkpoint.tensors[name], self._method
        if not name.startswith("model.layers."):
            return stored
        layer = int(name.split(".")[2])

        def result() -> Any:
            return self._result(layer, name)

        if not is_matrix(name):
            if method.factors is None:
                return stored
            return Tensor(stored.shape, np.dtype(np.float32), result)
        codes = _codes(method, stored.shape, lambda: _in_parts(result()))
        return Tensor(stored.shape, np.dtype(np.float32), lambda: dequantized(codes, stored.shape), codes)

    def _result(self, layer: int, name: str) -> Any:
        if layer < self._current or self._current < 0:
            embedding = self._checkpoint.tensors[EMBEDDING].read()
            self._streams = [jnp.asarray(embedding[row][None].astype(np.float32)) for row in self._windows]
            self._current = -1
        while self._current < layer:
            self._results = {}
            work = _Layer(self._checkpoint, self._current + 1, self._method, self._progress)
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


class _Layer:
    """One layer while it is quantized: what each weight is now, and the codes of those that are done."""

    def __init__(self, checkpoint: Checkpoint, index: int, method: Method, progress: Progress):
        self._config, self._index, self._method, self._progress = checkpoint.config, index, method, progress
        self._path, self._prefix = checkpoint.path, f"model.layers.{index}."
        self._now: dict[str, np.ndarray] = {}  # float32, by the names within the layer
        self._parts: dict[str, Quantized] = {}
        for name, tensor in checkpoint.tensors.items():
            if name.startswith(self._prefix):
                values = tensor.read()
                check_finite(name, values, path=checkpoint.path)
                self._now[name.removeprefix(self._prefix)] = np.array(values, np.float32)
        experts = [f"block_sparse_moe.experts.{e}" for e in range(self._config.experts)]
        self._ffns = [tuple(f"{e}.w{i}.weight" for i in (1, 3, 2)) for e in experts] or [
            tuple(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        ]
        self._kinds_done = 0

    def results(self) -> dict[str, Any]:
        """By its whole name the codes of each matrix, and what each other tensor has become."""
        return {self._prefix + name: self._parts.get(name, values) for name, values in self._now.items()}

    def pass_through(self, streams: Sequence[Array]) -> list[Array]:
        """Quantize the layer for these residual streams; what it, quantized, makes of them."""
        config, seq = self._config, streams[0].shape[1]
        table = rope_table(config, seq)
        positions = Positions(jnp.arange(seq)[None], table.cos[None], table.sin[None])
        attended = partial(_attended, positions=positions, window=config.window(self._index), config=config)

        norm, o = "input_layernorm.weight", "self_attn.o_proj.weight"
        qkv = [f"self_attn.{name}_proj.weight" for name in "qkv"]
        self._quantize(qkv, lambda x, layer: _normed(x, layer.attention_norm, eps=config.eps), streams, norm=norm)
        self._quantize([o], attended, streams, rows=qkv[2])
        layer = self._layer()
        streams = [_projected(attended(x, layer), layer, x) for x in streams]

        norm = "post_attention_layernorm.weight"
        entering = [name for gate, up, _ in self._ffns for name in (gate, up)]
        self._quantize(entering, lambda x, layer: _normed(x, layer.ffn_norm, eps=config.eps), streams, norm=norm)
        for e, (_, up, down) in enumerate(self._ffns):

            def gated(x: Array, layer: Layer, e: int = e) -> Array:
                ffn = layer.ffn.experts[e] if isinstance(layer.ffn, Experts) else layer.ffn
                return _gated(x, layer._replace(ffn=ffn), config=config)

            self._quantize([down], gated, streams, rows=up)
        layer = self._layer()
        return [_fed_forward(x, layer, config=config) for x in streams]

    def _quantize(
        self,
        names: Sequence[str],
        inputs: Callable[[Array, Layer], Array],
        streams: Sequence[Array],
        *,
        norm: str | None = None,
        rows: str | None = None,
    ) -> None:
        """Quantize the matrices that meet `inputs`, which a norm's weight or some rows of a matrix scale."""
        method = self._method
        seen = observe(self._told(inputs, streams), gram=method.gram)
        if not all(a is None or np.isfinite(a).all() for a in seen):
            raise refused(self._path, f"{self._prefix}{names[0]} meets inputs that overflow float32")
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
        self._kinds_done += 1

    def _divide_norm(self, norm: str, s: Float64[np.ndarray, " cols"]) -> None:
        self._now[norm] = smoothquant.fold(self._now[norm], s).astype(np.float32)
        router = "block_sparse_moe.gate.weight"
        if norm.startswith("post_attention") and router in self._now:
            self._now[router] = smoothquant.smooth(self._now[router], s).astype(np.float32)

    def _divide_rows(self, name: str, s: Float64[np.ndarray, " width"]) -> None:
        """Of codes the scales. The heads of a group have the same s for the values that they share."""
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

    def _told(self, inputs: Callable[[Array, Layer], Array], streams: Sequence[Array]) -> Iterator[Array]:
        layer, kinds = self._layer(), 3 + len(self._ffns)
        stage = f"layer {self._index + 1} of {self._config.layers}"
        for i, x in enumerate(streams):
            self._progress(stage, (self._kinds_done + i / len(streams)) / kinds)
            yield inputs(x, layer)

    def _layer(self) -> Layer:
        """The layer as it is now, on the default device."""
        now = self._now

        def linear(*names: str) -> Linear:
            biases = [now[bias] for name in names if (bias := name.removesuffix("weight") + "bias") in now]
            bias = jnp.asarray(np.concatenate(biases)) if biases else None
            return Linear(jnp.asarray(np.concatenate([now[name] for name in names])), bias)

        def vector(name: str) -> Any:
            return jnp.asarray(now[name]) if name in now else None

        ffns = [FeedForward(linear(gate, up), linear(down)) for gate, up, down in self._ffns]
        router = vector("block_sparse_moe.gate.weight")
        return Layer(
            attention_norm=vector("input_layernorm.weight"),
            qkv=linear(*(f"self_attn.{name}_proj.weight" for name in "qkv")),
            q_norm=vector("self_attn.q_norm.weight"),
            k_norm=vector("self_attn.k_norm.weight"),
            o=linear("self_attn.o_proj.weight"),
            ffn_norm=vector("post_attention_layernorm.weight"),
            ffn=ffns[0] if router is None else Experts(router, ffns),
        )


@partial(jax.jit, static_argnames="eps")
def _normed(x: Float[Array, "1 seq dim"], weight: Float[Array, " dim"], *, eps: float) -> Float[Array, "1 seq dim"]:
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
    """The mean over the heads that share values, for each of them."""
    by_head = means.reshape(config.kv_heads, -1, config.head_dim)
    return np.broadcast_to(by_head.mean(axis=1, keepdims=True), by_head.shape).reshape(-1)
