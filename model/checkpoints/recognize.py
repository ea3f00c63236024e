"""Recognizes files and folders that this package cannot read.

The errors say what such a file or folder is, and what to do instead.
"""

import os
import re
from pathlib import Path

from llamaspec.model.checkpoints.checkpoint import CheckpointError, quoted, refused
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.strict_json import read_object

GGUF = b"GGUF"
TO_SAFETENSORS = "convert the model to safetensors with transformers' from_pretrained() and save_pretrained()"
IMATRIX = "is an importance matrix (imatrix), which llama.cpp uses for quantization, not a model"
# Safetensors files begin with the header's length, llama2.c files with the model's width. The leading bytes here, read
# as a number, are too large for either.
# An ONNX file begins with its version (field 1 of ModelProto), then usually with the name of its producer.
ONNX = re.compile(rb"\x08[\x01-\x1f][\x12\x1a\x22\x3a\x42]")
OTHER_FORMATS = {
    GGUF: "is a GGUF file, expected safetensors: give the path of the GGUF file instead of its directory",
    b"PK\x03\x04": f"is a zip archive, probably a PyTorch pickle (.pth, .bin), which we never read: {TO_SAFETENSORS}",
    b"\x80\x02\x8a": f"is a Python pickle, which we never read: {TO_SAFETENSORS}",
    b"\x80\x04\x95": f"is a Python pickle, which we never read: {TO_SAFETENSORS}",
    b"version https://git-lfs": "is a Git LFS pointer, not the weights: download the weights with `git lfs pull`",
}
TEXTS = {
    b"<": "is an HTML or XML page, not weights: did the download need a login?",
    b"{": "is a JSON file, not weights: give the path of its directory",
}
PRINTABLE = frozenset(range(0x20, 0x7F)) | set(b"\t\n\r")


def weights_file(path: str | Path) -> MappedFile:
    """Map a file of weights into memory. Raises `CheckpointError` if we recognize that the file is something else."""
    file = MappedFile(path)
    start = file.bytes(0, 64).removeprefix(b"\xef\xbb\xbf")
    for magic, what in OTHER_FORMATS.items():
        if start.startswith(magic):
            raise refused(path, what)
    if set(start[:4]) <= PRINTABLE:
        for first, what in TEXTS.items():
            if start.lstrip().startswith(first):
                raise refused(path, what)
    if begins_imatrix(start):
        raise refused(path, IMATRIX)
    if ONNX.match(start):
        raise refused(
            path, "is an ONNX model, which we write but do not read: give the checkpoint that it was made from"
        )
    if len(start) > 8 and set(start) <= PRINTABLE:  # llama2.c's magic number is printable, too.
        raise refused(path, "is a text file, not weights")
    return file


def begins_imatrix(start: bytes) -> bool:
    """Tell whether a file begins like an imatrix file of llama.cpp.

    Such a file begins with the number of tensors, then the length of a name, then the name.
    """
    count, length = (int.from_bytes(start[at : at + 4], "little") for at in (0, 4))
    name = start[8 : 8 + length]
    return 0 < count < 1 << 20 and 0 < length <= len(start) - 8 and re.fullmatch(rb"[\w.]+\.weight", name) is not None


def snapshot_of(folder: str | Path) -> Path:
    """Return the snapshot in `folder` if it is a model's folder in Hugging Face's cache (`models--owner--name`).

    We choose the snapshot that `refs/main` names, or the only snapshot. If we find no such snapshot, or if `folder` is
    any other path, we return `folder`.
    """
    path = Path(folder)
    snapshots = path / "snapshots"
    if not os.path.isdir(snapshots) or os.path.exists(path / "config.json"):
        return path
    try:
        there = [entry.name for entry in os.scandir(snapshots) if entry.is_dir()]
        revision = _first_line(path / "refs" / "main")
    except OSError:
        return path
    if revision in there:
        return snapshots / revision
    return snapshots / there[0] if len(there) == 1 else path


def _first_line(path: Path) -> str:
    """Return the first line of a file, at most 100 bytes; an empty string if the file does not exist."""
    if not path.is_file():
        return ""
    with open(path, "rb") as file:
        return file.readline(100).decode(errors="replace").strip()


def folder_without_config(folder: Path) -> CheckpointError:
    """Build the error for a folder without a config.json; the error says what the folder holds if we recognize it."""
    names = sorted(os.listdir(folder))
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if "adapter_config.json" in names:
        base = read_object(folder / "adapter_config.json").get("base_model_name_or_path")
        named = f", {quoted(base)}," if isinstance(base, str) else ""
        return refused(folder, f"is an adapter (LoRA): give its base model{named} and --adapter {folder}")
    if ggufs:
        return refused(folder, f"is a folder of GGUF files: give the path of one of these files: {_listed(ggufs)}")
    if "snapshots" in names:
        there = sorted(os.listdir(folder / "snapshots"))
        paths = _listed([f"snapshots/{name}" for name in there])
        what = f"give the path of a snapshot: {paths}" if there else "it contains no snapshot"
        return refused(folder, f"is a model's folder of Hugging Face's cache: {what}")
    if any(name.startswith("consolidated.") and name.endswith(".pth") for name in names):
        what = "is in Meta's or Mistral's own layout (consolidated.*.pth: Python pickles, which we never read)"
        how = "convert it with convert_llama_weights_to_hf.py or convert_mistral_weights_to_hf.py of transformers 4.45"
        return refused(folder, f"{what}: download the model in Hugging Face's layout, with a config.json, or {how}")
    if "params.json" in names:
        return refused(folder, "has Mistral's params.json, but lacks the weights, consolidated.safetensors")
    weights = [name for name in names if name.endswith((".bin", ".safetensors")) and not name.startswith("tok")]
    what = f"it has {_listed(weights)}: give the path of a llama2.c .bin file, or add the weights' config.json"
    return refused(folder, f"has no config.json{f'; {what}' if weights else ''}")


def leads_out(path: Path) -> Path | None:
    """Return the target of `path` if it is a link that leads out of its folder; else None.

    In Hugging Face's cache, files in `snapshots/<revision>` are links into the folder `blobs` next to `snapshots`. Such
    a target belongs to the model, so we return None for it.
    """
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    cached = next((parent for parent in folder.parents[:2] if parent.name == "snapshots"), None)
    blobs = cached.parent / "blobs" if cached else folder
    return None if target.is_relative_to(folder) or target.parent == blobs else target


def _listed(names: list[str]) -> str:
    most = 5
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
