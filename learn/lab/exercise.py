"""The parts of an exercise."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from llamaspec.verify.catalogue import IMPLEMENTATIONS
from llamaspec.verify.mutant import Implementation, Mutant


@dataclass(frozen=True)
class Broken:
    """A kernel in which one line is wrong: a mutant of `verify.mutants`."""

    number: int
    chapter: str
    op: str  # the contract that judges
    mutant: str
    title: str  # what a user of the kernel would report
    hint: str
    seen: str  # where such a mistake was made, and the thread about it

    @property
    def implementation(self) -> Implementation:
        """The right kernel, and its mutants."""
        return IMPLEMENTATIONS[self.op]

    @cached_property
    def change(self) -> Mutant:
        """The wrong line. Raises LookupError where the mutants have none of this name."""
        found = [mutant for mutant in self.implementation.mutants if mutant.name == self.mutant]
        if not found:
            raise LookupError(f"{self.op} has no mutant called {self.mutant}")
        return found[0]


@dataclass(frozen=True)
class Own:
    """A layer to write, from an empty function."""

    number: int
    chapter: str
    name: str  # of the function
    title: str
    hint: str
    file: str  # in reference/, where its definition and so the solution is
    skeleton: str
    op: str = ""  # the contract that judges; "": `judge` does
    only: tuple[tuple[str, tuple[str, ...]], ...] = ()  # draws of the contract
    judge: Callable[[Callable], str | None] | None = None  # says what is wrong, or None


Exercise = Broken | Own
