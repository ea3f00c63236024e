"""Recognizes files and folders that this package cannot read as models; says what they are and what to do."""

import os
import re
from pathlib import Path

from llamaspec.model.checkpoints.checkpoint import CheckpointError, quoted, refused
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.strict_json import read_object

GGUF = b"GGUF"
TO_SAFETENSORS = "transformers' from_pretrained() and save_pretrained() write it as safetensors"
IMATRIX = "is an importance matrix (imatrix) of llama.cpp, which guides its quantization: no model"
# The formats that we read begin with a number: a header's length or a model's width. Each key here, read as a number,
# is too large for both.
OTHER_FORMATS = {
    GGUF: "is a GGUF file, expected safetensors: name the file itself",
    b"PK\x03\x04": f"is a zip archive, as PyTorch's pickles are (.pth, .bin), which are never read: {TO_SAFETENSORS}",
    b"\x80\x02\x8a": f"is a Python pickle, which is never read: {TO_SAFETENSORS}",
    b"\x80\x04\x95": f"is a Python pickle, which is never read: {TO_SAFETENSORS}",
    b"version https://git-lfs": "is a Git LFS pointer, not the file: fetch it with `git lfs pull`",
}
TEXTS = {
    b"<": "is an HTML or XML page, not weights: did its download need a login?",
    b"{": "is JSON, not weights: name the directory that it lies in",
}
PRINTABLE = frozenset(range(0x20, 0x7F)) | set(b"\t\n\r")


def weights_file(path: str | Path) -> MappedFile:
    """Map a file of weights. Raises `CheckpointError` for a file that is recognized as something else."""
    file = MappedFile(path)
    start = file.bytes(0, 64).removeprefix(b"\xef\xbb\xbf")
    for magic, what in OTHER_FORMATS.items():
        if start.startswith(magic):
            raise refused(path, what)
    if set(start[:4]) <= PRINTABLE:
        for first, what in TEXTS.items():
            if start.lstrip().startswith(first):
                raise refused(path, what)
    if _begins_imatrix(start):
        raise refused(path, IMATRIX)
    if len(start) > 8 and set(start) <= PRINTABLE:  # llama2.c's magic number is printable, too.
        raise refused(path, "is text, not weights")
    return file


def _begins_imatrix(start: bytes) -> bool:
    """Tell whether a file begins as an imatrix file does: a number of tensors, the length of a name, the name."""
    count, length = (int.from_bytes(start[at : at + 4], "little") for at in (0, 4))
    name = start[8 : 8 + length]
    return 0 < count < 1 << 20 and 0 < length <= len(start) - 8 and re.fullmatch(rb"[\w.]+\.weight", name) is not None


def snapshot_of(folder: str | Path) -> Path:
    """Find the snapshot in a model's folder of Hugging Face's cache, `models--owner--name`; return any other path as it
    is.

    The snapshot is the one that `refs/main` names, or the only one.
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
    """Read the first line of a short file; "" if the file does not exist."""
    if not path.is_file():
        return ""
    with open(path, "rb") as file:
        return file.readline(100).decode(errors="replace").strip()


def folder_without_config(folder: Path) -> CheckpointError:
    """Make the error for a folder without a config.json; it says what the folder holds, if we recognize that."""
    names = sorted(os.listdir(folder))
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if "adapter_config.json" in names:
        base = read_object(folder / "adapter_config.json").get("base_model_name_or_path")
        merge = f"merge it into its base model{f', {quoted(base)},' if isinstance(base, str) else ''} first"
        return refused(folder, f"is an adapter (LoRA), not a whole model: {merge}, as peft's merge_and_unload does")
    if ggufs:
        return refused(folder, f"is a folder of GGUF files: name one of them, {_listed(ggufs)}")
    if "snapshots" in names:
        there = sorted(os.listdir(folder / "snapshots"))
        what = f"name a snapshot, {_listed([f'snapshots/{name}' for name in there])}" if there else "it has no snapshot"
        return refused(folder, f"is a model's folder of Hugging Face's cache: {what}")
    if any(name.startswith("consolidated.") and name.endswith(".pth") for name in names):
        what = "is Meta's or Mistral's own layout (consolidated.*.pth, Python pickles, which are never read)"
        how = "convert it by convert_llama_weights_to_hf.py or convert_mistral_weights_to_hf.py of transformers 4.45"
        return refused(folder, f"{what}: take the model in Hugging Face's layout, with a config.json, or {how}")
    if "params.json" in names:
        return refused(folder, "has Mistral's params.json, but no consolidated.safetensors, which belongs to it")
    weights = [name for name in names if name.endswith((".bin", ".safetensors")) and not name.startswith("tok")]
    there = f", but {_listed(weights)}: a .bin of llama2.c is named itself, other weights need their config.json"
    return refused(folder, f"no config.json is there{there if weights else ''}")


def leads_out(path: Path) -> Path | None:
    """Return the target of a link that leads out of the link's folder; None for any other path.

    In Hugging Face's cache, `snapshots/<revision>` has links into `blobs` next to `snapshots`. These belong to the
    model, and do not count.
    """
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    cached = next((parent for parent in folder.parents[:2] if parent.name == "snapshots"), None)
    blobs = cached.parent / "blobs" if cached else folder
    return None if target.is_relative_to(folder) or target.parent == blobs else target


def _listed(names: list[str]) -> str:
    most = 5
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
