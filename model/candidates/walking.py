"""Prepares a model for `verify.judging.walk`, which calls and judges the ops of a model one at a time.

    checkpoint = random_checkpoint(config, weights(tensor_shapes(config), seed=0))
    model = walkable(checkpoint, XLA, dtype=np.dtype("float32"), rows=26)
    steps, report = walk_through(model, config=config, dtype="float32", seed=0)

`weights` and `walk_through` come from `verify.judging.walk`, which this package does not import.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from llamaspec.model.cache import empty_cache
from llamaspec.model.candidates.kernels import runnable, walked_ops
from llamaspec.model.checkpoints.checkpoint import Checkpoint, Tensor
from llamaspec.model.ops.choice import ops_for
from llamaspec.model.ops.cpu import CPU
from llamaspec.model.ops.table import Ops, Positions
from llamaspec.model.ops.xla import XLA
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.weights.loading import load_params
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config


@dataclass(frozen=True)
class WalkableModel:
    """A model whose ops can be called one at a time, for a batch of one sequence."""

    params: Any  # has the fields embedding, layers and norm
    exact: Any  # the same weights in float64, as `reference.llama.Params`
    ops: Ops
    cache: Callable[[int], list[Any]]  # returns an empty cache for each layer, given a capacity
    positions: Callable[[np.ndarray], Positions]  # turns positions [batch, seq] into the argument of the ops
    array: Callable[[np.ndarray], Any]  # turns a NumPy array into an array for the ops


OpsFor = Callable[
    [Config, Params, int], Ops
]  # makes a table of ops from a config, weights, and the length of the cache


def chosen_ops(kernels: str) -> OpsFor:
    """Return a function that chooses a table of ops. `kernels` is a name that the option `--kernels` accepts.

    The function raises the errors of `ops_for`.
    """

    def table(config: Config, params: Params, rows: int) -> Ops:
        return ops_for(kernels, config, params, batch=1, capacity=rows, cache_dtype=params.embedding.dtype).ops

    return table


class Table(NamedTuple):
    """A table of ops (or a function that makes one), and a context manager in which to call the ops."""

    ops: Ops | OpsFor
    context: Callable[[], AbstractContextManager]


def tables() -> dict[str, Table]:
    """Return tables of ops by name. "our" has the kernels for GPUs, which are interpreted if there is no GPU."""
    return {"xla": Table(XLA, nullcontext), "cpu": Table(CPU, nullcontext), "our": Table(walked_ops, runnable)}


def random_checkpoint(config: Config, arrays: Mapping[str, np.ndarray]) -> Checkpoint:
    """Make a checkpoint in memory from `arrays`, which maps tensor names to values."""
    tensors = {name: Tensor(a.shape, a.dtype, lambda a=a: a) for name, a in arrays.items()}
    return Checkpoint("random", "memory", config, tensors, bos=None, stops=frozenset())


def walkable(checkpoint: Checkpoint, table: Ops | OpsFor, *, dtype: np.dtype, rows: int) -> WalkableModel:
    """Load the model of `checkpoint` in `dtype`, for a sequence of `rows` tokens."""
    params = load_params(checkpoint, dtype=dtype, positions=rows)
    ops = table if isinstance(table, Ops) else table(checkpoint.config, params, rows)
    rounded_tensors = {
        name: tensor._replace(read=lambda tensor=tensor: tensor.read().astype(dtype))
        for name, tensor in checkpoint.tensors.items()
    }

    def compiled(op: Callable) -> Callable:
        parameters = inspect.signature(op).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        return jax.jit(op, static_argnames=[n for n in ("config", "window") if takes_any or n in parameters])

    def positions(at: np.ndarray) -> Positions:
        return Positions(*map(jax.device_put, (at, *params.rope.on_host(at))))

    def cache(capacity: int) -> list[Any]:
        return list(empty_cache(checkpoint.config, batch=1, capacity=capacity, dtype=dtype).layers)

    exact = load_reference_params(replace(checkpoint, tensors=rounded_tensors), lazily=True)
    return WalkableModel(params, exact, Ops(*map(compiled, ops)), cache, positions, jax.device_put)
