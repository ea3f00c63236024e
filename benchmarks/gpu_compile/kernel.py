"""The facts of one kernel, from the files that Mosaic GPU writes beside its compilation (`MOSAIC_GPU_DUMP_TO`)."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_compile import sass

_PTXAS = re.compile(
    r"Function properties for (?P<entry>\w+)\s+"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\s+"
    r"ptxas info\s+: Used (?P<registers>\d+) registers"
)
_LAUNCH = re.compile(r"blocks\(.*?\) in \((.*?)\) threads\(.*?\) in \((.*?)\) dynamic_shared_memory_size (%\S+)")
_CONSTANT = re.compile(r"%c(\d+)(?:_|\b)")
_FENCES = ("FENCE.VIEW.ASYNC", "MEMBAR.SC")  # that wait for a thread's reads
_COPIES_IN = ("UTMALDG", "UBLKCP.S.G")  # to shared memory
_READS = ("LDS", "HGMMA", "UTMASTG", "UBLKCP.G.S")
_EXPECT = re.compile(r"^( *)mosaic_gpu\.arrive_expect_tx .*?(%c\d+)")


@dataclass(frozen=True)
class Kernel:
    """What the compiler made of one kernel."""

    name: str
    registers: int  # a thread
    spilled: int  # bytes a thread
    shared: int  # bytes a thread block
    threads: int  # a thread block
    blocks: int
    prefetched: int  # bytes that the copy engine is asked for before the main loop
    refilled: int  # bytes that it is asked for in each turn of a loop, which the compiler may have made of several
    loop: int  # instructions of the main loop
    refills: bool  # the main loop itself asks the copy engine for more, not a loop around it or another warp
    hasty: bool  # asks for a copy before all threads have what they read from shared memory
    unmet: bool  # reads shared memory after it stored to it, and threads have not met in between
    instructions: int
    wgmma: int  # products for the tensor cores in innermost loops
    narrow: (
        int  # loads from global memory of less than 128 bits in the main loop, if it is not one made of several turns
    )
    waits: bool  # for the kernel before it: programmatic dependent launch
    eager: bool  # loads something before that
    kept: int  # loads before that whose results the first cache keeps, for whoever reads the same after it


def read_kernels(folder: Path) -> list[Kernel]:
    """Every kernel that was compiled while the compiler wrote to this folder."""
    return [_read_kernel(path) for path in sorted(folder.glob("*.ptxas"))]


def _read_kernel(path: Path) -> Kernel:
    # "gemv_3.ptxas": the name of the kernel and a number of the process
    dump = path.stem
    compiled = _PTXAS.search(path.read_text())
    assert compiled, f"no figures in {path}"
    layouts = path.with_name(f"{dump}.after_layout_inference.txt").read_text()
    blocks, threads, shared = launch(layouts)
    prefetched, refilled = copied(layouts)
    code = sass.read(path.with_name(f"{dump}.sass_ctrl").read_text())
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
            for found in code.loops()  # where a warp alone copies, its loop may be the longer one
            for word in code.inside(found)
        ),
        # Of several turns it may be the loop around them, which reads a number for each row.
        narrow=sum(word.opcode.startswith(("LDG", "LD.")) and ".128" not in word.opcode for word in loop if turns == 1),
        waits=wait is not None,
        eager=next(code.find("UTMALDG", "LDG"), len(code.instructions)) < (wait or 0),
        kept=sum(".STRONG" not in code.instructions[i].opcode for i in code.find("LDG") if i < (wait or 0)),
    )


def hasty(code: Sequence[sass.Instruction]) -> bool:
    r"""Whether the copy engine is asked for something after a read of shared memory, and not all threads are known to
    have what they read: each waits for its own reads, and then they meet.

    A read waits in a queue, in which the copy engine does not stand, and threads that meet do not wait for it. For what
    tensor cores read, each warp has waited. In the order of addresses: what a branch passes over counts as done.

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
    r"""Whether shared memory is read after a store to it, by threads that have not met: what another stored may not be
    there yet. By what threads, tensor cores or the copy engine read; not by `ldmatrix`, which here reads what was
    copied. In the order of addresses, too.

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


def _runs(code: sass.Listing) -> Iterator[Sequence[sass.Instruction]]:
    """What runs after what: the kernel from its beginning, and each loop twice, as a turn follows a turn."""
    yield code.instructions
    for loop in code.all_loops():
        yield [*code.inside(loop), *code.inside(loop)]


def launch(layouts: str) -> tuple[int, int, int]:
    """Thread blocks, threads of each and bytes of shared memory of each, from Mosaic's MLIR.

    >>> launch("gpu.launch async [%1] blocks(%arg2, %arg3) in (%arg8 = %c256, %arg9 = %c2_7) "
    ...        "threads(%arg5, %arg6) in (%arg11 = %c128, %arg12 = %c1) dynamic_shared_memory_size %c44064_i32 {")
    (512, 128, 44064)
    """
    found = _LAUNCH.search(layouts)
    assert found, "no gpu.launch"
    grid, block, shared = ([int(size) for size in _CONSTANT.findall(part)] for part in found.groups())
    return math.prod(grid), math.prod(block), shared[0]


def copied(layouts: str) -> tuple[int, int]:
    """Bytes that a thread block expects from the copy engine before its loops, and in each turn of them.

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
    """How often a turn of all loops waits at a barrier.

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
    """Lines, and whether they are in a loop."""
    loop = None  # the indentation of the outermost loop
    for line in layouts.splitlines():
        indent = len(line) - len(line.lstrip())
        if loop is None and re.search(r"\bscf\.(for|while)\b", line):
            loop = indent
        elif loop is not None and indent == loop and line.lstrip().startswith("}") and not line.endswith("{"):
            loop = None
        else:
            yield line, loop is not None
