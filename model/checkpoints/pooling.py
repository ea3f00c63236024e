"""Reads how a model of embeddings pools its hidden states.

sentence-transformers writes 1_Pooling/config.json. Newer versions write the name of a way to pool in pooling_mode.
Older versions write a switch for each way, such as pooling_mode_lasttoken, and set one switch to true. A GGUF file has
a number in the key `pooling_type`, after the name of the architecture.
"""

from pathlib import Path

from llamaspec.model.checkpoints.checkpoint import os_errors
from llamaspec.model.checkpoints.gguf.file import read_header
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.recognize import GGUF
from llamaspec.model.checkpoints.strict_json import read_object

DEFAULT = "last"
PREFIX = "pooling_mode_"
# names in pooling_mode and ends of the names of the switches, and our names
NAMES: dict[str, str] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
GGUF_TYPES = {0: DEFAULT, 1: "mean", 2: "cls", 3: "last", 4: "rank"}  # llama.cpp's numbers; 0: unspecified


def read_pooling(model: Path) -> str:
    """Return "last" or "mean", or the file's name of another way to pool. If no file states it, return "last".

    `model` is a directory, a GGUF file, or another file of weights in a directory. Raises `CheckpointError` for a file
    that we cannot read.
    """
    if model.is_file() and (file := MappedFile(model)).bytes(0, len(GGUF)) == GGUF:
        metadata = read_header(file).metadata
        key = f"{metadata.string('general.architecture', '')}.pooling_type"
        number = metadata.integer(key) if key in metadata else 0
        return GGUF_TYPES.get(number, f"type {number}")
    path = (model if model.is_dir() else model.parent) / "1_Pooling" / "config.json"
    with os_errors(path):
        if not path.exists():
            return DEFAULT
    values = read_object(path)
    if isinstance(named := values.get("pooling_mode"), str):
        names = [named]
    else:
        names = [str(name).removeprefix(PREFIX) for name, on in values.items() if name.startswith(PREFIX) and on]
    return " and ".join(NAMES.get(name, name) for name in names) or DEFAULT
