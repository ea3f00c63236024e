"""Runs compilations in processes, because a compilation may hang, abort, or depend on earlier ones."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any, NamedTuple

# Starting a process also reaps ended processes, and could take an exit code that another thread's join waits for.
_BOOKKEEPING = Lock()


class CallFailure(NamedTuple):
    """The reason why a call has no result."""

    reason: str


def call_each(
    function: Callable[[Any], Any],
    arguments: Sequence[Any],
    *,
    limit: float,
    at_once: int = 1,
    preload: Sequence[str] = (),
) -> Iterator[Any]:
    """Call `function` with each argument; yields results or `CallFailure`s in the order of the arguments.

    Each call has `limit` seconds and a new process, forked from a process that has only imported the modules `preload`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with ThreadPoolExecutor(at_once) as threads:
        yield from threads.map(lambda argument: _call(context, function, argument, limit), arguments)


def _call(context: Any, function: Callable[[Any], Any], argument: Any, limit: float) -> Any:
    parent_end, child_end = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(child_end, function, argument), daemon=True)
    with _BOOKKEEPING:
        process.start()
    child_end.close()
    try:
        answer = parent_end.recv() if parent_end.poll(limit) else CallFailure(f"took longer than {limit:g} s")
    except (EOFError, ConnectionResetError):
        answer = None
    finally:
        parent_end.close()
        process.kill()  # no-op if it has ended
        with _BOOKKEEPING:
            process.join()
    if answer is None:
        code = process.exitcode
        return CallFailure(f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")
    return answer


def _answer(pipe: Connection, function: Callable[[Any], Any], argument: Any) -> None:
    try:
        answer = function(argument)
    except Exception as error:
        # Some messages are pages long, and the beginning says what is wrong.
        answer = CallFailure(f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
    pipe.send(answer)
