"""`llamaspec profile` finds in XLA's trace which kernels ran, and how much of prefill and decode each part takes."""

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.benchmarks.suites.model_profile import IDLE, profiled
from llamaspec.benchmarks.suites.timed_model import choose_model
from llamaspec.model.insight.profile import REMAINDER, Event, events_of, parts_of, seconds_by, seconds_in_graphs
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.reference.config import Config

TINY = Config(dim=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=96, context=128, eps=1e-5, theta=1e4)
PRODUCTS = {f"{op} product" for op in ("norm_qkv", "project_add", "norm_gate_up", "down_add")}


@pytest.mark.slow  # 6 s
def test_a_model_is_profiled(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    file = tmp_path / "trace.json.gz"
    code, out, err = run("profile", "--shape", "tiny", "--context", "40", "--json", "--trace", str(file))
    assert code == 0, err
    parts = json.loads(out)["parts"]
    prefill, decode = ({row["part"]: row for row in parts[span]} for span in ("prefill", "decode"))
    assert prefill.keys() >= PRODUCTS | {"attend"} and "sample" not in prefill
    assert decode.keys() >= PRODUCTS | {"attend", "norm_logits product", "sample"}
    for rows in (prefill, decode):
        assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    weights = 4 * TINY.layers * 3 * TINY.ffn * TINY.dim
    assert decode["norm_gate_up product"]["bytes"] + decode["down_add product"]["bytes"] == weights
    trace = json.loads(gzip.decompress(file.read_bytes()))
    operations = [event for event in trace["traceEvents"] if "hlo_op" in event.get("args", {})]
    programs = {"prefill": "jit_prefill", "decode": "jit_decode"}
    for span, program in programs.items():
        ran, start, end = events_of(trace, f"{span} 0")
        inside = [event for event in operations if start <= event["ts"] <= end]
        assert ran and len(ran) == len(inside)
        assert {event["args"]["hlo_module"] for event in inside} & set(programs.values()) == {program}


def test_parts_come_from_a_second_run_if_the_first_ran_in_graphs(monkeypatch: pytest.MonkeyPatch):
    """A second run without CUDA graphs gives the time of each part, if kernels ran in graphs in the first run.

    On a CPU both runs are equal.
    """
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    subject = choose_model(model="", shape="tiny", dtype="float32", quantize=None)
    programs, shapes = subject.compiled(longest=40, batch=1)
    assert subject.without_graphs(programs, shapes) is None
    rows, _ = profiled(programs, subject.load(shapes), context=40, without_graphs=programs)
    for span in ("prefill", "decode"):
        parts = {row["part"] for row in rows[span]}
        assert parts >= PRODUCTS | {"attend", IDLE}
        assert sum(row["share"] for row in rows[span]) == pytest.approx(1)


@pytest.fixture(scope="module")
def h200() -> dict[str, Any]:
    """Load traces of TinyLlama in q8 on an H200, one with CUDA graphs and one without.

    Each trace has a prefill of 256 tokens, and two of the 128 decode steps that ran. `parts` maps XLA instructions to
    parts of the model. The traces are from jax 0.11.2.
    """
    return json.loads(gzip.decompress((Path(__file__).parents[2] / "goldens/profile_h200.json.gz").read_bytes()))


def test_kernels_in_cuda_graphs_have_no_instruction_names(h200: dict[str, Any]):
    for span, parts in h200["parts"].items():
        ran, start, end = events_of(h200["graphs"], f"{span} 0")
        assert seconds_by(ran, parts, start=start, end=end)[None] * 1e6 > 0.99 * (end - start)
    kernels = Counter(event.kernel for event in events_of(h200["graphs"], "decode 0")[0])
    named = Counter(event.kernel for event in events_of(h200["named"], "decode 0")[0])
    assert (kernels["gemv_mosaic_gpu_kernel"], named["gemv_mosaic_gpu_kernel"]) == (45, 90)


def test_the_time_of_kernels_in_graphs_is_divided_by_part(h200: dict[str, Any]):
    """The time of each part of the model is the sum of its kernels' times.

    The expected sums assign each kernel to a part by its name and its place in the trace.
    """

    def microseconds(span: str) -> tuple[dict[str | None, float], float]:
        ran, start, end = events_of(h200["graphs"], f"{span} 0")
        named, _, _ = events_of(h200["named"], f"{span} 0")
        spent = seconds_in_graphs(ran, named, h200["parts"][span], start=start, end=end)
        assert sum(spent.values()) * 1e6 == pytest.approx(end - start)
        return {part: seconds * 1e6 for part, seconds in spent.items()}, end - start

    ran, _, _ = events_of(h200["graphs"], "decode 0")
    of_kernel: dict[str, list[float]] = defaultdict(list)
    for event in ran:
        of_kernel[event.kernel].append(event.end - event.start)
    products = of_kernel[
        "gemv_mosaic_gpu_kernel"
    ]  # of a layer: attention's, then the feed-forward's; at the end the head's
    step, length = microseconds("decode")
    expected = {
        "norm_gate_up": sum(of_kernel["norm_gate_up_mosaic_gpu_kernel"]),
        "project_add": sum(products[:44:2]),
        "down_add": sum(products[1:44:2]),
        "norm_logits": products[44],
        "attend": sum(
            of_kernel["attention_decode_mosaic_gpu_kernel"] + of_kernel["attention_combine_mosaic_gpu_kernel"]
        ),
    }
    assert {part: step[part] / 2 for part in expected} == pytest.approx(expected, rel=0.02)  # plus nearby fusions
    assert step[None] < 0.1 * length and {"norm_qkv", "sample"} < step.keys()
    prompt, length = microseconds("prefill")
    assert prompt["norm_gate_up"] > prompt["down_add"] > prompt["project_add"] > prompt["attend"] > 100


def test_kernels_outside_of_graphs_get_times_of_the_second_run():
    named = [Event(1, 0.0, 2.0, "a", "gemv"), Event(1, 2.0, 3.0, "b", "add"), Event(1, 3.0, 9.0, "x", "unknown")]
    ran = [Event(1, 20.0, 21.0, "command_buffer", "gemv")]
    spent = seconds_in_graphs(ran, named, {"a": "A", "b": "B"}, start=20.0, end=30.0)
    assert {part: seconds * 1e6 for part, seconds in spent.items()} == pytest.approx({"A": 1, "B": 1, None: 8})
    assert seconds_in_graphs([], [], {}, start=0.0, end=1e6) == {None: 1.0}


def test_most_instructions_have_a_named_part(monkeypatch: pytest.MonkeyPatch):
    """Most XLA instructions belong to a named part.

    Instructions are counted, because times of a small model are noise.
    """
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    programs, _ = choose_model(model="", shape="tiny", dtype="float32", quantize=None).compiled(longest=40, batch=1)
    for program in (programs.prefill, programs.decode(True)):
        parts = parts_of(program.as_text())  # type: ignore[attr-defined]
        ran = [part for name, part in parts.items() if "fusion" in name or name.startswith(("dot", "copy"))]
        assert len(ran) > 20 and ran.count(REMAINDER) < len(ran) / 4


def test_a_trace_that_cannot_be_written_is_refused_before_anything_runs(run):
    code, out, err = run("profile", "--trace", "/nowhere/trace.json")
    assert (code, out) == (1, "")
    assert "/nowhere/trace.json" in err and err.count("\n") == 1


def test_a_shape_and_a_model_are_one_too_many(run):
    code, _, err = run("profile", "stories", "--shape", "tinyllama-1.1b")
    assert code == 2 and "either MODEL or --shape" in err


def test_a_span_that_was_not_recorded_is_missed():
    with pytest.raises(ValueError, match="no span named decode"):
        events_of({"traceEvents": [{"ph": "M", "name": "decode"}]}, "decode")


times = st.floats(0, 100, allow_nan=False)
events = st.builds(
    lambda thread, start, length, instruction: Event(thread, start, start + length, instruction),
    st.integers(1, 3), times, times, st.sampled_from(["a", "b", "c", "unknown"]),
)  # fmt: skip


@given(ran=st.lists(events, max_size=12), last=st.floats(100, 300))
@example(ran=[], last=100.0)
def test_shares_are_the_whole_span(ran: list[Event], last: float):
    ran = sorted(ran, key=lambda event: event.start)
    spent = seconds_by(ran, {"a": "A", "b": "B", "c": "A"}, start=0.0, end=last)
    assert all(seconds > 0 for seconds in spent.values())
    assert sum(spent.values()) * 1e6 == pytest.approx(last)  # sums of at most 50 rounded terms
    unshared = [event for event in ran if event.instruction in ("a", "c")]
    if not any(event.instruction == "b" for event in ran) and len({event.thread for event in ran}) == 1:
        covered, reached = 0.0, 0.0
        for event in unshared:
            covered += max(0.0, min(event.end, last) - max(event.start, reached))
            reached = max(reached, min(event.end, last))
        assert spent.get("A", 0.0) * 1e6 == pytest.approx(covered)


def test_instructions_without_a_name_belong_where_they_are():
    hlo = """HloModule jit_decode

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %inner = f32[8]{0} add(%p, %p), metadata={op_name="jit(decode)/while/body/down_add/add"}
}

%branch (q: (f32[8])) -> (f32[8]) {
  %q = (f32[8]{0}) parameter(0)
  %copy.1 = f32[8]{0} copy(%q)
  ROOT %tuple = (f32[8]{0}) tuple(%copy.1)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %wrapped = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  %cond.1 = (f32[8]{0}, /*index=1*/s32[]) conditional(%i, %x, %x), branch_computations={%other, %branch}, metadata={op_name="jit(decode)/attend/cond"}
  ROOT %bare = f32[8]{0} copy(%wrapped)
}
"""  # noqa: E501
    parts = parts_of(hlo)
    assert (parts["wrapped"], parts["copy.1"], parts["bare"]) == ("down_add", "attend", "rest")
    assert "cond.1" not in parts and "x" not in parts
