"""Opens a tokenizer of any kind, recognized by the content of its file."""

import re
from pathlib import Path

from llamaspec.model.checkpoints.checkpoint import os_errors, refused
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.recognize import GGUF
from llamaspec.model.tokenizers.tokenizer import Tokenizer

NAMES = ("tokenizer.json", "tekken.json", "tokenizer.model", "tokenizer.bin")
TWO_FILES = ("vocab.json", "merges.txt")  # a tokenizer, if both are in a directory; the last choice
MISTRALS = re.compile(r"tokenizer\.model\.v\d+(m\d+)?")  # the name in Mistral's own layout, with a version
LIKELY = re.compile(r"tok.*\.(json|model|bin|gguf)$|spm.*\.model$", re.IGNORECASE)  # names of tokenizers by others
TEKKEN = re.compile(rb'"rank"\s*:\s*\d+\s*,\s*"token_(bytes|str)"\s*:')
LARGEST = 48 << 20  # bytes; the largest known, Gemma 3's tokenizer.json, has 33 million


def load_tokenizer(path: str | Path, *, beside: str | None = None) -> Tokenizer:
    """Open the tokenizer in a file, or the first of `NAMES`, the newest of `MISTRALS`, or `TWO_FILES` in a directory.

    The file may be a GGUF with a tokenizer inside. `beside` is the model's file in this directory; if there is no
    tokenizer, the error names this file. Raises CheckpointError, one line that names the file and the fault.
    """
    path = Path(path)
    with os_errors(path):
        if path.is_dir():
            path = _in_directory(path, beside)
    file = MappedFile(path)
    if file.bytes(0, len(GGUF)) == GGUF:
        from llamaspec.model.tokenizers.gguf import read_gguf

        if tokenizer := read_gguf(file):
            return tokenizer
        raise refused(path, "has no tokenizer inside")
    if file.size > LARGEST:
        raise refused(path, f"has {file.size:,} bytes, too many for a tokenizer")
    return _recognize(file.bytes(0, file.size), str(path))


def tokenizer_in(folder: Path) -> Path | None:
    """Find the tokenizer in a folder; None where there is none."""
    for name in NAMES:
        if (folder / name).exists():
            return folder / name
    # Mistral's versions have one vocabulary, and a newer one names more control tokens.
    versions = (path for path in folder.glob("tokenizer.model.v*") if MISTRALS.fullmatch(path.name))
    newest = max(versions, key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)], default=None)
    vocab, merges = (folder / name for name in TWO_FILES)
    return newest or (vocab if vocab.exists() and merges.exists() else None)


def _in_directory(folder: Path, beside: str | None) -> Path:
    if tokenizer_path := tokenizer_in(folder):
        return tokenizer_path
    likely = sorted(path.name for path in folder.iterdir() if LIKELY.search(path.name))[:5]
    place, here = (beside, "beside it") if beside else (folder if folder != Path() else "the current folder", "here")
    hint = f"; {here} is {', '.join(likely)}" if likely else ""
    names = f"{', '.join(NAMES)}, {' with '.join(TWO_FILES)}"
    raise refused(place, f"no tokenizer {here}: looked for {names}; --tokenizer names another{hint}")


def _recognize(data: bytes, path: str) -> Tokenizer:
    # Each library takes a tenth of a second to import, so we import only the one that we need.
    head = data[:200].lstrip(b"\xef\xbb\xbf \t\r\n")
    if head.startswith(b"version https://git-lfs"):
        raise refused(path, "a git-LFS pointer, not the file itself; fetch it with `git lfs pull`")
    if head[:1] == b"<":
        raise refused(path, "a web page, not a tokenizer; the download may have gone wrong")
    if head[:1] == b"{" and TEKKEN.search(data, 0, 100_000):
        from llamaspec.model.tokenizers.tekken import read_tekken

        return read_tekken(data, path=path)
    if head[:1] == b"{" and Path(path).name == TWO_FILES[0]:
        from llamaspec.model.tokenizers.vocab_and_merges import read_vocab_and_merges

        return read_vocab_and_merges(data, path=path)
    if head[:1] == b"{":
        from llamaspec.model.tokenizers.huggingface import read_huggingface

        return read_huggingface(data, path=path)
    if re.match(rb"[A-Za-z0-9+/]+=* +\d", data):
        from llamaspec.model.tokenizers.tiktoken_ranks import read_tiktoken

        return read_tiktoken(data, path=path)
    if data[2:4] == b"\0\0":  # llama2.c's file has the high half of a length below 65,536 here.
        from llamaspec.model.tokenizers.llama2c import read_llama2c

        return read_llama2c(data, path=path)
    from llamaspec.model.tokenizers.sentencepiece_model import read_sentencepiece

    return read_sentencepiece(data, path=path)
