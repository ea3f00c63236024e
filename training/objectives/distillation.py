"""Distillation: a student learns a teacher's distribution over the next token, not only the actual next token.

`reference.losses.distillation` defines the loss, T^2 KL(teacher || student) at temperature T, at each counted position.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from llamaspec.model.checkpoints.checkpoint import Checkpoint, refused
from llamaspec.model.ops.table import Ops
from llamaspec.model.tensors import weights as weights_of
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config
from llamaspec.training.data import Example
from llamaspec.training.objectives.objective import Objective
from llamaspec.training.objectives.supervised import packed_logits, packed_work
from llamaspec.training.steps import Sums, Tensors


def distillation(
    params: Callable[[Tensors, Any], Params],
    *,
    config: Config,
    teacher_config: Config,
    ops: Ops,
    dtype: np.dtype,
    rows: int,
    length: int,
    temperature: float,
) -> Objective:
    """Make the objective of distillation on packed documents.

    The frozen arrays are a pair: the student's frozen arrays, and the teacher's weights. The objective reports the loss
    per counted token, and the share of counted tokens for which student and teacher have the same likeliest id.
    """

    def loss(
        tensors: Tensors,
        frozen: tuple[Any, Params],
        ids: Int[Array, "batch seq"],
        at: Int[Array, "batch seq"],
        weights: Float[Array, "batch seq"],
    ) -> tuple[Array, Sums]:
        student_frozen, teacher = frozen
        logits = packed_logits(params(tensors, student_frozen), ids, at, config=config, ops=ops, dtype=dtype)
        taught = packed_logits(teacher, ids, at, config=teacher_config, ops=ops, dtype=dtype)
        student_log, teacher_log = (jax.nn.log_softmax(a / temperature, axis=-1) for a in (logits, taught))
        divergence = jnp.sum(jnp.exp(teacher_log) * (teacher_log - student_log), axis=-1)
        total = temperature**2 * jnp.sum(divergence * weights[:, 1:])
        agrees = jnp.argmax(logits, axis=-1) == jnp.argmax(taught, axis=-1)
        return total, {"loss": total, "same_top": jnp.sum(agrees * weights[:, 1:])}

    def work(examples: Sequence[Example]) -> Any:
        return packed_work(examples, rows=rows, length=length)

    return Objective(loss, ("loss", "same_top"), work)


def kept_layers(checkpoint: Checkpoint, layers: Sequence[int]) -> Checkpoint:
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
    names = {(w.layer, w.part, w.role, w.expert, w.head): w.name for w in weights_of(config)}
    tensors = {}
    for weight in weights_of(smaller):
        source = None if weight.layer is None else layers[weight.layer]
        tensors[weight.name] = checkpoint.tensors[names[source, weight.part, weight.role, weight.expert, weight.head]]
    return replace(checkpoint, config=smaller, tensors=tensors)
