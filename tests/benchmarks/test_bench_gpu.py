"""Dry runs of `llamaspec bench` for a GPU: its suites, the parts of a suite, and the reports."""

import doctest
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import io_callback

from llamaspec.benchmarks.common import model_speed
from llamaspec.benchmarks.common.kernel_cases import attention, case, kernel_cases, variants
from llamaspec.benchmarks.common.kernel_cases.attention import window_cases
from llamaspec.benchmarks.common.kernel_cases.case import BFLOAT16
from llamaspec.benchmarks.common.report import skipped, timed
from llamaspec.benchmarks.suites.gpu import report as gpu_report
from llamaspec.benchmarks.suites.gpu import right, suite, tuning
from llamaspec.benchmarks.suites.gpu import scale as tiny_scale
from llamaspec.benchmarks.suites.gpu.clock import Deadline
from llamaspec.benchmarks.suites.gpu.drawing import draw
from llamaspec.benchmarks.suites.gpu.kernels import time_kernels
from llamaspec.benchmarks.suites.gpu.models import decoding, params_of, programs_of, time_models
from llamaspec.benchmarks.suites.gpu.right import check, spoiled, unseen
from llamaspec.benchmarks.suites.gpu.scale import dry, full
from llamaspec.benchmarks.suites.gpu.suite import GRACE, SectionRow, SuitePart, plan, run_part
from llamaspec.benchmarks.suites.gpu.tuning import listed, product_of, tune
from llamaspec.commands.interrupt import CommandHandler
from llamaspec.model.insight.cost import decode_cost
from llamaspec.model.insight.machine import Ceilings
from llamaspec.model.insight.timing import Seconds
from llamaspec.model.ops.xla import XLA
from llamaspec.pallas_kernels.parts.tile import MOST_ROWS, Tile, tile_for
from llamaspec.pallas_kernels.unsupported import Unsupported
from tests.benchmarks.charts import rectangles
from tests.support.processes import REPOSITORY
from tests.support.refusals import mentions
from tests.support.waiting import PATIENCE


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run llamaspec in a process where JAX finds no GPU; return the finished process."""
    words = [sys.executable, "-m", "llamaspec.cli", *map(str, arguments)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True)


def test_without_a_gpu_the_suite_says_so_in_one_line(tmp_path: Path):
    done = command("bench", "--suite", "gpu", "--json", tmp_path / "kept.json")
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and mentions(line, "9.0 H100 cpu --dry-run")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # 87 s
def test_a_dry_run_runs_the_suite_and_says_that_times_mean_nothing(tmp_path: Path):
    report_file, chart = tmp_path / "kept.json", tmp_path / "chart.svg"
    done = command("bench", "--suite", "kernels", "--dry-run", "--json", report_file, "--plot", chart)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == done.stdout.splitlines()[-1] == gpu_report.NOTHING_MEANT
    report = json.loads(report_file.read_text())
    assert report["dry_run"] == gpu_report.NOTHING_MEANT and report["skipped"] == []
    assert set(report["sections"]) == {"right", "clearing", "kernels", "attention"}
    assert all(row["outcome"] == "right" for row in report["sections"]["right"])
    for name in ("kernels", "attention"):
        assert all(row["speedup"] > 0 and row["share"] > 0 for row in report["sections"][name])
    assert [(row["rows"], row["more"] == 0) for row in report["sections"]["clearing"][::3]] == [(0, True)] * 2
    assert [row["rows"] for row in report["sections"]["clearing"][:3]] == [0, 1, 63]
    assert gpu_report.NOTHING_MEANT in chart.read_text()


def test_all_parts_together_fit_into_nine_minutes():
    parts = plan("gpu", dry=False)
    assert sum(part.seconds for part in parts) + GRACE <= 9 * 60
    assert [part.section for part in parts[:2]] == ["memory", "right"]
    assert {part.section for part in plan("gpu", dry=True)} == {part.section for part in parts}
    for suite_name in ("models", "kernels", "variants"):
        parts = plan(suite_name, dry=False)
        assert sum(part.seconds for part in parts) + GRACE <= 9 * 60
        assert sum(part.seconds + max(0.0, part.grace - GRACE) for part in parts[1:]) + parts[0].seconds <= 570
        assert [part.section for part in plan(suite_name, dry=True)] == [part.section for part in parts]


@pytest.mark.sampled(1)  # 5 s each
@pytest.mark.parametrize(
    ("part", "seconds", "why"),
    [
        (SuitePart("memory", 1), 0.2 - GRACE, "it took too long and was killed"),
        (SuitePart("starting", 1, {"unknown": 1}), 60.0, "it ended with 1: TypeError"),
    ],
)
def test_a_failing_part_is_reported_as_skipped(part: SuitePart, seconds: float, why: str, tmp_path: Path):
    (result,) = run_part(part, scale="dry", seconds=seconds, cache=str(tmp_path))
    assert result.section == part.section
    assert result.row["skipped"] == part.name
    assert result.row["why"].startswith(why)


@pytest.mark.slow  # 6 s
def test_kernels_are_checked_and_what_does_not_fit_is_named():
    scale = dry()
    chosen = [case for case in scale.checked if case.op in ("attention_decode", "softmax") and case.dtype == "float32"]
    scale = replace(scale, checked=tuple(chosen))
    *rows, canaries = check(scale, Deadline(600))
    assert [(row["case"], row["outcome"]) for row in rows] == [(case.name, "right") for case in chosen]
    assert all(row["share_of_bound"] <= 1 and row["differing"] == 0 for row in rows)
    assert canaries["outcome"] == "right"
    *rows, _ = check(scale, Deadline(0))
    assert rows == [skipped(case.name) for case in chosen]


def test_a_wrong_or_nondeterministic_kernel_is_detected():
    scale = replace(dry(), running=nullcontext)
    norm = next(candidate for candidate in scale.checked if candidate.op == "rmsnorm")
    calls = count()

    def unsteady(x, weight):
        noise = io_callback(lambda: np.float32(next(calls)), jax.ShapeDtypeStruct((), np.float32))
        return norm.plain(x, weight) + noise

    def off(x, weight):
        return norm.plain(x, weight).at[0, 3].add(0.01)

    rows = check(replace(scale, checked=(replace(norm, function=off), replace(norm, function=unsteady))), Deadline(600))
    wrong, racing, _ = rows
    assert (wrong["outcome"], wrong["differing"]) == ("wrong", 0) and wrong["share_of_bound"] > 1
    assert racing["outcome"] == "wrong" and racing["differing"] > 0


def test_a_kernels_refusal_is_reported():
    scale = replace(dry(), running=nullcontext)
    norm = next(candidate for candidate in scale.checked if candidate.op == "rmsnorm")

    def refuse(x, weight):
        raise Unsupported("rmsnorm takes no 256 elements")

    row, _ = check(replace(scale, checked=(replace(norm, function=refuse),)), Deadline(600))
    assert (row["outcome"], row["words"]) == ("refused", "rmsnorm takes no 256 elements")


def test_a_kernel_that_fails_is_wrong_and_others_are_still_checked():
    norm = next(candidate for candidate in dry().checked if candidate.op == "rmsnorm")

    def fall(x, weight):
        raise RuntimeError("no such layout\nat all")

    cases = replace(norm, function=fall), replace(norm, function=norm.plain)
    scale = replace(dry(), running=nullcontext, checked=cases)
    failed, right_one, _ = check(scale, Deadline(600))
    assert failed == {"case": norm.name, "outcome": "failed", "words": "RuntimeError: no such layout"}
    assert right_one["outcome"] == "right"
    report = gpu_report.as_report(
        [SectionRow("memory", MACHINE), SectionRow("right", failed)], suite="kernels", dry=True
    )
    assert gpu_report.wrong(report) == [norm.name]


def test_checks_compile_without_measuring_times(monkeypatch: pytest.MonkeyPatch):
    """The benchmark's correctness checks compile without XLA's autotuning.

    On a busy GPU, autotuning may choose code that rounds differently; such a check once rejected correct kernels.
    """
    norm = next(case for case in dry().checked if case.op == "rmsnorm")
    real_compile, passed = jax.stages.Lowered.compile, []
    expected = right.untuned_options("cpu")

    def compile(self: jax.stages.Lowered, options: Any = None) -> jax.stages.Compiled:
        passed.append(options)
        return real_compile(self)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    assert right.checked(replace(norm, function=norm.plain, kernels={}), 1)["outcome"] == "right"
    assert passed == [expected]


@pytest.mark.slow  # 13 s
def test_no_query_sees_what_is_before_its_window(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "WINDOW", 50)
    monkeypatch.setattr(right, "WINDOW", 50)
    cases = [*window_cases(tiny_scale.TINY, BFLOAT16, tiny_scale.TINY_WORK)]
    for candidate in cases:
        drawn = spoiled(candidate, jax.tree.map(np.array, draw(candidate, seed=1)))
        assert (
            np.isnan(unseen(candidate, drawn)[1].astype(np.float32)).sum() > np.isnan(drawn[1].astype(np.float32)).sum()
        )
    *rows, _ = check(replace(dry(), varied=tuple(cases)), Deadline(600), varied=True)
    assert [row["outcome"] for row in rows] == ["right"] * 3


def test_every_variant_is_held_to_exact_numbers_in_some_shape():
    def kind(candidate: case.Case) -> tuple[str, str, str]:
        return (
            candidate.op,
            candidate.dtype,
            "" if candidate.op.startswith("attention") else "".join(re.findall(r" x\d+$", candidate.shape)),
        )

    scale = full()
    checked_kinds = {kind(candidate) for candidate in (*scale.checked, *scale.varied)}
    assert {kind(candidate) for candidate in variants().values()} <= checked_kinds
    launched_twice = {
        (candidate.op.split()[0], *re.findall(r" x([5-8])$", candidate.shape)) for candidate in scale.varied
    }
    assert {(op, size) for op in ("gemv", "norm_gate_up", "norm_qkv") for size in "5678"} <= launched_twice
    for candidate in scale.varied:
        if not candidate.op.startswith("attention"):
            parts = candidate.arrays[0] if isinstance(candidate.arrays[0], tuple) else (candidate.arrays[0],)
            assert sum(part.shape[0] * part.shape[-1] for part in parts) < 2**26, candidate.name  # NumPy takes seconds


@pytest.mark.slow  # 3 s
def test_every_tile_of_several_chunks_is_held_to_exact_numbers():
    scale = full()
    checked_names = {candidate.name for candidate in (*scale.checked, *scale.varied)}
    chunked = [
        candidate for candidate in scale.timed if (product := product_of(candidate)) and tile_for(*product).chunks
    ]
    small = {candidate.name for candidate in chunked if candidate.arrays[0].size < 2**26}
    assert "gemv residual 2048x8192 bfloat16" in small
    assert small <= checked_names
    assert all(
        "norm" in candidate.op for candidate in chunked if candidate.name not in small
    )  # a smaller case checks the output head


def test_every_wide_tile_of_codes_is_held_to_exact_numbers():
    def tiled(candidate: case.Case) -> tuple[str, int, Tile] | None:
        product = product_of(candidate)
        tile = getattr(candidate.function, "keywords", {}).get("tile")
        return (candidate.op, product[2], tile or tile_for(*product)) if product else None

    scale = full()
    wide = {
        of for candidate in scale.timed if " q" in candidate.op and (of := tiled(candidate)) and of[-1].rows > MOST_ROWS
    }
    assert ("gemv q8 residual", 28_672, Tile(64)) in wide
    assert wide <= {
        tiled(candidate) for candidate in (*scale.checked, *scale.varied)
    }  # with fewer rows than the largest


@pytest.mark.parametrize("prepared", [1, 2])
def test_a_case_that_cannot_be_timed_is_named_and_the_others_are_timed(prepared: int):
    scale = dry()
    (timed,) = scale.timed

    def fall(*arguments):
        raise RuntimeError("no such layout")

    norm = next(candidate for candidate in scale.checked if candidate.op == "rmsnorm")
    norm = replace(norm, function=norm.plain)
    scale = replace(scale, running=nullcontext, timed=(replace(timed, function=fall), norm), prepared=prepared)
    rows = list(time_kernels(scale, Deadline(600), backwards=True))
    assert rows[0]["case"] == norm.name
    assert rows[1] == skipped(timed.name, "RuntimeError: no such layout")


class EndingClock(Deadline):
    """A deadline that has not passed at the first `looks` reads of `over`, and has passed at every later read."""

    def __init__(self, looks: int):
        self._looks = looks

    @property
    def over(self) -> bool:
        self._looks -= 1
        return self._looks < 0


@pytest.mark.sampled(2)  # 1 s each
@pytest.mark.parametrize(("looks", "timed"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_cases_are_skipped_once_time_is_over(looks: int, timed: int):
    norm = next(candidate for candidate in dry().checked if candidate.op == "rmsnorm")
    cases = tuple(replace(norm, function=norm.plain, shape=f"{norm.shape} {i}") for i in range(3))
    scale = replace(dry(), running=nullcontext, timed=cases, prepared=2)
    rows = list(time_kernels(scale, EndingClock(looks)))
    assert [row["case"] for row in rows[:timed]] == [candidate.name for candidate in cases[:timed]]
    assert rows[timed:] == [skipped(candidate.name) for candidate in cases[timed:]]


@pytest.mark.slow  # 3 s
def test_a_model_draws_as_many_tokens_a_call_as_a_session_would(monkeypatch):
    scale = replace(dry(), burst=4)
    model, context = scale.models[0], scale.contexts[0]
    params = params_of(model, scale)
    programs = programs_of(model, params, XLA, scale)
    requests = []
    monkeypatch.setattr(
        "llamaspec.benchmarks.suites.gpu.models.tokens_at_once", lambda step, most: requests.append((step, most)) or 3
    )
    row = decoding(model, params, programs, scale, context=context)
    assert (row["burst"], [most for _, most in requests]) == (3, [4, 4])
    assert row["bytes"] == decode_cost(params, model.config, position=context + 1.5, batch=1).bytes
    queue = []

    def ask(burst):
        queue.append(burst)
        return len(queue)

    results = []
    monkeypatch.setattr("llamaspec.benchmarks.common.model_speed.decoding", lambda *arguments, **fixed: ask)
    monkeypatch.setattr(
        "llamaspec.benchmarks.suites.gpu.models.measure",
        lambda read, effort: results.append(read()) or Seconds(1, 1, 1),
    )
    decoding(model, params, programs, scale, context=context)
    assert results == [1, 3, 5] and len(queue) == 6  # results of earlier calls; one more call is queued
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"\b4\b.*\b5\b"):
        model_speed.decoding(programs, params, context=context)(5)


def test_several_sequences_decode_at_once():
    """`bench --suite models --batch 3` counts the tokens and bytes of all three sequences, and times no prompt."""
    scale = replace(dry(), models=(replace(dry().models[0], by=("XLA",)),))
    (part,) = (part for part in suite.plan("models", dry=True, batch=3) if part.section == "models")
    rows = list(time_models(scale, Deadline(600), **part.options))
    assert [(row["what"], row["tokens"]) for row in rows] == [("decode, greedy", 3), ("decode, top-p", 3)]
    (single, three) = (
        decode_cost(params_of(scale.models[0], scale), scale.models[0].config, position=8.5, batch=batch).bytes
        for batch in (1, 3)
    )
    assert rows[0]["bytes"] == three > single


def test_models_that_do_not_fit_are_named():
    assert list(time_models(dry(), Deadline(0))) == [
        skipped("tiny bfloat16 by kernels"),
        skipped("tiny bfloat16 by XLA"),
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemv residual 2048x5632 bfloat16", ("gemv", 2048, 5632)),
        ("gemv residual 4096x4096 x8 bfloat16", None),
        ("gemv q4 norm 128256x4096 bfloat16", ("gemv int4/64", 128256, 4096)),
        ("norm_qkv q8_row 32+2x8x128x4096 bfloat16", ("norm_qkv int8", 6144, 4096)),
        ("norm_qkv 32+2x8x128x4096 bfloat16", ("norm_qkv", 6144, 4096)),
        ("softmax 32000 float32", None),
    ],
)
def test_tuned_tiles_are_looked_up_by_the_kernels_key(name: str, expected: tuple[str, int, int] | None):
    product = product_of(kernel_cases()[name])
    assert (product and product[:3]) == expected


@pytest.mark.slow  # 5 s
def test_tiles_are_timed():
    scale = dry()
    (row,) = tune(scale, Deadline(600))
    assert row["key"] == "norm_qkv 192x256 bfloat16"
    now = tile_for("norm_qkv", 192, 256, BFLOAT16)
    assert row["tile"] == row["now"] == listed(now) == [16]  # the only tile of a dry run
    assert not row["faster"]
    report = gpu_report.as_report([SectionRow("memory", MACHINE), SectionRow("tuning", row)], suite="kernels", dry=True)
    assert "norm_qkv 192x256 bfloat16 | 16 " in gpu_report.as_text(report)
    assert gpu_report.tuned({"a": [8, 8]}, report) == {"a": [8, 8]}


@pytest.mark.parametrize("module", [case, gpu_report, right, tuning])
def test_examples(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


MACHINE = {
    "about": {"device": "gpu X", "processor": "1 x Y", "driver": "1.2", "versions": {"jax": "0.12"}},
    "ceilings": Ceilings(copy=8e9, read=10e9, flops={"float32": 1e12, "bfloat16": 2e12})._asdict(),
}


def test_a_report_says_what_was_found_and_what_was_left_out():
    large = {"case": "gemv 8x8 bfloat16", "op": "gemv", "plain": 0.04, "speedup": 2.0}
    model = {"case": "tiny float32", "by": "XLA", "what": "decode, greedy", "context": 128, "tokens": 1}
    seconds = Seconds(0.02, 0.01, 0.03)
    results = [
        SectionRow("memory", MACHINE),
        SectionRow("right", {"case": "add 3 float32", "outcome": "wrong", "share_of_bound": 2.0, "differing": 0}),
        SectionRow("kernels", large | timed(seconds, bytes=80e6, flops=0, dtype="bfloat16")),
        SectionRow("kernels", skipped("gemv 9x9 bfloat16")),
        SectionRow("models", model | timed(seconds, bytes=40e6, flops=0, dtype="float32")),
    ]
    report = gpu_report.as_report(results, suite="gpu", dry=False)
    text = gpu_report.as_text(report)
    assert "gemv 9x9 bfloat16 (there was no time left)" in text and gpu_report.NOTHING_MEANT not in text
    (kernel,), (decode,) = report["sections"]["kernels"], report["sections"]["models"]
    assert kernel["share"] == pytest.approx(0.5)
    assert decode["tokens_a_second"] == 50
    assert gpu_report.wrong(report) == ["add 3 float32"]
    assert len(rectangles(gpu_report.as_svg(report))) == 3  # XLA's decoding, the kernel, and XLA's form of it


def test_without_the_machine_s_figures_there_is_no_report(monkeypatch: pytest.MonkeyPatch):
    died = [SectionRow("memory", skipped("memory", "it ended with -6: out of memory"))]
    monkeypatch.setattr(suite, "run_part", lambda *_, **__: died)
    with pytest.raises(ValueError, match="-6: out of memory"):
        list(suite.run_suite("gpu", dry=False))


TIMED = {"case": "add 8 float32", "op": "add"} | timed(Seconds(2e-3, 1e-3, 3e-3), bytes=64, flops=0, dtype="float32")


@pytest.mark.parametrize(("end", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_an_interrupted_run_keeps_its_measurements(end, status, run, monkeypatch, tmp_path: Path):
    def parts(part: SuitePart, **_):
        assert isinstance(
            signal.getsignal(signal.SIGINT), CommandHandler
        )  # otherwise the process would end soon after Ctrl-C
        yield SectionRow("memory", MACHINE) if part.section == "memory" else SectionRow(part.section, TIMED)
        if part.section == "kernels":
            raise end

    monkeypatch.setattr(suite, "run_part", parts)
    report_file = tmp_path / "kept.json"
    report_file.write_text("from an earlier run")
    code, out, err = run("bench", "--suite", "variants", "--json", str(report_file))
    assert (code, err) == (status, f"error: interrupted: the results so far are in {report_file}.interrupted\n")
    assert report_file.read_text() == "from an earlier run"
    report = json.loads((tmp_path / "kept.json.interrupted").read_text())
    assert [row["case"] for row in report["sections"]["kernels"]] == ["add 8 float32"]
    assert report["interrupted"] == status
    assert "variants: the remaining cases (interrupted)" in out


def test_an_interrupted_part_ends_its_processes_and_keeps_results(monkeypatch):
    class Process:
        def __init__(self):
            self.ended = Event()

        def kill(self):
            self.ended.set()

    processes = {0: Process(), 1: Process()}
    other_began = Event()

    def share_of(part: SuitePart, *, started):
        share = part.options["share"]
        started(processes[share])
        yield SectionRow("right", {"case": f"of share {share}"})
        if share == 0:
            assert other_began.wait(PATIENCE)
            raise KeyboardInterrupt
        other_began.set()
        assert processes[share].ended.wait(PATIENCE)
        yield SectionRow("right", skipped("right", "it ended with -9"))

    monkeypatch.setattr(suite, "run_part", share_of)
    rows = []
    with pytest.raises(KeyboardInterrupt):
        rows.extend(result.row for result in suite.run_shares(SuitePart("right", 10, shares=2)))
    assert rows == [{"case": "of share 0"}, {"case": "of share 1"}]
    assert all(process.ended.is_set() for process in processes.values())


def test_a_run_that_is_interrupted_before_anything_was_measured_leaves_nothing(run, monkeypatch, tmp_path: Path):
    def at_once(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "run_part", at_once)
    code, out, _ = run("bench", "--suite", "gpu", "--json", str(tmp_path / "kept.json"))
    assert (code, out) == (130, "")
    assert not list(tmp_path.glob("kept*"))


def test_the_documents_count_the_cases_of_the_suites():
    scale = full()
    text = " ".join((REPOSITORY / "docs/performance-gpu.md").read_text(encoding="utf-8").split())
    assert f"`gpu` runs {len(scale.checked):,} cases {scale.repeats:,} times each" in text
    assert f"`kernels` {len(scale.varied):,} cases {scale.varied_repeats:,} times each" in text
