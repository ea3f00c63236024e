"""The hyperparameters of a training."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from llamaspec.model.checkpoints.checks import check_model
from llamaspec.reference.config import Config


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a training. Together with the documents, they determine the weights."""

    config: Config
    steps: int
    batch: int  # documents per step
    lr: float
    seed: int = 0
    warm_up: int = 100  # steps
    decay: float = 0.1
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the computation; the trained weights are float32
    remat: bool = False
    answers: float = 1.0  # loss weight of tokens that answer a question about a story; other tokens have weight 1


def check_recipe(recipe: Recipe, *, bos: int | None, stops: frozenset[int]) -> None:
    """Raise ValueError for a hyperparameter out of range, or for a model that cannot exist.

    `bos` and `stops` are ids of the documents' tokenizer.
    """
    check_at_least_one(steps=recipe.steps, batch=recipe.batch)
    check_context(recipe.config.context)
    for name, value in {"lr": recipe.lr, "answers": recipe.answers}.items():
        if not 0 < value < np.inf:
            raise ValueError(f"{name} must be positive, got {value}")
    if recipe.seed < 0:
        raise ValueError(f"seed must not be negative, got {recipe.seed}")
    check_model("the model to train", recipe.config, bos=bos, stops=stops)


def check_at_least_one(**numbers: int) -> None:
    """Raise ValueError if one of the named `numbers` is below 1."""
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def check_context(context: int) -> None:
    """Raise ValueError if the context is too short to predict a token."""
    if context < 2:
        raise ValueError(f"context must be at least 2 (one token to read and one to predict), got {context}")
