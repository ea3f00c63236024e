"""`benchmarks/audits/schemes.py` compares quantization schemes: each scheme runs, and the table shows its results."""

import doctest
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from llamaspec import load
from llamaspec.benchmarks.audits import scheme_forms, schemes
from llamaspec.benchmarks.audits.scheme_forms import bits, forms, padded, weight_error
from llamaspec.benchmarks.audits.schemes import in_windows, markdown, sample_stories, speeds
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.open import BUILT_IN
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.llama import load_backend
from llamaspec.model.options import RunOptions
from llamaspec.model.quantize.methods import METHODS
from llamaspec.reference.quantizers import ggml
from llamaspec.reference.quantizers.schemes import SCHEMES
from tests.support import tiny_tokenizers
from tests.support.random_models import SMALL, random_checkpoint

TINY = replace(SMALL, dim=32, heads=2, kv_heads=2, head_dim=16, ffn=64, layers=1, vocab=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a one-layer model with a tokenizer that has a BOS token; return the folder."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_huggingface(replace(random_checkpoint(TINY, seed=0), bos=256, stops=frozenset({257})), folder)
    (folder / "tokenizer.model").write_bytes(tiny_tokenizers.llama3())
    return folder


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(schemes, "WINDOWS", 2)
    monkeypatch.setattr(schemes, "WINDOW", 16)


def test_stories_begin_with_bos_and_end_with_eos(folder):
    llama = load(folder)
    stories = sample_stories(llama, 200, seed=3)
    assert sum(map(len, stories)) >= 200 > sum(map(len, stories[:-1]))
    assert all(story[0] == 256 and len(story) <= llama.context for story in stories)
    assert all(story[-1] in llama.stops or len(story) == llama.context for story in stories)
    assert sample_stories(llama, 200, seed=3) == stories != sample_stories(llama, 200, seed=4)


def test_windows_begin_as_texts_do(small):
    windows = in_windows([[256, *range(20)], [256, *range(20, 40)]])
    np.testing.assert_array_equal(windows, [[256, *range(15)], [256, *range(15, 30)]])


@pytest.mark.slow  # 13 s
def test_every_form_is_judged(folder, small, tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMASPEC_DATA", raising=False)
    monkeypatch.setitem(BUILT_IN, "stories", folder)
    left_out = ("q8, activations q8_0", "float32, cache int8")  # these compile programs
    monkeypatch.setattr(
        schemes, "forms", lambda *arguments: (form for form in forms(*arguments) if form.name not in left_out)
    )
    report_file = tmp_path / "kept.json"
    done = CliRunner().invoke(schemes.main, ["--tokens", "100", "--rounds", "0", "--json", str(report_file)])
    assert done.exit_code == 0, done.output
    report = json.loads(report_file.read_text())
    assert markdown(report) in done.stdout
    entry = report["models"]["stories"]
    assert entry["tokens"] >= 100 - entry["stories"]
    rows = entry["rows"]
    names = ("float32", "bfloat16", *SCHEMES, *METHODS, *(f"GGUF {type}" for type in scheme_forms.GGML))
    assert set(rows) == {*names, "q8_row, int8 activations"}
    exact_row = rows.pop("float32")
    assert (exact_row["bits"], exact_row["error"], exact_row["mean"], exact_row["same_top"]) == (32, 0, 0, 1)
    assert all(0 < row["mean"] < math.log(512) for row in rows.values())
    assert all(0 < row["error"] < 0.2 for name, row in rows.items() if name not in ("awq", "smoothquant"))
    assert rows["awq"]["error"] is rows["smoothquant"]["error"] is None
    assert rows["q8_row, int8 activations"]["mean"] > rows["q8_row"]["mean"]


def test_bits_and_errors_are_those_of_the_definitions():
    base = random_checkpoint(TINY, seed=0)
    checkpoints = {form.name: form.checkpoint for form in forms(base, np.ones((1, 4), np.int32))}
    matrices = scheme_forms.matrices(base).values()
    rows = sum(tensor.shape[0] for tensor in matrices)  # each row of 32 or 64 columns is one group
    assert bits(checkpoints["q4"]) == 4 + 32 * rows / sum(math.prod(tensor.shape) for tensor in matrices)
    assert bits(checkpoints["bfloat16"]) == 16
    for type in scheme_forms.GGML:
        assert bits(checkpoints[f"GGUF {type}"]) == 8 * ggml.TYPES[type].bytes / ggml.TYPES[type].weights
        apart = [ggml.decode(ggml.encode(w, type), type) - w for w in (tensor.read() for tensor in matrices)]
        size = sum(np.sum(tensor.read().astype(np.float64) ** 2) for tensor in matrices)
        error = math.sqrt(sum(np.sum(d**2) for d in apart) / size)
        assert weight_error(base, checkpoints[f"GGUF {type}"]) == pytest.approx(error, rel=1e-6)


def test_partial_blocks_of_hidden_vectors_are_padded():
    """A hidden layer that does not fill whole blocks is padded with zeros; logits and reported errors stay the same."""
    base = random_checkpoint(replace(TINY, ffn=44), seed=0)
    filled = padded(base, 32)
    assert (filled.config.ffn, padded(filled, 32)) == (64, filled)
    rows = [load_backend(model, RunOptions(backend="reference")).logits([1, 2, 3]) for model in (base, filled)]
    np.testing.assert_allclose(rows[1], rows[0], rtol=0, atol=1e-12 * np.abs(rows[0]).max())
    checkpoints = {form.name: form.checkpoint for form in forms(base, np.ones((1, 4), np.int32))}
    assert checkpoints["q4"].config == base.config
    q8_0 = checkpoints["GGUF Q8_0"]
    assert weight_error(base, filled) == 0 < weight_error(base, q8_0) == weight_error(filled, q8_0) < 0.01
    assert bits(q8_0) == 8.5


@pytest.mark.slow  # 10 s
def test_decoding_speeds_of_forms_are_measured(monkeypatch):
    monkeypatch.setattr(schemes, "DECODED", {name: schemes.DECODED[name] for name in ("float32", "GGUF Q8_0")})
    monkeypatch.setitem(SHAPES, "tiny", replace(TINY, context=512))
    rates_by_form = speeds("tiny", rounds=2)
    assert list(rates_by_form) == ["float32", "GGUF Q8_0"]
    assert all(len(rates) == 2 and min(rates) > 0 for rates in rates_by_form.values())
    assert speeds("tiny", rounds=0) == {}


def test_the_table():
    row = {"bits": 4.5, "error": 0.123, "perplexity": 2.0, "mean": 0.01, "p99": 0.1, "same_top": 0.9}
    of_a = {"float32": row, "q4": row, "gptq": {**row, "error": None}}
    models, rates = (
        {"a": {"rows": of_a}, "b": {"rows": {"q4": row}}},
        {"float32": [2.0], "q4": [1.0], "Q4_K": [4.0], "Q6_K": [3.0]},
    )
    heads = " | ".join(f"{name}: perplexity | KL | same top" for name in models)
    assert markdown({"models": models, "decoding": rates}).splitlines() == [
        f"| scheme | bits | error of weights | {heads} | decoding |",
        "|---|---|---|---|---|---|---|---|---|---|",
        "| float32 | 4.5 | 0.12 | 2.0000 | 0.010 | 90.0 % |  |  |  |  |",
        "| q4 | 4.5 | 0.12 | 2.0000 | 0.010 | 90.0 % | 2.0000 | 0.010 | 90.0 % | slower: 0.5 (0.5 to 0.5) |",
        "| gptq | 4.5 |  | 2.0000 | 0.010 | 90.0 % |  |  |  | as q4 |",
        "",
        "Decoding: Q4_K 2.0 (2.0 to 2.0), Q6_K 1.5 (1.5 to 1.5).",
    ]
    assert doctest.testmod(schemes).failed == 0
