"""Opens a checkpoint of any format that this package reads; we recognize the format by content, not by file name."""

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
ENDINGS = {".gguf", ".bin", ".safetensors"}  # suffixes of model files
MIN_SIMILARITY = 0.8  # least similarity (by difflib, at most 1) for which we suggest a name


def place_of(model: str | Path) -> Path:
    """Find the path of a model from what the user typed: a path, a name in `BUILT_IN`, or a Hub name `owner/name`.

    We try these three in this order, and look up a Hub name in the Hub's cache. If none exists, we return `model` as a
    path. If the path is a model's folder in the Hub's cache, we return a snapshot in this folder.
    """
    path = Path(model)
    if os.path.exists(path):
        return snapshot_of(path)
    return BUILT_IN.get(str(model)) or find_in_cache(str(model)) or path


def nearest(path: Path) -> Path | None:
    """Guess what a misspelled path means: a similar file or folder in the same place, or a name in `BUILT_IN`.

    Returns None if nothing is similar.

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
    """Tell whether a file with weights is a safetensors file; otherwise it is a llama2.c file.

    From byte 8 on, a safetensors file has JSON. A llama2.c file has a little-endian integer of four bytes there. The
    first byte of the integer may be the code of "{" (for example, if the integer is 123 or 379), but its last byte is
    0, and JSON does not contain a zero byte.
    """
    start = file.bytes(8, 12)
    return start.startswith(b"{") and b"\0" not in start


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a model of any supported format, and check everything except the values of the weights.

    `path` leads to a GGUF or llama2.c file, to a directory in Hugging Face's or Mistral's layout, or to a .safetensors
    file in such a directory. It may also be a name that `place_of` can find. Raises `CheckpointError` if we cannot read
    the model.
    """
    path = place_of(path)
    if "\0" in str(path):
        raise refused(path, "the name contains a zero byte, which no file name can contain")
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
        raise refused(path, "the name is not valid Unicode, so no file can have it") from error
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
