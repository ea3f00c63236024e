"""Reads the facts of a compiled program from its optimized HLO: launches, copies, memory."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(")
_INSTRUCTION = re.compile(r"^  (ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|condition|to_apply|true_computation|false_computation|calls)=%([^\s,}]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_KERNEL = re.compile(r'op_name="(?:[^"]*/)?([^"/]+)/mpmd_map"')

# Opcodes without a kernel: views of memory, control, and the second halves of asynchronous pairs.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all", "add-dependency"}
_CONTROL = {"while", "conditional", "call", "async-start"}
_UPDATES = {"dynamic-update-slice", "scatter"}


class Launch(NamedTuple):
    """The launch of one kernel, ours or the compiler's, or of one copy."""

    kind: str  # the name of a Mosaic kernel, or the opcode of another launch
    by_us: bool
    bytes: int  # of the largest array that it writes in full


@dataclass(frozen=True)
class ProgramFacts:
    """Facts of a compiled function."""

    launches: tuple[Launch, ...]
    temp: int  # bytes
    aliased: int  # bytes of donated arguments that are reused for results
    seconds: float  # seconds of a core to lower and compile the function
    issued: tuple[
        str, ...
    ]  # kinds of the items of work that the host issues, in XLA's words: kCommandBuffer, kWhile, kCustomCall …


def issued(thunks: str) -> list[str]:
    """List the kinds of work that the host issues, read from XLA's dump of thunks. A CUDA graph counts once.

    >>> issued("000: kCommandBuffer [source | sink]\\n    001: kCopy [source | sink]\\ncondition:\\n002: kWhile [sink]")
    ['kCommandBuffer', 'kWhile']
    """
    return re.findall(r"^\d+: (k\w+)", thunks, re.MULTILINE)


def launches(hlo: str) -> list[Launch]:
    """List the kernels and copies of a program. The body of a loop counts once."""
    computations = _computations(hlo)
    entry = next(name for name, (is_entry, _) in computations.items() if is_entry)
    return list(_launches(entry, computations))


def products(hlo: str) -> tuple[int, int]:
    r"""Count the matrix products of a program: calls of cuBLASLt, and XLA's own kernels.

    >>> products('custom-call(%x, %w), custom_call_target="__cublas$lt$matmul"\n{"kind":"__triton_nested_gemm_fusion"}')
    (1, 1)
    """
    return hlo.count('custom_call_target="__cublas$lt$matmul"'), len(re.findall(r'"kind":"__triton\w*gemm', hlo))


def swaps(hlo: str, size: int) -> int:
    r"""Count the scatters without `unique_indices=true`, into arrays of at least `size` bytes.

    >>> swaps(" %a = f32[8]{0} scatter(%x, %i, %y)\n %b = f32[8]{0} scatter(%x, %i, %y), unique_indices=true", 32)
    1
    """
    writes = [line.partition(" scatter(") for line in hlo.splitlines() if " scatter(" in line]
    return sum("unique_indices=true" not in how and _bytes(shape) >= size for shape, _, how in writes)


class _Instruction(NamedTuple):
    root: bool
    shape: str
    opcode: str
    operands: str


def _computations(hlo: str) -> dict[str, tuple[bool, list[_Instruction]]]:
    computations: dict[str, tuple[bool, list[_Instruction]]] = {}
    body: list[_Instruction] = []
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            body = []
            computations[header[2]] = (header[1] is not None, body)
        # We drop a Mosaic kernel's configuration, which holds the whole kernel.
        elif word := _INSTRUCTION.match(line.partition(", backend_config=")[0]):
            body.append(_Instruction(word[1] is not None, word[3], word[4], word[5]))
    return computations


def _launches(name: str, computations: dict[str, tuple[bool, list[_Instruction]]]) -> Iterator[Launch]:
    for word in computations[name][1]:
        called = _CALLED.findall(word.operands)
        for branches in _BRANCHES.findall(word.operands):
            called += re.findall(r"%([^\s,]+)", branches)
        if word.opcode in _CONTROL:
            for computation in called:
                yield from _launches(computation, computations)
        elif word.opcode in ("fusion", "fusion-start"):
            root = next(inner for inner in computations[called[0]][1] if inner.root)
            # An update in place writes only the update. If XLA cannot update in place, the HLO has a separate copy.
            written = 0 if root.opcode in _UPDATES else _bytes(root.shape)
            yield Launch(word.opcode, by_us=False, bytes=written)
        elif word.opcode == "custom-call" and "mosaic_gpu" in word.operands:
            kernel = _KERNEL.search(word.operands)
            yield Launch(kernel[1] if kernel else "mosaic", by_us=True, bytes=_bytes(word.shape))
        elif word.opcode not in _FREE and not word.opcode.endswith("-done"):
            yield Launch(word.opcode, by_us=False, bytes=_bytes(word.shape))


def _bytes(shape: str) -> int:
    """Compute the bytes of the largest array in a shape.

    >>> _bytes("(bf16[8,4096]{1,0}, s32[])")
    65536
    """
    return max((_array_bytes(kind, sizes) for kind, sizes in _ARRAY.findall(shape)), default=0)


def _array_bytes(kind: str, sizes: str) -> int:
    bits = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])
    return math.prod(int(size) for size in sizes.split(",") if size) * bits // 8
