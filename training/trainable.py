"""The tensors that fine-tuning trains: all weights of a model, or the low-rank adapters of a frozen model."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from llamaspec.model.checkpoints.adapter import Adapter, LowRank, adaptable, write_adapter
from llamaspec.model.checkpoints.checkpoint import Checkpoint, Tensor
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.convert import files_inside
from llamaspec.model.weights.loading import Progress, load_params, no_progress
from llamaspec.model.weights.params import Params, adapted_params, params_of, rope_table
from llamaspec.training.constraints import FREE, Constraint
from llamaspec.training.steps import Tensors


class Trainable(NamedTuple):
    """The tensors to train, and what the loss needs to compute with them."""

    tensors: Tensors  # float32, at the start
    frozen: Any  # arrays that stay as they are
    params: Callable[[Tensors, Any], Params]  # makes the model's tree of weights from tensors and frozen arrays
    write: Callable[[Path, Tensors], None]  # writes the result into the folder of the training


def all_weights(checkpoint: Checkpoint, *, context: int, dtype: np.dtype, constraint: Constraint = FREE) -> Trainable:
    """Return all weights of a model, in float32, as the tensors to train.

    The loss computes in `dtype`, after `constraint` has changed each weight. The trained model is written to DIR/model
    in the dtype of the base model. Pruned weights are 0 there, but weights are not rounded.
    """
    config = checkpoint.config
    tensors = {name: jnp.asarray(tensor.read(), jnp.float32) for name, tensor in checkpoint.tensors.items()}

    def params(tensors: Tensors, frozen: Any) -> Params:
        constrained = {name: constraint.apply(name, a, frozen).astype(dtype) for name, a in tensors.items()}
        return params_of(config, constrained, rope_table(config, context))

    def write(out: Path, trained: Tensors) -> None:
        weights = trained
        if constraint.arrays is not None:
            weights = {name: constraint.apply(name, a, constraint.arrays) for name, a in trained.items()}
        write_checkpoint(checkpoint, weights, out / "model")

    return Trainable(tensors, constraint.arrays, params, write)


def write_checkpoint(base: Checkpoint, tensors: Tensors, folder: Path) -> None:
    """Write trained weights as a model with the files of `base`. Weights that `base` quantizes become float32."""

    def tensor(name: str, stored: Tensor) -> Tensor:
        dtype = np.dtype(np.float32) if stored.codes else stored.dtype
        return Tensor(stored.shape, dtype, lambda: np.asarray(tensors[name]).astype(dtype))

    named = {name: tensor(name, stored) for name, stored in base.tensors.items()}
    files, _ = files_inside(base)
    trained = Checkpoint(base.path, base.format, base.config, named, bos=base.bos, stops=base.stops)
    write_huggingface(trained, folder, files=files)


def adapters(
    checkpoint: Checkpoint,
    *,
    rank: int,
    alpha: float,
    parts: Iterable[str],
    seed: int,
    context: int,
    dtype: np.dtype,
    base: str,
    progress: Progress = no_progress,
) -> Trainable:
    """Return LoRA adapters of the matrices `parts` as the tensors to train.

    The model's own weights are frozen, in `dtype` or quantized.

    At the start, matrix A is uniform within 1 / sqrt(cols) of 0, as in PEFT, and matrix B is 0. So the adapted model
    first equals the base model. `base` is the name of the base model in the adapter's files.
    """
    config = checkpoint.config
    weights = adaptable(config, parts)
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, weight in weights.items():
        rows, cols = weight.shape
        tensors[f"{name}.a"] = jnp.asarray(rng.uniform(-1, 1, (rank, cols)) / np.sqrt(cols), jnp.float32)
        tensors[f"{name}.b"] = jnp.zeros((rows, rank), jnp.float32)
    frozen = load_params(checkpoint, dtype=dtype, positions=context, progress=progress)
    scale = Adapter(rank, alpha, {}).scale

    def pairs(tensors: Tensors) -> dict[str, LowRank]:
        return {name: LowRank(tensors[f"{name}.a"], tensors[f"{name}.b"]) for name in weights}

    def params(tensors: Tensors, frozen: Any) -> Params:
        return adapted_params(frozen, config, pairs(tensors), scale=scale)

    def write(out: Path, trained: Tensors) -> None:
        write_adapter(Adapter(rank, alpha, pairs(trained)), out, config, base=base)

    return Trainable(tensors, frozen, params, write)
