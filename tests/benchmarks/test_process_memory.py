"""The predicted memory of a process, without its arrays, agrees with our measurements; the measuring script runs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamaspec.benchmarks.audits import process_memory
from llamaspec.benchmarks.audits.process_memory import main
from llamaspec.benchmarks.common.random_model import random_shapes
from llamaspec.model.running.memory import PROCESS, memory_of
from llamaspec.reference.config import Config

CONFIG = Config(256, 1, 4, 2, 64, 512, vocab=4096, context=256, eps=1e-5, theta=1e4)
# Layers, scheme, and bytes of memory: after the start of JAX, then in addition to compile, and to run. Measured by
# benchmarks/audits/process_memory.py on 2 cores of an AMD EPYC, 2026-11-21, Python 3.12.1, jax 0.12.0.1, NumPy 2.5.5.
MEASURED = [
    (2, None, 179_220_480, 284_868_608, 107_465_728),
    (8, None, 179_183_616, 266_903_552, 132_692_992),
    (24, None, 177_954_816, 348_282_880, 205_294_592),
    (2, "q8", 177_819_648, 285_184_000, 118_529_024),
    (8, "q8", 177_569_792, 282_218_496, 152_554_496),
    (24, "q8", 177_901_568, 353_140_736, 261_127_168),
    (2, "q4", 179_085_312, 321_736_704, 126_848_000),
    (8, "q4", 179_171_328, 311_541_760, 173_878_272),
    (24, "q4", 177_819_648, 395_268_096, 284_400_640),
    (2, "nf4", 177_893_376, 335_077_376, 131_845_120),
    (8, "nf4", 177_795_072, 295_776_256, 184_974_336),
    (24, "nf4", 177_893_376, 417_075_200, 338_021_376),
    (2, "fp8", 177_618_944, 317_362_176, 128_633_856),
    (8, "fp8", 177_885_184, 296_034_304, 166_665_216),
    (24, "fp8", 179_605_504, 401_829_888, 291_924_992),
    (2, "mxfp4", 179_400_704, 330_022_912, 132_832_256),
    (8, "mxfp4", 179_519_488, 305_008_640, 190_807_040),
    (24, "mxfp4", 179_765_248, 537_452_544, 336_231_424),
]


@pytest.mark.sampled(6)  # 18 cases, 3 s
@pytest.mark.parametrize(("layers", "quantize", "started", "compiling", "running"), MEASURED)
def test_plans_are_made_with_what_was_measured(
    layers: int, quantize: str | None, started: int, compiling: int, running: int
):
    """Planned and measured memory differ by less than 50 MB. (`inspect --plan` promises only 50 MB plus 5 %.)"""
    config, dtype = replace(CONFIG, layers=layers), np.dtype(np.float32)
    shapes = random_shapes(config, dtype=dtype, positions=1, quantize=quantize)
    planned = memory_of(shapes, config, batch=1, context=256, chunk=64, platform="cpu", cache_dtype=dtype)
    assert abs(started - PROCESS) < 50e6
    assert abs(started + compiling - planned.compiling) < 50e6
    assert abs(started + running - planned.process) < 50e6


@pytest.mark.slow  # 6 s
def test_it_can_be_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_memory, "MEASURED_SCHEMES", (None,))
    report_file = tmp_path / "kept.json"
    main(["--layers", "1", "2", "--json", str(report_file)])
    out = capsys.readouterr().out
    assert "| layers | started, MB |" in out and "running float32: " in out
    rows = json.loads(report_file.read_text())["rows"]
    assert [row["layers"] for row in rows] == [1, 2]
    assert all(row[key] > 0 for row in rows for key in ("started", "compiling", "running"))
