"""Reads how a model of embeddings pools its hidden states, from 1_Pooling/config.json of sentence-transformers.

The file has a switch for each way to pool, such as `pooling_mode_lasttoken`. One switch is true.
"""

from pathlib import Path

from llamaspec.model.checkpoints.checkpoint import os_errors
from llamaspec.model.checkpoints.strict_json import read_object

DEFAULT = "last"
PREFIX = "pooling_mode_"
NAMES: dict[str, str] = {"lasttoken": "last", "mean_tokens": "mean"}  # ends of the names of the switches, and our names


def read_pooling(model: Path) -> str:
    """Return "last" or "mean", or the file's name of another way to pool. Without the file, return "last".

    `model` is a directory, or a file of weights in it. Raises `CheckpointError` for a file that we cannot read.
    """
    path = (model if model.is_dir() else model.parent) / "1_Pooling" / "config.json"
    with os_errors(path):
        if not path.exists():
            return DEFAULT
    names = [str(name).removeprefix(PREFIX) for name, on in read_object(path).items() if name.startswith(PREFIX) and on]
    return " and ".join(NAMES.get(name, name) for name in names) or DEFAULT
