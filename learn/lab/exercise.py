"""The parts of an exercise."""

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
    op: str  # the contract that judges
    mutant: str
    title: str  # the report of a user of the kernel
    hint: str
    seen: str  # a project that made the mistake, and the thread about it

    @property
    def implementation(self) -> Implementation:
        """The right kernel, and its mutants."""
        return IMPLEMENTATIONS[self.op]

    @cached_property
    def change(self) -> Mutant:
        """The wrong line. Raises LookupError if no mutant has this name."""
        matches = [mutant for mutant in self.implementation.mutants if mutant.name == self.mutant]
        if not matches:
            raise LookupError(f"{self.op} has no mutant called {self.mutant}")
        return matches[0]


@dataclass(frozen=True)
class Own:
    """A layer to write, from an empty function."""

    number: int
    chapter: str
    name: str  # of the function
    title: str
    hint: str
    file: str  # in reference/, with its definition, which is the solution
    skeleton: str
    op: str = ""  # the contract that judges it; "": `judge` does
    only: tuple[tuple[str, tuple[str, ...]], ...] = ()  # draws of the contract
    judge: Callable[[Callable], str | None] | None = None  # returns the fault, or None


Exercise = Broken | Own
