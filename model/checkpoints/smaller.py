"""Smaller models that are parts of a checkpoint: some of its layers, attention heads or feed-forward channels."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from llamaspec.model.checkpoints.checkpoint import Checkpoint, Tensor, refused
from llamaspec.model.tensors import Weight, weights
from llamaspec.reference.quantizers.pruning import channels

Place = tuple[int | None, int | None]  # a layer, and an expert or None


def with_layers(checkpoint: Checkpoint, layers: Sequence[int]) -> Checkpoint:
    """Return a model with only the given layers of `checkpoint`, in the given order. Embedding, norm and head stay.

    Raises CheckpointError for a layer that the model does not have.
    """
    config = checkpoint.config
    if wrong := [layer for layer in layers if not 0 <= layer < config.layers]:
        raise refused(checkpoint.path, f"has no layer {wrong[0]}: its layers are 0 to {config.layers - 1}")
    by_layer = {
        name: tuple(values[layer] for layer in layers)
        for name in ("windows", "rotary_layers")
        if (values := getattr(config, name)) is not None
    }
    smaller = replace(config, layers=len(layers), **by_layer)
    names = {(w.layer, w.part, w.role, w.expert, w.head): w.name for w in weights(config)}
    tensors = {}
    for weight in weights(smaller):
        source = None if weight.layer is None else layers[weight.layer]
        tensors[weight.name] = checkpoint.tensors[names[source, weight.part, weight.role, weight.expert, weight.head]]
    return replace(checkpoint, config=smaller, tensors=tensors)


def first_layers(checkpoint: Checkpoint, count: int) -> Checkpoint:
    """Return a model with only the first `count` layers of `checkpoint`. Raises CheckpointError if it has fewer."""
    if count > checkpoint.config.layers:
        raise refused(checkpoint.path, f"has only {checkpoint.config.layers} layers, not {count}")
    return with_layers(checkpoint, range(count))


def without_weakest(checkpoint: Checkpoint, *, heads: float = 1.0, ffn: float = 1.0) -> Checkpoint:
    """Return a model with only a share of the attention heads and of the feed-forward channels of each layer.

    A channel is a row of gate and of up, and a column of down. A key-value head stays or goes with its query heads:
    their rows of q, k and v, and their columns of o. We keep those with the largest norm, at least one of each, in
    their order. So the smaller model computes what `checkpoint` computes with zeros in the other columns of o and down.

    Raises CheckpointError if a norm of q and k extends over several heads, and for weights that are not finite.
    """
    config = checkpoint.config
    if heads < 1 and (config.wide_qk_norm or config.head_qk_norm or config.sinks):
        raise refused(checkpoint.path, "has norms or sinks of several heads, so no head can be removed")
    kv_heads, width = (max(1, round(share * n)) for share, n in ((heads, config.kv_heads), (ffn, config.ffn)))
    group = config.heads // config.kv_heads
    smaller = replace(config, heads=kv_heads * group, kv_heads=kv_heads, ffn=width)
    chosen_groups = _strongest(checkpoint, "kv_heads", config.kv_heads, kv_heads)
    chosen_channels = _strongest(checkpoint, "ffn", config.ffn, width)

    def part(weight: Weight) -> Tensor:
        groups, at = chosen_groups.get((weight.layer, None)), (weight.layer, weight.expert)
        rows = {
            "heads": _rows(groups, group * config.head_dim),
            "kv_heads": _rows(groups, config.head_dim),
            "ffn": chosen_channels.get(at),
        }
        return _part(checkpoint.tensors[weight.name], [rows.get(axis) for axis in weight.axes])

    return replace(checkpoint, config=smaller, tensors={w.name: part(w) for w in weights(config)})


def _strongest(checkpoint: Checkpoint, axis: str, count: int, keep: int) -> Mapping[Place, Int[np.ndarray, " kept"]]:
    """Choose `keep` of the `count` parts of an axis, by the norm of all weights that belong to a part.

    Along the axis "kv_heads", these are also the weights along "heads". Returns an empty mapping if all parts stay.
    """
    joined: dict[Place, list[Float[np.ndarray, "parts weights"]]] = {}
    axes = ("heads", "kv_heads") if axis == "kv_heads" else (axis,)
    for weight in weights(checkpoint.config) if keep < count else ():
        for i, name in enumerate(weight.axes):
            if name in axes:
                values = np.moveaxis(checkpoint.tensors[weight.name].read().astype(np.float64), i, 0)
                joined.setdefault((weight.layer, weight.expert), []).append(values.reshape(count, -1))
    return {
        place: np.flatnonzero(channels(np.concatenate(parts, axis=1), keep=keep)[:, 0])
        for place, parts in joined.items()
    }


def _rows(parts: Int[np.ndarray, " kept"] | None, size: int) -> Int[np.ndarray, " rows"] | None:
    """Return the rows of some parts, each of `size` rows; None stands for all parts.

    >>> _rows(np.array([0, 2]), 2).tolist()
    [0, 1, 4, 5]
    """
    return None if parts is None else (parts[:, None] * size + np.arange(size)).reshape(-1)


def _part(tensor: Tensor, chosen: Sequence[Int[np.ndarray, " kept"] | None]) -> Tensor:
    """Return the part of a tensor with the chosen indices of each axis; None chooses all. Codes become floats."""
    if all(indices is None for indices in chosen):
        return tensor
    shape = tuple(size if indices is None else len(indices) for size, indices in zip(tensor.shape, chosen, strict=True))

    def read() -> np.ndarray:
        values = tensor.read()
        for axis, indices in enumerate(chosen):
            values = values if indices is None else np.take(values, indices, axis=axis)
        return values

    return Tensor(shape, tensor.dtype, read)
