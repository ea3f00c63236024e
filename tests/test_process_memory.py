"""What plans say of a process beside its arrays is what was measured, and can be measured again."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import process_memory
from benchmarks.process_memory import main
from benchmarks.random_model import random_shapes
from model.running.memory import PROCESS, memory_of
from reference.config import Config
from tests.processes import REPOSITORY

CONFIG = Config(256, 1, 4, 2, 64, 512, vocab=4096, context=256, eps=1e-5, theta=1e4)
KEPT = json.loads((REPOSITORY / "benchmarks/results/process-memory.json").read_text())["rows"]


@pytest.mark.parametrize("row", KEPT, ids=[f"{row['layers']} layers, {row['quantize']}" for row in KEPT])
def test_plans_are_made_with_what_was_measured(row: dict):
    """Within the 50 MB that a plan may be off by, beside 5 %."""
    config, dtype = replace(CONFIG, layers=row["layers"]), np.dtype(np.float32)
    shapes = random_shapes(config, dtype=dtype, positions=1, quantize=row["quantize"])
    planned = memory_of(shapes, config, batch=1, context=256, chunk=64, platform="cpu", cache_dtype=dtype)
    assert abs(row["started"] - PROCESS) < 50e6
    assert abs(row["started"] + row["compiling"] - planned.compiling) < 50e6
    assert abs(row["started"] + row["running"] - planned.process) < 50e6


def test_it_can_be_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_memory, "SCHEMES", (None,))
    kept = tmp_path / "kept.json"
    main(["--layers", "1", "2", "--json", str(kept)])
    out = capsys.readouterr().out
    assert "| layers | started, MB |" in out and "running float32: " in out
    rows = json.loads(kept.read_text())["rows"]
    assert [row["layers"] for row in rows] == [1, 2]
    assert all(row[key] > 0 for row in rows for key in ("started", "compiling", "running"))
