"""Problems of KernelBench (https://arxiv.org/abs/2502.10517): a class `Model`, and `ModelNew`, which is to replace it.

The op of a problem is found by holding `Model` itself to contracts: the first that it meets, called in one of a few
ways, is what `ModelNew` is held to. Rows of -inf alone, masks and padding are left out, since conventions differ there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from llamaspec.verify.bounds.precision import PRECISIONS
from llamaspec.verify.campaign import Campaign, Job
from llamaspec.verify.candidates.candidate import NoVerdict, Outputs
from llamaspec.verify.contract import Claim, Contract, Law, Trial
from llamaspec.verify.draws.domain import domain
from llamaspec.verify.draws.drawing import each
from llamaspec.verify.judging.runner import verify

TRIED = 12  # draws that `Model` is held to
CONVENTIONS = {"hidden": "none", "mask": "none", "padding": 0.0}


@dataclass(frozen=True)
class Way:
    """A way to call a problem's class as an op."""

    op: str
    call: str  # of `verify.candidates.kernelbench_calls`
    ranks: tuple[int, ...]  # of the problem's inputs
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ignores: frozenset[str] = frozenset()  # arguments that the problem does not take

    def contract(self, held: Contract) -> Contract:
        """`held` without the laws that change an argument which the problem does not take."""
        return replace(held, laws=[self._held(law) for law in held.laws]) if self.ignores else held

    def _held(self, law: Law) -> Law:
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

    def job(self, path: str, name: str) -> Job:
        """The class called `name` in the problem at `path`, as a candidate."""
        return Job(self.op, f"kernelbench:{self.call}:{path}:{name}", only=self.only)


class _NotTaken(Exception):
    """A law changed an argument that the problem does not take."""


# A product after the call, with a weight or with `up`, rounds once more, as float32 kernels do and others do not.
WAYS = (
    Way("gemm", "product", (2, 2)),
    Way("gemv", "product_with_vector", (2, 2)),
    Way("rmsnorm", "over_channels", (4,)),
    Way("swiglu", "gate_alone", (2,)),
    Way("attention", "heads_first", (4, 4, 4), only={"mask": ["none"], "group": [1]}, ignores=frozenset({"mask"})),
)


def ways(contracts: Mapping[str, Contract]) -> Iterator[Way]:
    """All ways to call a problem as one of `contracts`: those above, and with the arguments of each definition."""
    yield from (way for way in WAYS if way.op in contracts)
    for contract in contracts.values():
        left_out = {
            name: [value]
            for name, value in CONVENTIONS.items()
            if name in contract.draws and value in domain(contract.draws[name]).drawn
        }
        arguments = contract.arguments(precision=PRECISIONS["float32"], **next(each(contract.draws, Random(0))))
        positional, _ = contract.split(arguments)
        ranks = tuple(value.ndim for value in positional.values() if isinstance(value, np.ndarray))
        yield Way(contract.name, "as_defined", ranks, only=left_out)


def way_of(
    path: str, contracts: Mapping[str, Contract], campaign: Campaign, *, heed: Callable[[], None] = lambda: None
) -> Way:
    """Find what `Model` of the problem at `path` computes.

    Raises ImportError for a file that cannot be imported, and ValueError where it is no op that `contracts` know.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    with campaign.worker(f"kernelbench:ranks:{path}:Model") as worker:
        worker.start()
        found = worker.call({}, {})
    if not isinstance(found, Outputs):
        raise ValueError(f"{path}: get_inputs {found.kind}: {found.message}")
    ranks = tuple(int(rank) for rank in found.arrays[0])
    tried = [way for way in ways(contracts) if way.ranks == ranks]
    for way in tried:
        heed()
        if _meets(way, path, way.contract(contracts[way.op]), campaign):
            return way
    inputs = f"{len(ranks)} inputs of {', '.join(map(str, ranks))} axes"
    raise ValueError(
        f"{path}: Model, of {inputs}, is none of the ops that contracts know; --contract FILE.py gives one of your own"
    )


def _meets(way: Way, path: str, contract: Contract, campaign: Campaign) -> bool:
    job = way.job(path, "Model")
    with campaign.worker(job.candidate) as worker:
        try:
            report = verify(
                contract,
                worker,
                precision=PRECISIONS["float32"],
                examples=TRIED,
                seed=campaign.seed,
                seconds=campaign.seconds,
                only=way.only,
                shrink=False,
            )
        except NoVerdict:
            return False
    return report.outcome == "within bounds"
