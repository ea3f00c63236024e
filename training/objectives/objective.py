"""The parts that the objectives of all fine-tuning methods share."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llamaspec.training.loop import Work
from llamaspec.training.steps import Tensors, reproducible


class Objective(NamedTuple):
    """A loss for `steps.compile_step`, and a function that makes its batches from examples."""

    loss: Callable
    sums: tuple[str, ...]  # the names of the sums that the loss reports
    work: Callable[[Sequence[Any]], Work]  # makes the batches of some examples


class HeldOut(NamedTuple):
    """The loss on held-out examples, and the other figures that the objective reports."""

    loss: float
    measures: dict[str, float]

    def __str__(self):
        """
        >>> print(HeldOut(0.21, {"right": 0.9}))
        held-out loss 0.2100, right 0.900
        """
        return ", ".join([f"held-out loss {self.loss:.4f}", *(f"{name} {x:.3f}" for name, x in self.measures.items())])


def evaluator(
    objective: Objective, examples: Sequence[Any], frozen: Any, *, platform: str
) -> Callable[[Tensors], HeldOut]:
    """Make a function that takes the trained tensors, and computes their loss and figures on held-out examples."""
    compiled, work = reproducible(objective.loss, platform), objective.work(examples)

    def evaluate(tensors: Tensors) -> HeldOut:
        totals = dict.fromkeys(objective.sums, 0.0)
        for batch in work.batches:
            _, sums = compiled(tensors, frozen, *batch)
            totals = {name: total + float(sums[name]) for name, total in totals.items()}
        means = {name: total / work.divisor for name, total in totals.items()}
        return HeldOut(means.pop("loss"), means)

    return evaluate
