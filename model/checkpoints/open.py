"""Opens a checkpoint of any format that this package reads, recognized by its content rather than by its name."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from llamaspec.model.checkpoints.checkpoint import Checkpoint, os_errors, refused
from llamaspec.model.checkpoints.hub import find_in_cache, how_to_download
from llamaspec.model.checkpoints.huggingface.read import open_huggingface
from llamaspec.model.checkpoints.llama2c.read import open_llama2c
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.mistral import EMBEDDING, is_mistrals, open_mistral
from llamaspec.model.checkpoints.recognize import GGUF, folder_without_config, snapshot_of, weights_file
from llamaspec.model.checkpoints.safetensors_header import read_header

BUILT_IN = {"stories": Path(__file__).parents[1] / "stories"}  # models in this package, by name
ENDINGS = {".gguf", ".bin", ".safetensors"}  # of files that are models
MIN_SIMILARITY = 0.8  # the least similarity (by difflib, at most 1) of a name and a misspelling of it


def place_of(model: str | Path) -> Path:
    """Find where a model is: a path that exists, else a name of `BUILT_IN`, else `owner/name` in the Hub's cache.

    Any other name is returned as a path. For a model's folder in the Hub's cache we return the snapshot in it.
    """
    path = Path(model)
    if os.path.exists(path):
        return snapshot_of(path)
    return BUILT_IN.get(str(model)) or find_in_cache(str(model)) or path


def nearest(path: Path) -> Path | None:
    """Find what a misspelled path may mean: a file or folder next to it, or a name of `BUILT_IN`; else None.

    >>> nearest(Path("storis"))
    PosixPath('stories')
    """
    from difflib import get_close_matches

    names = list(BUILT_IN) if path.parent == Path() else []
    with suppress(OSError, ValueError):
        names += [
            entry.name for entry in os.scandir(path.parent) if entry.is_dir() or Path(entry.name).suffix in ENDINGS
        ]
    return next((path.with_name(name) for name in get_close_matches(path.name, names, 1, MIN_SIMILARITY)), None)


def is_safetensors(file: MappedFile) -> bool:
    """Tell a safetensors file from a llama2.c file.

    At byte 8, a safetensors file has JSON, and a llama2.c file has a number of four bytes: the layers or the width. The
    number may begin with the byte "{", as 123 and 379 do, but its last byte is 0, and JSON has no such byte.
    """
    start = file.bytes(8, 12)
    return start.startswith(b"{") and b"\0" not in start


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF or llama2.c file, Hugging Face's or Mistral's directory, or a .safetensors file next to its config.

    `path` may also be a name that `place_of` knows. We read and check everything except the weights' bytes. Raises
    `CheckpointError`.
    """
    path = place_of(path)
    if "\0" in str(path):
        raise refused(path, "no file has a zero byte in its name")
    if not os.path.lexists(path):
        if meant := nearest(path):
            raise refused(path, f"No such file or directory. Did you mean {meant}?")
        if command := how_to_download(str(path)):
            raise refused(
                path, f"No such file or directory, and no such model in the Hub's cache. To download it: {command}"
            )
    try:
        with os_errors(path):
            is_directory = stat.S_ISDIR(path.stat().st_mode)
    except UnicodeError as error:  # The name has half a surrogate pair.
        raise refused(path, "is not a name that a file can have") from error
    if is_directory:
        with os_errors(path):
            if is_mistrals(path):
                return open_mistral(path)
            if not (path / "config.json").exists():
                raise folder_without_config(path)
        return open_huggingface(path)
    file = MappedFile(path)
    if file.bytes(0, len(GGUF)) == GGUF:
        from llamaspec.model.checkpoints.gguf.read import (
            open_gguf,  # imports ggml's quantizers: 30 ms, only for GGUF
        )

        return open_gguf(file)
    file = weights_file(path)
    if not is_safetensors(file):
        return open_llama2c(file)
    named = f"{EMBEDDING}.weight" in read_header(file)
    return open_mistral(path.parent, file) if named else open_huggingface(path.parent, file)
