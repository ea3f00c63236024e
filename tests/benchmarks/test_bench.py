"""Tests of `llamaspec bench`: how it computes figures, how it measures a model on this machine, what it refuses."""

import doctest
import json
import os
import re
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

from llamaspec.benchmarks.common import report as benchmarks_report
from llamaspec.benchmarks.common import svg
from llamaspec.benchmarks.common.random_model import random_params, random_shapes
from llamaspec.benchmarks.common.report import timed, with_shares
from llamaspec.benchmarks.suites import growth, model_suite
from llamaspec.cli import llamaspec
from llamaspec.model import system
from llamaspec.model.checkpoints.checkpoint import Checkpoint, Tensor
from llamaspec.model.device import HOPPER, Device
from llamaspec.model.insight import machine, timing
from llamaspec.model.insight.cost import decode_bytes, decode_cost, prefill_cost
from llamaspec.model.insight.describe import EMBEDDING, describe, matrix_weights
from llamaspec.model.insight.machine import (
    ArraySizes,
    Ceilings,
    keep_read_rate,
    kept_read_rate,
    last_level_cache,
    measure_ceilings,
    reading_in_words,
)
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.insight.timing import Effort, Seconds, in_turn, measure, measure_turns
from llamaspec.model.ops import choice
from llamaspec.model.tensors import tensor_shapes
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.reference.attention import causal_mask
from llamaspec.reference.config import Config
from tests.benchmarks.charts import rectangles
from tests.support.refusals import mentions

SMALL = ArraySizes(1 << 18, 32, Effort(2))
TINY = Config(dim=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=96, context=128, eps=1e-5, theta=1e4)
MOE = replace(TINY, experts=4, experts_per_token=2)
CEILINGS = Ceilings(copy=8e9, read=10e9, flops={"float32": 1e12, "bfloat16": 2e12})


@pytest.mark.sampled(4)  # 12 cases, 4 s
@pytest.mark.parametrize("config", [*SHAPES.values(), TINY, MOE], ids=[*SHAPES, "tiny", "experts"])
def test_a_token_costs_what_inspect_says(config: Config):
    dtype = np.dtype(np.float32)
    tensors = {name: Tensor(shape, dtype, lambda: np.empty(0)) for name, shape in tensor_shapes(config).items()}
    described = describe(Checkpoint("random", "memory", config, tensors, bos=None, stops=frozenset()))
    chosen = config.experts_per_token / config.experts if config.experts else 1
    multiplied = sum(
        np.prod(shape) * (chosen if ".experts." in name else 1)
        for name, shape in tensor_shapes(config).items()
        if len(shape) == 2 and (name != EMBEDDING or config.tied)
    )
    assert 2 * multiplied == described["flops_per_token"]
    shapes = random_shapes(config, dtype=dtype, positions=8)
    cost = decode_cost(sized(shapes), config, position=9, batch=1)
    assert cost.bytes == pytest.approx(described["bytes_per_token"] + 10 * described["cache_bytes_per_token"], abs=0.5)


def sized(shapes):
    """Make arrays with these shapes, but without memory for their elements."""
    return jax.tree.map(lambda a: np.broadcast_to(np.zeros((), a.dtype), a.shape), shapes)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 9])
def test_attention_counts_the_pairs_that_a_mask_lets_through(window: int | None):
    params = random_params(random_shapes(TINY, dtype=np.dtype(np.float32), positions=8), TINY)
    config = replace(TINY, windows=(window,) * TINY.layers)
    seen = np.isfinite(causal_mask(7, 7, window=window))
    products = 2 * matrix_weights(TINY, head=False)
    attention = 2 * (2 * TINY.head_dim) * TINY.heads * TINY.layers  # operations per query and key
    assert prefill_cost(params, config, tokens=7, batch=3).flops == 3 * (7 * products + attention * seen.sum())
    step, first = (decode_cost(params, config, position=position, batch=1) for position in (6, 0))
    more = seen[-1].sum() - 1
    assert step.flops - first.flops == attention * more
    assert step.bytes - first.bytes == 2 * TINY.layers * TINY.kv_heads * TINY.head_dim * 4 * more


def test_decoding_several_reads_the_weights_once():
    params = random_params(random_shapes(TINY, dtype=np.dtype(np.float32), positions=8), TINY)
    single, two, four = (decode_cost(params, TINY, position=9, batch=batch) for batch in (1, 2, 4))
    assert four.flops == 4 * single.flops
    assert four.bytes - two.bytes == 2 * (two.bytes - single.bytes)
    assert four.bytes < 2 * single.bytes


def test_several_tokens_read_the_experts_that_any_of_them_chooses():
    """The computed cost of 2 or 3 tokens counts each expert once, even if several of the tokens choose it.

    This cost is the mean over all choices of experts, which are equally likely.
    """
    params = random_params(random_shapes(MOE, dtype=np.dtype(np.float32), positions=8), MOE)
    one_expert = 3 * MOE.dim * MOE.ffn * 4 * MOE.layers
    one_token, many = (prefill_cost(params, MOE, tokens=tokens) for tokens in (1, 10_000))
    choices = [set(choice) for choice in combinations(range(MOE.experts), MOE.experts_per_token)]
    for tokens in (2, 3):
        read = np.mean([len(set().union(*chosen)) for chosen in product(choices, repeat=tokens)])
        more = (read - MOE.experts_per_token) * one_expert
        assert prefill_cost(params, MOE, tokens=tokens).bytes - one_token.bytes == pytest.approx(more)
        assert prefill_cost(params, MOE, tokens=1, batch=tokens).bytes - one_token.bytes == pytest.approx(more)
        together, single = (decode_cost(params, MOE, position=0, batch=batch).bytes for batch in (tokens, 1))
        cache_and_row = 2 * MOE.layers * MOE.kv_heads * MOE.head_dim * 4 + MOE.dim * 4
        assert together - single == pytest.approx(more + (tokens - 1) * cache_and_row)
        parts, part = (decode_bytes(params, MOE, position=0, batch=batch)["moe_add product"] for batch in (tokens, 1))
        assert parts - part == pytest.approx(more)
    assert many.bytes - one_token.bytes == pytest.approx((MOE.experts - MOE.experts_per_token) * one_expert)
    # The operations per token depend only on the experts that it chooses, not on the number of tokens.
    attention = {tokens: 4 * MOE.layers * MOE.heads * MOE.head_dim * tokens * (tokens + 1) / 2 for tokens in (1, 9)}
    assert prefill_cost(params, MOE, tokens=9).flops - attention[9] == 9 * (one_token.flops - attention[1])


def test_shares_are_of_what_the_machine_reaches():
    row = with_shares(timed(Seconds(2.0, 1.0, 3.0), bytes=8e9, flops=1e12, dtype="float32"), CEILINGS)
    assert (row["bytes_a_second"], row["flops_a_second"], row["share"]) == (4e9, 0.5e12, 0.5)
    assert (row["floor"], row["of_floor"]) == (1.0, 0.5)  # the operations take longer than the bytes
    assert with_shares({"case": "canaries"}, CEILINGS) == {"case": "canaries"}


def test_a_call_is_timed_as_often_as_was_said():
    calls = []
    seconds = measure(lambda: calls.append(0), Effort(3, warm=2, in_flight=4))
    assert len(calls) == 2 + 3 * 4
    assert 0 < seconds.least <= seconds.median <= seconds.most


def test_enough_turns_are_timed_to_take_a_minimum_time(monkeypatch):
    now, turns_asked = [0.0], []
    late = {2: 0.03, 4: 30.0}  # additional seconds of the third and the fifth call
    monkeypatch.setattr("llamaspec.model.insight.timing.time.perf_counter", lambda: now[0])

    def call(turns):
        now[0] += 0.05 + 0.01 * turns + late.get(len(turns_asked), 0.0)
        turns_asked.append(turns)

    seconds = measure_turns(call, 10.0, Effort(2, warm=0))
    turns = max(turns_asked)
    assert turns_asked[:5] == [1, 0, 0, 1, 1] and turns_asked[-2:] == [turns] * 2 and 9.9 < 0.01 * turns < 10.1
    assert seconds == pytest.approx((0.01, 0.01, 0.01))  # without the overhead per call
    turns_asked.clear()
    late.clear()
    measure_turns(call, 0.01, Effort(1, warm=0))
    assert turns_asked == [1, 0, 1, 1]  # one call takes long enough
    with pytest.raises(RuntimeError, match=r"iterations take less than 10\.0 s"):
        measure_turns(lambda turns: call(0), 10.0, Effort(1, warm=0))


def test_compared_functions_are_timed_alternately():
    """Calls of two functions alternate.

    Each duration of the first function is paired with the mean of the second function's durations just before and just
    after.
    """
    order, ticks = [], iter([8.0, 4.0, 2.0])

    def second_call() -> float:
        order.append("other")
        return next(ticks)

    pairs = in_turn(lambda: order.append("call"), second_call, Effort(2, warm=1))
    assert order == ["call", "other", "call", "other", "call", "other"]
    assert [beside for _, beside in pairs] == [6.0, 3.0]
    assert all(seconds > 0 for seconds, _ in pairs)


def test_a_machine_is_measured():
    ceilings = measure_ceilings(["float32", "bfloat16"], SMALL)
    assert min(ceilings.copy, ceilings.read, *ceilings.flops.values()) > 0
    assert set(ceilings.flops) == {"float32", "bfloat16"}


@pytest.mark.sampled(1)  # 1 to 2 s each
@pytest.mark.parametrize("scheme", [None, "q8", "q4", "fp8", "mxfp4"])
def test_random_weights_are_numbers_in_every_scheme(scheme: str | None):
    shapes = random_shapes(TINY, dtype=np.dtype(np.float32), positions=8, quantize=scheme)
    params = random_params(shapes, TINY)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(lambda a: (a.shape, a.dtype), shapes)
    for matrix in (params.layers[0].qkv.weight, params.layers[1].o.weight, params.head):
        assert isinstance(matrix, QuantizedMatrix) == bool(scheme)
        weights = np.asarray(matrix.weights() if isinstance(matrix, QuantizedMatrix) else matrix)
        assert np.isfinite(weights).all() and 1e-3 < weights.std() < 10


@pytest.mark.slow  # 4 s each
@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (1, r"\([\d.]+ GB/s, \d+ % of the bandwidth that bench measured\)"),  # one byte: it holds no weights
        (1 << 40, r"\([\d.]+ GB/s, from a cache\)"),
    ],
)
def test_a_story_ends_with_its_read_rate(cache: int, words: str, run, monkeypatch: pytest.MonkeyPatch):
    keep_read_rate(Path(os.environ["XDG_CACHE_HOME"]) / "llamaspec", CEILINGS._asdict())
    monkeypatch.setattr(machine, "last_level_cache", lambda: cache)
    code, _, err = run("story", "--seed", "1", "--max-new-tokens", "8")
    assert code == 0, err
    assert re.search(rf"then [\d.]+ tokens/s {words}; ", err)


def test_the_measured_read_rate_is_stored_per_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keep_read_rate(tmp_path, CEILINGS._asdict())
    assert kept_read_rate(tmp_path) == CEILINGS.read
    # If the size of caches is unknown, a read that is faster than memory must have come from a cache.
    monkeypatch.setattr(machine, "last_level_cache", lambda: None)
    assert reading_in_words(tmp_path, bytes=9e9, seconds=1.0) == "9.0 GB/s, 90 % of the bandwidth that bench measured"
    assert reading_in_words(tmp_path, bytes=11e9, seconds=1.0) == "11.0 GB/s, from a cache"
    (tmp_path / "machine.json").write_text('{"device": "another", "read": 1}')
    assert kept_read_rate(tmp_path) is None
    assert reading_in_words(tmp_path, bytes=11e9, seconds=1.0) == "11.0 GB/s"
    assert kept_read_rate(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("shared", "sizes", "expected"),
    [
        (["0-1", "0-1"], ["32768K", "32768K"], 32 << 20),
        (["0", "1"], ["8192K", "4096K"], 12 << 20),
        (["0-1", "0-1"], ["32768K", ""], None),
    ],
)
def test_the_caches_of_all_cpus_count_once(
    shared: list[str], sizes: list[str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for cpu in (0, 1):
        for level, size, sharing in ((1, "32K", str(cpu)), (3, sizes[cpu], shared[cpu]), (2, "1024K", str(cpu))):
            cache = tmp_path / str(cpu) / f"index{level}"
            cache.mkdir(parents=True)
            for name, value in (("level", level), ("size", size), ("shared_cpu_list", sharing)):
                (cache / name).write_text(f"{value}\n")
    monkeypatch.setattr(system, "CACHES", str(tmp_path / "{}"))
    monkeypatch.setattr(system, "usable_cpus", lambda: [0, 1])
    assert last_level_cache() == expected
    monkeypatch.setattr(system, "CACHES", str(tmp_path / "nothing"))
    assert last_level_cache() is None


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setitem(machine.SIZES, "cpu", SMALL)
    monkeypatch.setattr(machine, "last_level_cache", lambda: 1)  # arrays grow with the cache of the processor
    monkeypatch.setattr(model_suite, "last_level_cache", lambda: 1)  # one byte: it holds no model
    monkeypatch.setattr(model_suite, "GROWTH", (16, 64))
    monkeypatch.setattr(model_suite, "BATCHES", (1, 3))
    monkeypatch.setattr(model_suite, "PATIENT", Effort(1, warm=0))


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    llamaspec.main(["bench", *map(str, arguments)], standalone_mode=False)
    return capsys.readouterr().out


@pytest.mark.slow  # 10 s
def test_the_speed_of_a_model(tiny, tmp_path: Path, capsys):
    report_file, chart = tmp_path / "kept.json", tmp_path / "chart.svg"
    text = run(capsys, "--shape", "tiny", "--quantize", "q8", "--batch", "2", "--json", report_file, "--plot", chart)
    report = json.loads(report_file.read_text())
    whats = [row["what"] for row in report["rows"]]
    assert whats == ["first token", "prefill", "decode, greedy", "decode, top-p", "breakdown"]
    for row in report["rows"][1:4]:
        assert row["least"] <= row["median"] <= row["most"]
        assert row["batch"] == 2
        assert row["floor"] > 0
        assert row["tokens_a_second"] == pytest.approx(2 * row["tokens"] / row["median"])
    rate = report["ceilings"]["flops"]["float32"]
    for row in report["rows"][2:4]:
        floors = [max(row["bytes"] / round["read"], row["flops"] / rate) for round in row["rounds"]]
        shares = [floor / round["seconds"] for floor, round in zip(floors, row["rounds"], strict=True)]
        assert row["of_floor"] == pytest.approx(median(shares))
        assert (row["of_floor_least"], row["of_floor_most"]) == pytest.approx((min(shares), max(shares)))
    read = [round["read"] for row in report["rows"][2:4] for round in row["rounds"]]
    assert report["ceilings"]["read"] == median(read)
    parts = {part["part"]: part for part in report["rows"][4]["parts"]["decode"]}
    assert {"norm_gate_up product", "attend", "sample", "between ops, and the host"} <= parts.keys()
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
    assert parts["norm_logits product"]["floor"] > 0 and "where the time goes" in text
    assert report["rows"][1]["tokens"] == report["rows"][2]["context"] == (TINY.context - 16) // 2
    assert report["about"]["versions"]["jax"] == jax.__version__
    assert {"copy", "read", "flops"} == set(report["ceilings"])
    assert "tiny, random weights, float32, matrices in q8" in text and "of floor, %" in text
    assert len(rectangles(chart.read_text())) == 3


@pytest.mark.slow  # 7 s
def test_a_model_in_cache_has_no_share_of_memory_bandwidth(
    tiny, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model_suite, "last_level_cache", lambda: 32 << 20)
    report_file, chart = tmp_path / "kept.json", tmp_path / "chart.svg"
    text = run(capsys, "--shape", "tiny", "--json", report_file, "--plot", chart)
    report = json.loads(report_file.read_text())
    rate = report["ceilings"]["flops"]["float32"]
    for row in report["rows"][1:4]:
        assert row["cached"] and not {"share", "rounds", "of_floor_least"} & row.keys()
        assert row["floor"] == pytest.approx(row["flops"] / rate)
        assert row["of_floor"] == pytest.approx(row["floor"] / row["median"])
    assert all("floor" not in part for part in report["rows"][4]["parts"]["decode"])
    assert "fits in the cache of 33.6 MB" in text and "of copy, %" not in text
    assert len(rectangles(chart.read_text())) == 3


class Measured(Exception):
    """Raised by a stand-in for a benchmark suite, to stop the command before it measures."""


@pytest.mark.parametrize("suite", ["decode", "growth"])
def test_bench_prints_how_a_model_runs(suite: str, tiny, capsys, monkeypatch: pytest.MonkeyPatch):
    """`bench` prints the dtype, the device and the number of ops without a kernel, in the same words as `generate`.

    It prints none of this if a model runs on a CPU with the default options. The test simulates a GPU.
    """

    def stop(suite: str, **_: object):
        raise Measured

    def announced(*arguments: str) -> str:
        with pytest.raises(Measured):
            run(capsys, "--suite", suite, "--shape", "tiny", *arguments)
        return capsys.readouterr().err

    monkeypatch.setattr(model_suite, "run_suite", stop)
    assert announced() == ""
    assert announced("--dtype", "bfloat16") == "bfloat16 on CPU\n"
    if suite == "decode":
        assert announced("--backend", "reference") == ""
    for module in (model_suite, choice):
        monkeypatch.setattr(module, "default_device", lambda: Device("gpu", "NVIDIA H200", HOPPER))
    line = r"bfloat16 on NVIDIA H200; \d of 7 ops run without a kernel: `llamaspec doctor` says why\n"
    assert re.fullmatch(line, announced("--dtype", "bfloat16"))


def test_the_reference_is_timed_too(tiny, tmp_path: Path, capsys):
    report_file = tmp_path / "kept.json"
    run(capsys, "--shape", "tiny", "--backend", "reference", "--context", "20", "--json", report_file)
    prefill, decode = json.loads(report_file.read_text())["rows"]
    assert (prefill["what"], prefill["tokens"]) == ("prefill, reference", 20)
    assert (decode["what"], decode["context"]) == ("decode, reference", 20)
    assert decode["tokens_a_second"] == pytest.approx(1 / decode["median"])
    with pytest.raises(ValueError, match="batch of 1"):
        llamaspec.main(["bench", "--backend", "reference", "--batch", "2"], standalone_mode=False)


@pytest.mark.slow  # 8 s
def test_the_growth_suite_runs(tiny, tmp_path: Path, capsys):
    report_file, chart = tmp_path / "kept.json", tmp_path / "chart.svg"
    text = run(capsys, "--shape", "tiny", "--suite", "growth", "--json", report_file, "--plot", chart)
    report = json.loads(report_file.read_text())
    rows = report["rows"]
    assert [row["tokens"] for row in rows if row["series"] == "prefill"] == [16, 32, 64]
    decoded = [(row["context"], row["batch"]) for row in rows if row["series"] != "prefill"]
    assert decoded == [(16, 1), (32, 1), (64, 1), (16, 1), (16, 3)]
    assert len(list(ElementTree.parse(chart).iter("{http://www.w3.org/2000/svg}polyline"))) == 4
    context, prefill, batch = report["slopes"]
    assert [context["series"], prefill["series"], batch["series"]] == ["context", "prefill", "batch"]
    read = report["ceilings"]["read"]
    assert context["reading"] == pytest.approx(2 * TINY.layers * TINY.kv_heads * TINY.head_dim * 4 / read)
    assert prefill["reading"] < 0 < prefill["computing"]  # a longer prompt shares each read of the weights
    assert "a token more before it adds" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "llama-9"], "llama-9 stories-15m"),
        (["--context", "5000"], "5000 16"),
        (["--kernels", "pallas"], "pallas 9.0"),
        (["nowhere.bin"], "nowhere.bin"),
        (["--json", "/nowhere/kept.json"], "/nowhere/kept.json"),
    ],
)
def test_what_cannot_be_timed_is_refused_at_once(arguments: list[str], words: str):
    with pytest.raises((ValueError, OSError)) as refused:
        llamaspec.main(["bench", *arguments], standalone_mode=False)
    assert mentions(str(refused.value), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "gpu", "--batch", "2"], "--batch does not apply --suite gpu"),
        (["--suite", "kernels", "stories"], "does not apply --suite kernels"),
        (["--dry-run"], "--dry-run does not apply --suite decode"),
        (["stories", "--shape", "tinyllama-1.1b"], "either MODEL or --shape not both"),
    ],
)
def test_options_of_other_suites_are_wrong_usage(arguments: list[str], words: str):
    from click import UsageError

    with pytest.raises(UsageError) as refused:
        llamaspec.main(["bench", *arguments], standalone_mode=False)
    assert mentions(refused.value.format_message(), words)


@pytest.mark.parametrize("module", [growth, machine, model_suite, benchmarks_report, svg, timing])
def test_examples(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
