"""Primitives of JAX in NumPy: those that only move elements, and arithmetic with concrete numbers.

XLA would compile each primitive for each shape, which takes far longer than the arithmetic.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Parameters = dict[str, Any]  # of a primitive
Arrays = Sequence[np.ndarray]


def _broadcast(x: np.ndarray, parameters: Parameters) -> np.ndarray:
    shape, places = parameters["shape"], parameters["broadcast_dimensions"]
    aligned = [1] * len(shape)
    for place, length in zip(places, x.shape, strict=True):
        aligned[place] = length
    return np.broadcast_to(x.reshape(aligned), shape)


def _slice(x: np.ndarray, parameters: Parameters) -> np.ndarray:
    strides = parameters["strides"] or [1] * x.ndim
    limits = zip(parameters["start_indices"], parameters["limit_indices"], strides, strict=True)
    return x[tuple(slice(start, limit, stride) for start, limit, stride in limits)]


def _window(x: np.ndarray, starts: Arrays, sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of a window that JAX moves to lie within x."""
    places = zip(starts, sizes, x.shape, strict=True)
    clamped = [(min(max(int(start), 0), length - size), size) for start, size, length in places]
    return tuple(slice(start, start + size) for start, size in clamped)


def _dynamic_slice(x: np.ndarray, *starts: np.ndarray, slice_sizes: Sequence[int], **_: Any) -> np.ndarray:
    return x[_window(x, starts, slice_sizes)]


def _dynamic_update(x: np.ndarray, update: np.ndarray, *starts: np.ndarray, **_: Any) -> np.ndarray:
    changed = x.copy()
    changed[_window(x, starts, update.shape)] = update
    return changed


def _pad(x: np.ndarray, value: np.ndarray, *, padding_config: Sequence[tuple[int, int, int]]) -> np.ndarray:
    lengths = [
        max(low, 0) + length + max(length - 1, 0) * inner + max(high, 0)
        for length, (low, high, inner) in zip(x.shape, padding_config, strict=True)
    ]
    padded = np.full(lengths, value, x.dtype)
    places = zip(x.shape, padding_config, strict=True)
    inside = (
        slice(max(low, 0), max(low, 0) + (length - 1) * (inner + 1) + 1 if length else 0, inner + 1)
        for length, (low, _, inner) in places
    )
    padded[tuple(inside)] = x
    cut = (
        slice(max(-low, 0), length - max(-high, 0))
        for length, (low, high, _) in zip(lengths, padding_config, strict=True)
    )
    return padded[tuple(cut)]


def _choose(which: np.ndarray, *cases: np.ndarray, **_: Any) -> np.ndarray:
    chosen = cases[0]
    for number, case in enumerate(cases[1:], 1):
        chosen = np.where(np.asarray(which) == number, case, chosen)
    return chosen


def _split(x: np.ndarray, parameters: Parameters) -> list[np.ndarray]:
    return np.split(x, np.cumsum(parameters["sizes"])[:-1], parameters["axis"])


# By primitive: the operands whose elements move, and a function of all operands and the parameters.
MOVES: dict[str, tuple[slice, Callable[[Arrays, Parameters], Any]]] = {
    "broadcast_in_dim": (slice(0, 1), lambda arrays, parameters: _broadcast(arrays[0], parameters)),
    "reshape": (slice(0, 1), lambda arrays, parameters: arrays[0].reshape(parameters["new_sizes"])),
    "transpose": (slice(0, 1), lambda arrays, parameters: arrays[0].transpose(parameters["permutation"])),
    "squeeze": (slice(0, 1), lambda arrays, parameters: np.squeeze(arrays[0], tuple(parameters["dimensions"]))),
    "rev": (slice(0, 1), lambda arrays, parameters: np.flip(arrays[0], parameters["dimensions"])),
    "tile": (slice(0, 1), lambda arrays, parameters: np.tile(arrays[0], parameters["reps"])),
    "slice": (slice(0, 1), lambda arrays, parameters: _slice(arrays[0], parameters)),
    "split": (slice(0, 1), lambda arrays, parameters: _split(arrays[0], parameters)),
    "dynamic_slice": (slice(0, 1), lambda arrays, parameters: _dynamic_slice(*arrays, **parameters)),
    "dynamic_update_slice": (slice(0, 2), lambda arrays, parameters: _dynamic_update(*arrays, **parameters)),
    "pad": (slice(0, 2), lambda arrays, parameters: _pad(*arrays, **parameters)),
    "stack": (slice(None), lambda arrays, parameters: np.stack(arrays, parameters["axis"])),
    "concatenate": (slice(None), lambda arrays, parameters: np.concatenate(arrays, parameters["dimension"])),
    "select_n": (slice(1, None), lambda arrays, parameters: _choose(*arrays)),
}


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divide as XLA does: integers are rounded towards 0."""
    return a / b if a.dtype.kind in "fV" else (a - np.fmod(a, b)) // b


def _iota(parameters: Parameters) -> np.ndarray:
    shape, dimension = parameters["shape"], parameters["dimension"]
    counted = np.arange(shape[dimension], dtype=parameters["dtype"])
    return np.broadcast_to(counted.reshape([-1 if n == dimension else 1 for n in range(len(shape))]), shape)


UFUNCS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "rem": np.fmod,
    "neg": np.negative,
    "abs": np.absolute,
    "sign": np.sign,
    "square": np.square,
    "max": np.maximum,
    "min": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "is_finite": np.isfinite,
}
BITS: dict[str, np.ufunc] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}
REDUCTIONS: dict[str, np.ufunc] = {
    "reduce_sum": np.add,
    "reduce_max": np.maximum,
    "reduce_min": np.minimum,
    "reduce_and": np.logical_and,
    "reduce_or": np.logical_or,
}


def arithmetic(name: str, arrays: Arrays, parameters: Parameters) -> np.ndarray | None:
    """Compute a primitive with concrete numbers. Return None for a primitive that we leave to JAX."""
    if name in UFUNCS or name in BITS:
        return np.asarray((UFUNCS.get(name) or BITS[name])(*arrays))
    if name in REDUCTIONS:
        x = arrays[0]
        axes = tuple(parameters["axes"])
        if math.prod(x.shape) and REDUCTIONS[name] is not np.add:
            return np.asarray(REDUCTIONS[name].reduce(x, axis=axes))
        return np.asarray(np.sum(x, axis=axes, dtype=x.dtype)) if REDUCTIONS[name] is np.add else None
    if name == "convert_element_type":
        return arrays[0].astype(parameters["new_dtype"])
    if name == "iota":
        return _iota(parameters)
    if name == "clamp":
        return np.asarray(np.clip(arrays[1], arrays[0], arrays[2]))
    return None
