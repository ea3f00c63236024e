"""Loads the tensors of a checkpoint onto the device, as the tree of weights `Params`."""

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from llamaspec.model.checkpoints.checkpoint import Blocks, Checkpoint, Tensor, no_pair
from llamaspec.model.checkpoints.checks import check_finite
from llamaspec.model.checkpoints.codes import in_common_form
from llamaspec.model.device import Device, default_device
from llamaspec.model.system import use_huge_pages
from llamaspec.model.tensors import tensor_shapes
from llamaspec.model.weights.adapted import Adapted
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.embedding import Embedding
from llamaspec.model.weights.forms.table import CLASS_OF_FORM
from llamaspec.model.weights.gguf_blocks import blocks_of, matrix_of_blocks
from llamaspec.model.weights.gpu_codes import Stacked, in_runs_of_a_form, to_kernel_layout
from llamaspec.model.weights.groups import can_multiply
from llamaspec.model.weights.params import Names, Params, Rope, array_names, assemble, rope_table
from llamaspec.model.weights.quantizing import (
    can_quantize_whole,
    in_parts,
    is_worth_compiling,
    quantized_parts,
    quantized_whole,
)
from llamaspec.reference.config import Config

Progress = Callable[[str, float], object]  # called with the name of a stage, and the share of the stage that is done


def no_progress(stage: str, share: float) -> None:
    """Report nothing: the default `Progress`."""


HUGE_PAGE = 2 << 20  # bytes; JAX on a CPU reads weights aligned to huge pages faster, and without a copy


def load_params(
    checkpoint: Checkpoint,
    *,
    dtype: np.dtype,
    positions: int,
    loaded: tuple[Checkpoint, Params] | None = None,
    checked: bool = True,
    readers: int = 1,
    device: Device | None = None,
    progress: Progress = no_progress,
) -> Params:
    """Load all tensors of `checkpoint` onto the default device: quantized tensors as codes, all others in `dtype`.

    `positions` is the number of positions in the RoPE table. `loaded` is a pair: another checkpoint with the same
    shapes, and its parameters. If a tensor is equal in both checkpoints, the result shares its array and does not read
    it again.

    `checked=True` means that the caller has called `check_weights`; otherwise we check each part of a tensor after
    reading it, and raise the same errors. `readers` is the number of threads; each thread loads one array at a time.
    Copies to a GPU may still be running when `load_params` returns. `device` describes the default device; None: ask
    JAX.
    """
    device = device or default_device()
    done, total, lock = 0.0, sum(tensor.bytes for tensor in checkpoint.tensors.values()), Lock()
    shared = _shared(checkpoint, *loaded) if loaded else {}
    by_device = is_worth_compiling(tensor.stored for tensor in checkpoint.tensors.values())

    def note(name: str, tensor: Tensor, part: Any) -> None:
        """Report progress for a part of a tensor that was just read; also check the part if `checked` is False."""
        nonlocal done
        rows = len(jax.tree.leaves(part)[0])
        if not checked:
            _check_part(name, tensor, part, checkpoint.path)
        with lock:
            done += tensor.bytes * rows / tensor.shape[0]
            progress("reading weights", done / total)

    def place(*names: str, apart: bool = False) -> Array | QuantizedMatrix | Stacked | Adapted:
        if names in shared:
            return shared[names]
        remaining = iter(names)
        tensors = [checkpoint.tensors[name] for name in names]
        matrix = _each_or_all(
            lambda run: place_run([next(remaining) for _ in run], run),
            _without_applied(tensors),
            apart=apart and device.has_kernels,
        )
        return _with_applied(matrix, tensors, jax.device_put)

    def place_run(names: Sequence[str], tensors: list[Tensor]) -> Array | QuantizedMatrix:
        tensors = _joined(tensors)
        if by_device and device.platform != "cpu" and can_quantize_whole(tensors):
            result = quantized_whole(tensors, names, note)
            if result.exact:
                return to_kernel_layout(result.matrix, device)
        blocks = blocks_of(tensors) if device.platform != "cpu" else None
        shapes = _shape_of_blocks(tensors, blocks) if blocks else _shapes(tensors, dtype)
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
        uploaded = jax.device_put(buffers, may_alias=True)
        if blocks:
            placed = matrix_of_blocks(uploaded, type=blocks[0].type, for_kernels=device.has_kernels)
        else:
            placed = to_kernel_layout(uploaded, device)
        # Each of several readers waits for its copy to the device, so it keeps only one array in main memory.
        return placed if readers == 1 else jax.block_until_ready(placed)

    rope = rope_table(checkpoint.config, positions)
    if readers == 1:
        return assemble(checkpoint.config, place, rope)
    with ThreadPoolExecutor(readers) as pool:
        leaves = jax.tree.leaves(array_names(checkpoint.config, rope))
        places = {leaf.names: leaf.apart for leaf in leaves if isinstance(leaf, Names)}

        def size(names: tuple[str, ...]) -> int:
            return sum(checkpoint.tensors[name].bytes for name in names)

        # We load the largest arrays first. They need most memory for a moment, while the device still holds little, and
        # no reader is still busy with a large array when all others have finished.
        arrays: dict[tuple[str, ...], Future] = {
            names: pool.submit(place, *names, apart=places[names]) for names in sorted(places, key=size, reverse=True)
        }
        try:
            return assemble(checkpoint.config, lambda *names, apart=False: arrays[names].result(), rope)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            checkpoint.release()


def abstract_params(
    config: Config,
    *,
    dtype: np.dtype,
    positions: int,
    tensors: Mapping[str, Tensor] | None = None,
    device: Device | None = None,
) -> Params:
    """Return the shapes and dtypes of the arrays that `load_params` will return, to compile programs before loading.

    `tensors` are the checkpoint's tensors; None: no tensor is quantized. `device` describes the device that will hold
    the arrays; None: ask JAX for the default device.
    """
    device = device or default_device()
    plain = {name: Tensor(shape, dtype, lambda: np.empty(0)) for name, shape in tensor_shapes(config).items()}
    known = tensors or plain
    table = jax.ShapeDtypeStruct((positions, config.rotary_features // 2), np.float32)

    def place(*names: str, apart: bool = False) -> Any:
        def placed(some: list[Tensor]) -> Any:
            return to_kernel_layout(_shapes(_joined(some), dtype), device)

        tensors = [known[name] for name in names]
        matrix = _each_or_all(placed, _without_applied(tensors), apart=apart and device.has_kernels)
        return _with_applied(matrix, tensors, lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype))

    tables = (table,) * (2 if config.local_theta is None else 4)
    return assemble(config, place, Rope(*tables))  # type: ignore  # shapes in the place of arrays


def _shared(
    checkpoint: Checkpoint, loaded: Checkpoint, params: Params
) -> dict[tuple[str, ...], Array | QuantizedMatrix | Stacked]:
    """Map the names of tensors to their array in `params`, for tensors that are equal in `loaded` and `checkpoint`.

    An array may stack several tensors; then all of them must be equal. `params` are the parameters of `loaded`.
    """
    arrays = {}

    def take(place: Any, array: Any) -> None:
        if isinstance(place, Names) and all(checkpoint.tensors[name] == loaded.tensors[name] for name in place.names):
            arrays[place.names] = array.matrix if isinstance(array, Embedding) else array

    jax.tree.map(take, array_names(loaded.config, params.rope), params)
    return arrays


def _stored_parts(tensor: Tensor, shapes: Any, note: Callable[[Any], None], by_device: bool) -> Iterator[Any]:
    """Yield the rows of a tensor, some at a time, in the layout of `shapes`; call `note` with each part read."""
    codes = tensor.codes
    if codes and codes.blocks and not isinstance(shapes, QuantizedMatrix):
        for packed in codes.blocks.rows():
            note(packed)
            yield packed
    elif not isinstance(shapes, QuantizedMatrix):
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
    """Stack tensors into one array, which `placed` makes.

    With `apart`, return a `Stacked` instead if the tensors have several forms of codes. A `Stacked` has an array for
    each run of tensors with the same form.
    """
    runs = in_runs_of_a_form(tensors) if apart else [tensors]
    return placed(runs[0]) if len(runs) == 1 else Stacked(tuple(placed(run) for run in runs))


def _without_applied(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors without the adapters that products apply. A merged adapter stays part of its tensor."""
    return [tensor.stored if tensor.applies else tensor for tensor in tensors]


def _with_applied(matrix: Any, tensors: list[Tensor], put: Callable[[np.ndarray], Any]) -> Any:
    """Return the matrix of `tensors` with the adapters that products apply, if there are any.

    `put` copies an array to the device.
    """
    if not any(tensor.applies for tensor in tensors):
        return matrix
    pairs = [tensor.applies.pair if tensor.applies else no_pair(*tensor.shape) for tensor in tensors]
    return Adapted(matrix, tuple(put(pair.a) for pair in pairs), tuple(put(pair.b) for pair in pairs))


def _joined(tensors: list[Tensor]) -> list[Tensor]:
    """Convert the codes of several tensors to one form, so that we can stack the tensors.

    If products can read no form that fits all tensors, we remove the codes, and later read the tensors as floats.
    """
    cols = math.prod(tensors[0].shape[1:])
    codes = in_common_form([tensor.codes for tensor in tensors])
    usable = codes if codes and can_multiply(codes[0], cols) else [None] * len(tensors)
    return [tensor._replace(codes=form) for tensor, form in zip(tensors, usable, strict=True)]


def _shapes(tensors: Sequence[Tensor], dtype: np.dtype) -> Any:
    """Return the shapes and dtypes of the arrays for tensors from `_joined`."""
    rows, row = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1:]
    if codes := tensors[0].codes:
        return CLASS_OF_FORM[codes.form].shapes(rows, math.prod(row), codes)
    return jax.ShapeDtypeStruct((rows, *row), dtype)


def _shape_of_blocks(tensors: Sequence[Tensor], blocks: Sequence[Blocks]) -> Any:
    """Return the shape of the array for the file's bytes of all tensors."""
    return jax.ShapeDtypeStruct((sum(tensor.shape[0] for tensor in tensors), blocks[0].row_bytes), np.uint8)


def check_weights(checkpoint: Checkpoint, *, progress: Progress = no_progress) -> None:
    """Read all tensors, and raise `CheckpointError` if a tensor contains NaN or infinity."""
    done, total = 0, sum(tensor.bytes for tensor in checkpoint.tensors.values())
    for name, adapted_tensor in checkpoint.tensors.items():
        tensor = adapted_tensor.stored  # the adapter was checked when it was read
        for part in _parts_to_check(tensor):
            _check_part(name, tensor, part, checkpoint.path)
            checkpoint.release()
            done += tensor.bytes * len(jax.tree.leaves(part)[0]) / tensor.shape[0]
            progress("checking weights", done / total)


def _parts_to_check(tensor: Tensor) -> Iterator[Any]:
    """Yield the rows of a tensor, some at a time, in the form that we can check fastest."""
    codes = tensor.codes
    if not codes:
        return in_parts(tensor.read())
    return codes.blocks.rows() if codes.blocks else codes.parts()


def _check_part(name: str, tensor: Tensor, part: Any, path: str) -> None:
    """Raise CheckpointError if a weight, scale or minimum in `part` (some rows of the tensor `name`) is not finite.

    `part` has floats, codes, or blocks (as bytes). If a block has a scale that is not finite, we unpack the whole
    matrix to say which scale.
    """
    codes = tensor.codes
    if isinstance(part, np.ndarray) and part.dtype == np.uint8:
        assert codes and codes.blocks
        for unpacked in () if codes.blocks.are_finite(part) else codes.parts():
            _check_part(name, tensor, unpacked, path)
        return
    if isinstance(part, np.ndarray):
        check_finite(name, part, path=path)
        return
    assert codes
    CLASS_OF_FORM[codes.form].check(part, name, path)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate an array of zeros that starts at the beginning of a huge page.

    The memory consists of huge pages, except an incomplete last page.
    """
    size = int(np.prod(shape)) * dtype.itemsize
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE
    if huge_bytes := size // HUGE_PAGE * HUGE_PAGE:
        use_huge_pages(memory, start, huge_bytes)
    return np.frombuffer(memory, dtype, int(np.prod(shape)), start).reshape(shape)
