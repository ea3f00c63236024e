"""The compiled functions of a training step: the gradient of a batch, and the update of the weights.

We cut a step's documents into small batches of similar lengths and add their gradients. The result is the gradient of
all documents together, with little padding and little memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool

from llamaspec.model.running.compile import training_options

Tensors = dict[str, Array]  # name: weight or gradient
Sums = dict[str, Array]  # sums over a batch that a loss reports, by name; one of them is "loss"


class TrainingFunctions(NamedTuple):
    """The compiled functions of a training. `add_gradient` compiles once per shape of a batch."""

    add_gradient: Callable[..., tuple[Tensors, Sums]]
    update: Callable[..., tuple[Tensors, optax.OptState, Bool[Array, ""]]]


def compile_step(loss: Callable, transform: optax.GradientTransformation, *, platform: str) -> TrainingFunctions:
    """Compile the functions of a training on a CPU or a GPU.

    `loss` takes the trained tensors, the frozen arrays, and the arrays of a batch. It returns the number to minimize,
    which is a sum over the batch, and the sums to report.
    """

    def add_gradient(gradient: Tensors, sums: Sums, trained: Tensors, frozen: Any, *batch: Array):
        """Add the gradient and the sums of this batch to the totals of the previous batches."""
        (_, more), slopes = jax.value_and_grad(loss, has_aux=True)(trained, frozen, *batch)
        return jax.tree.map(jnp.add, gradient, slopes), jax.tree.map(jnp.add, sums, more)

    def update(trained: Tensors, state: optax.OptState, gradient: Tensors, count: Array):
        """Take an optimizer step for the mean loss of `count` predictions.

        Returns the tensors, the optimizer's state, and whether the gradient is finite. For a gradient with NaN or
        infinity, tensors and state do not change.
        """
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(slope)) for slope in jax.tree.leaves(gradient)]))

        def take(trained: Any, state: Any) -> tuple[Any, Any]:
            changes, state = transform.update(jax.tree.map(lambda g: g / count, gradient), state, trained)
            return optax.apply_updates(trained, changes), state

        trained, state = lax.cond(finite, take, lambda *unchanged: unchanged, trained, state)
        return trained, state, finite

    return TrainingFunctions(
        add_gradient=reproducible(add_gradient, platform, donate_argnums=(0, 1)),
        update=reproducible(update, platform, donate_argnums=(0, 1)),
    )


def reproducible(function: Callable, platform: str, **options: Any) -> Callable:
    """Compile a function as `jax.jit` does with `options`, so that all runs and processes compute the same bits.

    XLA then does not time several kernels and take the fastest. Each shape of a batch compiles a program, and timing
    the kernels of a dozen programs took nine minutes.
    """
    return jax.jit(function, compiler_options=training_options(platform), **options)  # type: ignore[arg-type]
