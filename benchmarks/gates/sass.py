"""Reads machine code from nvdisasm's listing, with or without control codes before each instruction."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P[\dT]+)?\s*([A-Z][A-Z0-9_.]*)\s*(.*)")
_LABEL = re.compile(r"^\.(L_x_\d+):")
_TARGET = re.compile(r"`\(\.(L_x_\d+)\)")

_SPIN = 8  # instructions


class Instruction(NamedTuple):
    opcode: str  # with modifiers: LDG.E.128
    operands: str
    guard: str = ""  # predicate: @!P0


class Loop(NamedTuple):
    start: int  # first instruction
    end: int  # branch back


class SassListing(NamedTuple):
    """Instructions of a kernel in the order of their addresses."""

    instructions: Sequence[Instruction]
    labels: dict[str, int]  # index of the next instruction

    def find(self, *opcodes: str) -> Iterator[int]:
        """Yield the indices of instructions with one of these opcodes, with or without modifiers such as `.E`.

        >>> list(read("/*0000*/ LDG.E.128 R8, desc[UR4][R4.64]").find("LDG"))
        [0]
        """
        return (i for i, word in enumerate(self.instructions) if word.opcode.split(".")[0] in opcodes)

    def all_loops(self) -> Iterator[Loop]:
        """Yield all loops, including nested ones: the instructions from the target of a backward branch to the branch.

        We omit branches back across the kernel's exit: the compiler puts rare paths after the exit, and these return
        by such a branch.
        """
        for end, word in enumerate(self.instructions):
            if word.opcode.split(".")[0] == "BRA" and (target := _TARGET.search(word.operands)):
                loop = Loop(self.labels[target[1]], end)
                behind = any(word.opcode == "EXIT" and not word.guard for word in self.inside(loop))
                if loop.start <= end and not behind:
                    yield loop

    def loops(self) -> list[Loop]:
        """List the innermost loops, without the short loops that spin at a barrier."""
        loops: list[Loop] = []
        for loop in self.all_loops():
            outer = any(loop.start <= inner.start and inner.end <= loop.end for inner in loops)
            exits = any(word.opcode == "EXIT" for word in self.inside(loop))
            if loop.end - loop.start >= _SPIN and not outer and not exits:
                loops.append(loop)
        return loops

    def inside(self, loop: Loop) -> Sequence[Instruction]:
        """Return the instructions of a loop."""
        return self.instructions[loop.start : loop.end + 1]

    def main_loop(self) -> Sequence[Instruction]:
        """Return the longest innermost loop; empty if the kernel has none."""
        longest = max(self.loops(), key=lambda loop: loop.end - loop.start, default=None)
        return self.inside(longest) if longest else ()


def read(listing: str) -> SassListing:
    """Parse the first kernel of a listing.

    >>> for word in read('''
    ... .L_x_2:
    ...    -:-:-:Y:06        /*0d30*/                   FADD R3, R0, R3
    ...    -:-:-:Y:06        /*0d40*/               @P0 BRA `(.L_x_2)
    ... ''').instructions:
    ...     print(word)
    Instruction(opcode='FADD', operands='R3, R0, R3', guard='')
    Instruction(opcode='BRA', operands='`(.L_x_2)', guard='@P0')
    """
    instructions: list[Instruction] = []
    labels = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif word := _LINE.search(line):
            instructions.append(Instruction(word[2], word[3].strip(), word[1] or ""))
    return SassListing(instructions, labels)
