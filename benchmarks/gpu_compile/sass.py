"""Machine code of sm_90a as nvdisasm lists it, with labels and with or without the control codes in front."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[\dT]+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*)")
_LABEL = re.compile(r"^\.(L_x_\d+):")
_TARGET = re.compile(r"`\(\.(L_x_\d+)\)")

_SPIN = 8  # instructions


class Instruction(NamedTuple):
    opcode: str  # with its modifiers: LDG.E.128
    operands: str


class Loop(NamedTuple):
    start: int  # its first instruction
    end: int  # the branch back


class Listing(NamedTuple):
    """A kernel's instructions in the order of their addresses."""

    instructions: Sequence[Instruction]
    labels: dict[str, int]  # of the instruction that follows

    def find(self, *opcodes: str) -> Iterator[int]:
        """Where instructions of these opcodes are, whatever their modifiers.

        >>> list(read("/*0000*/ LDG.E.128 R8, desc[UR4][R4.64]").find("LDG"))
        [0]
        """
        return (i for i, word in enumerate(self.instructions) if word.opcode.split(".")[0] in opcodes)

    def loops(self) -> list[Loop]:
        """Innermost loops: from the target of a branch back to that branch, with no such loop inside.

        Left out are spins, the few instructions that try a barrier, and branches from behind the exit: what is
        rarely taken stands there, and returns.
        """
        loops = []
        for end, word in enumerate(self.instructions):
            if word.opcode.split(".")[0] == "BRA" and (target := _TARGET.search(word.operands)):
                start = self.labels[target[1]]
                body = self.instructions[start:end]
                inner = any(start <= loop.start and loop.end <= end for loop in loops)
                if len(body) >= _SPIN and not inner and not any(word.opcode == "EXIT" for word in body):
                    loops.append(Loop(start, end))
        return loops

    def inside(self, loop: Loop) -> Sequence[Instruction]:
        """The instructions of a loop."""
        return self.instructions[loop.start : loop.end + 1]

    def main_loop(self) -> Sequence[Instruction]:
        """The longest innermost loop; empty where the kernel has none."""
        longest = max(self.loops(), key=lambda loop: loop.end - loop.start, default=None)
        return self.inside(longest) if longest else ()


def read(listing: str) -> Listing:
    """The first kernel of a listing.

    >>> read('''
    ... .L_x_2:
    ...    -:-:-:Y:06        /*0d30*/                   FADD R3, R0, R3
    ...    -:-:-:Y:06        /*0d40*/               @P0 BRA `(.L_x_2)
    ... ''').instructions
    [Instruction(opcode='FADD', operands='R3, R0, R3'), Instruction(opcode='BRA', operands='`(.L_x_2)')]
    """
    instructions: list[Instruction] = []
    labels = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif word := _LINE.search(line):
            instructions.append(Instruction(word[1], word[2].strip()))
    return Listing(instructions, labels)
