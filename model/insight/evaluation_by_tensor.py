"""Measures how much each quantized tensor changes the predictions of a model.

We replace one tensor of the base model by the quantized tensor, and compute the divergence between the predictions
before and after. So the result includes how later layers amplify or reduce the error. The error of a tensor's weights,
or of its op, does not show this.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.insight.evaluation import (
    Comparison,
    Divergence,
    EvalText,
    Predictor,
    compare,
    recorded,
    scored_logits,
)
from llamaspec.model.weights.loading import Progress, no_progress


class TensorCost(NamedTuple):
    """The effect of one tensor: how the base's predictions change if the model's tensor replaces the base's tensor."""

    name: str
    relative_error: float  # rms of the weights' differences / rms of the weights
    divergence: Divergence


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with all quantized matrices decoded to float32.

    Then `with_weights` can replace any of them, because all of them have the same type.
    """
    return replace(checkpoint, tensors={name: t._replace(codes=None) for name, t in checkpoint.tensors.items()})


def relative_error(base: np.ndarray, changed: np.ndarray) -> float:
    """Divide the root mean square of the difference by the root mean square of `base` (if that is 0, by 1).

    >>> relative_error(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    0.1
    """
    exact = base.astype(np.float64)
    size = float(np.linalg.norm(exact))
    return float(np.linalg.norm(changed - exact)) / size if size else float(np.linalg.norm(changed))


def compare_by_tensor(
    running: Predictor,
    base_running: Predictor,
    model: Checkpoint,
    base: Checkpoint,
    text: EvalText,
    *,
    context: int,
    stride: int | None = None,
    progress: Progress = no_progress,
) -> tuple[Comparison, list[TensorCost]]:
    """Compare the whole `model` with its base. Then compare each tensor that differs, one at a time in the order of
    use.

    `running` runs `model`, and `base_running` runs `decoded(base)`. We compute the logits of the base once. Then we
    replace one tensor at a time in the weights of `base_running`, and read no other tensor again. Raises ValueError if
    the two checkpoints have tensors of different names or shapes.
    """
    check_alike(base, model)
    base, window = decoded(base), {"context": context, "stride": stride}
    with recorded(scored_logits(base_running, text, progress=progress, **window)) as base_rows:
        total = compare(running, base_rows, text, progress=progress, **window)
        costs = []
        for i, (name, tensor) in enumerate(model.tensors.items()):
            weights = tensor.read()
            if error := relative_error(base.tensors[name].read(), weights):
                changed = base.tensors[name]._replace(dtype=weights.dtype, read=tensor.read)
                swapped = replace(base, tensors={**base.tensors, name: changed})
                single = base_running.with_weights(swapped, read_from=base)

                def report(stage: str, part: float, name: str = name, i: int = i) -> None:
                    progress(name, (i + part) / len(model.tensors))

                compared = compare(single, base_rows, text, progress=report, **window)
                costs.append(TensorCost(name, error, compared.divergence))
    return total, costs


def check_alike(base: Checkpoint, model: Checkpoint) -> None:
    """Raise ValueError unless both checkpoints have tensors with the same names and shapes."""
    for name in {**base.tensors, **model.tensors}:
        if name not in base.tensors or name not in model.tensors:
            raise ValueError(f"{base.path} and {model.path} are different models: only one of them has {name}")
        shapes = [list(checkpoint.tensors[name].shape) for checkpoint in (base, model)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{base.path} and {model.path} are different models: {name} has the shape {shapes[0]} in the first "
                f"and {shapes[1]} in the second"
            )
