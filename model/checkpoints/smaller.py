"""Smaller models that are parts of a checkpoint: some of its layers."""

from collections.abc import Sequence
from dataclasses import replace

from llamaspec.model.checkpoints.checkpoint import Checkpoint, refused
from llamaspec.model.tensors import weights


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
