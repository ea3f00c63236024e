"""A plan for running a model, made before anything is loaded: memory, work, and the highest possible speed.

Memory is the most that a first run should take. Speeds are ceilings; `llamaspec bench` measures the share of the
ceiling that a model reaches.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from llamaspec.model.insight.cost import Cost, decode_cost, prefill_cost
from llamaspec.model.running.memory import Memory, gigabytes, memory_of
from llamaspec.model.running.programs import prompt_chunk
from llamaspec.model.weights.params import Params
from llamaspec.reference.collectives import ring_seconds, tree_seconds
from llamaspec.reference.config import Config


class Link(NamedTuple):
    """The time of a message between two devices: alpha seconds, and beta seconds a byte."""

    alpha: float
    beta: float

    def all_reduce_seconds(self, devices: int, size: int | float) -> float:
        """Return the seconds to sum `size` bytes over devices, along a ring or a tree, the faster of the two.

        >>> round(Link(3e-6, 1 / 450e9).all_reduce_seconds(2, 16384) * 1e6, 2)
        6.04
        """
        if devices == 1:
            return 0.0
        sizes = {"alpha": self.alpha, "beta": self.beta}
        return min(ring_seconds(devices, float(size), **sizes), tree_seconds(devices, float(size), **sizes))


# Alpha and beta were measured on two H100s (benchmarks/results/several-h100.md). In a decode step of an 8B model each
# of the 64 all-reduces takes about 20 us, the time of two messages; large ones move 140 GB/s. An all-reduce as a
# separate program takes 44 us. `llamaspec bench --suite collectives` measures these times.
NVLINK = Link(alpha=10e-6, beta=1 / 140e9)


class DeviceLimits(NamedTuple):
    """The memory and the rates of a device, which limit the speed in a plan."""

    name: str
    platform: str  # "cpu" or "gpu"
    memory: float  # bytes; for this machine, the free bytes
    bandwidth: float  # bytes that the device reads a second
    flops: Mapping[str, float]  # a second, in products of matrices, by dtype
    cache: int = 0  # bytes of the last-level cache; 0 for the GPUs in `DEVICES`

    def seconds(self, cost: Cost, dtype: str) -> float:
        """Return the least seconds that `cost` takes.

        >>> DeviceLimits("slow", "cpu", 1e9, 10.0, {"float32": 100.0}).seconds(Cost(bytes=20, flops=100), "float32")
        2.0
        """
        return cost.seconds(bandwidth=self.bandwidth, rate=self.flops[dtype], cache=self.cache)

    def waits_for(self, cost: Cost, dtype: str) -> str:
        """Name what `cost` waits for: `memory` or `arithmetic`."""
        return "memory" if self.seconds(cost, dtype) > cost.flops / self.flops[dtype] else "arithmetic"


# Numbers from the makers' data sheets, without sparsity: bfloat16 with matrix units, float32 without.
DEVICES = {
    "h200": DeviceLimits("NVIDIA H200 SXM", "gpu", 141e9, 4.8e12, {"bfloat16": 989e12, "float32": 67e12}),
    "h100": DeviceLimits("NVIDIA H100 SXM", "gpu", 80e9, 3.35e12, {"bfloat16": 989e12, "float32": 67e12}),
    "a100": DeviceLimits("NVIDIA A100 SXM 80 GB", "gpu", 80e9, 2.039e12, {"bfloat16": 312e12, "float32": 19.5e12}),
    "l4": DeviceLimits("NVIDIA L4", "gpu", 24e9, 300e9, {"bfloat16": 121e12, "float32": 30.3e12}),
    "rtx-4090": DeviceLimits(
        "NVIDIA GeForce RTX 4090", "gpu", 24e9, 1.008e12, {"bfloat16": 165.2e12, "float32": 82.6e12}
    ),
    "rtx-3090": DeviceLimits("NVIDIA GeForce RTX 3090", "gpu", 24e9, 936e9, {"bfloat16": 71e12, "float32": 35.6e12}),
}


class Work(NamedTuple):
    """A prompt or a step of decoding: its cost for all sequences, and the least time."""

    what: str
    after: int  # earlier tokens of each sequence
    tokens: int  # of all sequences
    cost: Cost  # of one device
    seconds: float  # the least time, with sums over devices
    waits_for: str
    sums: float = 0.0  # the part of `seconds` for sums over devices

    def as_json(self) -> dict[str, Any]:
        """Return the cost per token, for JSON."""
        return {
            "what": self.what,
            "after": self.after,
            "flops_per_token": self.cost.flops / self.tokens,
            "bytes_per_token": self.cost.bytes / self.tokens,
            "flops_per_byte": self.cost.intensity,
            "tokens_per_second": self.tokens / self.seconds,
            "seconds_of_sums": self.sums,
            "waits_for": self.waits_for,
        }


class MemoryPlan(NamedTuple):
    """Memory and speed of a model on a device."""

    name: str
    dtype: str
    quantize: str | None
    cache: str  # dtype
    context: int
    batch: int
    experts: int  # experts of a layer; 0 for a model without experts
    device: DeviceLimits
    memory: Memory  # of each device
    work: list[Work]
    devices: int = 1
    link: Link = NVLINK  # between devices

    @property
    def fits(self) -> bool:
        """Whether the memory of the device is enough."""
        return self.memory.fits(self.device.memory)

    def as_json(self) -> dict[str, Any]:
        """Return the whole plan, for JSON."""
        return {
            "model": self.name,
            "dtype": self.dtype,
            "quantize": self.quantize,
            "cache": self.cache,
            "context": self.context,
            "batch": self.batch,
            "experts": self.experts,
            "devices": self.devices,
            "device": {**self.device._asdict(), "flops": dict(self.device.flops)},
            "memory": {**self.memory._asdict(), "peak": self.memory.peak, "fits": self.fits},
            "link": self.link._asdict() if self.devices > 1 else None,
            "work": [work.as_json() for work in self.work],
        }


def make_plan(
    name: str, params: Params, config: Config, device: DeviceLimits, *,
    context: int, batch: int, quantize: str | None, cache_dtype: np.dtype | None = None, devices: int = 1,
    link: Link = NVLINK,
) -> MemoryPlan:  # fmt: skip
    """Plan for `batch` sequences of up to `context` tokens. `params` are shapes from `abstract_params`.

    With several devices, `params` and `config` describe the share of each, as `model.parallel` makes it. They exchange
    two sums per layer over `link`.

    The cache has the embedding's dtype, unless `cache_dtype` is given. Raises ValueError for a dtype that the device
    has no rate for.
    """
    dtype = params.embedding.dtype.name
    cache = cache_dtype or params.embedding.dtype
    if dtype not in device.flops:
        raise ValueError(f"no speed of {device.name} is known for {dtype}")

    def work(what: str, after: int, tokens: int, cost: Cost) -> Work:
        sums = 2 * config.layers * link.all_reduce_seconds(devices, 4 * tokens * batch * config.dim)
        computing, waits_for = device.seconds(cost, dtype), device.waits_for(cost, dtype)
        waits_for = waits_for if sums < computing else "sums over devices"
        return Work(what, after, tokens * batch, cost, computing + sums, waits_for, sums)

    platform = device.platform
    chunk = prompt_chunk(config, platform)
    return MemoryPlan(
        *(name, dtype, quantize, cache.name, context, batch, config.experts, device),
        memory=memory_of(
            params, config, batch=batch, context=context, chunk=chunk, platform=platform, cache_dtype=cache
        ),
        work=[
            work("prefill", 0, context, prefill_cost(params, config, tokens=context, batch=batch)),
            *(
                work("decode", at, 1, decode_cost(params, config, position=at, batch=batch, cache_dtype=cache))
                for at in sorted({0, context // 2, context - 1})
            ),
        ],
        devices=devices,
        link=link,
    )


def as_text(plan: MemoryPlan) -> str:
    """Format a plan for a person to read."""
    device = plan.device
    scheme = f", matrices in {plan.quantize}" if plan.quantize else ""
    scheme += f", a cache of {plan.cache}" if plan.cache != plan.dtype else ""
    lines = [
        f"{plan.name}, {plan.dtype}{scheme}: {plan.batch} x {plan.context:,} tokens",
        f"{device.name}: {gigabytes(int(device.memory))} of memory, {device.bandwidth / 1e9:,.0f} GB/s, "
        f"{device.flops[plan.dtype] / 1e9:,.0f} GFLOP/s in {plan.dtype}"
        + (f", a cache of {device.cache / 1e6:,.1f} MB" if device.cache else ""),
        *([f"{plan.devices} devices, of which each has a share: the figures are those of one"] * (plan.devices > 1)),
        "",
    ]
    memory = plan.memory._asdict()
    compiling = memory.pop("compiling")
    lines += [f"{name:12}{count / 1e6:12,.1f} MB" for name, count in memory.items() if count]
    lines += [
        f"{'in all':12}{sum(memory.values()) / 1e6:12,.1f} MB",
        *([f"{'compiling':12}{compiling / 1e6:12,.1f} MB, before the others are there"] if compiling else []),
        f"{'at most':12}{plan.memory.peak / 1e6:12,.1f} MB{'' if plan.fits else ', which is MORE THAN THERE IS'}",
        "",
        f"{'':7}{'after':>8}{'MFLOP':>12}{'MB':>12}{'FLOP/byte':>11}{'tokens/s':>12}  waits for",
    ]
    for work in plan.work:
        row = work.as_json()
        lines.append(
            f"{work.what:7}{work.after:8,}{row['flops_per_token'] / 1e6:12,.2f}{row['bytes_per_token'] / 1e6:12,.3f}"
            f"{row['flops_per_byte']:11,.1f}{_rate(row['tokens_per_second']):>12}  {work.waits_for}"
        )
    lines.append("FLOP and bytes are those of a token, tokens/s the most that is possible.")
    if plan.devices > 1:
        step = plan.work[-1]
        alpha, beta = plan.link
        lines.append(
            f"Sums over devices take {step.sums / step.seconds:.0%} of a step, at {alpha * 1e6:,.1f} us a message and "
            f"{1 / beta / 1e9:,.1f} GB/s."
        )
    if plan.experts:
        lines.append(f"Of {plan.experts} experts, those are read that tokens choose which choose evenly.")
    return "\n".join(lines) + "\n"


def _rate(tokens_per_second: float) -> str:
    """Format a rate: one decimal below 1000, none above.

    >>> _rate(12.34), _rate(177_458_945.8)
    ('12.3', '177,458,946')
    """
    return f"{tokens_per_second:,.{0 if tokens_per_second >= 1000 else 1}f}"
