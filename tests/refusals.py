"""How a file that cannot be used must be refused: soon, in little memory, in one line that names the file."""

import time
import tracemalloc
from pathlib import Path

import pytest

from model.checkpoints import Checkpoint, CheckpointError, check_finite, open_checkpoint

SECONDS = 3.0
BYTES = 400 << 20  # beside the 100 MB or so that Python and NumPy take before they begin


def load(path: str | Path) -> Checkpoint:
    """Open a checkpoint and read everything in it, as a model would."""
    checkpoint = open_checkpoint(path)
    for name, tensor in checkpoint.tensors.items():
        array = tensor.read()
        assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype)
        check_finite(name, array, path=checkpoint.path)
    return checkpoint


def refusal(path: str | Path, *, named: str | None = None) -> str:
    """What `load` says about `path`, which must be refused; the message names `named`, or else `path`."""
    began = time.thread_time()  # of the processor, so that a busy machine fails nothing; a hang is seen as one
    with pytest.raises(CheckpointError) as caught:
        load(path)
    seconds = time.thread_time() - began
    tracemalloc.start()  # again, since this takes several times as long
    try:
        with pytest.raises(CheckpointError):
            load(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.isprintable(), "one line"
    assert len(message) < 1000
    assert message.startswith(named or str(path)), message
    assert seconds < SECONDS
    assert peak < BYTES
    return message
