"""What is found under a checkpoint's name, told by its first bytes."""

from pathlib import Path

from model.checkpoints.checkpoint import refused
from model.checkpoints.mapped import MappedFile

GGUF = b"GGUF"
# Four bytes at least, or three that no header's length and no model's width can be: numbers begin our own formats.
STRANGERS = {
    GGUF: "is a GGUF file, where safetensors is due: name the file itself",
    b"PK\x03\x04": "is a zip archive, as PyTorch's .pth and .bin files are: convert it to safetensors",
    b"\x80\x02\x8a": "is a Python pickle, which is never read: convert it to safetensors",
    b"\x80\x04\x95": "is a Python pickle, which is never read: convert it to safetensors",
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
    for magic, what in STRANGERS.items():
        if start.startswith(magic):
            raise refused(path, what)
    if set(start[:4]) <= PRINTABLE:
        for first, what in TEXTS.items():
            if start.lstrip().startswith(first):
                raise refused(path, what)
    if len(start) > 8 and set(start) <= PRINTABLE:  # the magic number of llama2.c is text, too
        raise refused(path, "is text, not weights")
    return file
