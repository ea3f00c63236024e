"""The weights of a Llama as JAX arrays; matrices with the same input are stacked here, at load.

q, k and v share their input, and so do gate and up: one product per layer replaces three or two. Layers stay in a list,
since slices of one large array would be copied at every use.
"""

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from llamaspec.model.checkpoints.checkpoint import Checkpoint, Shifted, Tensor, refused
from llamaspec.model.checkpoints.checks import check_finite
from llamaspec.model.checkpoints.codes import in_common_form
from llamaspec.model.system import use_huge_pages
from llamaspec.model.tensors import Role, Stack, stacks, tensor_shapes
from llamaspec.model.weights.codes import CLASS_OF_FORM, QuantizedMatrix
from llamaspec.model.weights.embedding import Embedding
from llamaspec.model.weights.gpu_codes import Stacked, as_read_here, in_runs_of_a_form
from llamaspec.model.weights.groups import can_multiply
from llamaspec.model.weights.quantizing import (
    can_quantize_whole,
    in_parts,
    is_worth_compiling,
    quantized_parts,
    quantized_whole,
)
from llamaspec.reference.config import Config
from llamaspec.reference.rope import Rotation, frequencies

Progress = Callable[[str, float], object]  # called with the stage and the share of it that is done


def no_progress(stage: str, share: float) -> None:
    """Report nothing: the default `Progress`."""


HUGE_PAGE = 2 << 20  # bytes; JAX on a CPU reads weights that are aligned to it faster, and without a copy


Matrix = Float[Array, "rows cols"] | QuantizedMatrix | Stacked


class Linear(NamedTuple):
    weight: Matrix
    bias: Float[Array, " rows"] | None


class FeedForward(NamedTuple):
    gate_up: Linear  # [2 ffn, dim]; [ffn, dim] where there is no gate
    down: Linear


class Shared(NamedTuple):
    """The expert that every token passes."""

    score: Float[Array, "one dim"]
    gate_up: Linear
    down: Linear


class Experts(NamedTuple):
    router: Float[Array, "experts dim"]
    experts: Sequence[FeedForward]
    shared: Shared | None = None
    router_bias: Float[Array, " experts"] | None = None


class Layer(NamedTuple):
    attention_norm: Float[Array, " dim"] | None  # None: there is no norm
    qkv: Linear  # [(heads + 2 kv_heads) head_dim, dim]
    q_norm: Float[Array, " q_width"] | None  # of a head, or of all heads in a row
    k_norm: Float[Array, " k_width"] | None
    o: Linear
    ffn_norm: Float[Array, " dim"] | None  # attention's own array in a parallel block
    ffn: FeedForward | Experts
    attention_post_norm: Float[Array, " dim"] | None = None
    ffn_post_norm: Float[Array, " dim"] | None = None
    attention_norm_bias: Float[Array, " dim"] | None = None  # of a LayerNorm
    ffn_norm_bias: Float[Array, " dim"] | None = None
    sinks: Float[Array, " heads"] | None = None


class Rope(NamedTuple):
    """Cosines and sines of every position, from float64: a float32 angle is off by a percent at position 100,000."""

    cos: Float[Array, "positions pairs"]
    sin: Float[Array, "positions pairs"]
    local_cos: Float[Array, "positions pairs"] | None = None  # of layers with a theta of their own
    local_sin: Float[Array, "positions pairs"] | None = None

    def on_host(self, at: Int[np.ndarray, "*shape"]) -> tuple[np.ndarray, np.ndarray]:
        """Take the cosines and sines of some positions, of layers without a theta of their own."""
        return np.asarray(self.cos)[at], np.asarray(self.sin)[at]


class Params(NamedTuple):
    embedding: Float[Array, "vocab dim"] | Embedding
    layers: Sequence[Layer]
    norm: Float[Array, " dim"]
    head: Matrix  # [vocab, dim]; the embedding's own arrays if the two are tied
    rope: Rope
    norm_bias: Float[Array, " dim"] | None = None  # of a LayerNorm

    @property
    def tied(self) -> bool:
        return jax.tree.leaves(self.head)[0] is jax.tree.leaves(self.embedding)[0]


def rope_table(config: Config, positions: int) -> Rope:
    """Compute cos and sin of the first `positions` positions, float32."""
    tables = _angles(config.rotation(), positions)
    if config.local_theta is not None:
        tables += _angles(Rotation(frequencies(config.rotary_features, theta=config.local_theta)), positions)
    return Rope(*map(jax.device_put, tables))


def _angles(rotation: Rotation, positions: int) -> tuple[np.ndarray, np.ndarray]:
    turns, length = rotation
    cos, sin = np.empty((2, positions, len(turns)), np.float32)
    for start in range(0, positions, 4096):  # in parts: the whole in float64 would take several times the memory
        angles = np.arange(start, min(start + 4096, positions))[:, None] * turns
        cos[start : start + 4096], sin[start : start + 4096] = length * np.cos(angles), length * np.sin(angles)
    return cos, sin


def load_params(
    checkpoint: Checkpoint,
    *,
    dtype: np.dtype,
    positions: int,
    loaded: tuple[Checkpoint, Params] | None = None,
    checked: bool = True,
    readers: int = 1,
    progress: Progress = no_progress,
) -> Params:
    """Read every tensor of `checkpoint` onto the default device: codes as codes, all others as `dtype`.

    `positions` is the number of positions in the RoPE table. `loaded` is another checkpoint of the same shapes with its
    parameters: arrays of tensors that both checkpoints have are shared. `checked` says that `check_weights` was called.
    Otherwise each part is checked as it is read, with the same errors. So many `readers`, which are threads, read an
    array each at a time. The arrays of a GPU may still be on their way.
    """
    done, total, lock = 0.0, sum(tensor.bytes for tensor in checkpoint.tensors.values()), Lock()
    shared = _shared(checkpoint, *loaded) if loaded else {}
    by_device = is_worth_compiling(checkpoint.tensors.values())

    def note(name: str, tensor: Tensor, part: Any) -> None:
        """Check a part that is read, unless it was checked before, and report it."""
        nonlocal done
        rows = len(jax.tree.leaves(part)[0])
        if not checked:
            _check_part(name, tensor, part, checkpoint.path)
        with lock:
            done += tensor.bytes * rows / tensor.shape[0]
            progress("reading weights", done / total)

    def place(*names: str, apart: bool = False) -> Array | QuantizedMatrix | Stacked:
        if names in shared:
            return shared[names]
        left = iter(names)
        tensors = [checkpoint.tensors[name] for name in names]
        return _each_or_all(lambda run: place_run([next(left) for _ in run], run), tensors, apart=apart)

    def place_run(names: Sequence[str], tensors: list[Tensor]) -> Array | QuantizedMatrix:
        tensors = _joined(tensors)
        if by_device and can_quantize_whole(tensors):
            found = quantized_whole(tensors, names, note)
            if found.exact:
                return as_read_here(found.matrix)
        shapes = _shapes(tensors, dtype)
        buffers = jax.tree.map(lambda shape: aligned_zeros(shape.shape, shape.dtype), shapes)
        start = 0
        for name, tensor in zip(names, tensors, strict=True):
            for part in _stored_parts(tensor, shapes, partial(note, name, tensor), by_device):
                rows = len(jax.tree.leaves(part)[0])
                for buffer, values in zip(jax.tree.leaves(buffers), jax.tree.leaves(part), strict=True):
                    buffer[start : start + rows] = values
                start += rows
                if readers == 1:
                    checkpoint.release()
        placed = as_read_here(jax.device_put(buffers, may_alias=True))
        # A reader waits for its array, so that no more than one array of each is in main memory.
        return placed if readers == 1 else jax.block_until_ready(placed)

    rope = rope_table(checkpoint.config, positions)
    if readers == 1:
        return _assemble(checkpoint.config, place, rope)
    with ThreadPoolExecutor(readers) as pool:
        arrays: dict[tuple[str, ...], Future] = {}
        for names in jax.tree.leaves(array_names(checkpoint.config, rope)):
            if isinstance(names, Names) and names.names not in arrays:
                arrays[names.names] = pool.submit(place, *names.names, apart=names.apart)
        try:
            return _assemble(checkpoint.config, lambda *names, apart=False: arrays[names].result(), rope)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            checkpoint.release()


@dataclass(frozen=True)
class Names:
    """The names of the tensors that one array is made of: a leaf that stands in the array's place."""

    names: tuple[str, ...]
    apart: bool = False  # whether they may be an array each


def array_names(config: Config, rope: Rope) -> Params:
    """Build the tree of `load_params` with `Names` in the places of arrays, and `rope` as given."""
    return _assemble(config, lambda *names, apart=False: Names(names, apart), rope)


def _shared(
    checkpoint: Checkpoint, other: Checkpoint, params: Params
) -> dict[tuple[str, ...], Array | QuantizedMatrix | Stacked]:
    """Find the arrays of `params`, read from `other`, whose tensors `checkpoint` has too; by the tensors' names."""
    found = {}

    def take(place: Any, held: Any) -> None:
        if isinstance(place, Names) and all(checkpoint.tensors[name] == other.tensors[name] for name in place.names):
            found[place.names] = held.matrix if isinstance(held, Embedding) else held

    jax.tree.map(take, array_names(other.config, params.rope), params)
    return found


def _stored_parts(tensor: Tensor, shapes: Any, note: Callable[[Any], None], by_device: bool) -> Iterator[Any]:
    """Yield consecutive rows of a tensor in the form of the arrays of `shapes`; `note` gets each part as it is read."""
    codes = tensor.codes
    if not isinstance(shapes, QuantizedMatrix):
        for part in in_parts(tensor.read()):
            note(part)
            yield part
    elif codes and codes.source and not codes.source.codes:
        yield from quantized_parts(codes, shapes, note, by_device)
    else:
        assert codes
        for part in codes.parts():
            note(part)
            yield shapes.stored(part, codes)


def _each_or_all(placed: Callable[[list[Tensor]], Any], tensors: list[Tensor], *, apart: bool) -> Any:
    """Make one array of tensors; on a GPU with kernels, one of each form where they may lie `apart`."""
    runs = in_runs_of_a_form(tensors) if apart else [tensors]
    return placed(runs[0]) if len(runs) == 1 else Stacked(tuple(placed(run) for run in runs))


def _joined(tensors: list[Tensor]) -> list[Tensor]:
    """Give tensors that will be stacked one form: codes that can run, else none."""
    cols = math.prod(tensors[0].shape[1:])
    codes = in_common_form([tensor.codes for tensor in tensors])
    usable = codes if codes and can_multiply(codes[0], cols) else [None] * len(tensors)
    return [tensor._replace(codes=one) for tensor, one in zip(tensors, usable, strict=True)]


def _shapes(tensors: Sequence[Tensor], dtype: np.dtype) -> Any:
    """Return the shapes and dtypes of the arrays for tensors from `_joined`."""
    rows, row = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1:]
    if codes := tensors[0].codes:
        return CLASS_OF_FORM[codes.form].shapes(rows, math.prod(row), codes)
    return jax.ShapeDtypeStruct((rows, *row), dtype)


def check_weights(checkpoint: Checkpoint, *, progress: Progress = no_progress) -> None:
    """Raise `CheckpointError` for a tensor that holds NaN or infinity."""
    done, total = 0, sum(tensor.bytes for tensor in checkpoint.tensors.values())
    for name, tensor in checkpoint.tensors.items():
        for part in tensor.codes.parts() if tensor.codes else in_parts(tensor.read()):
            _check_part(name, tensor, part, checkpoint.path)
            checkpoint.release()
            done += tensor.bytes * len(jax.tree.leaves(part)[0]) / tensor.shape[0]
            progress("checking weights", done / total)


def _check_part(name: str, tensor: Tensor, part: Any, path: str) -> None:
    """Check consecutive rows of a tensor; of codes, their scales."""
    if isinstance(part, np.ndarray):
        check_finite(name, part, path=path)
        return
    assert tensor.codes
    if tensor.codes.form == "fp8" and (part.codes & 0x7F == 0x7F).any():
        raise refused(path, f"{name} holds a NaN")
    if tensor.codes.form == "mxfp4":
        if (part.scales == 0xFF).any():
            raise refused(path, f"{name} has a scale that is NaN")
    else:
        check_finite(f"{name}'s scales", part.scales, path=path)
    if isinstance(part, Shifted):
        check_finite(f"{name}'s minima", part.minima, path=path)


def params_of(config: Config, tensors: Mapping[str, Array], rope: Rope) -> Params:
    """Build the tree from named arrays, as in training: traceable, and so differentiable."""
    return _assemble(config, lambda *names, apart=False: jnp.concatenate([tensors[name] for name in names]), rope)


def abstract_params(
    config: Config, *, dtype: np.dtype, positions: int, tensors: Mapping[str, Tensor] | None = None
) -> Params:
    """Return the shapes and dtypes that `load_params` will give, for compilation.

    `tensors` are those of the checkpoint; without them, no tensor is quantized.
    """
    plain = {name: Tensor(shape, dtype, lambda: np.empty(0)) for name, shape in tensor_shapes(config).items()}
    known = tensors or plain
    table = jax.ShapeDtypeStruct((positions, config.rotary_features // 2), np.float32)

    def place(*names: str, apart: bool = False) -> Any:
        def placed(some: list[Tensor]) -> Any:
            return as_read_here(_shapes(_joined(some), dtype))

        return _each_or_all(placed, [known[name] for name in names], apart=apart)

    tables = (table,) * (2 if config.local_theta is None else 4)
    return _assemble(config, place, Rope(*tables))  # type: ignore


def _assemble(config: Config, place: Callable[..., Any], rope: Rope) -> Params:
    """Build the tree of weights; `place` makes one array of the named tensors, stacked along their rows.

    q, k and v may lie `apart` where their codes differ: only their kernel reads several matrices.
    """

    def placed(stack: Stack) -> Any:
        array = place(*(weight.name for weight in stack.weights), apart=stack.field == "qkv")
        if stack.weights[0].role not in (Role.MATRIX, Role.EXPERT):
            return array
        return Linear(array, place(*(bias.name for bias in stack.biases)) if stack.biases else None)

    by_block: dict[tuple[int | None, int | None], dict[str, Any]] = {}  # by layer and expert, then by field
    for stack in stacks(config):
        fields = by_block.setdefault((stack.layer, stack.expert), {})
        fields[stack.field] = placed(stack)
        if stack.biases and stack.weights[0].role is Role.NORM:
            fields[f"{stack.field}_bias"] = place(*(bias.name for bias in stack.biases))
        if stack.biases and stack.weights[0].role is Role.ROUTER:
            fields["router_bias"] = place(stack.biases[0].name)

    def feed_forward(fields: dict[str, Any]) -> FeedForward:
        return FeedForward(fields["gate_up"], fields["down"])

    def layer(i: int) -> Layer:
        fields = by_block[i, None]
        second = "attention_norm" if config.parallel_residual else "ffn_norm"
        return Layer(
            attention_norm=fields.get("attention_norm"),
            qkv=fields["qkv"],
            q_norm=fields.get("q_norm"),
            k_norm=fields.get("k_norm"),
            o=fields["o"],
            ffn_norm=fields.get(second),
            ffn=Experts(
                fields["router"],
                [feed_forward(by_block[i, e]) for e in range(config.experts)],
                Shared(fields["shared_score"], fields["shared_gate_up"], fields["shared_down"])
                if config.shared_ffn
                else None,
                fields.get("router_bias"),
            )
            if config.experts
            else feed_forward(fields),
            attention_post_norm=fields.get("attention_post_norm"),
            ffn_post_norm=fields.get("ffn_post_norm"),
            attention_norm_bias=fields.get("attention_norm_bias"),
            ffn_norm_bias=fields.get(f"{second}_bias"),
            sinks=fields.get("sinks"),
        )

    outside = by_block[None, None]
    table, norm = outside["embedding"], outside["norm"]
    return Params(
        embedding=Embedding(table, config.dim, norm.dtype) if isinstance(table, QuantizedMatrix) else table,
        layers=[layer(i) for i in range(config.layers)],
        norm=norm,
        head=table if config.tied else outside["head"],
        rope=rope,
        norm_bias=outside.get("norm_bias"),
    )


def weight_bytes(params: Params) -> int:
    """Count the bytes of the weights, each stored once; also of `abstract_params`."""
    head = None if params.tied else params.head
    leaves = jax.tree.leaves((params.embedding, params.layers, params.norm, params.norm_bias, head))
    each = {id(leaf): leaf for leaf in leaves}.values()  # a parallel block has one norm in two places
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in each)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate an array of zeros in memory of its own, in huge pages except for an incomplete last one."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE
    if whole := size // HUGE_PAGE * HUGE_PAGE:
        use_huge_pages(memory, start, whole)
    return np.frombuffer(memory, dtype, int(np.prod(shape)), start).reshape(shape)
