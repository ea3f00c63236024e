"""Parsers of SASS and of compiled programs, and the checks on their findings, with small examples written by hand."""

import doctest
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamaspec.benchmarks.common.kernel_cases.case import Case, KernelLimits
from llamaspec.benchmarks.gates import kernel, program, report, sass
from llamaspec.benchmarks.gates.cards import SHEETS
from llamaspec.benchmarks.gates.checks import broken_by, broken_by_step, broken_on_card, instructions_per_weight, lacks
from llamaspec.benchmarks.gates.h200 import BANDWIDTH, LATENCY, MULTIPROCESSORS, resident_blocks, roofline
from llamaspec.benchmarks.gates.kernel import Kernel, copied, launch, loaded_and_moved, read_kernels
from llamaspec.benchmarks.gates.program import Launch, ProgramFacts, launches
from llamaspec.benchmarks.gates.sass import read
from llamaspec.benchmarks.gates.workers import CallFailure, call_each
from tests.support.refusals import mentions

# The kernel requests a tile, waits for the previous kernel, and loops over nine instructions around a barrier. A thread
# that must try the barrier again does so in code after the exit.
CODE = """
        .type           gemv_mosaic_gpu_kernel,@function
   -:-:-:Y:01        /*0000*/                   LDC R1, c[0x0][0x28]
   -:-:-:Y:01        /*0010*/                   @UP2 UTMALDG.4D [UR32], [UR6]
   -:-:-:Y:01        /*0020*/                   ACQBULK
   -:-:3:Y:02        /*0030*/                   LDG.E.128 R8, desc[UR4][R4.64]
.L_x_2:
   -:-:-:-:04        /*0040*/                   ULOP3.LUT UR6, UR4, 0x3, URZ, 0xc0, !UPT
.L_x_36:
   -:-:1:Y:02        /*0050*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9], R4
   1:-:-:Y:05        /*0060*/              @!P0 BRA `(.L_x_0)
.L_x_3:
   -:-:1:Y:01        /*0070*/                   LDS.128 R4, [R61+UR5]
   -:-:-:Y:01        /*0080*/                   FFMA R31, R7.reuse, R10, R31
   -:-:-:Y:01        /*0090*/                   FFMA R30, R7.reuse, R10, R30
   -:-:-:Y:01        /*00a0*/                   FFMA R29, R7.reuse, R10, R29
   -:-:-:Y:01        /*00b0*/                   FFMA R28, R7.reuse, R10, R28
   -:-:-:Y:06        /*00c0*/               @P0 BRA `(.L_x_2)
   -:-:-:Y:01        /*00d0*/                   FADD R67, R38, R67
   1:-:-:Y:05        /*00e0*/                   EXIT
.L_x_0:
   -:-:-:-:04        /*00f0*/                   MOV R5, UR9
.L_x_37:
   -:-:1:Y:02        /*0100*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R5+URZ], R4
   1:-:-:Y:05        /*0110*/              @!P0 BRA `(.L_x_37)
   -:-:-:Y:05        /*0120*/                   BRA `(.L_x_3)
.L_x_4:
   -:-:-:-:00        /*0130*/                   BRA `(.L_x_4)
"""
LAYOUTS = """
%31 = gpu.launch async [%1] blocks(%a) in (%b = %c256, %c = %c2) threads(%d) in (%e = %c128) \
dynamic_shared_memory_size %c44064_i32 {
  mosaic_gpu.arrive_expect_tx barrier(%61 : memref) %c8192_i32
  %77 = scf.for %arg14 = %c0_i32 to %c16_i32 step %c1_i32 : i32 {
    scf.if %3 {
      mosaic_gpu.arrive_expect_tx barrier(%61 : memref) %c4096_i32
    }
  }
  mosaic_gpu.arrive_expect_tx barrier(%61 : memref) %c8192_i32
}
"""
PTXAS = """
ptxas info    : Function properties for gemv_mosaic_gpu_kernel
    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 88 registers, used 2 barriers, 1 bytes smem
"""
KERNEL = Kernel(
    name="gemv",
    registers=88,
    spilled=12,
    shared=44064,
    threads=128,
    blocks=512,
    prefetched=16384,
    refilled=4096,
    loop=9,
    refills=False,
    hasty=False,
    unmet=False,
    instructions=20,
    wgmma=0,
    narrow=0,
    waits=True,
    eager=True,
    cached_loads=0,
    streamed={},
    moved=0,
    features=("copy_engine", "dependent_launch"),
)


RTX = SHEETS["rtx-3060"].card
ON_RTX = replace(KERNEL, spilled=0, waits=False, eager=False, streamed={128: 14}, features=())


@pytest.mark.parametrize("module", [kernel, program, report, sass])
def test_the_examples_in_the_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


def test_the_main_loop_is_neither_a_spin_nor_the_way_back_from_one():
    loop = read(CODE).main_loop()
    assert [word.opcode for word in (loop[0], loop[-1])] == ["ULOP3.LUT", "BRA"]
    assert len(loop) == 9


def test_the_inner_one_of_nested_loops_counts():
    inner = "\n".join(["/*0010*/ FADD R0, R0, R1"] * 8)
    listing = f".L_x_0:\n/*0000*/ MOV R0, R1\n.L_x_1:\n{inner}\n/*0090*/ BRA `(.L_x_1)\n/*00a0*/ BRA `(.L_x_0)"
    assert [(loop.start, loop.end) for loop in read(listing).loops()] == [(1, 9)]


def test_a_loop_with_an_exit_in_its_middle_is_not_counted():
    turn = "\n".join(["/*0010*/ FADD R0, R0, R1"] * 8)
    for guard, repeated in (("@!P0 ", [(0, 9)]), ("", [])):
        listing = read(f".L_x_0:\n{turn}\n/*0090*/ {guard}EXIT\n/*00a0*/ BRA `(.L_x_0)")
        assert ([(loop.start, loop.end) for loop in listing.all_loops()], listing.loops()) == (repeated, [])


def test_code_without_a_loop_has_no_main_loop():
    assert read("/*0000*/ EXIT").main_loop() == ()


def kernels_read(folder: Path, code: str = CODE, layouts: str = LAYOUTS) -> list[Kernel]:
    """Write the files that the compiler would write, and parse the kernels in these files."""
    for name, text in (("ptxas", PTXAS), ("sass_ctrl", code), ("after_layout_inference.txt", layouts)):
        (folder / f"gemv_0.{name}").write_text(text)
    return read_kernels(folder)


def test_a_kernel_is_read_from_what_the_compiler_wrote(tmp_path: Path):
    assert kernels_read(tmp_path) == [KERNEL]


def test_loads_after_the_wait_are_not_eager(tmp_path: Path):
    late = CODE.replace("UTMALDG.4D", "NOP")
    narrow = late.replace("LDS.128 R4,", "LDG.E.U16 R4,")
    narrow = narrow.replace("FFMA R31", "UTMALDG.4D [UR8], [UR6] //")
    assert kernels_read(tmp_path, narrow) == [replace(KERNEL, eager=False, narrow=1, refills=True)]


def test_weak_loads_before_the_wait_stay_in_the_l1_cache(tmp_path: Path):
    early = CODE.replace("LDC R1, c[0x0][0x28]", "LDG.E R1, desc[UR4][R4.64]")
    for code, cached in ((early, 1), (early.replace("LDG.E R1", "LDG.E.STRONG.GPU R1"), 0)):
        assert kernels_read(tmp_path, code) == [replace(KERNEL, cached_loads=cached)]


def test_an_unrolled_loop_is_refilled_twice(tmp_path: Path):
    turn = "   -:-:1:Y:02        /*0050*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9], R4\n"
    layouts = LAYOUTS.replace("    scf.if", "    nvvm.mbarrier.try_wait.parity %2, %3, %4\n    scf.if")
    twice = CODE.replace(turn, 2 * turn)
    assert kernels_read(tmp_path, twice, layouts) == [replace(KERNEL, refilled=8192, loop=10, instructions=21)]


@pytest.mark.parametrize("fence", ["FENCE.VIEW.ASYNC.S", "MEMBAR.SC.CTA"])
@pytest.mark.parametrize(
    ("before", "after", "hasty"),
    [
        ("FFMA R31", "UTMALDG.2D", True),  # in the loop, after its read
        ("ULOP3.LUT UR6", "UTMALDG.2D", True),  # before this iteration's read, but after the previous iteration's read
        ("FADD R67", "UTMALDG.2D", True),  # after the loop
        ("FADD R67", "UBLKCP.S.G", True),
        ("FADD R67", "UTMASTG.2D", False),
        ("MOV R5", "UTMALDG.2D", True),
    ],
)
def test_a_copy_that_does_not_wait_for_reads_is_detected(
    before: str, after: str, hasty: bool, fence: str, tmp_path: Path
):
    code = CODE.replace(before, f"{after} [UR8], [UR4] //")
    waits = code.replace("FFMA R30", f"{fence} //")
    meets, meets_and_waits = (some.replace("FFMA R29", "BAR.SYNC //") for some in (code, waits))
    hasty_kernels = [kernels_read(tmp_path, some)[0].hasty for some in (code, waits, meets, meets_and_waits)]
    assert hasty_kernels == [hasty, hasty, hasty, before == "FFMA R31"]  # the copy precedes both


def test_a_copy_over_operands_of_other_warps_is_detected(tmp_path: Path):
    code = CODE.replace("LDS.128 R4,", "HGMMA.64x8x16.F32 R4,").replace("FFMA R29", "UTMALDG.2D [UR8], [UR4] //")
    met = code.replace("FFMA R30", "BAR.SYNC //")
    assert [kernels_read(tmp_path, some)[0].hasty for some in (code, met)] == [True, False]


@pytest.mark.parametrize("read", ["LDS.128", "HGMMA.64x8x16.F32", "UTMASTG.2D", "UBLKCP.G.S"])
@pytest.mark.parametrize(
    ("before", "after", "unmet"),
    [
        ("LDG.E.128", "STS", True),  # before the loop
        ("ULOP3.LUT UR6", "STS", True),  # in the loop, before its read
        ("FFMA R31", "STS", True),  # after this iteration's read, but before the next iteration's read
        ("MOV R5", "STS", False),  # after the last read
        ("FFMA R31", "STG", False),
    ],
)
def test_a_read_before_the_store_of_another_thread_is_detected(
    before: str, after: str, unmet: bool, read: str, tmp_path: Path
):
    code = CODE.replace(before, f"{after} [R8], R4 //").replace("LDS.128", read)
    met = code.replace(read, f"BAR.SYNC\n/*0000*/ {read}")
    assert [kernels_read(tmp_path, some)[0].unmet for some in (code, met)] == [unmet, False]


def test_a_copied_matrix_may_be_read_while_another_is_stored(tmp_path: Path):
    code = CODE.replace("ULOP3.LUT UR6", "STS [R8], R4 //").replace("LDS.128", "LDSM.16.M88.4")
    assert not kernels_read(tmp_path, code)[0].unmet


def test_the_launch_and_the_copies_are_read_from_the_layouts():
    assert launch(LAYOUTS) == (512, 128, 44064)
    assert copied(LAYOUTS) == (16384, 4096)


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "blocks"),
    [
        (32, 128, 0, 16),  # 65536 registers are 512 a thread for a block of 128 threads: 16 times 32
        (33, 128, 0, 12),  # a warp gets registers in units of 256, so 33 a thread become 40
        (255, 128, 0, 2),
        (168, 384, 0, 1),
        (32, 1024, 0, 2),
        (16, 32, 0, 32),
        (32, 128, 227 * 1024, 1),
        (32, 128, 113 * 1024, 2),  # with 1 KiB that every block needs: 2 x 114 of 228
        (32, 128, 113 * 1024 + 1, 1),
    ],
)
def test_as_many_blocks_share_a_multiprocessor_as_fit(registers: int, threads: int, shared: int, blocks: int):
    kernel = replace(KERNEL, registers=registers, threads=threads, shared=shared)
    assert resident_blocks(kernel) == blocks


def test_the_roofline_is_the_least_of_memory_latency_and_issue():
    refilling = replace(KERNEL, refills=True)

    def bound(**facts: int) -> float:
        least = roofline(replace(refilling, **facts))
        assert least
        return least.bandwidth

    assert bound() == BANDWIDTH
    # Every second multiprocessor has one block, with 16 kB in flight.
    assert bound(blocks=MULTIPROCESSORS // 2) == pytest.approx(MULTIPROCESSORS / 2 * 16384 / LATENCY, rel=1e-12)
    # The loop has ten times as many instructions as four schedulers can issue while memory delivers one iteration's
    # bytes.
    slots = roofline(refilling)
    assert slots and slots.slots
    assert bound(loop=round(9 * 40 / slots.slots)) == pytest.approx(BANDWIDTH / 10, rel=1e-2)
    assert roofline(replace(KERNEL, prefetched=0)) is None
    without = roofline(KERNEL)
    assert without and without.slots is None


HLO = """
%fused_append (p.0: bf16[1024,4096], p.1: bf16[1,4096]) -> bf16[1024,4096] {
  %p.0 = bf16[1024,4096]{1,0} parameter(0)
  ROOT %dus = bf16[1024,4096]{1,0} dynamic-update-slice(%p.0, %p.1, %c), metadata={op_name="append"}
}

%fused_join (p.2: bf16[4096,4096]) -> bf16[8192,4096] {
  ROOT %cat = bf16[8192,4096]{1,0} concatenate(%p.2, %p.2), dimensions={0}
}

%body (s: (s32[], bf16[1,4096])) -> (s32[], bf16[1,4096]) {
  %s = (s32[], bf16[1,4096]{1,0}) parameter(0)
  %x = bf16[1,4096]{1,0} get-tuple-element(%s), index=1
  %mpmd_map.0 = bf16[1,4096]{1,0} custom-call(%w, %x), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(f)/while/body/jit(_gemv)/gemv/mpmd_map" stack_frame_id=8}, backend_config={module = "(fusion(%"}
  ROOT %t = (s32[], bf16[1,4096]{1,0}) tuple(%i, %mpmd_map.0)
}

%condition (s: (s32[], bf16[1,4096])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%yes (p.4: f32[8]) -> f32[8] {
  ROOT %copy.5 = f32[8]{0} copy(%p.4)
}

%no (p.5: f32[8]) -> f32[8] {
  ROOT %p.5 = f32[8]{0} parameter(0)
}

ENTRY %main.9 (w: bf16[4096,4096], cache: bf16[1024,4096]) -> bf16[8192,4096] {
  %w = bf16[4096,4096]{1,0} parameter(0)
  %fusion-start = ((bf16[1024,4096]{1,0}), bf16[1024,4096]{1,0}, u32[]) fusion-start(%cache), calls=%fused_append
  %while.5 = (s32[], bf16[1,4096]{1,0}) while(%tuple.6), condition=%condition, body=%body
  %fusion-done = bf16[1024,4096]{1,0} fusion-done(%fusion-start)
  %choice = f32[8]{0} conditional(%p, %a, %b), branch_computations={%yes, %no}
  ROOT %join = bf16[8192,4096]{1,0} fusion(%w), kind=kLoop, calls=%fused_join
}
"""


@pytest.mark.parametrize("update", ["dynamic-update-slice", "scatter"])
def test_a_program_launches_what_its_loops_and_branches_do(update):
    assert launches(HLO.replace("dynamic-update-slice", update)) == [
        Launch("fusion-start", by_us=False, bytes=0),  # in place
        Launch("compare", by_us=False, bytes=1),
        Launch("gemv", by_us=True, bytes=8192),
        Launch("copy", by_us=False, bytes=32),
        Launch("fusion", by_us=False, bytes=64 << 20),
    ]


CASE = Case(
    "gemv", "4096x4096", "bfloat16", lambda: None, (), {"gemv": KernelLimits(88, 2.3)},
    plain=lambda: None, exact=lambda: (), bits=16,
)  # fmt: skip
SOUND = replace(KERNEL, spilled=0, loop=36, refills=True)  # 2.25 instructions a weight
PROGRAM = ProgramFacts(
    (Launch("gemv", by_us=True, bytes=1 << 24),), temp=0, aliased=0, seconds=0.1, issued=("kCommandBuffer",)
)


def test_a_sound_kernel_breaks_no_gate():
    assert instructions_per_weight(SOUND, bits=16) == 2.25
    assert list(broken_by(CASE, PROGRAM, [SOUND])) == []
    assert list(broken_by(CASE, PROGRAM, [replace(SOUND, loop=0, refills=False, registers=200)])) == []  # unrolled


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"spilled": 4}, "gemv expected no register spills 4 bytes"),
        ({"registers": 89}, "gemv at most 88 registers got 89"),
        ({"loop": 38}, "gemv at most 2.3 instructions got 2.38"),
        ({"narrow": 1}, "gemv loads 128 bits 1 narrower"),
        ({"hasty": True}, "gemv requests copy shared memory still reading"),
        ({"unmet": True}, "gemv reads shared memory store another thread barrier"),
        ({"waits": False}, "gemv does not wait"),
        ({"eager": False}, "gemv expected loads before wait none"),
    ],
)
def test_a_kernel_that_is_worse_than_planned_is_named(facts: dict[str, int], words: str):
    [line] = broken_by(CASE, PROGRAM, [replace(SOUND, **facts)])
    assert mentions(line, words)


def test_a_kernel_that_does_other_than_planned_is_named():
    tensor = replace(CASE, kernels={"gemv": KernelLimits(wgmma=True)})
    assert list(broken_by(tensor, PROGRAM, [SOUND])) == [
        "gemv: expected tensor-core products (wgmma) in a loop, got none"
    ]
    assert list(broken_by(tensor, PROGRAM, [replace(SOUND, wgmma=4)])) == []
    short = replace(CASE, kernels={"gemv": KernelLimits(loop=35)})
    assert list(broken_by(short, PROGRAM, [SOUND])) == [
        "gemv: expected at most 35 instructions in the main loop, got 36"
    ]
    assert list(broken_by(CASE, PROGRAM, [])) == ["expected gemv to be compiled, got nothing"]
    padded = replace(PROGRAM, launches=(*PROGRAM.launches, Launch("fusion", by_us=False, bytes=1 << 20)))
    assert list(broken_by(CASE, padded, [SOUND])) == [
        "fusion of the compiler writes 1048576 bytes; expected less than 1048576"
    ]


@pytest.mark.parametrize(
    ("card", "facts", "words"),
    [
        ("rtx-3060", {"spilled": 4}, "gemv expected no register spills 4 bytes"),
        ("rtx-3060", {"shared": 99 * 1024 + 1}, "gemv at most 101376 bytes shared memory got 101377"),
        ("rtx-3060", {"features": ("copy_engine",)}, "gemv instructions copy_engine card does not have"),
        ("rtx-5090", {"features": ("wgmma",), "waits": True}, "gemv instructions wgmma card does not have"),
        ("rtx-3060", {"waits": True}, "gemv expected no wait previous kernel"),
        ("rtx-5090", {}, "gemv expected a wait previous kernel"),
        ("rtx-3060", {"moved": 3}, "gemv waits for loads in flight moves 3 registers"),
        ("rtx-3060", {"streamed": {128: 10, 64: 4}}, "gemv loads to registers of 128 bits 4 narrower"),
        ("rtx-3060", {"streamed": {}}, "gemv loads of weights to registers none"),
        ("rtx-3060", {"unmet": True}, "gemv reads shared memory store another thread barrier"),
        ("rtx-3060", {"hasty": True}, "gemv requests copy shared memory still reading"),
    ],
)
def test_a_kernel_that_does_not_suit_a_card_is_named(card: str, facts: dict[str, Any], words: str):
    case = replace(CASE, arrays=(None, np.zeros((1, 4096))))
    assert list(broken_on_card(case, RTX, PROGRAM, [ON_RTX])) == []
    [line] = broken_on_card(case, SHEETS[card].card, PROGRAM, [replace(ON_RTX, **facts)])
    assert mentions(line, words)


def test_attention_loads_nothing_before_the_wait_for_the_previous_kernel():
    case = replace(CASE, op="attention_decode", kernels={"gemv": KernelLimits(eager=False)}, bits=0)
    early = replace(ON_RTX, waits=True, cached_loads=2)
    assert list(broken_on_card(case, SHEETS["rtx-5090"].card, PROGRAM, [early])) == [
        "gemv: 2 loads before the wait for the previous kernel stay in the first-level cache"
    ]


def test_loads_of_several_vectors_may_be_half_as_wide():
    case = replace(CASE, arrays=(None, np.zeros((8, 4096))))
    kernels = [replace(ON_RTX, streamed={bits: 4}) for bits in (64, 32)]
    assert [len(list(broken_on_card(case, RTX, PROGRAM, [kernel]))) for kernel in kernels] == [0, 1]
    assert list(broken_on_card(case, RTX, PROGRAM, [])) == ["expected gemv to be compiled, got nothing"]


def test_prompts_and_many_vectors_by_codes_need_wgmma():
    assert [lacks(replace(CASE, op=op), RTX) for op in ("gemv", "coded_gemm q8", "attention_prefill")] == [
        None, "wgmma", "wgmma"
    ]  # fmt: skip
    assert lacks(replace(CASE, op="coded_gemm q8"), SHEETS["h200"].card) is None


@pytest.mark.parametrize("card", SHEETS)
def test_a_data_sheet_describes_the_card_to_the_compiler(card: str):
    sheet = SHEETS[card]
    assert f"core_count: {sheet.card.processors}\n" in sheet.target
    assert f"shared_memory_per_block_optin: {sheet.card.block_shared}\n" in sheet.target
    assert ("ACCELERATED_FEATURES" in sheet.target) == card.startswith(("rtx-50", "gb10"))


def test_a_move_waits_only_for_what_the_same_turn_loads():
    load, move = "/*0000*/ LDG.E.NA.LTC128B.{}CONSTANT R4, desc[UR4][R2.64]", "/*0010*/ IMAD.MOV.U32 R8, RZ, RZ, R{}"

    def moves(bits: str, register: int, *before: str) -> int:
        lines = [load.format(bits), *before, move.format(register)]
        return loaded_and_moved(read("\n".join(lines)).instructions)

    assert [moves("128.", register) for register in (3, 4, 7, 8)] == [0, 1, 1, 0]
    assert [moves("64.", register) for register in (5, 6)] == [1, 0]
    assert [moves("", register) for register in (4, 5)] == [1, 0]
    assert moves("128.", 5, "/*0008*/ FADD R5, R1, R2") == 0  # the register has another number by then


def test_only_weight_kernels_may_load_through_l1_before_the_wait():
    early, reads_none = replace(SOUND, cached_loads=2), replace(CASE, kernels={"gemv": KernelLimits(eager=False)})
    assert list(broken_by(CASE, PROGRAM, [early])) == []
    assert list(broken_by(reads_none, PROGRAM, [early])) == [
        "gemv: 2 loads before the wait for the previous kernel stay in the first-level cache"
    ]


def test_more_than_six_kernels_per_layer_break_a_gate():
    def step(layers: int, a_layer: int, **facts: Any) -> ProgramFacts:
        done = tuple(Launch("gemv", by_us=True, bytes=8192) for _ in range(40 + layers * a_layer))
        return replace(PROGRAM, launches=done, aliased=1 << 30, **facts)

    def broken(a_layer: int = 6, cache: int = 1 << 30, plain: int = 0, **facts: Any) -> list[str]:
        steps = step(2, a_layer), step(32, a_layer, **facts)
        return list(broken_by_step(*steps, layers=(2, 32), cache=cache, plain=plain))

    assert broken() == []
    assert broken(a_layer=7, plain=1) == []
    assert broken(a_layer=7) == ["expected at most 6 kernels per layer, got 7"]
    assert broken(cache=2 << 30) == ["expected 2147483648 bytes of the cache to be updated in place, got 1073741824"]
    assert broken(temp=32 << 20) == ["expected less than 33554432 bytes of temporary memory, got 33554432"]
    split = broken(issued=("kCommandBuffer", "kWhile", "kCommandBuffer"))
    assert split == ["expected the host to issue one CUDA graph, got 3 items (kCommandBuffer, kWhile)"]
    assert broken(seconds=20.5) == ["expected at most 20 s to compile 32 layers, got 20 s"]


@pytest.mark.parametrize(
    ("function", "argument", "limit", "answer"),
    [
        (len, "abc", 60, 3),
        (len, 3, 60, CallFailure("TypeError: object of type 'int' has no len()")),
        (time.sleep, 600, 0.2, CallFailure("took longer than 0.2 s")),
        (os._exit, 3, 60, CallFailure("ended with exit code 3")),
        (signal.raise_signal, signal.SIGKILL, 60, CallFailure("was killed by signal 9")),
    ],
)
def test_a_call_in_a_separate_process_returns_a_result_or_an_error(function, argument, limit, answer):
    assert list(call_each(function, [argument], limit=limit)) == [answer]


def test_calls_are_answered_in_order_even_if_one_fails():
    answers = call_each(os._exit, [1, 2, 3], limit=60, at_once=2)
    assert list(answers) == [CallFailure(f"ended with exit code {code}") for code in (1, 2, 3)]
