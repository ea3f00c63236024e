"""Problems of KernelBench (https://arxiv.org/abs/2502.10517): a class `Model`, and its replacement `ModelNew`.

To find the op of a problem, we verify `Model` with one contract after the other, through a few adapters. `ModelNew`
must meet the first contract that `Model` meets. We do not draw rows of only -inf, masks or padding, since
implementations have different conventions for them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from llamaspec.verify.bounds.precision import PRECISIONS
from llamaspec.verify.campaign import Campaign, CandidateJob
from llamaspec.verify.candidates.candidate import NoVerdict, Outputs
from llamaspec.verify.contract import Claim, Contract, Law, Trial
from llamaspec.verify.draws.domain import domain
from llamaspec.verify.draws.drawing import draws_from
from llamaspec.verify.judging.runner import verify

TRIED = 12  # draws for `Model`
CONVENTIONS = {"hidden": "none", "mask": "none", "padding": 0.0}


@dataclass(frozen=True)
class Adapter:
    """A way to call the class of a KernelBench problem with the arguments of an op."""

    op: str
    call: str  # a function of `verify.candidates.kernelbench_calls`
    ranks: tuple[int, ...]  # number of axes of each input of the problem
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ignores: frozenset[str] = frozenset()  # arguments that the problem does not have

    def contract(self, contract: Contract) -> Contract:
        """Return `contract`, but skip a law if it changes an argument that the problem does not have."""
        return (
            replace(contract, laws=[self._without_ignored(law) for law in contract.laws]) if self.ignores else contract
        )

    def _without_ignored(self, law: Law) -> Law:
        def check(trial: Trial) -> Claim | None:
            def again(**changes: Any) -> tuple[np.ndarray, ...]:
                if self.ignores & changes.keys():
                    raise _NotTaken
                return trial.again(**changes)

            try:
                return law.check(trial._replace(again=again))
            except _NotTaken:
                return None

        return Law(law.name, check)

    def job(self, path: str, name: str) -> CandidateJob:
        """Make a job for the problem at `path`. The candidate is the problem's class `name`."""
        return CandidateJob(self.op, f"kernelbench:{self.call}:{path}:{name}", only=self.only)


class _NotTaken(Exception):
    """Signals that a law changes the value of an argument, but the problem's class does not take this argument."""


# Multiplying by a weight or by `up` after the call rounds once more, which only float32 kernels do as well.
ADAPTERS = (
    Adapter("gemm", "product", (2, 2)),
    Adapter("gemv", "product_with_vector", (2, 2)),
    Adapter("rmsnorm", "over_channels", (4,)),
    Adapter("swiglu", "gate_alone", (2,)),
    Adapter("attention", "heads_first", (4, 4, 4), only={"mask": ["none"], "group": [1]}, ignores=frozenset({"mask"})),
)


def adapters(contracts: Mapping[str, Contract]) -> Iterator[Adapter]:
    """Yield ways to call a problem: the entries of `ADAPTERS` for ops in `contracts`, then one way for each contract.

    The way for a contract passes all arguments unchanged.
    """
    yield from (adapter for adapter in ADAPTERS if adapter.op in contracts)
    for contract in contracts.values():
        left_out = {
            name: [value]
            for name, value in CONVENTIONS.items()
            if name in contract.draws and value in domain(contract.draws[name]).drawn
        }
        arguments = contract.arguments(precision=PRECISIONS["float32"], **next(draws_from(contract.draws, Random(0))))
        positional, _ = contract.split(arguments)
        ranks = tuple(value.ndim for value in positional.values() if isinstance(value, np.ndarray))
        yield Adapter(contract.name, "as_defined", ranks, only=left_out)


def adapter_for(
    path: str, contracts: Mapping[str, Contract], campaign: Campaign, *, heed: Callable[[], None] = lambda: None
) -> Adapter:
    """Find the op that `Model` of the problem at `path` computes.

    We call `heed` before we try an op, so that the caller can stop the search with an exception.

    Raises ImportError for a file that cannot be imported, and ValueError if no contract fits.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    with campaign.worker(f"kernelbench:ranks:{path}:Model") as worker:
        worker.start()
        outcome = worker.call({}, {})
    if not isinstance(outcome, Outputs):
        raise ValueError(f"{path}: get_inputs {outcome.kind}: {outcome.message}")
    ranks = tuple(int(rank) for rank in outcome.arrays[0])
    tried = [adapter for adapter in adapters(contracts) if adapter.ranks == ranks]
    for adapter in tried:
        heed()
        if _meets(adapter, path, adapter.contract(contracts[adapter.op]), campaign):
            return adapter
    inputs = f"{len(ranks)} inputs of {', '.join(map(str, ranks))} axes"
    raise ValueError(f"{path}: Model, with {inputs}, meets no contract; add your own with --contract FILE.py")


def _meets(adapter: Adapter, path: str, contract: Contract, campaign: Campaign) -> bool:
    job = adapter.job(path, "Model")
    with campaign.worker(job.candidate) as worker:
        try:
            report = verify(
                contract,
                worker,
                precision=PRECISIONS["float32"],
                examples=TRIED,
                seed=campaign.seed,
                seconds=campaign.seconds,
                only=adapter.only,
                shrink=False,
            )
        except NoVerdict:
            return False
    return report.outcome == "within bounds"
