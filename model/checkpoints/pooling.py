"""Reads and writes how a model of embeddings pools its hidden states.

sentence-transformers writes modules.json, a list of modules that compute a vector one after another: a Transformer, a
Pooling, and often a Normalize. Each module may have a folder; the folder of Pooling has a config.json. Newer versions
write the name of a way to pool in this file, in pooling_mode. Older versions write a switch for each way, such as
pooling_mode_lasttoken, and set one switch to true. Without any of these keys, the model pools by the mean. Source:
sentence-transformers 6.2, base/model.py `_load_modules` and sentence_transformer/modules/pooling.py.

A GGUF file has a number in the key `pooling_type`, after the name of the architecture.
"""

import json
import re
from pathlib import Path

from llamaspec.model.checkpoints.checkpoint import os_errors, refused
from llamaspec.model.checkpoints.gguf.file import read_header
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.recognize import GGUF
from llamaspec.model.checkpoints.strict_json import read_list, read_object, short

DEFAULT = "last"
MODULES, FOLDER = "modules.json", "1_Pooling"
PREFIX = "pooling_mode_"
# names in pooling_mode and ends of the names of the switches, and our names
NAMES: dict[str, str] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "cls_token": "cls"}
GGUF_TYPES = {1: "mean", 2: "cls", 3: "last", 4: "rank"}  # llama.cpp's numbers; 0: unspecified
NUMBERS = {"mean": 1, "cls": 2, "last": 3}  # numbers of the ways to pool that sentence-transformers also has
LIBRARY = "sentence_transformers."
WITHOUT_EFFECT = ("Transformer", "Normalize", "Dropout")  # We divide each vector by its norm in any case.


def read_pooling(model: Path) -> str:
    """Return the name of the way to pool, such as "last" or "mean". If no file states a way, return "last".

    `model` is a directory, a GGUF file, or another file of weights in a directory. Raises `CheckpointError` for a file
    that we cannot read.
    """
    return stated_pooling(model) or DEFAULT


def stated_pooling(model: Path) -> str | None:
    """Return the way to pool as `read_pooling` does; None if no file states it.

    If modules.json has more modules that change a vector, such as Dense, the result also has their names.
    """
    if model.is_file() and (file := MappedFile(model)).bytes(0, len(GGUF)) == GGUF:
        metadata = read_header(file).metadata
        key = f"{metadata.string('general.architecture', '')}.pooling_type"
        number = metadata.integer(key) if key in metadata else 0
        return GGUF_TYPES.get(number, f"type {number}") if number else None
    folder = model if model.is_dir() else model.parent
    steps = []
    for kind, path in modules(folder):
        name = kind.removeprefix(LIBRARY).rpartition(".")[2] if kind.startswith(LIBRARY) else kind
        if name == "Pooling":
            steps.append(_mode(folder / path / "config.json"))
        elif name not in WITHOUT_EFFECT:
            steps.append(name)
    return " and then ".join(steps) or None


def modules(folder: Path) -> list[tuple[str, str]]:
    """Return the class and the folder (relative to `folder`) of each module of sentence-transformers.

    Without modules.json, the folder 1_Pooling is a module if it exists. Raises `CheckpointError` if modules.json is not
    a list of modules, or if a module's folder is not inside `folder`.
    """
    path = folder / MODULES
    with os_errors(path):
        if not path.exists():
            pools = (folder / FOLDER / "config.json").exists()
            return [(f"{LIBRARY}models.Pooling", FOLDER)] if pools else []
    entries = []
    for entry in read_list(path):
        match entry:
            case {"type": str(kind), "path": str(place)} if re.fullmatch(r"(\w[\w.-]*)?/?", place, re.ASCII):
                entries.append((kind, place))
            case {"type": str(), "path": place}:
                raise refused(path, f"the path of a module is {short(place)}, expected the name of a folder next to it")
            case _:
                raise refused(path, f"contains {short(entry)}, expected objects with the strings type and path")
    return entries


def pooling_files(pooling: str, *, dim: int) -> dict[str, bytes]:
    """Return the files that tell sentence-transformers how to pool, by path. `pooling` is a key of `NUMBERS`.

    `dim` is the width of the hidden states.
    """
    kinds = {"Transformer": "", "Pooling": FOLDER, "Normalize": "2_Normalize"}
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"{LIBRARY}models.{kind}"}
        for i, (kind, path) in enumerate(kinds.items())
    ]
    ends = {end: name for end, name in NAMES.items() if end in ("cls_token", "mean_tokens", "lasttoken")}
    mode = {"word_embedding_dimension": dim} | {f"{PREFIX}{end}": name == pooling for end, name in ends.items()}
    files = {MODULES: listed, f"{FOLDER}/config.json": mode}
    return {path: (json.dumps(value, indent=2) + "\n").encode() for path, value in files.items()}


def _mode(path: Path) -> str:
    """Return the way to pool that the config.json of the module Pooling states."""
    values = read_object(path)
    match values.get("pooling_mode"):
        case str(name):
            names = [name]
        case list(names):
            pass
        case _:
            names = [str(name).removeprefix(PREFIX) for name, on in values.items() if name.startswith(PREFIX) and on]
    return " and ".join(NAMES.get(str(name), str(name)) for name in names) or "mean"
