"""Summaries of benchmark runs in the repository are short and dated, and come from the benchmarks' raw files."""

import doctest
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from llamaspec.benchmarks import summary
from llamaspec.benchmarks.common.report import RESULTS
from llamaspec.benchmarks.summary import MOST_LINES, main
from tests.support.processes import REPOSITORY

SUMMARIES = sorted(RESULTS.glob("*.md"))
ABOUT = {
    "device": "cpu cpu",
    "processor": "2 x a CPU",
    "driver": None,
    "date": "2026-01-02",
    "python": "3.12.1",
    "versions": {"jax": "0.12"},
}
MEMORY = {"about": ABOUT, "rows": [{"layers": 2, "quantize": None, "started": 1e6, "compiling": 2e6, "running": 3e6}]}
TIMED = {"case": "add 8", "op": "add", "median": 1e-6, "least": 1e-6, "most": 1e-6}
CHECK = {"case": "add 8 float32", "outcome": "right", "share_of_bound": 0.5, "differing": 0}
GPU = {
    **{"suite": "gpu", "about": ABOUT, "ceilings": {"copy": 1e12, "read": 1e12, "flops": {}}, "skipped": []},
    "sections": {"right": [CHECK, {**CHECK, "outcome": "wrong", "differing": 3}], "kernels": [TIMED]},
}
CAMPAIGN = {
    **{"group": "numpy", "op": "add", "candidate": "c", "dtype": "float32", "outcome": "within bounds", "seed": 1},
    **{"examples": 10, "seconds": 1.0, "of the bound": 0.5, "of the alarm": 0.25, "machine": "2 cores"},
    **{"ended": "2026-01-02T03:04:05+00:00", "versions": {"numpy": "2"}},
}


def summarized(folder: Path, report: object, suffix: str = "json"):
    raw = folder / f"run.{suffix}"
    raw.write_text(json.dumps(report))
    done = CliRunner().invoke(main, ["--out", str(folder), str(raw)])
    written = folder / "run.md"
    return done, written.read_text() if written.exists() else None


def test_kept_summaries_are_short_and_say_where_they_are_from():
    assert {path.stem for path in SUMMARIES} >= {"gpu", "gpu-kernels", "peers", "schemes", "decode-cpu"}
    assert not [path for path in SUMMARIES if path.read_text().count("\n") > MOST_LINES]
    about = [path.read_text().splitlines() for path in SUMMARIES if path.stem != "gpu-compile"]
    assert all(any("2026-" in line for line in lines) and any("jax 0." in line for line in lines) for lines in about)


def test_raw_files_are_not_tracked():
    assert "/benchmarks/results/raw/" in (REPOSITORY / ".gitignore").read_text().splitlines()


def test_a_report_becomes_tables_with_the_machine_and_the_date(tmp_path):
    _, text = summarized(tmp_path, MEMORY)
    assert text and text.startswith("# run\n\nMeasured on 2026-01-02: cpu cpu, 2 x a CPU, Python 3.12.1, jax 0.12.\n")
    assert "|      2 |" in text


def test_checks_of_kernels_are_counted_and_the_wrong_ones_are_seen(tmp_path):
    _, text = summarized(tmp_path, GPU)
    assert text and "Measured on 2026-01-02" in text and "| add 8 |" in text
    assert "| add |     2 |     1 |                      0.5000 |                   3 |" in text


def test_a_log_of_lines_is_read(tmp_path):
    _, text = summarized(tmp_path, CAMPAIGN, "jsonl")
    assert text and "2026-01-02 to 2026-01-02, 2 cores, seed 1, numpy 2." in text and "within bounds" in text


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ({**GPU, "dry_run": "nothing"}, "cannot summarize a dry run"),
        ({**GPU, "interrupted": 130}, "it was interrupted"),
        ({"model": {"tiny": True}, "rates": {}, "ratios": []}, "cannot summarize a dry run"),
        ({"a": 1}, "expected a report that one of this repository's benchmarks wrote"),
        ({**MEMORY, "rows": MEMORY["rows"] * 301}, "at most 300 lines"),
    ],
)
def test_what_must_not_be_kept_is_refused(tmp_path, report, why):
    done, text = summarized(tmp_path, report)
    assert done.exit_code == 1 and text is None
    assert done.output.startswith("Error: ") and why in done.output


def test_examples():
    assert doctest.testmod(summary).failed == 0
