"""`benchmarks/audits/peers.py` times several engines in turn, and compares times of the same round.

Only our engine runs here.
"""

import doctest
import json
import os
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from llamaspec.benchmarks.audits import gpu_peers as beside
from llamaspec.benchmarks.audits import peers
from llamaspec.benchmarks.audits.peer_workers.our_engine import LlamaspecEngine as OurEngine
from llamaspec.benchmarks.audits.peers import (
    TINY,
    EngineProcess,
    commands,
    engine,
    markdown,
    matching_tokens,
    measure,
    ratios,
)
from llamaspec.benchmarks.common.random_model import random_checkpoint

ANSWERS = """
import json, sys
print(json.dumps({"versions": {"echo": "1"}}), flush=True)
for line in sys.stdin:
    ((request, count),) = json.loads(line).items()
    if request == "die":
        sys.exit(3)
    print(json.dumps({"seconds": count, "ids": [count]}), flush=True)
"""


def test_an_engine_is_a_process_that_answers():
    with engine(sys.executable, "-c", ANSWERS, threads=1) as peer:
        assert peer.versions == {"echo": "1"}
        assert peer.ask("decode", 3) == {"seconds": 3, "ids": [3]}
        with pytest.raises(ValueError, match="ended with exit status 3"):
            peer.ask("die", 0)


def test_engines_run_in_turn_and_the_first_round_is_a_warm_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "PAUSE", 0)
    requests = []

    def stub(name: str, seconds: float) -> EngineProcess:
        def ask(request: str, count: int):
            requests.append((name, request))
            return {"read": 12.0, "bytes": 2.0} if request == "read" else {"seconds": seconds, "ids": [1, 2]}

        return EngineProcess(ask, {})

    engines = {"ours float32": stub("ours float32", 1.0), "llama.cpp F32": stub("llama.cpp F32", 2.0)}
    rates, drawn = measure(engines, rounds=2, tell=lambda line: None)
    a_round = [("ours float32", "read")] + [(name, what) for name in engines for what in ("prefill", "decode")]
    assert requests == 3 * a_round
    assert rates["ours float32"] == {"prefill": [512.0] * 2, "decode": [64.0] * 2}
    assert rates["the floor"] == {"prefill": [], "decode": [6.0] * 2}
    ratio_by_row = {(row["to"], row["what"]): row["ratio"] for row in ratios(rates)}
    assert ratio_by_row == {
        ("llama.cpp F32", "decode"): 2,
        ("llama.cpp F32", "prefill"): 2,
        ("the floor", "decode"): 64 / 6,
    }
    about = {"processor": "p", "cores": 2, "rounds": 2, "versions": {"jax": "0"}}
    text = markdown({**about, "rates": rates, "matching_tokens": matching_tokens(drawn), "ratios": ratios(rates)})
    assert "| ours float32 | llama.cpp F32 | 2.00 (2.00 to 2.00) | 1.00 | 2.00 (2.00 to 2.00) | 1.00 |" in text
    assert text.count("\n|---") == 2


def test_ours_answers_as_generate_runs(tmp_path: Path):
    config = replace(TINY, dim=64, heads=2, kv_heads=2, head_dim=32, layers=1, ffn=96, vocab=128, context=64)
    commands_by_name = commands(tmp_path, random_checkpoint(config), llama_cpp=None, transformers=None, cores=1)
    assert list(commands_by_name) == [f"ours {form}" for form in peers.OUR_FORMS]
    *_, directory, form = commands_by_name["ours q8"]
    own_engine = OurEngine(directory, form)
    assert own_engine.prefill(40)["seconds"] > 0
    drawn = own_engine.decode(5)
    assert len(drawn["ids"]) == 6 and drawn["seconds"] > 0
    assert own_engine.decode(5)["ids"] == drawn["ids"]


@pytest.mark.slow  # 7 s
def test_a_tiny_run_shows_that_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(peers, "OUR_FORMS", ("float32",))
    monkeypatch.setattr(peers, "LLAMA_CPP", {})  # this Python may have llama.cpp
    monkeypatch.setattr(peers, "PAUSE", 0)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: None)  # other tests need all cores
    report_file = tmp_path / "kept.json"
    peers.main.main(["--tiny", "--rounds", "1", "--json", str(report_file)], standalone_mode=False)
    report = json.loads(report_file.read_text())
    assert report["model"]["tiny"]
    counts = {name: len(rates["decode"]) for name, rates in report["rates"].items()}
    assert counts == {"ours float32": 1, "the floor": 1}
    assert [(row["ours"], row["to"]) for row in report["ratios"]] == [("ours float32", "the floor")]
    assert "| ours float32 | the floor | " in capsys.readouterr().out


def test_examples():
    assert doctest.testmod(peers).failed == 0


@pytest.fixture
def llama_cpp(tmp_path):
    """Create executable stand-ins for the programs of a llama.cpp build."""
    rows = {"0": [{"n_prompt": 0, "n_gen": 4, "samples_ts": [3.0, 5.0]}]}
    rows["16"] = [{"n_prompt": 16, "n_gen": 0, "samples_ts": [7.0]}]
    choose = "\n".join(
        f"'-p {prompts} '*) echo '{json.dumps(rows_of_prompt)}';;" for prompts, rows_of_prompt in rows.items()
    )
    bench = (
        f'#!/bin/sh\ncase "$*" in *IQ4*) echo no such type >&2; exit 1;; esac\nshift 8\ncase "$* " in {choose} esac\n'
    )
    for name, text in {"llama-bench": bench, "llama-quantize": '#!/bin/sh\ncp "$2" "$3"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_gpu_comparisons_write_and_delete_model_files_in_turn(llama_cpp, tmp_path, monkeypatch):
    """The next model file is written before our engine runs. Measured files are deleted, except for the BF16 file."""

    def ask_our_engine(model: Path, form: str, context: int, *, wait, **options):
        wait()
        return {"form": form, "context": context, "files": sorted(file.name for file in model.parent.iterdir())}

    monkeypatch.setattr(beside, "ask_our_engine", ask_our_engine)
    folder = tmp_path / "models"
    folder.mkdir()
    sizes = {"prompts": [16], "decoded": 4, "rounds": 1, "over": inf, "device": "cpu", "transformers": False}
    options = {"llama_cpp": llama_cpp, "types": ["BF16", "IQ4_NL", "Q4_0"], "schemes": ("q8",), **sizes}
    rows = list(beside.compared(TINY, folder, **options))
    peer_rates = {"prefill 16": (7.0, 7.0, 7.0), "decode 4": (4.0, 3.0, 5.0)}
    here = {"form": "stored", "context": 20}
    assert rows == [
        {"file": "BF16", "engine": "llama.cpp", **peer_rates},
        {"file": "BF16", "engine": "ours", **here, "files": ["BF16.gguf", "IQ4_NL.gguf", "hf"]},
        {"file": "IQ4_NL", "engine": "llama.cpp", "failed": "ValueError: llama-bench: no such type"},
        {"file": "IQ4_NL", "engine": "ours", **here, "files": ["BF16.gguf", "IQ4_NL.gguf", "Q4_0.gguf", "hf"]},
        {"file": "Q4_0", "engine": "llama.cpp", **peer_rates},
        {"file": "Q4_0", "engine": "ours", **here, "files": ["BF16.gguf", "Q4_0.gguf", "hf"]},
        {"file": "q8", "engine": "ours", "form": "q8", "context": 20, "files": ["BF16.gguf", "hf"]},
    ]
    (tmp_path / "late").mkdir()
    late = beside.compared(TINY, tmp_path / "late", **{**options, "over": 0.0})
    assert all("skipped" in row for row in late)


def test_a_decode_only_comparison_needs_no_prompts(llama_cpp, tmp_path, monkeypatch):
    (llama_cpp / "llama-quantize").write_text("#!/bin/sh\necho no such type >&2; exit 1\n")
    monkeypatch.setattr(beside, "ask_our_engine", lambda model, form, context, **options: {"context": context})
    sizes = {"prompts": [], "decoded": 4, "rounds": 1, "over": inf, "device": "cpu", "transformers": False}
    options = {"llama_cpp": llama_cpp, "types": ["BF16", "Q4_0"], "schemes": (), **sizes}
    folder = tmp_path / "models"
    folder.mkdir()
    first, own_row, failed, _ = beside.compared(TINY, folder, **options)
    assert first == {"file": "BF16", "engine": "llama.cpp", "decode 4": (4.0, 3.0, 5.0)}
    assert own_row["context"] == 12 and failed["failed"] == "ValueError: llama-quantize: no such type"
    assert [file.name for file in folder.iterdir()] == ["BF16.gguf"]
