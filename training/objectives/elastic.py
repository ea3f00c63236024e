"""Elastic depth: the first layers of a model learn to be a model, too.

`reference.backward.llama` defines it: an objective computes its loss from the logits after each of some depths, and the
loss to minimize is the mean. One forward pass computes all of these logits.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from llamaspec.model.cache import empty_cache
from llamaspec.model.forward import residual_stream
from llamaspec.model.ops.table import Ops
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config
from llamaspec.training.steps import Sums


def logits_at_depths(
    params: Params,
    ids: Int[Array, "batch seq"],
    at: Int[Array, "batch seq"],
    depths: Sequence[int],
    *,
    config: Config,
    ops: Ops,
    dtype,
) -> list[Float[Array, "batch predicted vocab"]]:
    """For each d in `depths`, compute logits with only the first d layers. They predict ids 1, 2, … of each row.

    `at` are the positions within the row's documents.
    """
    cache = empty_cache(config, batch=ids.shape[0], capacity=ids.shape[1], dtype=dtype)
    states, _ = residual_stream(params, ids, cache, positions_within=at, config=config, ops=ops)
    return [ops.norm_logits(states[depth], params, config=config)[:, :-1] for depth in depths]


def names_at(names: Sequence[str], depths: Sequence[int]) -> tuple[str, ...]:
    """List the sums that `mean_over` reports, given the names of the sums at each depth.

    >>> names_at(("loss", "right"), [5, 10])
    ('loss', 'right', 'loss_at_5', 'right_at_5', 'loss_at_10', 'right_at_10')
    """
    more = [f"{name}_at_{depth}" for depth in depths for name in names] if len(depths) > 1 else []
    return (*names, *more)


def mean_over(depths: Sequence[int], logits: Sequence[Array], measure: Callable[[Array], Sums]) -> tuple[Array, Sums]:
    """Compute the mean loss over `depths`, and the sums to report: `measure` computes them from the logits of a depth.

    Of the sums without a depth in their name, "loss" is the mean, and the others belong to the last depth.
    """
    sums = [measure(own) for own in logits]
    total = sum((own["loss"] for own in sums[1:]), sums[0]["loss"]) / len(depths)
    by_depth = {f"{name}_at_{d}": own[name] for d, own in zip(depths, sums, strict=True) for name in own}
    return jnp.asarray(total), sums[-1] | {"loss": total} | (by_depth if len(depths) > 1 else {})
