"""Turns failures of the tokenizers library, which is written in Rust, into one line.

A panic of Rust derives from BaseException, and we can recognize its class only by name. Before Python sees the panic,
Rust prints lines about it to file descriptor 2. To keep these lines off stderr, we send the descriptor to a file in
memory during the call, and then print what others have written to it.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock

from llamaspec.model.checkpoints.checkpoint import CheckpointError, refused

# The lines of a panic: a line break, the place, the message, and a note about RUST_BACKTRACE.
PANIC = re.compile(rb"\n?thread '[^\n]*' [^\n]*panicked at .*?(?:\nnote: [^\n]*\n|\Z)", re.DOTALL)
STDERR = 2
_one_call = RLock()  # The descriptor belongs to the whole process.


@contextmanager
def library_errors(path: str, what: str, *, may_panic: bool = True) -> Iterator[None]:
    """Turn any failure of the library, a Rust panic included, into a `CheckpointError` about `path`.

    With `may_panic`, the lines that Rust prints about a panic do not reach stderr. Only one such call runs at a time.
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
        except OSError:  # It is closed.
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
