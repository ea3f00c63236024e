"""Opens a tokenizer of any kind; we recognize the kind by the content of the file."""

import re
from pathlib import Path

from llamaspec.model.checkpoints.checkpoint import os_errors, refused
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.recognize import GGUF
from llamaspec.model.tokenizers.tokenizer import Tokenizer

NAMES = ("tokenizer.json", "tekken.json", "tokenizer.model", "tokenizer.bin")
TWO_FILES = ("vocab.json", "merges.txt")  # a tokenizer, if both are in a directory; the last choice
MISTRALS = re.compile(r"tokenizer\.model\.v\d+(m\d+)?")  # file names in Mistral's own layout, with a version
LIKELY = re.compile(r"tok.*\.(json|model|bin|gguf)$|spm.*\.model$", re.IGNORECASE)  # other names, for suggestions
TEKKEN = re.compile(rb'"rank"\s*:\s*\d+\s*,\s*"token_(bytes|str)"\s*:')
LARGEST = 48 << 20  # bytes; the largest known tokenizer file, Gemma 3's tokenizer.json, has 33 million bytes


def load_tokenizer(path: str | Path, *, beside: str | None = None) -> Tokenizer:
    """Open a tokenizer from its file, from a GGUF file that contains it, or from a directory.

    In a directory, we open the first of these that exists: the files in `NAMES`, in this order; the newest file with a
    name that matches `MISTRALS`; the two files in `TWO_FILES`. If `path` is the directory of the model file `beside`,
    the error for a missing tokenizer names `beside`. Raises CheckpointError if there is no tokenizer, or if it cannot
    be used.
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
        raise refused(path, "is a GGUF file without a tokenizer")
    if file.size > LARGEST:
        raise refused(path, f"has {file.size:,} bytes, expected at most {LARGEST:,} for a tokenizer")
    return _recognize(file.bytes(0, file.size), str(path))


def tokenizer_in(folder: Path) -> Path | None:
    """Find the path of the tokenizer file in a folder; None if the folder has no tokenizer."""
    for name in NAMES:
        if (folder / name).exists():
            return folder / name
    # All versions of Mistral's tokenizer have the same vocabulary, and newer versions have more control tokens.
    versions = (path for path in folder.glob("tokenizer.model.v*") if MISTRALS.fullmatch(path.name))
    newest = max(versions, key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)], default=None)
    vocab, merges = (folder / name for name in TWO_FILES)
    return newest or (vocab if vocab.exists() and merges.exists() else None)


def _in_directory(folder: Path, beside: str | None) -> Path:
    if tokenizer_path := tokenizer_in(folder):
        return tokenizer_path
    likely = sorted(path.name for path in folder.iterdir() if LIKELY.search(path.name))[:5]
    place, here = (beside, "next to it") if beside else (folder if folder != Path() else "the current folder", "in it")
    hint = f"; perhaps the tokenizer is {' or '.join(likely)}" if likely else ""
    names = f"{', '.join(NAMES)}, {' with '.join(TWO_FILES)}"
    what = f"no tokenizer was found {here} (looked for {names})"
    raise refused(place, f"{what}: give its path with --tokenizer{hint}")


def _recognize(data: bytes, path: str) -> Tokenizer:
    # Each library takes a tenth of a second to import, so we import only the one that we need.
    head = data[:200].lstrip(b"\xef\xbb\xbf \t\r\n")
    if head.startswith(b"version https://git-lfs"):
        raise refused(path, "is a Git LFS pointer, not the tokenizer: download the tokenizer with `git lfs pull`")
    if head[:1] == b"<":
        raise refused(path, "is an HTML or XML page, not a tokenizer: did the download need a login?")
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
    if data[2:4] == b"\0\0":  # In llama2.c's file, these bytes are the high half of a length below 65,536.
        from llamaspec.model.tokenizers.llama2c import read_llama2c

        return read_llama2c(data, path=path)
    from llamaspec.model.tokenizers.sentencepiece_model import read_sentencepiece

    return read_sentencepiece(data, path=path)
