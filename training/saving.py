"""Checkpoints of a training, and the model that it writes at its end."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from llamaspec.model.checkpoints.checkpoint import Checkpoint, Tensor, os_errors, refused
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.staging import new_file
from llamaspec.model.tensors import tensor_shapes
from llamaspec.training.data import Source, stops
from llamaspec.training.recipe import Recipe
from llamaspec.training.steps import Tensors

CHECKPOINTS = 2  # checkpoints
CHECKPOINT = re.compile(r"step-(\d{8})\.safetensors")


def checkpoints(out: Path) -> list[Path]:
    """Return the checkpoints in a directory, from the first to the last.

    Returns an empty list for a missing directory.
    """
    with os_errors(out):
        names = os.listdir(out) if out.exists() else []
    return [out / name for name in sorted(names) if CHECKPOINT.fullmatch(name)]


def save_state(
    out: Path, step: int, seconds: float, identity: Mapping[str, Any], tensors: Tensors, state: optax.OptState
) -> None:
    """Write a checkpoint, and then remove all checkpoints except the last two.

    Raises FloatingPointError, and leaves the folder as it is, if a weight is not finite.
    """
    about = {"recipe": json.dumps(dict(identity)), "step": str(step), "seconds": f"{seconds:.3f}"}
    arrays = {name: np.asarray(leaf) for name, leaf in _named(tensors, state).items()}
    if broken := next((name for name, array in arrays.items() if not np.all(np.isfinite(array))), None):
        what = f"{broken} is not finite after step {step}"
        raise FloatingPointError(f"{what}: start again with a different --out and a smaller --lr")
    with new_file(out / f"step-{step:08}.safetensors", replace=True) as staged:
        try:
            save_file(arrays, staged, metadata=about)
        except SafetensorError as error:  # safetensors raises its own exception for an OSError
            raise refused(out, " ".join(str(error).split())) from error
    for old in checkpoints(out)[:-CHECKPOINTS]:
        old.unlink(missing_ok=True)


def load_state(
    path: Path, identity: Mapping[str, Any], tensors: Tensors, state: Any
) -> tuple[Tensors, Any, int, float]:
    """Read the weights, optimizer state, completed steps and elapsed seconds that `save_state` wrote.

    `tensors` and `state` give the expected names and shapes. Raises CheckpointError for a damaged file, or for a
    checkpoint of a training with a different `identity`.
    """
    try:
        with os_errors(path), safe_open(path, "np") as file:
            about = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}
        step, seconds, written = int(about["step"]), float(about["seconds"]), json.loads(about["recipe"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise refused(
            path, "is not a training checkpoint, or is damaged: delete it to resume from the previous checkpoint"
        ) from error
    expected_identity = json.loads(json.dumps(dict(identity)))
    # A run on a text has no digest of the stories, and the other way round.
    if differing := [name for name, value in expected_identity.items() if written.get(name) != value]:
        raise refused(path, f"was made with a different {', '.join(differing)}: --resume needs the same values")
    expected = _named(tensors, state)
    if {name: a.shape for name, a in arrays.items()} != {name: np.shape(a) for name, a in expected.items()}:
        raise refused(path, "lacks tensors with the names and shapes that this training needs")
    leaves = [jnp.asarray(arrays[name]) for name in expected]
    tensors, state = jax.tree.unflatten(jax.tree.structure((tensors, state)), leaves)
    return tensors, state, step, seconds


def _named(tensors: Tensors, state: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path((tensors, state))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def write_model(out: Path, recipe: Recipe, source: Source, tensors: Tensors) -> None:
    """Write the model to `out`/model, with its weights in bfloat16."""
    narrow = np.dtype(ml_dtypes.bfloat16)

    def read(name: str) -> Callable[[], np.ndarray]:
        return lambda: np.asarray(tensors[name]).astype(narrow)

    named = {name: Tensor(shape, narrow, read(name)) for name, shape in tensor_shapes(recipe.config).items()}
    checkpoint = Checkpoint(str(out), "safetensors", recipe.config, named, bos=source.bos, stops=stops(source))
    write_huggingface(checkpoint, out / "model")
