"""`llamaspec profile`: what ran is found in XLA's trace, and the time of a span is shared out among its parts."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.benchmarks.suites.timed_model import choose_model
from llamaspec.model.insight.profile import REST, Event, events_of, parts_of, seconds_by
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


def test_what_runs_has_a_name(monkeypatch: pytest.MonkeyPatch):
    """Copies that XLA adds do not count. We count instructions: times of a small model are noise."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    programs, _ = choose_model(model="", shape="tiny", dtype="float32", quantize=None).compiled(longest=40, batch=1)
    for program in (programs.prefill, programs.decode(True)):
        parts = parts_of(program.as_text())  # type: ignore[attr-defined]
        ran = [part for name, part in parts.items() if "fusion" in name or name.startswith(("dot", "copy"))]
        assert len(ran) > 20 and ran.count(REST) < len(ran) / 4


def test_a_trace_that_cannot_be_written_is_refused_before_anything_runs(run):
    code, out, err = run("profile", "--trace", "/nowhere/trace.json")
    assert (code, out) == (1, "")
    assert "/nowhere/trace.json" in err and err.count("\n") == 1


def test_a_shape_and_a_model_are_one_too_many(run):
    code, _, err = run("profile", "stories", "--shape", "tinyllama-1.1b")
    assert code == 2 and "either MODEL or --shape" in err


def test_a_span_that_was_not_recorded_is_missed():
    with pytest.raises(ValueError, match="no span decode"):
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
    assert sum(spent.values()) * 1e6 == pytest.approx(last)  # sums of at most 50 terms, rounded
    alone = [event for event in ran if event.instruction in ("a", "c")]
    if not any(event.instruction == "b" for event in ran) and len({event.thread for event in ran}) == 1:
        covered, reached = 0.0, 0.0
        for event in alone:
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
    found = parts_of(hlo)
    assert (found["wrapped"], found["copy.1"], found["bare"]) == ("down_add", "attend", "rest")
    assert "cond.1" not in found and "x" not in found
