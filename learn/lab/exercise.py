"""The types of exercises: a broken kernel to repair, and a layer to write."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from llamaspec.verify.catalogue import IMPLEMENTATIONS
from llamaspec.verify.mutant import Implementation, Mutant


@dataclass(frozen=True)
class Broken:
    """A kernel with one wrong line: a mutant of `verify.mutants`."""

    number: int
    chapter: str
    op: str  # the name of the op, and of the contract that judges the kernel
    mutant: str
    title: str  # a user's report about the kernel
    hint: str
    seen: str  # a project with the same mistake, with a link to the discussion

    @property
    def implementation(self) -> Implementation:
        """The correct kernel, and its mutants."""
        return IMPLEMENTATIONS[self.op]

    @cached_property
    def change(self) -> Mutant:
        """The mutant that makes the wrong line. Raises LookupError if no mutant has this name."""
        matches = [mutant for mutant in self.implementation.mutants if mutant.name == self.mutant]
        if not matches:
            raise LookupError(f"the op {self.op} has no mutant with the name {self.mutant!r}")
        return matches[0]


@dataclass(frozen=True)
class LayerToWrite:
    """A layer that the user writes, starting from an empty function."""

    number: int
    chapter: str
    name: str  # the name of the function
    title: str
    hint: str
    file: str  # the file in reference/ with the definition, which serves as the solution
    skeleton: str
    op: str = ""  # the contract of this op judges the layer; "": `judge` judges it
    only: tuple[tuple[str, tuple[str, ...]], ...] = ()  # the only values that the contract draws for some arguments
    judge: Callable[[Callable], str | None] | None = None  # returns what is wrong with a function, or None


Exercise = Broken | LayerToWrite
