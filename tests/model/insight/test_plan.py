"""`llamaspec inspect --plan` predicts how much memory a process uses."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest

from llamaspec.benchmarks.common.random_model import random_shapes
from llamaspec.benchmarks.suites import timed_model
from llamaspec.benchmarks.suites.timed_model import choose_model
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.device import room
from llamaspec.model.insight import machine
from llamaspec.model.insight.cost import decode_cost, prefill_cost
from llamaspec.model.insight.machine import ArraySizes
from llamaspec.model.insight.plan import DEVICES, as_text, make_plan
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.insight.timing import Effort
from llamaspec.model.llama import choose_dtype
from llamaspec.model.running.memory import PROCESS, Memory, check_fits, loading_peak, memory_of
from llamaspec.model.running.programs import prompt_chunk
from llamaspec.model.running.reference_backend import reference_memory
from llamaspec.model.tensors import quantizable
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.loading import abstract_params
from llamaspec.model.weights.params import weight_bytes
from llamaspec.reference.config import Config
from tests.support.processes import run_python
from tests.support.random_models import random_checkpoint
from tests.support.refusals import mentions

FLOAT32 = np.dtype(np.float32)
WIDE = Config(512, 4, 8, 4, 64, 1376, vocab=16_000, context=2048, eps=1e-5, theta=1e4)
HEAVY = Config(1024, 2, 16, 8, 64, 2816, vocab=48_000, context=256, eps=1e-5, theta=1e4)
DEEP = Config(256, 24, 4, 2, 64, 512, vocab=4096, context=256, eps=1e-5, theta=1e4)
SMALL = Config(64, 2, 4, 2, 16, 128, vocab=96, context=128, eps=1e-5, theta=1e4)

WRITE = """
import sys
from llamaspec.model.checkpoints.llama2c.write import write_llama2c
from tests.support.random_models import random_checkpoint
from tests.model.insight.test_plan import DEEP, HEAVY, WIDE
write_llama2c(random_checkpoint({"wide": WIDE, "heavy": HEAVY, "deep": DEEP}[sys.argv[1]], seed=0), sys.argv[2])
"""
RUN = """
import sys
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.llama import load_backend
from llamaspec.model.options import RunOptions, SamplingOptions
from llamaspec.model.running.session import Session
checkpoint = open_checkpoint(sys.argv[1])
backend = load_backend(checkpoint, RunOptions(quantize=sys.argv[2] or None, backend=sys.argv[3], own_process=True))
session = Session(backend, vocab=checkpoint.config.vocab)
prompt = [1] * (checkpoint.config.context - 4)
for _ in session.bursts(prompt, max_new_tokens=4, options=SamplingOptions(), seed=0, stops=frozenset()):
    pass
"""


@pytest.mark.slow  # 8 to 17 s each
@pytest.mark.parametrize(
    ("name", "config", "quantize"), [("wide", WIDE, "q4"), ("heavy", HEAVY, ""), ("deep", DEEP, "nf4")]
)
def test_a_first_run_takes_the_memory_that_was_planned(name: str, config: Config, quantize: str, tmp_path: Path):
    model = tmp_path / "model.bin"
    assert run_python(WRITE, name, str(model)).code == 0
    subject = choose_model(model=str(model), shape=None, dtype=None, quantize=quantize or None)
    planned = memory_of(
        *(subject.shapes(config.context), config),
        **{"batch": 1, "context": config.context, "chunk": prompt_chunk(config, "cpu")},
        platform="cpu",
        cache_dtype=FLOAT32,
    )
    run_takes(planned, str(model), quantize, "jax")


@pytest.mark.slow  # 10 s
def test_the_reference_takes_the_memory_that_loading_checks(tmp_path: Path):
    model = tmp_path / "model.bin"
    assert run_python(WRITE, "wide", str(model)).code == 0
    run_takes(reference_memory(WIDE, context=WIDE.context), str(model), "", "reference")


def run_takes(planned: Memory, *arguments: str):
    """Check that the peak memory of a process differs from the plan by at most 5 % plus 50 MB.

    If a run takes more, the process runs again, up to three times, because compilations that overlap sometimes took 70
    MB more.
    """
    peak = np.inf
    for _ in range(3):
        done = run_python(RUN, *arguments)
        assert done.code == 0, done.err
        if (peak := min(peak, done.peak)) <= 1.05 * planned.peak + 50e6:
            break
    assert abs(peak - planned.peak) <= 0.05 * peak + 50e6, (peak, planned)


@pytest.mark.slow  # 28 s
def test_this_machine_is_measured_for_a_plan(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(machine.SIZES, "cpu", ArraySizes(1 << 18, 32, Effort(2)))
    monkeypatch.setattr(machine, "last_level_cache", lambda: 1)  # one byte: no model fits in the cache
    code, out, err = run("inspect", "--plan", "--context", "100", "--batch", "2", "--quantize", "q8", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["model"], plan["dtype"], plan["quantize"], plan["batch"]) == ("stories", "float32", "q8", 2)
    device, empty = plan["device"], plan["work"][1]
    assert device["platform"] == "cpu" and device["memory"] > 0 and device["bandwidth"] > 0
    floor = max(
        2 * empty["bytes_per_token"] / device["bandwidth"], 2 * empty["flops_per_token"] / device["flops"]["float32"]
    )
    assert empty["tokens_per_second"] == pytest.approx(2 / floor)
    monkeypatch.setattr(machine, "last_level_cache", lambda: 1 << 40)
    monkeypatch.setattr(machine, "free_bytes", lambda: 1 << 24)  # the measured arrays would take a quarter of memory
    code, out, err = run("inspect", "--plan", "--context", "100", "--json")
    assert code == 0, err
    cached = json.loads(out)
    for work in cached["work"]:
        assert work["waits_for"] == "arithmetic"
        rate = cached["device"]["flops"]["float32"] / work["flops_per_token"]
        assert work["tokens_per_second"] == pytest.approx(rate)
    text = run("inspect", "stories", "--plan", "--context", "100")[1]
    assert "1,099,511.6 MB" in text


def test_a_plan_for_a_device_reads_nothing_and_says_what_bounds_it(run):
    code, out, err = run("inspect", "--plan", "--shape", "llama-3.1-8b", "--device", "h200", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["dtype"], plan["context"], plan["device"]["name"]) == ("bfloat16", 4096, "NVIDIA H200 SXM")
    assert plan["memory"]["weights"] == 2 * 8_030_261_248
    assert plan["memory"]["fits"]
    prefill, empty, *_, full = plan["work"]
    assert (prefill["waits_for"], empty["waits_for"]) == ("arithmetic", "memory")
    assert empty["tokens_per_second"] == pytest.approx(4.8e12 / empty["bytes_per_token"])
    assert prefill["tokens_per_second"] == pytest.approx(989e12 / prefill["flops_per_token"])
    assert empty["flops_per_byte"] == empty["flops_per_token"] / empty["bytes_per_token"]
    cached = full["bytes_per_token"] - empty["bytes_per_token"]
    assert cached == full["after"] * 2 * 32 * 8 * 128 * 2  # keys and values, layers, heads, head_dim, bytes


def test_a_plan_for_several_devices_counts_a_share_and_all_reduces(run):
    shape = ("inspect", "--plan", "--shape", "llama-3.1-70b", "--device", "h200", "--json")
    single, eight = (json.loads(run(*shape, "--devices", n)[1]) for n in ("1", "8"))
    assert (single["devices"], eight["devices"]) == (1, 8)
    assert not single["memory"]["fits"] and eight["memory"]["fits"]
    embedding = 2 * 128_256 * 8192  # every device has the whole embedding
    shared = single["memory"]["weights"] - embedding
    norms = 2 * (2 * 80 + 1) * 8192
    assert eight["memory"]["weights"] == embedding + norms + (shared - norms) // 8
    for single_work, eight_work in zip(single["work"], eight["work"], strict=True):
        assert single_work["seconds_of_sums"] == 0 < eight_work["seconds_of_sums"]
        assert eight_work["tokens_per_second"] < 8 * single_work["tokens_per_second"]
    step = eight["work"][1]
    assert step["seconds_of_sums"] == pytest.approx(2 * 80 * 6 * (4e-6 + 4 * 8192 / 150e9))  # a tree of 8 devices


@pytest.mark.slow  # 5 s
def test_a_plan_over_the_memory_at_hand_says_so(run):
    code, out, err = run("inspect", "--plan", "--shape", "llama-3.1-70b", "--device", "rtx-4090")
    assert code == 0, err
    assert "MORE THAN THE DEVICE HAS" in out
    assert json.loads(run("inspect", "--plan", "--shape", "llama-3.1-70b", "--device", "rtx-4090", "--json")[1])[
        "memory"
    ]["fits"] is False  # fmt: skip
    code, out, _ = run("inspect", "--plan", "--shape", "llama-3.1-70b", "--device", "h200", "--quantize", "q4")
    assert code == 0 and "MORE THAN THE DEVICE HAS" not in out


def test_a_plan_for_a_card_says_what_is_known_of_its_kernels():
    config = SHAPES["stories-15m"]
    params = abstract_params(config, dtype=FLOAT32, positions=128)
    for name, words in (("h200", "measured"), ("rtx-3060", "none")):
        plan = make_plan("m", params, config, DEVICES[name], context=128, batch=1, quantize=None)
        assert f"\nkernels: {words}\n" in as_text(plan)
        assert plan.as_json()["device"]["kernels"] == words
    own = DEVICES["l4"]._replace(platform="cpu", kernels="")
    assert "kernels" not in as_text(make_plan("m", params, config, own, context=128, batch=1, quantize=None))


def test_several_sequences_share_the_weights_and_nothing_else():
    config = SHAPES["tinyllama-1.1b"]
    shapes = abstract_params(config, dtype=FLOAT32, positions=1)
    single, four = (
        make_plan("m", shapes, config, DEVICES["h200"], context=128, batch=batch, quantize=None) for batch in (1, 4)
    )
    assert single.memory.weights == four.memory.weights == weight_bytes(shapes) == 4 * 1_100_048_384
    assert four.memory.logits == 4 * single.memory.logits
    assert four.memory.activations == 4 * single.memory.activations
    for single_work, together in zip(single.work, four.work, strict=True):
        assert together.tokens == 4 * single_work.tokens
        assert together.as_json()["flops_per_token"] == single_work.as_json()["flops_per_token"]
        assert together.cost.intensity >= single_work.cost.intensity


def test_a_plan_counts_the_experts_that_tokens_choose():
    config = replace(SMALL, experts=8, experts_per_token=2)
    shapes = abstract_params(config, dtype=FLOAT32, positions=1)
    expert = config.layers * 3 * config.ffn * config.dim * 4
    read = []
    for batch in (1, 2):
        plan = make_plan("m", shapes, config, DEVICES["l4"], context=128, batch=batch, quantize=None)
        cached = 2 * config.layers * config.kv_heads * config.head_dim * 4
        read.append(plan.work[1].cost.bytes - batch * (cached + config.dim * 4))
        assert mentions(as_text(plan), "the 8 experts expected")
    assert read[1] - read[0] == pytest.approx(1.5 * expert)  # 2 experts for one token, 3.5 for two
    shapes = abstract_params(SMALL, dtype=FLOAT32, positions=1)
    plain = make_plan("m", shapes, SMALL, DEVICES["l4"], context=128, batch=2, quantize=None)
    assert "experts" not in as_text(plain)


def test_a_cache_of_int8_is_half_of_bfloat16_and_its_scales(run):
    narrow, plain = (
        json.loads(run("inspect", "--plan", "--shape", "llama-3.1-8b", "--device", "h200", "--json", *cache)[1])
        for cache in (("--cache", "int8"), ())
    )
    assert (narrow["cache"], plain["cache"]) == ("int8", "bfloat16")
    angles = (4096 + 256) * 128 * 4
    ratio = (narrow["memory"]["cache"] - angles) / (plain["memory"]["cache"] - angles)
    assert ratio == (128 + 4) / (2 * 128)  # codes and one scale, compared with bfloat16
    assert narrow["work"][-1]["bytes_per_token"] < plain["work"][-1]["bytes_per_token"]


def test_arrays_and_their_shapes_cost_the_same():
    config = replace(SMALL, tied=True)
    shapes = abstract_params(config, dtype=FLOAT32, positions=128)
    arrays = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
    assert decode_cost(shapes, config, position=7, batch=2) == decode_cost(arrays, config, position=7, batch=2)
    assert prefill_cost(shapes, config, tokens=7) == prefill_cost(arrays, config, tokens=7)


def test_on_a_gpu_only_arrays_count():
    config = SHAPES["stories-110m"]
    shapes = abstract_params(config, dtype=FLOAT32, positions=1)
    on_cpu, on_gpu = (
        memory_of(shapes, config, batch=1, context=64, chunk=64, platform=platform, cache_dtype=FLOAT32)
        for platform in ("cpu", "gpu")
    )
    assert on_gpu.process == on_gpu.compiling == 0 < on_cpu.process < on_cpu.compiling
    assert on_gpu.peak == on_gpu.weights + on_gpu.cache + on_gpu.activations + on_gpu.logits
    plan = make_plan("m", shapes, config, DEVICES["l4"], context=64, batch=1, quantize=None)
    assert plan.memory._asdict().items() >= {"process": 0, "compiling": 0}.items()
    assert "process" not in as_text(plan)


@pytest.mark.parametrize(
    ("shape", "scheme", "gibibytes"),  # the first two as nvidia-smi showed them on an H200
    [("tinyllama-1.1b", None, 4.6), ("llama-3.1-8b", "q8", 16.6), ("llama-3.1-8b", "q4", 8.6)],
)
def test_a_plan_predicts_the_memory_that_a_process_takes_on_a_gpu(run, shape, scheme, gibibytes):
    words = ("inspect", "--plan", "--shape", shape, "--device", "h200", "--dtype", "bfloat16")
    options = ("--quantize", scheme) if scheme else ()
    memory = json.loads(run(*words, *options, "--json")[1])["memory"]
    assert memory["allocated"] / 2**30 == pytest.approx(gibibytes, rel=0.05)
    assert memory["weights"] <= memory["loading"] < memory["allocated"]
    assert mentions(run(*words, *options)[1], f"allocated {memory['allocated'] / 1e6:,.1f} MB")


def test_the_peak_of_loading_counts_what_all_readers_load_at_once():
    """The planned peak of loading includes all weights, and the temporary arrays of all reader threads.

    While a matrix is quantized, its codes need 3 bytes per weight. With one thread, only one matrix at a time needs
    them; the largest matrix comes first. A tied head takes no memory.
    """
    shapes = random_shapes(SMALL, dtype=FLOAT32, positions=1, quantize="q8")._replace(rope=None)  # type: ignore
    sizes, temporary = [], []
    for leaf in jax.tree.leaves(shapes, is_leaf=lambda leaf: isinstance(leaf, QuantizedMatrix)):
        sizes.append(sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(leaf)))
        temporary.append(3 * len(leaf.codes) * leaf.cols if isinstance(leaf, QuantizedMatrix) else 0)
    assert loading_peak(shapes, readers=len(sizes)) == sum(sizes) + sum(temporary)
    largest = max(range(len(sizes)), key=lambda i: sizes[i] + temporary[i])
    assert sizes[largest] + temporary[largest] <= loading_peak(shapes, readers=1) < sum(sizes) + max(temporary)
    plain = abstract_params(replace(SMALL, tied=True), dtype=FLOAT32, positions=1)._replace(rope=None)  # type: ignore
    assert loading_peak(plain) == weight_bytes(plain)


def test_a_plan_fits_where_loading_would_go_on():
    """A plan says that a model fits if and only if loading would accept the model.

    Both compare the free memory with the memory that is needed in addition to what the process uses already.
    """
    config = SHAPES["stories-110m"]
    shapes = abstract_params(config, dtype=FLOAT32, positions=1)

    def plan(free: float, platform: str):
        device = DEVICES["l4"]._replace(platform=platform, memory=free)
        return make_plan("m", shapes, config, device, context=64, batch=1, quantize=None)

    for platform, baseline in (("cpu", PROCESS), ("gpu", 0)):
        memory = plan(0, platform).memory
        enough = memory.peak - baseline
        for free in (enough, enough - 1):
            fits = plan(free, platform).fits
            assert fits == (free == enough)
            with nullcontext() if fits else pytest.raises(MemoryError):
                check_fits(memory, context=64, available=free)


def stored(checkpoint: Checkpoint, *, matrices: type, vectors: type) -> Checkpoint:
    """Give a checkpoint's matrices the dtype `matrices`, and its norms and its embedding the dtype `vectors`."""
    tensors = {
        name: tensor._replace(dtype=np.dtype(matrices if name in quantizable(checkpoint.config) else vectors))
        for name, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)


@pytest.mark.parametrize(
    ("matrices", "vectors", "scheme", "on_a_gpu"),
    [
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16, None, "bfloat16"),
        (ml_dtypes.bfloat16, np.float32, None, "bfloat16"),
        (np.float16, np.float16, None, "bfloat16"),
        (np.float16, np.float32, None, "bfloat16"),
        (np.float32, np.float32, None, "float32"),
        (np.float32, ml_dtypes.bfloat16, None, "float32"),
        (np.float32, np.float32, "q8", "bfloat16"),
        (np.float32, np.float32, "q4", "bfloat16"),
    ],
)
def test_the_matrices_decide_which_dtype_a_gpu_runs(matrices, vectors, scheme, on_a_gpu):
    """On a GPU, the dtype of the matrices decides the default dtype, since GGUF files always have float32 norms."""
    checkpoint = stored(random_checkpoint(SMALL, seed=0), matrices=matrices, vectors=vectors)
    run = quantized(checkpoint, scheme) if scheme else checkpoint
    assert choose_dtype(None, run, platform="gpu") == on_a_gpu
    assert choose_dtype(None, run, platform="cpu") == "float32"
    for dtype in ("float32", "bfloat16"):
        assert choose_dtype(dtype, run, platform="gpu") == choose_dtype(dtype, run, platform="cpu") == dtype


@pytest.mark.parametrize(("scheme", "on_a_gpu"), [("q8", "bfloat16"), (None, "float32")])
def test_bench_and_plan_use_the_dtype_that_runs(scheme, on_a_gpu, monkeypatch: pytest.MonkeyPatch):
    plain = random_checkpoint(SMALL, seed=0, dtype=np.float32)
    checkpoint = quantized(plain, scheme) if scheme else plain
    monkeypatch.setattr(timed_model, "open_checkpoint", lambda path: checkpoint)
    for platform, dtype in (("cpu", "float32"), ("gpu", on_a_gpu)):
        subject = choose_model(model="m", shape=None, dtype=None, quantize=None, platform=platform)
        assert subject.dtype == dtype
        assert subject.shapes(8).embedding.dtype == dtype
    assert choose_model(model="m", shape=None, dtype="bfloat16", quantize=None).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (
            Memory(weights=4_400_000_000, cache=180_000_000, activations=10**7, logits=0, process=10**9, compiling=0),
            "4.40 GB weights 0.18 GB cache 64 0.83 GB 0.10 GB",
        ),
        (
            Memory(weights=6_000_000, cache=1_000_000, activations=0, logits=0, process=10**8, compiling=460_000_000),
            "compiling 0.28 GB 0.10 GB",
        ),
    ],
)
def test_what_does_not_fit_is_named_by_what_takes_most(memory: Memory, words: str):
    with pytest.raises(MemoryError) as refusal:
        check_fits(memory, context=64, available=100_000_000)
    assert mentions(str(refusal.value), words)
    with pytest.raises(MemoryError) as refusal:
        check_fits(memory, context=64, available=100_000_000, other_programs=70_000_000_000)
    assert mentions(str(refusal.value), words) and "70.0 GB" in str(refusal.value)


def test_gpu_memory_of_other_programs_is_not_free(monkeypatch):
    """Memory that other programs hold on a GPU is not free.

    Here JAX may use 60 GB of an 80 GB GPU, and holds 1 GB. Other programs hold so much that only 5 GB are free.
    """
    pool = {"bytes_limit": 60_000_000_000, "bytes_in_use": 600_000_000, "pool_bytes": 1_000_000_000}
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: pool)
    monkeypatch.setattr("llamaspec.model.device.jax.local_devices", lambda: [gpu])
    monkeypatch.setattr("llamaspec.model.device.cuda_memory", lambda: (5_000_000_000, 80_000_000_000))
    assert room() == (5_400_000_000, 74_000_000_000)
    monkeypatch.setattr("llamaspec.model.device.cuda_memory", lambda: (79_000_000_000, 80_000_000_000))
    assert room() == (59_400_000_000, 0)
    monkeypatch.setattr("llamaspec.model.device.cuda_memory", lambda: None)
    assert room() == (59_400_000_000, 0)
    # JAX counts nothing if XLA_PYTHON_CLIENT_ALLOCATOR is `platform`; the computer's own memory must not be used
    # instead.
    gpu.memory_stats = lambda: None
    monkeypatch.setattr("llamaspec.model.device.cuda_memory", lambda: (5_000_000_000, 80_000_000_000))
    assert room() == (5_000_000_000, 0)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--plan", "--device", "abacus"], 1, "unknown device abacus h200"),
        (["--plan", "--shape", "llama-9", "--device", "h200"], 1, "unknown shape llama-9"),
        (
            ["--plan", "--context", "5000", "--device", "h200"],
            1,
            "context must be between 1 and the model's 1024 tokens 5000",
        ),
        (["nowhere.bin", "--plan", "--device", "h200"], 1, "nowhere.bin"),
        (["stories", "--plan", "--shape", "llama-2-7b"], 2, "either MODEL or --shape not both"),
        (["--device", "h200"], 2, "--device needs --plan"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: list[str], status: int, words: str, run):
    code, out, err = run("inspect", *arguments)
    assert (code, out) == (status, "")
    assert err.startswith("error: ") and mentions(err, words) and err.count("\n") == 1
