"""Compare a candidate's formula with the definition in a process of its own, which may hang or crash.

JAX traces the candidate there, so the process runs the candidate's Python code.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import STARTING
from llamaspec.verify.candidates.worker import load
from llamaspec.verify.catalogue import CONTRACTS, contract_for, in_file
from llamaspec.verify.judging.formula import UNDECIDED, Formula


@dataclass(frozen=True)
class Task:
    """A candidate, the op whose definition we compare, and the limits of the comparison."""

    op: str
    candidate: str
    dtype: str
    seed: int
    seconds: float
    contract_file: str | None = None  # the file of the user's contracts; None: ours
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)


def compare(task: Task) -> Formula:
    """Start the process and wait for its verdict, at most a few minutes longer than `task.seconds`."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(task, sender))
    process.start()
    sender.close()
    patience = task.seconds + STARTING
    try:
        if not receiver.poll(patience):
            return Formula(UNDECIDED, f"no answer within {patience:g} s")
        return receiver.recv()
    except EOFError:
        process.join(STARTING)
        return Formula(UNDECIDED, f"the process ended with the exit status {process.exitcode}")
    finally:
        process.kill()
        process.join()
        receiver.close()


def _answer(task: Task, sender: Connection) -> None:
    """Send the verdict. The candidate's output is discarded."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        from llamaspec.verify.algebra import equality
    except ImportError as error:
        sender.send(Formula(UNDECIDED, f"this Python has no JAX: {error}"))
        return
    contracts = in_file(task.contract_file)[0] if task.contract_file else CONTRACTS
    sender.send(
        equality.compare(
            contract_for(task.op, contracts),
            load(task.candidate),
            precision=precision(task.dtype),
            only=task.only,
            seed=task.seed,
            seconds=task.seconds,
        )
    )
