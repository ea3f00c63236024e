"""Measures the speed of a model on the default device, and how the speed changes as the work grows."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from llamaspec.benchmarks.common.model_speed import (
    GREEDY,
    TimedPrograms,
    decoding,
    first_token_seconds,
    prefill_seconds,
)
from llamaspec.benchmarks.common.report import Row, skipped, timed, with_shares
from llamaspec.benchmarks.common.resident import forget_peak, peak_resident_bytes
from llamaspec.benchmarks.suites.growth import slopes
from llamaspec.benchmarks.suites.model_profile import profiled
from llamaspec.benchmarks.suites.timed_model import DRAWN, TimedModel, choose_model
from llamaspec.model.device import default_device
from llamaspec.model.insight.cost import Cost, decode_cost, prefill_cost
from llamaspec.model.insight.machine import (
    ArraySizes,
    Ceilings,
    Reader,
    about,
    from_cache,
    kept_link,
    last_level_cache,
    measure_ceilings,
    this_machine,
)
from llamaspec.model.insight.plan import DEVICES, NVLINK, Link, MemoryPlan, make_plan
from llamaspec.model.insight.profile import Trace
from llamaspec.model.insight.timing import Effort, Seconds, in_turn, measure, spread
from llamaspec.model.llama import load_backend
from llamaspec.model.options import BackendName, RunOptions, SamplingOptions, choose_context
from llamaspec.model.parallel.share import share
from llamaspec.model.running.jax_backend import describe_run
from llamaspec.model.running.reference_backend import BY_REFERENCE
from llamaspec.model.running.session import Session
from llamaspec.model.system import return_freed_memory
from llamaspec.model.weights.loading import Progress, no_progress
from llamaspec.model.weights.params import Params

PROMPT = 512  # tokens of a prompt, unless the model's context is short
GROWTH = (128, 8192)  # smallest and largest number of tokens; each length is twice the previous one
BATCHES = (1, 2, 4, 8, 16, 32)
PATIENT = Effort(3, warm=1)  # repeats of slow calls
# These take more memory than a generation: a sampling program in addition to the greedy one, and a trace.
NOT_COUNTED = ("decode, top-p", "breakdown")


def planned(
    model: str, *, shape: str | None, device: str | None, context: int | None, batch: int, dtype: str | None,
    quantize: str | None, cache: str | None, devices: int = 1, measured: Path | None = None,
    progress: Progress = no_progress,
) -> MemoryPlan:  # fmt: skip
    """Plan the memory and speed of the model that `choose_model` chooses, on a device of `model.insight.plan.DEVICES`.

    If `device` is None, the device is this machine, which is measured. Several `devices` of one kind share the model;
    several parts of a CPU share its memory and its rates, too. If `keep_link` has written the speed of the link between
    this machine's devices to the folder `measured`, the plan uses it.

    Raises ValueError for unknown names and for a context that the model does not have.
    """
    if device is not None and device not in DEVICES:
        raise ValueError(f"unknown device {device}: expected one of {', '.join(DEVICES)}")
    platform = DEVICES[device].platform if device else jax.default_backend()
    subject = choose_model(model=model, shape=shape, dtype=dtype, quantize=quantize, platform=platform)
    capacity = choose_context(context, subject.config.context)
    if not device:
        progress("measuring the machine", 0.0)
    where = DEVICES[device] if device else this_machine(subject.dtype)
    if devices > 1:
        config, shapes = share(subject.config, devices), subject.share_shapes(capacity, devices)
    else:
        config, shapes = subject.config, subject.shapes(capacity)
    link = NVLINK
    if where.platform == "cpu" and devices > 1:
        link = Link(0.0, devices / where.bandwidth)
        rates = {dtype: rate / devices for dtype, rate in where.flops.items()}
        where = where._replace(memory=where.memory / devices, bandwidth=where.bandwidth / devices, flops=rates)
    if measured and not device:
        link = kept_link(measured, devices) or link
    return make_plan(
        *(subject.name, shapes, config, where),
        **{"context": capacity, "batch": batch, "quantize": subject.quantize, "devices": devices, "link": link},
        cache_dtype=np.dtype(cache) if cache else None,
    )


def describe_suite(suite: str, *, context: int | None, batch: int, backend: BackendName = "jax", **chosen: Any) -> str:
    """Say in one line how `run_suite` runs the model: dtype, device, and on a GPU how many ops have no kernel.

    Raises the errors of `choose_model`, and ValueError for a context that the model cannot hold.
    """
    if backend == "reference":
        return BY_REFERENCE
    subject = choose_model(**chosen)
    longest = _longest(subject, suite, context, random=bool(chosen["shape"]))
    capacity = subject.capacity(longest)
    choice = subject.choice(subject.shapes(capacity), capacity=capacity, batch=batch)
    return describe_run(np.dtype(subject.dtype), default_device(), choice)


def run_suite(
    suite: str,
    *,
    context: int | None,
    batch: int,
    backend: BackendName = "jax",
    progress: Progress = no_progress,
    sizes: ArraySizes | None = None,
    **chosen: Any,
) -> dict[str, Any]:
    """Measure the machine and then the model that `choose_model` chooses. Returns a report.

    In the suite decode, the timed prompt has `context` tokens, and decoding starts after `context` tokens. None means
    512, or half of the model's context if that is less. In the suite growth, these numbers grow up to `context`, by
    default 8192 or the model's context if that is less. Raises ValueError for a context that the model cannot hold, and
    MemoryError for arrays that do not fit.
    """
    if backend == "reference" and (suite != "decode" or batch != 1):
        raise ValueError("the reference supports only the suite decode, and only a batch of 1")
    subject = choose_model(**chosen)
    longest = _longest(subject, suite, context, random=bool(chosen["shape"]))
    progress("measuring the machine", 0.0)
    ceilings = measure_ceilings([subject.dtype], sizes)
    reader = None if backend == "reference" else Reader(sizes)
    return_freed_memory()
    forget_peak()
    match suite, reader:
        case _, None:
            measured = reference_rows(subject, tokens=longest, progress=progress)
        case "decode", reader:
            measured = decode_rows(subject, tokens=longest, batch=batch, reader=reader, progress=progress)
        case _:
            measured = growth_rows(subject, batch=batch, longest=longest, reader=reader, progress=progress)
    rows, peak = [], 0
    for row in measured:
        rows.append(row)
        if row.get("what") not in NOT_COUNTED:
            peak = peak_bytes() - (reader.bytes if reader else 0)
    if read := [round["read"] for row in rows for round in row.get("rounds", [])]:
        ceilings = ceilings._replace(read=statistics.median(read))
    cache = last_level_cache()
    completed = [_completed(row, ceilings, cache) for row in rows if "skipped" not in row]
    return {
        "suite": suite,
        "about": about(),
        "ceilings": ceilings._asdict(),
        "cache": cache,
        "model": subject.about(),
        "rows": completed,
        "slopes": slopes(completed, ceilings),
        "skipped": [row for row in rows if "skipped" in row],
        "peak_bytes": peak,
    }


def decode_rows(subject: TimedModel, *, tokens: int, batch: int, reader: Reader, progress: Progress) -> Iterator[Row]:
    """Time the first token after a start, a prompt of `tokens` tokens, and decoding after `tokens` tokens."""
    progress("compiling", 0.1)
    programs, shapes = subject.compiled(longest=tokens, batch=batch)
    progress("weights", 0.3)
    params = subject.load(shapes)
    progress("running", 0.5)
    cold = first_token_seconds(programs, params)
    warm = first_token_seconds(programs, params)
    yield {
        **{"what": "first token", "batch": batch, "prompt": programs.chunk},
        **{"compiling": programs.seconds, "cold": cold, "warm": warm},
    }
    yield prefill_row(subject, programs, params, tokens=tokens)
    for name, options in (("greedy", GREEDY), ("top-p", SamplingOptions())):
        progress(f"decoding, {name}", 0.8)
        yield decode_row(subject, programs, params, context=tokens, reader=reader, name=name, options=options)
    progress("where the time goes", 0.9)
    parts, _ = profiled(programs, params, context=tokens, without_graphs=subject.without_graphs(programs, shapes))
    yield {"what": "breakdown", "context": tokens, "parts": parts}


def reference_rows(subject: TimedModel, *, tokens: int, progress: Progress) -> Iterator[Row]:
    """Time a prompt and decoding by the reference. Rows have no floor, because we measure no rate for float64."""
    progress("weights", 0.3)
    checkpoint, vocab = subject.checkpoint(), subject.config.vocab
    backend = load_backend(
        checkpoint, RunOptions(backend="reference", context=tokens + DRAWN, quantize=subject.quantize)
    )
    ids = [i % vocab for i in range(tokens + 1)]  # decoding feeds the last one first
    decoding = Session[Any, Any](backend, vocab=vocab)

    def read():
        Session[Any, Any](backend, vocab=vocab).prefill(ids)

    def draw():
        for _ in decoding.bursts(ids[:-1], max_new_tokens=DRAWN, options=GREEDY, seed=0, stops=frozenset()):
            pass

    progress("running", 0.5)
    about = {"batch": 1}
    yield {"what": "prefill, reference", **about, "context": 0, "tokens": tokens, **measure(read, PATIENT)._asdict()}
    seconds = measure(draw, PATIENT).over(DRAWN)
    yield {"what": "decode, reference", **about, "context": tokens, "tokens": 1, **seconds._asdict()}


def growth_rows(subject: TimedModel, *, batch: int, longest: int, reader: Reader, progress: Progress) -> Iterator[Row]:
    """Time prompts of increasing lengths, decoding after these lengths, and decoding with increasing batch sizes.

    Each length is twice the previous one.
    """
    lengths = [length for length in _doubling(*GROWTH) if length <= longest] or [longest]
    progress("compiling", 0.1)
    programs, shapes = subject.compiled(longest=lengths[-1], batch=batch)
    params = subject.load(shapes)
    for i, length in enumerate(lengths):
        progress(f"{length} tokens", 0.2 + 0.5 * i / len(lengths))
        yield {**prefill_row(subject, programs, params, tokens=length), "series": "prefill"}
        row = decode_row(subject, programs, params, context=length, reader=reader)
        planned = subject.memory(shapes, context=length, batch=batch)
        yield {**row, "series": "context", "planned_memory": planned.peak}
    del programs
    for i, count in enumerate(BATCHES):
        progress(f"{count} sequences", 0.7 + 0.3 * i / len(BATCHES))
        try:
            programs, _ = subject.compiled(longest=lengths[0], batch=count, shapes=shapes)
        except MemoryError as error:
            yield skipped(f"{count} sequences", str(error))
            continue
        yield {**decode_row(subject, programs, params, context=lengths[0], reader=reader), "series": "batch"}


def prefill_row(subject: TimedModel, programs: TimedPrograms, params: Params, *, tokens: int) -> Row:
    seconds = prefill_seconds(programs, params, tokens=tokens, effort=subject.effort)
    cost = prefill_cost(params, subject.config, tokens=tokens, batch=programs.batch)
    return _row("prefill", subject, programs, seconds, context=0, tokens=tokens, bytes=cost.bytes, flops=cost.flops)


def decode_row(
    subject: TimedModel,
    programs: TimedPrograms,
    params: Params,
    *,
    context: int,
    reader: Reader,
    name: str = "greedy",
    options: SamplingOptions = GREEDY,
) -> Row:
    """Time decoding after `context` tokens.

    If the weights do not fit in the processor's cache, we also measure the read bandwidth in each round, because it
    varies.
    """
    call = decoding(programs, params, context=context, options=options)
    middle = context + programs.burst / 2
    cost = decode_cost(params, subject.config, position=middle, batch=programs.batch)
    rounds = []
    if cost.bytes <= (last_level_cache() or 0):  # reading between rounds would evict the weights
        seconds = measure(call, subject.effort).over(programs.burst)
    else:
        rounds = [(elapsed / programs.burst, read) for elapsed, read in in_turn(call, reader, subject.effort)]
        seconds = Seconds(*spread([elapsed for elapsed, _ in rounds]))
    row = _row(f"decode, {name}", subject, programs, seconds, context=context, tokens=1, **cost._asdict())
    return {**row, "rounds": [{"seconds": elapsed, "read": read} for elapsed, read in rounds]} if rounds else row


def _row(
    what: str, subject: TimedModel, programs: TimedPrograms, seconds: Seconds, *, context: int, tokens: int,
    bytes: float, flops: float,
) -> Row:  # fmt: skip
    return {
        "what": what,
        "batch": programs.batch,
        "context": context,
        "tokens": tokens,
        **timed(seconds, bytes=bytes, flops=flops, dtype=subject.dtype),
    }


def profile_model(
    *, context: int | None, progress: Progress = no_progress, **chosen: Any
) -> tuple[dict[str, Any], Trace]:
    """Profile the model that `choose_model` chooses. Returns a report and the trace.

    `context` has the same meaning as in `run_suite`. Raises the same errors as `run_suite`.
    """
    subject = choose_model(**chosen)
    tokens = prompt_tokens(subject, context)
    progress("compiling", 0.1)
    programs, shapes = subject.compiled(longest=tokens, batch=1)
    progress("weights", 0.4)
    params = subject.load(shapes)
    progress("running", 0.8)
    without_graphs = subject.without_graphs(programs, shapes)
    rows, trace = profiled(programs, params, context=tokens, without_graphs=without_graphs)
    return {"about": about(), "model": subject.about(), "context": tokens, "parts": rows}, trace


def _longest(subject: TimedModel, suite: str, context: int | None, *, random: bool) -> int:
    """Choose the largest number of tokens before decoding. Raises ValueError if `context` is too long for the model."""
    tokens, most = prompt_tokens(subject, context), subject.config.context - subject.burst
    if suite == "decode":
        return tokens
    # Random weights have no trained length, so the context may be longer.
    return min(context or GROWTH[1], max(most, GROWTH[1]) if random else most)


def prompt_tokens(subject: TimedModel, context: int | None) -> int:
    """Choose the number of tokens in the prompt, which is also the number of tokens before decoding.

    Raises ValueError if the model cannot hold `context` tokens and one burst.
    """
    most = subject.config.context - subject.burst
    if context is not None and not 1 <= context <= most:
        raise ValueError(
            f"{context} tokens and a burst of {subject.burst} exceed the context of {subject.config.context} tokens"
        )
    return context or min(PROMPT, max(1, most // 2))


def _completed(row: Row, ceilings: Ceilings, cache: int | None) -> Row:
    """Add speeds, their ratios to the machine's rates, and the floor: the least time that these rates allow.

    `cache` is the size of the processor's cache in bytes. If the row's bytes come from this cache, the floor ignores
    memory bandwidth.
    """
    if row["what"] == "breakdown":
        parts = row["parts"]["decode"]
        read, seconds = (sum(part.get(key, 0) for part in parts) for key in ("bytes", "seconds"))
        if not from_cache(bytes=read, seconds=seconds, read=ceilings.read, cache=cache):
            for part in parts:
                if "bytes" in part:
                    part["floor"] = part["bytes"] / ceilings.read
        return row
    if "median" not in row:
        return row
    row = {**with_shares(row, ceilings), "tokens_a_second": row["tokens"] * row["batch"] / row["median"]}
    if "bytes" in row and from_cache(bytes=row["bytes"], seconds=row["most"], read=ceilings.read, cache=cache):
        del row["share"]
        floor = ceilings.floor(bytes=0, flops=row["flops"], dtype=row["dtype"])
        row |= {"cached": True, "floor": floor, "of_floor": floor / row["median"]}
    elif rounds := row.get("rounds"):
        cost, rate = Cost(row["bytes"], row["flops"]), ceilings.flops[row["dtype"]]
        floors = [cost.seconds(bandwidth=sample["read"], rate=rate) for sample in rounds]
        shares = spread([floor / sample["seconds"] for floor, sample in zip(floors, rounds, strict=True)])
        row |= {"read": statistics.median(sample["read"] for sample in rounds), "floor": statistics.median(floors)}
        row |= dict(zip(("of_floor", "of_floor_least", "of_floor_most"), shares, strict=True))
    return row


def _doubling(first: int, last: int) -> Iterator[int]:
    """Yield `first` and its doubles, up to `last`.

    >>> list(_doubling(128, 600))
    [128, 256, 512]
    """
    while first <= last:
        yield first
        first *= 2


def peak_bytes() -> int:
    """Return the peak memory of the device, or of this process on a CPU."""
    if stats := jax.devices()[0].memory_stats():
        return stats["peak_bytes_in_use"]
    return peak_resident_bytes()
