"""The weights of a Llama as JAX arrays: what is multiplied together is stacked once, here.

q, k and v share their input, and so do gate and up: stacked, each is one product a layer instead of
three or two. Layers stay in a list, since slices of one large array would be copied at every use.
"""

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from model.checkpoints.checkpoint import Checkpoint, Shifted, Tensor, refused, tensor_shapes
from model.checkpoints.checks import check_finite
from model.checkpoints.codes import alike
from model.weights.codes import CLASS_OF_FORM, Embedding, QuantizedMatrix, can_multiply
from model.weights.gpu_codes import as_read_here
from reference.config import Config
from reference.rope import frequencies

PART = 16 << 20  # bytes
Progress = Callable[[str, float], object]  # told what goes on, and what share of it is done


def no_progress(stage: str, share: float) -> None:
    """Tell nobody."""


HUGE_PAGE = 2 << 20  # bytes; weights that start on one are read faster, and JAX on a CPU takes them as they are


Matrix = Float[Array, "rows cols"] | QuantizedMatrix


class Linear(NamedTuple):
    weight: Matrix
    bias: Float[Array, " rows"] | None


class FeedForward(NamedTuple):
    gate_up: Linear  # [2 ffn, dim]
    down: Linear


class Experts(NamedTuple):
    router: Float[Array, "experts dim"]
    experts: Sequence[FeedForward]


class Layer(NamedTuple):
    attention_norm: Float[Array, " dim"]
    qkv: Linear  # [(heads + 2 kv_heads) head_dim, dim]
    q_norm: Float[Array, " head_dim"] | None
    k_norm: Float[Array, " head_dim"] | None
    o: Linear
    ffn_norm: Float[Array, " dim"]
    ffn: FeedForward | Experts


class Rope(NamedTuple):
    """The angles of every position, from float64: a float32 angle is off by a percent at position 100,000."""

    cos: Float[Array, "positions pairs"]
    sin: Float[Array, "positions pairs"]


class Params(NamedTuple):
    embedding: Float[Array, "vocab dim"] | Embedding
    layers: Sequence[Layer]
    norm: Float[Array, " dim"]
    head: Matrix  # [vocab, dim]; the same arrays as the embedding, where the two are tied
    rope: Rope

    @property
    def tied(self) -> bool:
        return jax.tree.leaves(self.head)[0] is jax.tree.leaves(self.embedding)[0]


def rope_table(config: Config, positions: int) -> Rope:
    """cos and sin of the first `positions` positions, float32."""
    turns = frequencies(config.head_dim, theta=config.theta, scaling=config.scaling)
    cos, sin = np.empty((2, positions, len(turns)), np.float32)
    for start in range(0, positions, 4096):  # in parts: in float64 the whole would be several times as large
        angles = np.arange(start, min(start + 4096, positions))[:, None] * turns
        cos[start : start + 4096], sin[start : start + 4096] = np.cos(angles), np.sin(angles)
    return Rope(jax.device_put(cos), jax.device_put(sin))


def load_params(
    checkpoint: Checkpoint,
    *,
    dtype: np.dtype,
    positions: int,
    loaded: tuple[Checkpoint, Params] | None = None,
    progress: Progress = no_progress,
) -> Params:
    """Read every tensor of `checkpoint` onto the default device: codes as codes, all else as `dtype`.

    `check_weights` comes first. `positions` is the number of positions that the RoPE table covers. Of another
    checkpoint that is `loaded`, of the same shapes, the arrays of the tensors that are in both are shared.
    """
    done, total = 0, sum(tensor.bytes for tensor in checkpoint.tensors.values())
    shared = _shared(checkpoint, *loaded) if loaded else {}

    def place(*names: str) -> Array | QuantizedMatrix:
        nonlocal done
        if names in shared:
            return shared[names]
        tensors = _joined([checkpoint.tensors[name] for name in names])
        shapes = _shapes(tensors, dtype)
        buffers = jax.tree.map(lambda shape: aligned_zeros(shape.shape, shape.dtype), shapes)
        start = 0
        for tensor in tensors:
            for part in _stored_parts(tensor, shapes):
                rows = len(jax.tree.leaves(part)[0])
                for buffer, values in zip(jax.tree.leaves(buffers), jax.tree.leaves(part), strict=True):
                    buffer[start : start + rows] = values
                start += rows
                checkpoint.release()
                done += tensor.bytes * rows / tensor.shape[0]
                progress("reading weights", done / total)
        return as_read_here(jax.device_put(buffers, may_alias=True))

    return _assemble(checkpoint.config, place, rope_table(checkpoint.config, positions))


class _Names(NamedTuple):
    """Of the tensors that become an array."""

    names: tuple[str, ...]


def _shared(
    checkpoint: Checkpoint, other: Checkpoint, params: Params
) -> dict[tuple[str, ...], Array | QuantizedMatrix]:
    """Arrays of `params`, read from `other`, by the names of the tensors in them, where `checkpoint` has the same."""
    found = {}

    def take(place: Any, held: Any) -> None:
        if _is_names(place) and all(checkpoint.tensors[name] == other.tensors[name] for name in place.names):
            found[place.names] = held.matrix if isinstance(held, Embedding) else held

    places = _assemble(other.config, lambda *names: _Names(names), params.rope)
    jax.tree.map(take, places, params, is_leaf=_is_names)
    return found


def _is_names(node: Any) -> bool:
    return isinstance(node, _Names)


def _stored_parts(tensor: Tensor, shapes: Any) -> Iterator[Any]:
    """Runs of a tensor's rows as the arrays of `shapes` hold them."""
    if isinstance(shapes, QuantizedMatrix):
        assert tensor.codes
        return (shapes.stored(part, tensor.codes) for part in tensor.codes.parts())
    return _in_parts(tensor.read())


def _joined(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors that are to be one along their rows: with codes that can run so, or without."""
    cols = math.prod(tensors[0].shape[1:])
    codes = alike([tensor.codes for tensor in tensors])
    usable = codes if codes and can_multiply(codes[0], cols) else [None] * len(tensors)
    return [tensor._replace(codes=one) for tensor, one in zip(tensors, usable, strict=True)]


def _shapes(tensors: Sequence[Tensor], dtype: np.dtype) -> Any:
    """The arrays for what `_joined` gives."""
    rows, row = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1:]
    if codes := tensors[0].codes:
        return CLASS_OF_FORM[codes.form].shapes(rows, math.prod(row), codes)
    return jax.ShapeDtypeStruct((rows, *row), dtype)


def check_weights(checkpoint: Checkpoint, *, progress: Progress = no_progress) -> None:
    """Raise CheckpointError for a tensor that holds NaN or infinity."""
    done, total = 0, sum(tensor.bytes for tensor in checkpoint.tensors.values())
    for name, tensor in checkpoint.tensors.items():
        for rows in _checked(name, tensor, checkpoint.path):
            checkpoint.release()
            done += tensor.bytes * rows / tensor.shape[0]
            progress("checking weights", done / total)


def _checked(name: str, tensor: Tensor, path: str) -> Iterator[int]:
    """Check runs of rows, the scales of codes for all that they scale; how many rows each has."""
    if not tensor.codes:
        for values in _in_parts(tensor.read()):
            check_finite(name, values, path=path)
            yield len(values)
        return
    for part in tensor.codes.parts():
        if tensor.codes.form == "fp8" and (part.codes & 0x7F == 0x7F).any():
            raise refused(path, f"{name} holds a NaN")
        if tensor.codes.form == "mxfp4":
            if (part.scales == 0xFF).any():
                raise refused(path, f"{name} has a scale that is NaN")
        else:
            check_finite(f"{name}'s scales", part.scales, path=path)
        if isinstance(part, Shifted):
            check_finite(f"{name}'s minima", part.minima, path=path)
        yield len(part.codes)


def params_of(config: Config, tensors: Mapping[str, Array], rope: Rope) -> Params:
    """The tree of named tensors that are arrays already, as in training: traceable, and so differentiable."""
    return _assemble(config, lambda *names: jnp.concatenate([tensors[name] for name in names]), rope)


def abstract_params(
    config: Config, *, dtype: np.dtype, positions: int, tensors: Mapping[str, Tensor] | None = None
) -> Params:
    """The shapes and dtypes that `load_params` will give: enough to compile for.

    `tensors` are a checkpoint's; without them, those of one that is not quantized.
    """
    plain = {name: Tensor(shape, dtype, lambda: np.empty(0)) for name, shape in tensor_shapes(config).items()}
    known = tensors or plain
    table = jax.ShapeDtypeStruct((positions, config.head_dim // 2), np.float32)

    def place(*names: str) -> Any:
        return as_read_here(_shapes(_joined([known[name] for name in names]), dtype))

    return _assemble(config, place, Rope(table, table))  # type: ignore


def _assemble(config: Config, place: Callable[..., Any], rope: Rope) -> Params:
    """The whole tree of weights; `place` joins the tensors of the names that it is given along their rows."""

    def linear(*names: str, bias: bool = False) -> Linear:
        weight = place(*(f"{name}.weight" for name in names))
        return Linear(weight, place(*(f"{name}.bias" for name in names)) if bias else None)

    def feed_forward(prefix: str) -> FeedForward | Experts:
        if config.experts:
            moe = f"{prefix}.block_sparse_moe"
            experts = [f"{moe}.experts.{e}" for e in range(config.experts)]
            return Experts(
                router=place(f"{moe}.gate.weight"),
                experts=[FeedForward(linear(f"{e}.w1", f"{e}.w3"), linear(f"{e}.w2")) for e in experts],
            )
        return FeedForward(
            gate_up=linear(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj", bias=config.ffn_bias),
            down=linear(f"{prefix}.mlp.down_proj", bias=config.ffn_bias),
        )

    def layer(prefix: str) -> Layer:
        attention = f"{prefix}.self_attn"
        return Layer(
            attention_norm=place(f"{prefix}.input_layernorm.weight"),
            qkv=linear(*(f"{attention}.{name}_proj" for name in "qkv"), bias=config.qkv_bias),
            q_norm=place(f"{attention}.q_norm.weight") if config.qk_norm else None,
            k_norm=place(f"{attention}.k_norm.weight") if config.qk_norm else None,
            o=linear(f"{attention}.o_proj", bias=config.o_bias),
            ffn_norm=place(f"{prefix}.post_attention_layernorm.weight"),
            ffn=feed_forward(prefix),
        )

    table, norm = place("model.embed_tokens.weight"), place("model.norm.weight")
    return Params(
        embedding=Embedding(table, config.dim, norm.dtype) if isinstance(table, QuantizedMatrix) else table,
        layers=[layer(f"model.layers.{i}") for i in range(config.layers)],
        norm=norm,
        head=table if config.tied else place("lm_head.weight"),
        rope=rope,
    )


def weight_bytes(params: Params) -> int:
    """Bytes that the weights take, each stored once: of `abstract_params`, before there are any."""
    head = None if params.tied else params.head
    return sum(
        int(np.prod(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves((params.embedding, params.layers, params.norm, head))
    )


def _in_parts(values: np.ndarray) -> Iterator[np.ndarray]:
    """Runs of rows of a few megabytes, so that little of the file is in memory beside what it is copied to."""
    rows = max(1, PART // max(1, values[:1].nbytes))
    for start in range(0, len(values), rows):
        yield values[start : start + rows]


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array in memory of its own, in huge pages as far as it fills them, the rest in small ones."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE
    if whole := size // HUGE_PAGE * HUGE_PAGE:
        memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return np.frombuffer(memory, dtype, int(np.prod(shape)), start).reshape(shape)
