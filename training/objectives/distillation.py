"""Distillation: a student learns a teacher's distribution over the next token, not only the actual next token.

`reference.losses.distillation` defines the loss, T^2 KL(teacher || student) at temperature T, at each counted position.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from llamaspec.model.ops.table import Ops
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config
from llamaspec.training.data import Example
from llamaspec.training.objectives.elastic import logits_at_depths, mean_over, names_at
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
    depths: Sequence[int] = (),
) -> Objective:
    """Make the objective of distillation on packed documents, or its mean over `depths` (see `objectives.elastic`).

    The frozen arrays are a pair: the student's frozen arrays, and the teacher's weights. The objective reports the loss
    per counted token, and the share of counted tokens for which student and teacher have the same likeliest id.
    """

    depths = depths or (config.layers,)

    def loss(
        tensors: Tensors,
        frozen: tuple[Any, Params],
        ids: Int[Array, "batch seq"],
        at: Int[Array, "batch seq"],
        weights: Float[Array, "batch seq"],
    ) -> tuple[Array, Sums]:
        student_frozen, teacher = frozen
        student = params(tensors, student_frozen)
        logits = logits_at_depths(student, ids, at, depths, config=config, ops=ops, dtype=dtype)
        taught = packed_logits(teacher, ids, at, config=teacher_config, ops=ops, dtype=dtype)
        teacher_log = jax.nn.log_softmax(taught / temperature, axis=-1)

        def measure(logits: Array) -> Sums:
            student_log = jax.nn.log_softmax(logits / temperature, axis=-1)
            divergence = jnp.sum(jnp.exp(teacher_log) * (teacher_log - student_log), axis=-1)
            agrees = jnp.argmax(logits, axis=-1) == jnp.argmax(taught, axis=-1)
            total = temperature**2 * jnp.sum(divergence * weights[:, 1:])
            return {"loss": total, "same_top": jnp.sum(agrees * weights[:, 1:])}

        return mean_over(depths, logits, measure)

    def work(examples: Sequence[Example]) -> Any:
        return packed_work(examples, rows=rows, length=length)

    return Objective(loss, names_at(("loss", "same_top"), depths), work)
