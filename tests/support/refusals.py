"""Check that a bad file is refused quickly, with little memory, in one line that names the file."""

import re
from pathlib import Path

from llamaspec.model.checkpoints import Checkpoint, check_finite, open_checkpoint
from llamaspec.model.tokenizers.load import load_tokenizer
from tests.support import bounded


def load(path: str | Path) -> Checkpoint:
    """Open a checkpoint and read every tensor, as a model would."""
    checkpoint = open_checkpoint(path)
    for name, tensor in checkpoint.tensors.items():
        array = tensor.read()
        assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype)
        check_finite(name, array, path=checkpoint.path)
        if tensor.codes:
            assert sum(len(part.codes) for part in tensor.codes.parts()) == tensor.shape[0]
    return checkpoint


def load_with_tokenizer(path: str | Path) -> None:
    """Load a checkpoint and its tokenizer; encode a string and decode every id."""
    load(path)
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("Hello, 12 wörlds\n")
    assert all(0 <= id < tokenizer.vocab for id in ids)
    b"".join(map(tokenizer.bytes_of, range(-1, tokenizer.vocab + 1)))


def refusal(path: str | Path, *, named: str | None = None) -> str:
    """Return the one-line message with which `load` refuses `path`. It must begin with `named`, by default `path`."""
    message = bounded.process().refusal(load, str(path))
    assert message is not None, "it was loaded"
    check_message(message, named or str(path))
    return message


def check_message(message: str, named: str) -> None:
    assert message.isprintable(), "one line"
    assert len(message) < 1000
    assert message.startswith(named), message


def mentions(message: str, words: str) -> bool:
    """Return whether a message contains all of the given words; `|` separates alternative lists of words.

    Tests list the words that identify a fault: a file, a field, an option, a number. The sentence around these words
    may change. A number must be there as a whole.

    >>> mentions("config.json: dim is 0, expected 1 to 1,048,576", "config.json dim 0")
    True
    >>> mentions("config.json: dim is 10, expected 1 to 8", "dim 0|ffn")
    False
    """
    alternatives = [alternative.split() for alternative in words.split("|")]
    assert all(alternatives)
    return any(all(_contains(message, word) for word in alternative) for alternative in alternatives)


def _contains(message: str, word: str) -> bool:
    if re.fullmatch(r"-?\d[\d.,e+-]*", word):
        return re.search(rf"(?<![\w.-]){re.escape(word)}(?!\w|[.,]\d)", message) is not None
    return word in message
