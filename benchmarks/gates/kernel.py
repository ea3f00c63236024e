"""Reads the facts of a kernel from the files that Mosaic GPU dumps while it compiles (`MOSAIC_GPU_DUMP_TO`)."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamaspec.benchmarks.gates import sass

_PTXAS = re.compile(
    r"Function properties for (?P<entry>\w+)\s+"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\s+"
    r"ptxas info\s+: Used (?P<registers>\d+) registers"
)
_LAUNCH = re.compile(r"blocks\(.*?\) in \((.*?)\) threads\(.*?\) in \((.*?)\) dynamic_shared_memory_size (%\S+)")
_CONSTANT = re.compile(r"%c(\d+)(?:_|\b)")
_FENCES = ("FENCE.VIEW.ASYNC", "MEMBAR.SC")  # instructions that wait for a thread's reads
_COPIES_IN = ("UTMALDG", "UBLKCP.S.G")  # copies to shared memory
_STREAMED = re.compile(r"LDG\.E\.NA\.LTC128B(?:\.(64|128))?\b")  # loads of `inline.load_global`
_REGISTER = re.compile(r"\bR(\d+)")
# Opcodes that need a feature of the card (fields of `Card`).
_FEATURES = {
    "copy_engine": ("UTMA", "UBLK", "SYNCS"),
    "wgmma": ("HGMMA", "IGMMA", "QGMMA", "WARPGROUP"),
    "dependent_launch": ("ACQBULK", "PREEXIT"),
}
_READS = ("LDS", "HGMMA", "UTMASTG", "UBLKCP.G.S")
_EXPECT = re.compile(r"^( *)mosaic_gpu\.arrive_expect_tx .*?(%c\d+)")


@dataclass(frozen=True)
class Kernel:
    """Facts of one compiled kernel."""

    name: str
    registers: int  # per thread
    spilled: int  # bytes per thread
    shared: int  # bytes per thread block
    threads: int  # per thread block
    blocks: int
    prefetched: int  # bytes of the asynchronous copies (TMA) that are requested before the main loop
    refilled: int  # bytes requested in each turn of a loop, which may be several unrolled turns
    loop: int  # instructions of the main loop
    refills: bool  # whether the main loop itself requests copies, and not an outer loop or another warp
    hasty: bool  # whether a copy is requested before all threads have finished their reads of shared memory
    unmet: bool  # whether shared memory is read after a store without a barrier between
    instructions: int
    wgmma: int  # tensor-core products in innermost loops
    narrow: int  # global loads of fewer than 128 bits in the main loop, unless this loop is unrolled
    waits: bool  # whether the kernel waits for the previous kernel (programmatic dependent launch)
    eager: bool  # whether the kernel loads anything before this wait
    cached_loads: int  # loads before this wait that the first-level cache keeps
    streamed: dict[int, int]  # loads of weights, keys or values from memory to registers, by their bits
    moved: int  # moves, in the main loop, of registers that such a load fills in the same turn
    features: tuple[str, ...]  # properties of `Card` that the instructions need


def read_kernels(folder: Path) -> list[Kernel]:
    """Read every kernel that was compiled while the compiler dumped to this folder."""
    return [_read_kernel(path) for path in sorted(folder.glob("*.ptxas"))]


def _read_kernel(path: Path) -> Kernel:
    # "gemv_3.ptxas": the kernel's name and a counter of the process
    dump = path.stem
    compiled = _PTXAS.search(path.read_text())
    assert compiled, f"{path}: expected the registers and spills that ptxas reports, found none"
    layouts = path.with_name(f"{dump}.after_layout_inference.txt").read_text()
    blocks, threads, shared = launch(layouts)
    prefetched, refilled = copied(layouts)
    code = sass.read(path.with_name(f"{dump}.sass_ctrl").read_text())
    streams = (_STREAMED.match(word.opcode) for word in code.instructions)
    loop = code.main_loop()
    turns = max(1, sum(".TRYWAIT" in word.opcode for word in loop) // max(1, waits_in_loops(layouts)))
    wait = next(code.find("ACQBULK"), None)
    return Kernel(
        name=dump.rpartition("_")[0],
        registers=int(compiled["registers"]),
        spilled=int(compiled["stores"]) + int(compiled["loads"]),
        shared=shared,
        threads=threads,
        blocks=blocks,
        prefetched=prefetched,
        refilled=refilled * turns,
        loop=len(loop),
        refills=any(word.opcode.startswith("UTMALDG") for word in loop),
        hasty=any(map(hasty, _runs(code))),
        unmet=any(map(unmet, _runs(code))),
        instructions=len(code.instructions),
        wgmma=sum(
            word.opcode.startswith("HGMMA")
            for any_loop in code.loops()  # the loop of a copying warp may be longer
            for word in code.inside(any_loop)
        ),
        # An unrolled loop may be the outer one, which reads a number for each row.
        narrow=sum(word.opcode.startswith(("LDG", "LD.")) and ".128" not in word.opcode for word in loop if turns == 1),
        waits=wait is not None,
        eager=next(code.find("UTMALDG", "LDG"), len(code.instructions)) < (wait or 0),
        cached_loads=sum(".STRONG" not in code.instructions[i].opcode for i in code.find("LDG") if i < (wait or 0)),
        streamed=dict(Counter(int(stream[1] or 32) for stream in streams if stream)),
        moved=loaded_and_moved(loop),
        features=tuple(
            name
            for name, prefixes in _FEATURES.items()
            if any(word.opcode.startswith(prefixes) for word in code.instructions)
        ),
    )


def loaded_and_moved(loop: Sequence[sass.Instruction]) -> int:
    r"""Count the moves of registers that `inline.load_global` fills in the same turn of the loop.

    Such a move waits for the load. Then nothing is in flight while the next turn computes.

    >>> code = ["/*0000*/ LDG.E.NA.LTC128B.128 R4, [R2.64]", "/*0010*/ FFMA R9, R8, R1, R9", "/*0020*/ MOV R8, R5"]
    >>> [loaded_and_moved(sass.read("\n".join(some)).instructions) for some in (code, code[:2])]
    [1, 0]
    """
    filled: set[int] = set()
    moves = 0
    for word in loop:
        registers = [int(number) for number in _REGISTER.findall(word.operands)]
        if stream := _STREAMED.match(word.opcode):
            filled |= set(range(registers[0], registers[0] + int(stream[1] or 32) // 32))
        elif "MOV" in word.opcode and len(registers) > 1:
            moves += registers[-1] in filled
        elif registers:
            filled.discard(registers[0])
    return moves


def hasty(code: Sequence[sass.Instruction]) -> bool:
    r"""Tell whether a copy into shared memory is requested before all threads have finished reading that memory.

    Each thread must wait for its own reads, and then all threads must pass a barrier: a read waits in a queue that
    asynchronous copies (TMA) bypass, and a barrier does not wait for this queue. Warps always wait for the tensor
    cores' reads. We look at all instructions in the order of their addresses, even if a branch skips some.

    >>> code = ["/*0000*/ LDS R4, [R2]", "/*0010*/ MEMBAR.SC.CTA", "/*0020*/ BAR.SYNC 0x1", "/*0030*/ UTMALDG.2D [UR8]"]
    >>> [hasty(sass.read("\n".join(some)).instructions) for some in (code, code[:1] + code[2:], code[:2] + code[3:])]
    [False, True, True]
    """
    reading = apart = False
    for word in code:
        if apart and word.opcode.startswith(_COPIES_IN):
            return True
        if word.opcode.startswith("LDS"):
            reading = apart = True
        elif word.opcode.startswith("HGMMA"):
            apart = True
        elif word.opcode.startswith(_FENCES):
            reading = False
        elif word.opcode.startswith("BAR.SYNC"):
            apart = reading
    return False


def unmet(code: Sequence[sass.Instruction]) -> bool:
    r"""Tell whether the code reads shared memory after a store, without a barrier between the two.

    Reads of threads, tensor cores and TMA count, in the order of addresses. `ldmatrix` does not count, because our
    kernels use it only for data that TMA has written.

    >>> code = ["/*0000*/ STS [R2], R4", "/*0010*/ BAR.SYNC.DEFER_BLOCKING 0x1, 0x80", "/*0020*/ LDS R4, [R2]"]
    >>> [unmet(sass.read("\n".join(some)).instructions) for some in (code, code[::2])]
    [False, True]
    """
    stored = False
    for word in code:
        if stored and word.opcode.startswith(_READS) and not word.opcode.startswith("LDSM"):
            return True
        stored = (stored or word.opcode.startswith("STS")) and not word.opcode.startswith("BAR.SYNC")
    return False


def _runs(code: sass.SassListing) -> Iterator[Sequence[sass.Instruction]]:
    """Yield sequences of instructions: the whole kernel, and for each loop two iterations, one after the other."""
    yield code.instructions
    for loop in code.all_loops():
        yield [*code.inside(loop), *code.inside(loop)]


def launch(layouts: str) -> tuple[int, int, int]:
    """Read the launch in Mosaic's MLIR: the number of thread blocks, and the threads and shared bytes of a block.

    >>> launch("gpu.launch async [%1] blocks(%arg2, %arg3) in (%arg8 = %c256, %arg9 = %c2_7) "
    ...        "threads(%arg5, %arg6) in (%arg11 = %c128, %arg12 = %c1) dynamic_shared_memory_size %c44064_i32 {")
    (512, 128, 44064)
    """
    match = _LAUNCH.search(layouts)
    assert match, "no gpu.launch"
    grid, block, shared = ([int(size) for size in _CONSTANT.findall(part)] for part in match.groups())
    return math.prod(grid), math.prod(block), shared[0]


def copied(layouts: str) -> tuple[int, int]:
    """Count the bytes that TMA copies for a thread block: outside of loops, and in one iteration of each loop.

    >>> copied('''
    ...   mosaic_gpu.arrive_expect_tx barrier(%61 : memref) %c8192_i32
    ...   %9 = scf.for %arg14 = %c0 to %c16 step %c1 {
    ...     mosaic_gpu.arrive_expect_tx barrier(%61 : memref) %c4096_i32_3
    ...   }
    ...   mosaic_gpu.arrive_expect_tx barrier(%61 : memref) %c8192_i32
    ... ''')
    (16384, 4096)
    """
    before, inside = 0, 0
    for line, looped in _lines(layouts):
        if expected := _EXPECT.match(line):
            size = int(expected[2][2:])
            before, inside = (before, inside + size) if looped else (before + size, inside)
    return before, inside


def waits_in_loops(layouts: str) -> int:
    """Count the waits at barriers in one iteration of each loop.

    >>> waits_in_loops('''
    ...   nvvm.mbarrier.try_wait.parity %208, %207, %c10000000_i32 : !llvm.ptr<3>, i32, i32
    ...   %9 = scf.for %arg14 = %c0 to %c16 step %c1 {
    ...     nvvm.mbarrier.try_wait.parity %208, %207, %c10000000_i32 : !llvm.ptr<3>, i32, i32
    ...   }
    ... ''')
    1
    """
    return sum("mbarrier.try_wait" in line for line, looped in _lines(layouts) if looped)


def _lines(layouts: str) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it is in a loop."""
    loop = None  # indentation of the outermost loop
    for line in layouts.splitlines():
        indent = len(line) - len(line.lstrip())
        if loop is None and re.search(r"\bscf\.(for|while)\b", line):
            loop = indent
        elif loop is not None and indent == loop and line.lstrip().startswith("}") and not line.endswith("{"):
            loop = None
        else:
            yield line, loop is not None
