"""A plan for running a model, made before anything is loaded: memory, work, and the highest possible speed.

The memory is the most that a first run should need. The speeds are upper limits. `llamaspec bench` measures how much of
the limit a model reaches.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from llamaspec.model.device import Device
from llamaspec.model.insight.cost import Cost, decode_cost, prefill_cost
from llamaspec.model.running.memory import Memory, allocated_on_gpu, gigabytes, loading_peak, memory_of
from llamaspec.model.running.programs import prompt_chunk
from llamaspec.model.weights.params import Params
from llamaspec.reference.collectives import ring_seconds, tree_seconds
from llamaspec.reference.config import Config


class Link(NamedTuple):
    """The time of a message between two devices: `alpha` seconds, plus `beta` seconds per byte."""

    alpha: float
    beta: float

    def all_reduce_seconds(self, devices: int, size: int | float) -> float:
        """Return the seconds to sum `size` bytes over devices, with the faster of the ring and the tree algorithm.

        >>> round(Link(3e-6, 1 / 450e9).all_reduce_seconds(2, 16384) * 1e6, 2)
        6.04
        """
        if devices == 1:
            return 0.0
        sizes = {"alpha": self.alpha, "beta": self.beta}
        return min(ring_seconds(devices, float(size), **sizes), tree_seconds(devices, float(size), **sizes))


# Alpha and beta were measured on four H200s (benchmarks/results/four-h200.md). In a decode step, a sum over two devices
# takes at most 11 to 12 us, and over four at most 10 to 15 us: the time of two to four messages. Large sums move 150
# GB/s. An all-reduce as a separate program takes 50 us. `llamaspec bench --suite collectives` measures these times.
NVLINK = Link(alpha=4e-6, beta=1 / 150e9)


class DeviceLimits(NamedTuple):
    """The memory and the rates of a device, which limit the speed in a plan."""

    name: str
    platform: str  # "cpu" or "gpu"
    memory: float  # bytes of memory; for this machine, free bytes
    bandwidth: float  # bytes that the device reads per second
    flops: Mapping[str, float]  # dtype: operations per second in matrix products
    cache: int = 0  # bytes of the last-level cache; 0 for the GPUs in `DEVICES`
    kernels: str = ""  # what we know of our kernels on a GPU (`Device.kernels`); empty for a CPU

    def seconds(self, cost: Cost, dtype: str) -> float:
        """Return the least seconds that a computation with this cost takes.

        >>> DeviceLimits("slow", "cpu", 1e9, 10.0, {"float32": 100.0}).seconds(Cost(bytes=20, flops=100), "float32")
        2.0
        """
        return cost.seconds(bandwidth=self.bandwidth, rate=self.flops[dtype], cache=self.cache)

    def waits_for(self, cost: Cost, dtype: str) -> str:
        """Return what a computation with this cost waits for: `memory` or `arithmetic`."""
        return "memory" if self.seconds(cost, dtype) > cost.flops / self.flops[dtype] else "arithmetic"


def _gpu(name: str, capability: str, memory: float, bandwidth: float, bfloat16: float, float32: float) -> DeviceLimits:
    """Describe a GPU of NVIDIA by bytes, bytes per second, and operations per second."""
    kernels = Device("gpu", name, capability).kernels
    flops = {"bfloat16": bfloat16, "float32": float32}
    return DeviceLimits(f"NVIDIA {name}", "gpu", memory, bandwidth, flops, kernels=kernels)


# Numbers from the makers' data sheets, without sparsity. The bfloat16 rates use matrix units, the float32 rates do not.
DEVICES = {
    "h200": _gpu("H200 SXM", "9.0", 141e9, 4.8e12, 989e12, 67e12),
    "h100": _gpu("H100 SXM", "9.0", 80e9, 3.35e12, 989e12, 67e12),
    "b200": _gpu("B200", "10.0", 180e9, 8e12, 2.25e15, 75e12),
    "a100": _gpu("A100 SXM 80 GB", "8.0", 80e9, 2.039e12, 312e12, 19.5e12),
    "l4": _gpu("L4", "8.9", 24e9, 300e9, 121e12, 30.3e12),
    "gb10": _gpu("GB10", "12.1", 128e9, 273e9, 125e12, 31e12),
    "rtx-5090": _gpu("GeForce RTX 5090", "12.0", 32e9, 1.792e12, 209.5e12, 104.8e12),
    "rtx-4090": _gpu("GeForce RTX 4090", "8.9", 24e9, 1.008e12, 165.2e12, 82.6e12),
    "rtx-3090": _gpu("GeForce RTX 3090", "8.6", 24e9, 936e9, 71e12, 35.6e12),
    "rtx-3060": _gpu("GeForce RTX 3060", "8.6", 12e9, 360e9, 25.5e12, 12.7e12),
}


class Work(NamedTuple):
    """A prompt or a step of decoding: its cost, and the least time that it takes."""

    what: str
    after: int  # number of earlier tokens of each sequence
    tokens: int  # number of tokens of all sequences
    cost: Cost  # cost for one device
    seconds: float  # the least time, including sums over devices
    waits_for: str
    sums: float = 0.0  # the part of `seconds` that sums over devices take

    def as_json(self) -> dict[str, Any]:
        """Return the work for JSON, with costs per token."""
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
    """The memory and the highest speed of a model on a device."""

    name: str
    dtype: str
    quantize: str | None
    cache: str  # dtype of the KV cache
    context: int
    batch: int
    experts: int  # experts per layer; 0 for a model without experts
    device: DeviceLimits
    memory: Memory  # memory on each device
    work: list[Work]
    devices: int = 1
    link: Link = NVLINK  # link between two devices
    loading: int = 0  # on a GPU: the bytes in use at the peak while weights are read

    @property
    def allocated(self) -> int:
        """The memory of a GPU that the process takes, as nvidia-smi shows it; 0 for a CPU."""
        peak = max(self.memory.peak, self.loading)
        return allocated_on_gpu(peak, most=self.device.memory) if self.device.platform == "gpu" else 0

    @property
    def fits(self) -> bool:
        """True if the device has enough memory."""
        return self.memory.fits(self.device.memory)

    def as_json(self) -> dict[str, Any]:
        """Return the complete plan, for JSON."""
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
            "memory": {
                **self.memory._asdict(),
                **{"peak": self.memory.peak, "fits": self.fits, "loading": self.loading, "allocated": self.allocated},
            },
            "link": self.link._asdict() if self.devices > 1 else None,
            "work": [work.as_json() for work in self.work],
        }


def make_plan(
    name: str, params: Params, config: Config, device: DeviceLimits, *,
    context: int, batch: int, quantize: str | None, cache_dtype: np.dtype | None = None, devices: int = 1,
    link: Link = NVLINK,
) -> MemoryPlan:  # fmt: skip
    """Plan for `batch` sequences of up to `context` tokens. `params` are shapes from `abstract_params`.

    With several devices, `params` and `config` describe the share of one device, as `model.parallel` makes it. The
    devices exchange two sums per layer over `link`.

    The cache has the embedding's dtype, unless `cache_dtype` is given. Raises ValueError for a dtype that the device
    has no rate for.
    """
    dtype = params.embedding.dtype.name
    cache = cache_dtype or params.embedding.dtype
    if dtype not in device.flops:
        raise ValueError(f"{device.name}: expected a dtype with a known speed ({', '.join(device.flops)}), got {dtype}")

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
        loading=loading_peak(params) if platform == "gpu" else 0,
    )


def as_text(plan: MemoryPlan) -> str:
    """Format a plan for people to read."""
    device = plan.device
    scheme = f", matrices in {plan.quantize}" if plan.quantize else ""
    scheme += f", KV cache in {plan.cache}" if plan.cache != plan.dtype else ""
    lines = [
        f"{plan.name}, {plan.dtype}{scheme}: {plan.batch} x {plan.context:,} tokens",
        f"{device.name}: {gigabytes(int(device.memory))} of memory, {device.bandwidth / 1e9:,.0f} GB/s, "
        f"{device.flops[plan.dtype] / 1e9:,.0f} GFLOP/s in {plan.dtype}"
        + (f", last-level cache of {device.cache / 1e6:,.1f} MB" if device.cache else ""),
        *([f"kernels: {device.kernels}"] * bool(device.kernels)),
        *([f"{plan.devices} devices share the model; the figures below are for one device"] * (plan.devices > 1)),
        "",
    ]
    memory = plan.memory._asdict()
    compiling = memory.pop("compiling")
    lines += [f"{name:12}{count / 1e6:12,.1f} MB" for name, count in memory.items() if count]
    lines += [
        f"{'total':12}{sum(memory.values()) / 1e6:12,.1f} MB",
        *([f"{'compiling':12}{compiling / 1e6:12,.1f} MB, before the rest is allocated"] if compiling else []),
        f"{'peak':12}{plan.memory.peak / 1e6:12,.1f} MB{'' if plan.fits else ', MORE THAN THE DEVICE HAS'}",
        *_lines_of_gpu(plan),
        "",
        f"{'':7}{'after':>8}{'MFLOP':>12}{'MB':>12}{'FLOP/byte':>11}{'tokens/s':>12}  waits for",
    ]
    for work in plan.work:
        row = work.as_json()
        lines.append(
            f"{work.what:7}{work.after:8,}{row['flops_per_token'] / 1e6:12,.2f}{row['bytes_per_token'] / 1e6:12,.3f}"
            f"{row['flops_per_byte']:11,.1f}{_rate(row['tokens_per_second']):>12}  {work.waits_for}"
        )
    lines.append("MFLOP and MB are per token. tokens/s is the highest possible rate of all sequences together.")
    if plan.devices > 1:
        step = plan.work[-1]
        alpha, beta = plan.link
        lines.append(
            f"Sums over devices take {step.sums / step.seconds:.0%} of a decode step, with {alpha * 1e6:,.1f} us per "
            "message and "
            f"{1 / beta / 1e9:,.1f} GB/s."
        )
    if plan.experts:
        lines.append(
            f"The bytes of the {plan.experts} experts are the expected number if tokens choose all experts equally "
            "often."
        )
    return "\n".join(lines) + "\n"


def _lines_of_gpu(plan: MemoryPlan) -> list[str]:
    """Return the lines about the memory that a process takes on a GPU in addition to its arrays; none for a CPU."""
    if not plan.allocated:
        return []
    return [
        f"{'loading':12}{plan.loading / 1e6:12,.1f} MB at most, before the cache is allocated",
        f"{'allocated':12}{plan.allocated / 1e6:12,.1f} MB of the GPU: JAX takes powers of 2, CUDA adds 0.6 GiB",
    ]


def _rate(tokens_per_second: float) -> str:
    """Format a rate with one decimal below 1000, and with none from 1000 on.

    >>> _rate(12.34), _rate(177_458_945.8)
    ('12.3', '177,458,946')
    """
    return f"{tokens_per_second:,.{0 if tokens_per_second >= 1000 else 1}f}"
