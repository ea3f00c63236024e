"""Converts failures of the tokenizers library, which is written in Rust, to errors with one line.

If Rust panics, Python gets an exception that derives from BaseException, and we can recognize its class only by name.
Before Python gets the exception, Rust prints lines about the panic to file descriptor 2. To hide these lines, we
redirect the descriptor to a file in memory during the call. Afterwards we print all other output from this file to
stderr.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock

from llamaspec.model.checkpoints.checkpoint import CheckpointError, refused

# The lines that Rust prints about a panic: a line break, the place, the message, and a note about RUST_BACKTRACE.
PANIC = re.compile(rb"\n?thread '[^\n]*' [^\n]*panicked at .*?(?:\nnote: [^\n]*\n|\Z)", re.DOTALL)
STDERR = 2
_one_call = RLock()  # Only one thread at a time may redirect the descriptor, which belongs to the whole process.


@contextmanager
def library_errors(path: str, what: str, *, may_panic: bool = True) -> Iterator[None]:
    """Convert any failure of the library in the block, even a Rust panic, to a `CheckpointError` about `path`.

    `what` begins the error message. With `may_panic`, we hide the lines that Rust prints to stderr about a panic, and
    only one thread at a time can be inside such a block.
    """
    try:
        with without_panic_lines() if may_panic else nullcontext():
            yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, CheckpointError):
            raise
        message = " ".join(str(error).split())[:200]
        raise refused(path, f"{what}: {message}") from None


@contextmanager
def without_panic_lines() -> Iterator[None]:
    """Drop the lines that Rust prints about a panic in this context. All other output to stderr appears at the end."""
    with _one_call:
        try:
            stderr = os.dup(STDERR)
        except OSError:  # stderr is closed.
            yield
            return
        printed = os.memfd_create("stderr")
        try:
            os.dup2(printed, STDERR)
            try:
                yield
            finally:
                os.dup2(stderr, STDERR)
                if size := os.fstat(printed).st_size:
                    os.write(STDERR, PANIC.sub(b"", os.pread(printed, size, 0)))
        finally:
            os.close(printed)
            os.close(stderr)
