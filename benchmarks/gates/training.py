"""Compiles a training step without a GPU, with llamaspec's options. All sums must have a fixed order."""

from dataclasses import replace
from functools import partial
from typing import Any

from llamaspec.benchmarks.gates.compiler import mesh, placed

import jax  # isort: skip  # after the compiler's module, which sets variables that JAX reads when it is imported

import jax.numpy as jnp
import numpy as np

from llamaspec.benchmarks.gates.decode_steps import FEW_LAYERS
from llamaspec.benchmarks.gates.program import swaps
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.tensors import tensor_shapes
from llamaspec.training.objectives.supervised import of_documents, summed_loss
from llamaspec.training.ops import WHOLE_ATTENTION
from llamaspec.training.optimizers import optimizer
from llamaspec.training.steps import compile_step

TRAINED = ("stories-15m",)
BATCH = (16, 256)  # documents, tokens of each


def compile_training(name: str) -> dict[str, int]:
    """Compile the functions of a training step in float32, with `FEW_LAYERS` layers.

    `name` must be in `TRAINED`.

    Returns a number for each function, by name: how many of its writes happen in an order that depends on threads.
    """
    config = replace(SHAPES[name], layers=FEW_LAYERS)
    shape = jax.ShapeDtypeStruct
    tensors = {name: shape(size, jnp.float32) for name, size in tensor_shapes(config).items()}
    scalar, sums = shape((), jnp.float32), {"loss": shape((), jnp.float32)}
    transform = optimizer(lr=1e-3, steps=100, warm_up=10, decay=0.1)
    state = jax.eval_shape(transform.init, tensors)
    loss = partial(summed_loss, config=config, ops=WHOLE_ATTENTION, dtype=np.dtype(np.float32))
    step = compile_step(of_documents(loss), transform, platform="gpu")
    documents = shape(BATCH, jnp.int32), shape(BATCH, jnp.float32)
    arguments: dict[str, tuple[Any, ...]] = {
        "add_gradient": (tensors, sums, tensors, None, *documents),
        "update": (tensors, state, tensors, scalar),
    }
    with jax.sharding.use_abstract_mesh(mesh().abstract_mesh):
        functions: dict[str, Any] = step._asdict()  # JAX's compiled functions, though their type is only `Callable`
        lowered = {name: functions[name].lower(*placed(shapes)) for name, shapes in arguments.items()}
    return {name: swaps(program.compile().as_text(), 1) for name, program in lowered.items()}


def broken_by_training(swaps: dict[str, int]) -> list[str]:
    """List the broken gates of a training step."""
    return [
        f"{name}: expected sums in a fixed order, got {count} whose order depends on threads"
        for name, count in swaps.items()
        if count
    ]
