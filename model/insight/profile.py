"""Measures the time of a program by part of the model, from a trace of XLA's profiler.

We trace each part of the model in a name scope, and XLA keeps these names in all its passes. So an instruction belongs
to the part that its name contains. An instruction without a name, such as a copy that XLA adds, belongs to the part of
the instruction that calls its computation.
"""

import gzip
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax

from llamaspec.model.ops.table import Ops

PRODUCT = "product"  # name scope of a matrix product inside an op
SAMPLE = "sample"  # name scope of drawing a token, in `model.sampling`
REMAINDER = "rest"
CONTROL_FLOW = ("while", "conditional", "call")  # the profiler records the instructions inside these instructions

# The computations that an instruction calls.
CALLS = re.compile(r"(?:calls|to_apply|body|condition|_computations?)=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)")

Trace = dict[str, Any]  # JSON in the format of Chrome's trace viewer, which Perfetto opens


class Event(NamedTuple):
    """One run of an instruction, or of one of its kernels on a GPU. Times are in microseconds."""

    thread: int
    start: float
    end: float
    instruction: str
    kernel: str = ""


def named(ops: Ops) -> Ops:
    """Wrap each op in a name scope with its name, and the matrix products inside it in the scope `PRODUCT`."""

    def scoped(op: Callable[..., Any], name: str) -> Callable[..., Any]:
        if isinstance(op, partial) and PRODUCT in op.keywords:
            op = partial(op, product=jax.named_scope(PRODUCT)(op.keywords[PRODUCT]))
        return jax.named_scope(name)(op)

    return Ops(*map(scoped, ops, Ops._fields))


def record(calls: Mapping[str, Callable[[], Any]]) -> Trace:
    """Profile the calls one after the other, and return one trace.

    The trace has a span for each call, with the call's name. The span ends when the arrays of the call are ready.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python calls would fill most of the trace
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for name, call in calls.items():
                with jax.profiler.TraceAnnotation(name):
                    jax.block_until_ready(call())
        (file,) = Path(folder).rglob("*.trace.json.gz")
        return json.loads(gzip.decompress(file.read_bytes()))


def save(trace: Trace, file: Path, *, packed: bool) -> None:
    """Write a trace to a file that Perfetto can open. If `packed`, compresses it with gzip."""
    text = json.dumps(trace).encode()
    file.write_bytes(gzip.compress(text) if packed else text)


def parts_of(hlo: str) -> dict[str, str]:
    """Map each instruction of an optimized program to its part of the model. Leaves out control flow.

    >>> parts_of('''%body {
    ...   %a = f32[8] fusion(%x), calls=%f, metadata={op_name="jit(decode)/while/body/project_add/product/add"}
    ...   %c = f32[8] conditional(%i, %a), branch_computations={%b}, metadata={op_name="jit(decode)/attend/cond"}
    ... }
    ... %b {
    ...   ROOT %d = f32[8] dot(%y, %z)
    ... }''')
    {'a': 'project_add product', 'd': 'attend'}
    """
    own: dict[str, str] = {}  # instruction: the part in its name
    inside: dict[str, str] = {}  # instruction: its computation
    called: dict[str, str] = {}  # computation: the instruction that calls it
    parts: dict[str, str] = {}  # computation: the part that an instruction in it names
    kinds: dict[str, str] = {}
    computation = ""
    for line in hlo.splitlines():
        if not line.startswith(" "):
            computation = header[1] if (header := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)) else computation
        elif match := re.match(r" +(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\(", line):
            name, kinds[name] = match[1], match[2]
            inside[name] = computation
            for listed in CALLS.findall(line):
                called.update((callee.strip("%"), name) for callee in listed.split(", "))
            scopes = re.search(r'op_name="([^"]*)"', line)
            if scopes and (named := _part(scopes[1].split("/"))):
                own[name] = parts[computation] = named

    fused = {caller: parts[callee] for callee, caller in called.items() if callee in parts}

    def part(name: str | None) -> str:
        if name is None:
            return REMAINDER
        if kinds[name] not in CONTROL_FLOW and name not in own and name in fused:
            return fused[name]
        return own.get(name) or part(called.get(inside[name]))

    return {name: part(name) for name, kind in kinds.items() if kind not in CONTROL_FLOW and kind != "parameter"}


def events_of(trace: Trace, span: str) -> tuple[list[Event], float, float]:
    """Return the instructions that started in the first span named `span`, and the span's start and end.

    Raises ValueError for a trace without such a span.
    """
    complete = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    began = next(((event["ts"], event["ts"] + event["dur"]) for event in complete if event["name"] == span), None)
    if began is None:
        raise ValueError(f"the profiler's trace has no span named {span}")
    start, end = map(float, began)
    ran = [
        Event(
            event["tid"],
            *(float(event["ts"]), float(event["ts"] + event["dur"])),
            event["args"]["hlo_op"],
            kernel=event["name"],
        )
        for event in complete
        if "hlo_op" in event.get("args", {}) and start <= event["ts"] <= end
    ]
    return sorted(ran, key=lambda event: event.start), start, end


def seconds_by(ran: Iterable[Event], kinds: Mapping[str, str], *, start: float, end: float) -> dict[str | None, float]:
    """Divide the seconds of a span among kinds of instructions. The key None gets the time when nothing ran.

    `kinds` maps instructions to kinds. Instructions that run at the same time share the time equally. If an instruction
    runs on several threads, XLA's profiler records it on only one of them. So if the next instruction starts later on
    another thread, we assume that the earlier instruction ran on that thread until then.

    >>> ran = [Event(1, 0.0, 4e6, "a"), Event(1, 5e6, 6e6, "b"), Event(2, 8e6, 9e6, "a")]
    >>> seconds_by(ran, {"a": "A", "b": "B"}, start=0.0, end=10e6)
    {None: 2.0, 'A': 5.0, 'B': 3.0}
    """
    known = [event for event in ran if event.instruction in kinds]
    edges = [(start, 0, ""), (end, 0, "")]
    latest = None
    for event, after in zip_longest(known, known[1:]):
        latest = event if latest is None or event.end > latest.end else latest
        stop = event.end
        if after and latest is event and after.start > stop and after.thread != event.thread:
            stop = after.start
        kind = kinds[event.instruction]
        edges += [(event.start, 1, kind), (min(stop, end), -1, kind)]
    spent: dict[str | None, float] = defaultdict(float)
    active: dict[str, int] = defaultdict(int)
    edges.sort()
    for (at, change, kind), (then, _, _) in pairwise(edges):
        active[kind] += change
        running = {kind: count for kind, count in active.items() if count > 0 and kind}
        for kind, count in running.items():
            spent[kind] += (then - at) * count / sum(running.values()) / 1e6
        if not running:
            spent[None] += (then - at) / 1e6
    return {kind: seconds for kind, seconds in spent.items() if seconds > 0}


def seconds_in_graphs(
    ran: Sequence[Event], named: Sequence[Event], parts: Mapping[str, str], *, start: float, end: float
) -> dict[str | None, float]:
    """Divide the seconds of a span among parts of the model, for kernels in CUDA graphs. None gets all other time.

    XLA's profiler does not name the instruction of a kernel in a graph, and it records only the last iteration of a
    loop in a graph. So we also need `named`: the kernels of the same program, compiled without graphs, with
    instructions and all iterations. In both runs, the n-th kernel with a given name belongs to the same part. We take
    the durations from the graphs, because a kernel that the host launches may wait longer for the previous kernel.

    >>> named = [Event(1, 3e6 * i, 3e6 * i + 2e6, op, "gemv") for i, op in enumerate("abab")]
    >>> ran = [Event(1, 0.0, 1e6, "command_buffer", "gemv"), Event(1, 1e6, 4e6, "command_buffer", "gemv")]
    >>> seconds_in_graphs(ran, named, {"a": "A", "b": "B"}, start=0.0, end=10e6)
    {'A': 2.0, 'B': 6.0, None: 2.0}
    """
    order: dict[str, list[str]] = defaultdict(list)  # kernel name: the part of its first kernel, of its second, …
    named = [event for event in named if event.instruction in parts]
    for event in named:
        order[event.kernel].append(parts[event.instruction])
    ran = [event for event in ran if event.kernel in order]
    in_graphs, by_host = _by_kernel(ran, order), _by_kernel(named, order)
    total: dict[str, float] = defaultdict(float)
    for label, (seconds, count) in by_host.items():
        recorded = in_graphs.get(label, (seconds, count))
        total[label[1]] += recorded[0] / recorded[1] * count
    span = (end - start) / 1e6  # seconds
    # The recorded iteration may be a little slower than the average.
    scale = min(1.0, span / sum(total.values())) if total else 1.0
    spent: dict[str | None, float] = {part: seconds * scale for part, seconds in total.items()}
    return {**spent, None: max(0.0, span - sum(spent.values()))}


def _by_kernel(events: Sequence[Event], order: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], tuple[float, int]]:
    """Sum the seconds of kernels, and count them, by kernel name and part of the model.

    For each kernel name, `order` lists the parts of the model that launch the kernel in one iteration. The list repeats
    in each iteration.
    """
    labels, passed = [], Counter[str]()
    for event in events:
        parts = order[event.kernel]
        labels.append((event.kernel, parts[passed[event.kernel] % len(parts)]))
        passed[event.kernel] += 1
    keys = {label: str(number) for number, label in enumerate(dict.fromkeys(labels))}
    in_a_row = [event._replace(thread=0, instruction=keys[label]) for event, label in zip(events, labels, strict=True)]
    start, end = min((event.start for event in events), default=0.0), max((event.end for event in events), default=0.0)
    seconds = seconds_by(in_a_row, {key: key for key in keys.values()}, start=start, end=end)
    return {label: (seconds.get(keys[label], 0.0), count) for label, count in Counter(labels).items()}


def _part(scopes: list[str]) -> str | None:
    """Return the part of the model that an instruction's scopes name, or None.

    >>> _part(["jit(decode)", "while", "body", "jit(_block)", "norm_qkv", "product", "add"])
    'norm_qkv product'
    """
    op = next((scope for scope in scopes if scope in (*Ops._fields, SAMPLE)), None)
    return f"{op} {PRODUCT}" if op and PRODUCT in scopes else op
