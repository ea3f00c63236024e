"""Direct preference optimization (DPO): the chosen answer of a pair becomes likelier than the rejected one.

`reference.losses.dpo` defines the loss. The frozen model of the definition is the model at the start. It is needed only
for the log probabilities of the pairs, which we compute once, before the first step.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from llamaspec.model.ops.table import Ops
from llamaspec.model.sampling import log_probabilities
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config
from llamaspec.training.conversations import Preference
from llamaspec.training.data import Example, padded_rows
from llamaspec.training.loop import Work
from llamaspec.training.objectives.objective import Objective
from llamaspec.training.objectives.supervised import packed_logits
from llamaspec.training.steps import Sums, Tensors, reproducible
from llamaspec.training.trainable import Trainable


class Scored(NamedTuple):
    """A pair, and the log probabilities of its answers under the model at the start."""

    pair: Preference
    frozen: tuple[float, float]  # of the chosen and of the rejected answer


def token_log_probabilities(
    params: Params,
    ids: Int[Array, "batch seq"],
    *,
    config: Config,
    ops: Ops,
    dtype: np.dtype,
    temperature: float = 1.0,
) -> Float[Array, "batch predicted"]:
    """Compute log p of ids 1, 2, … of each row. A row is one document."""
    at = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    logits = packed_logits(params, ids, at, config=config, ops=ops, dtype=dtype)
    return log_probabilities(logits, ids[:, 1:], temperature)


def answer_log_probabilities(
    params: Params,
    ids: Int[Array, "batch seq"],
    counted: Float[Array, "batch seq"],
    *,
    config: Config,
    ops: Ops,
    dtype: np.dtype,
) -> Float[Array, " batch"]:
    """Sum log p of the counted ids of each row. Padding does not count, so the length of a row does not matter."""
    return jnp.sum(token_log_probabilities(params, ids, config=config, ops=ops, dtype=dtype) * counted[:, 1:], axis=1)


def side_by_side(pairs: Sequence[Scored], *, rows: int, length: int) -> list[tuple[np.ndarray, ...]]:
    """Make batches of `rows` pairs. Rows 2 i and 2 i + 1 are the chosen and the rejected answer of pair i.

    A batch is a tuple: ids [2 rows, length], counted [2 rows, length], frozen [2 rows] (the log probabilities at the
    start), and real [rows], which is 0 for pairs that only fill up the last batch.
    """
    batches = []
    for start in range(0, len(pairs), rows):
        members = pairs[start : start + rows]
        examples = [example for member in members for example in member.pair]
        ids, counted = padded_rows(examples, rows=2 * rows, length=length)
        frozen, real = np.zeros((rows, 2), np.float32), np.zeros(rows, np.float32)
        for row, member in enumerate(members):
            frozen[row], real[row] = member.frozen, 1
        batches.append((ids, counted, frozen.reshape(-1), real))
    return batches


def preference(
    params: Callable[[Tensors, Any], Params],
    *,
    config: Config,
    ops: Ops,
    dtype: np.dtype,
    rows: int,
    length: int,
    beta: float,
) -> Objective:
    """Make the objective of scored pairs.

    The change of an answer is its log probability minus its log probability at the start. The margin of a pair is
    `beta` times the difference between the changes of the chosen and the rejected answer. The objective reports the
    margin, the share of pairs with a margin above 0, and both log probabilities, because both may fall while the margin
    grows.
    """

    def loss(
        tensors: Tensors,
        frozen_arrays: Any,
        ids: Int[Array, "batch seq"],
        counted: Float[Array, "batch seq"],
        frozen: Float[Array, " batch"],
        real: Float[Array, " pairs"],
    ) -> tuple[Array, Sums]:
        scores = answer_log_probabilities(
            params(tensors, frozen_arrays), ids, counted, config=config, ops=ops, dtype=dtype
        )
        chosen, rejected = scores.reshape(-1, 2).T
        gain, other_gain = (scores - frozen).reshape(-1, 2).T
        margin = beta * (gain - other_gain)
        total = jnp.sum(jax.nn.softplus(-margin) * real)
        sums = {"margin": margin, "accuracy": margin > 0, "chosen": chosen, "rejected": rejected}
        return total, {"loss": total} | {name: jnp.sum(value * real) for name, value in sums.items()}

    def work(pairs: Sequence[Scored]) -> Work:
        tokens = sum(min(len(example.ids), length) for scored in pairs for example in scored.pair)
        return Work(side_by_side(pairs, rows=rows, length=length), len(pairs), tokens)

    return Objective(loss, ("loss", "margin", "accuracy", "chosen", "rejected"), work)


def scored(
    pairs: Sequence[Preference],
    trainable: Trainable,
    *,
    config: Config,
    ops: Ops,
    dtype: np.dtype,
    rows: int,
    length: int,
    platform: str,
) -> list[Scored]:
    """Compute the log probabilities of both answers of each pair under the model as it is before training."""

    def score(tensors: Tensors, frozen: Any, ids: Array, counted: Array) -> Array:
        params = trainable.params(tensors, frozen)
        return answer_log_probabilities(params, ids, counted, config=config, ops=ops, dtype=dtype)

    compiled = reproducible(score, platform)
    results: list[Scored] = []
    for ids, counted, _, real in side_by_side([Scored(pair, (0.0, 0.0)) for pair in pairs], rows=rows, length=length):
        values = np.asarray(compiled(trainable.tensors, trainable.frozen, ids, counted)).reshape(-1, 2)
        for chosen, rejected in values[: int(real.sum())].tolist():
            results.append(Scored(pairs[len(results)], (chosen, rejected)))
    return results


def sides(pairs: Sequence[Preference]) -> list[Example]:
    """List the answers of all pairs as examples."""
    return [example for pair in pairs for example in pair]
