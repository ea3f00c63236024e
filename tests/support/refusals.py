"""Check that a bad file is refused quickly, with little memory, in one line that names the file."""

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
    """Return the one-line message with which `load` refuses `path`. It must name `named`, or else `path`."""
    message = bounded.process().refusal(load, str(path))
    assert message is not None, "it was loaded"
    check_message(message, named or str(path))
    return message


def check_message(message: str, named: str) -> None:
    assert message.isprintable(), "one line"
    assert len(message) < 1000
    assert message.startswith(named), message
