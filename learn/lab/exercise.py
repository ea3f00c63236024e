"""Types of exercises."""

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
    op: str  # the op, and the name of its contract, which judges
    mutant: str
    title: str  # the report of a user of the kernel
    hint: str
    seen: str  # a project that made the mistake, with a link to the discussion

    @property
    def implementation(self) -> Implementation:
        """The correct kernel, and its mutants."""
        return IMPLEMENTATIONS[self.op]

    @cached_property
    def change(self) -> Mutant:
        """Return the mutant that makes the wrong line. Raises LookupError if no mutant has this name."""
        matches = [mutant for mutant in self.implementation.mutants if mutant.name == self.mutant]
        if not matches:
            raise LookupError(f"{self.op} has no mutant called {self.mutant}")
        return matches[0]


@dataclass(frozen=True)
class LayerToWrite:
    """A layer to write: the user fills in an empty function."""

    number: int
    chapter: str
    name: str  # the name of the function
    title: str
    hint: str
    file: str  # the file in reference/ with the definition, which is the solution
    skeleton: str
    op: str = ""  # the contract that judges the layer; "": the function `judge` judges it
    only: tuple[tuple[str, tuple[str, ...]], ...] = ()  # the values to which the draws of the contract are narrowed
    judge: Callable[[Callable], str | None] | None = None  # returns the fault of a function, or None


Exercise = Broken | LayerToWrite
