"""Compute results on eight virtual devices, and print one JSON line per case on stdout.

Run it as `python -m tests.model.parallel.on_devices KIND`, with one of these kinds:

    walk        every case of `WALKS`
    more        every case of `MORE`
    every       every case of `EVERY`: takes two minutes; no test runs it
    gradients   every case of `GRADIENTS`
    caches      every case of `SPREAD`
    families    every case of `FAMILIES`
    drawn       tokens that four devices sample with one random key, and with a key per device
    trained     trainings on two devices, killed and resumed, for each kind of `TRAINED`
    tuned       fine-tunings on two devices, for each method of `TUNED`
    served      answers of engines, for each number of devices in `SERVED`
    stories     texts of the built-in model, for each sharding and number of devices in `SHARED_BY`
    commands    exit code, stdout and stderr of every command of `COMMANDS`
    shown       exit code, stdout and stderr of every command of `documented_commands`

A case that raises an exception ends the process with a traceback.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.processes import REPOSITORY

DEVICES = 8
# These processes spend nearly all of their time on compilation; the compiled programs are small.
COMPILED_FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


class Walk(NamedTuple):
    """A case in which `verify.judging.walk` checks a model's ops, one after the other, on several devices."""

    model: str  # key of `configs()`
    devices: int
    dtype: str = "float32"
    table: str = "xla"
    quantize: str | None = None
    way: str = "tensor"
    stored: bool = False  # devices cut stored codes instead of making their own
    adapter: bool = False


# Models of `verify.judging.walk.BEYOND`, named after the family that has their switches.
STARCODER_2, STABLELM_2 = "LayerNorm, GELU without a gate", "parallel halves, LayerNorm of each head"
NEMOTRON, GPT_OSS = "squared ReLU, RoPE of a part", "sinks, experts with biases"
WALKS = [
    Walk("broad", 2),
    Walk("broad", 8, "bfloat16"),
    Walk("experts", 4),
    Walk("wide", 2, table="cpu", quantize="q4", adapter=True),
    Walk("broad", 4, way="context"),
    Walk("even", 4, way="FSDP"),
    Walk(GPT_OSS, 2),
    Walk(STABLELM_2, 2, "bfloat16"),
    Walk("even", 4, "bfloat16", table="chosen for an H200"),
]
MORE = [
    Walk(GPT_OSS, 4),
    Walk("wide", 2, table="cpu", quantize="q4"),
    Walk("broad", 8, adapter=True),
    Walk("wide", 2, quantize="q4", stored=True, adapter=True),
    Walk("wide", 2, quantize="nf4", way="context", adapter=True),
    Walk(STABLELM_2, 4, "bfloat16"),
    Walk(STARCODER_2, 2),
    Walk(NEMOTRON, 4),
    Walk(GPT_OSS, 4, "bfloat16", way="context"),
    *(Walk("broad", devices) for devices in (1, 4, 8)),
    Walk("experts", 8, "bfloat16", way="context"),
    Walk("wide", 2, "bfloat16", table="cpu", quantize="q4", way="context"),
    Walk("wide", 2, table="cpu"),
    *(Walk("wide", 2, quantize=scheme) for scheme in ("q8", "q8_row", "q4", "nf4", "fp8", "mxfp4")),
    *(Walk("wide", 2, quantize=scheme, stored=True) for scheme in ("q4", "q8_row", "fp8", "mxfp4")),
    *(Walk("wide", 2, quantize=scheme, way="context") for scheme in ("fp8", "mxfp4")),
    *(Walk(name, 2, way="FSDP") for name in ("biases, scaled RoPE", "experts")),
    *(Walk(name, 3, way="context") for name in ("3 heads to 1, q/k norms, window", "7 heads to 1")),
    Walk("wide", 2, "bfloat16", table="cpu", quantize="q4"),
    # Each pair of a model, a number of devices, a dtype and a table occurs, except 7 heads on four devices.
    *(
        Walk(name, devices, dtype, table)
        for name in ("biases, scaled RoPE", "7 heads to 1", "experts")
        for devices in (2, 4)
        if devices == 2 or name != "7 heads to 1"
        for dtype, table in zip(
            ("float32", "bfloat16"), ("xla", "cpu") if devices == 2 else ("cpu", "xla"), strict=True
        )
    ),
]
EVERY = [
    Walk(model, devices, dtype, table, quantize)
    for table in ("xla", "cpu")
    for devices in (1, 2, 4, 8)
    for dtype in ("float32", "bfloat16")
    for model, quantize in (
        ("broad", None),
        ("8 heads, experts", None),
        *(("8 heads, groups", scheme) for scheme in ("q8", "q4", "nf4")),
    )
]
SHARED_BY = (("tensor", 1), ("tensor", 2), ("tensor", 4), ("context", 4))
GRADIENTS = {  # True: the gradient equals one device's gradient
    "data parallel": True,
    "FSDP": True,
    "FSDP, computed again": True,
    "FSDP with experts": True,
    "tensor parallel": True,
    "data parallel, differentiated inside with checks": False,
    "tensor parallel, differentiated inside": False,
}
FAMILIES = (  # switches without a derived bound: model of `switched`, way of sharing, devices
    ("Gemma, Granite, SmolLM3", "tensor", 4),
    ("Qwen2-MoE", "tensor", 4),
    ("OLMo 2", "tensor", 4),
    ("OLMo 2", "context", 4),
)
SPREAD = {  # caches on four devices; True: the logits equal one device's logits
    "float32": True,
    "int8": True,
    "bfloat16": True,
    "scaled and capped scores": True,
    "rows of others kept": False,
    "rows of others put at the end": False,
    "largest scores of each device": False,
}
TRAINED = ("data parallel", "FSDP")
TUNED = ("supervised", "preference", "distill", "reward")
SERVED = (1, 4)
TINY = ("--shape", "tiny", "--context", "20")  # a shape that only the commands' process has registered
COMMANDS = {  # run in order, in one process with one folder of caches
    "plan before": ("inspect", "--plan", "--devices", "2", "--json"),
    "bench of one and two": ("bench", *TINY, "--quantize", "q8", "--suite", "collectives", "--devices", "2"),
    "plan": ("inspect", "--plan", "--devices", "2", "--json"),
    "bench of three": ("bench", *TINY, "--devices", "3"),
    "bench of many sequences": ("bench", *TINY, "--devices", "2", "--batch", "2"),
    "alone": ("generate", "Once", "--parallel", "context"),
    "growth": ("bench", *TINY, "--devices", "2", "--suite", "growth"),
}
EARLY = ("--max-new-tokens", "40")


def documented_commands() -> dict[str, tuple[str, ...]]:
    """Return the commands that docs/parallel.md shows, by subcommand, with fewer tokens to generate."""
    (block,) = re.findall(r"^```sh\n(.*?)^```$", (REPOSITORY / "docs/parallel.md").read_text(), re.M | re.S)
    typed = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    return {verb: (verb, *words, *EARLY * (verb == "generate")) for verb, *words in typed}


def results(*arguments: str, module: str = "on_devices") -> list[dict[str, Any]]:
    """Run a module in a process with eight devices; return the JSON object that it prints for each case."""
    flags = f"--xla_force_host_platform_device_count={DEVICES} {COMPILED_FAST}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.model.parallel.{module}", *arguments],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def configs() -> Mapping[str, Any]:
    """Return models with shapes that make sharding mistakes visible."""
    from llamaspec.verify.judging.walk import BEYOND, CONFIGS

    small = replace(CONFIGS["biases, scaled RoPE"], layers=1)
    broad = replace(small, heads=8, kv_heads=2, head_dim=4, vocab=51, qk_norm=True, windows=(3,), tied=True)
    return {
        # Two kv heads for up to eight devices, a vocabulary that only one device divides, and every kind of weight.
        "broad": broad,
        "8 heads, experts": replace(broad, experts=4, experts_per_token=2),
        "8 heads, groups": replace(broad, dim=64, head_dim=64, ffn=512),  # 64 columns on each of eight devices
        "even": replace(small, heads=8, kv_heads=4, head_dim=4, vocab=52, tied=True),  # four devices divide all rows
        # Wide enough for groups of 64 columns on each of two devices.
        "wide": replace(small, layers=1, dim=128, heads=4, kv_heads=2, head_dim=32, ffn=256),
        **CONFIGS,
        **{name: replace(config, layers=1, windows=config.windows and (3,)) for name, config in BEYOND.items()},
        "experts": replace(CONFIGS["experts"], layers=1),
    }


def way_of(case: Walk, config: Any) -> Any:
    """Return the sharding of a case. Only these tests use FSDP for generation."""
    from jax.sharding import PartitionSpec as P

    from llamaspec.model.parallel.gathered import gathered, row_layouts
    from llamaspec.model.parallel.sharding import Sharding, sharding_named
    from llamaspec.model.weights.params import Names, array_names

    if case.way != "FSDP":
        return sharding_named(case.way)
    import jax

    named = row_layouts(config, case.devices)

    class ByRows(Sharding):
        """A sharding that gives each device some rows of every matrix, and the whole cache."""

        def config(self, config: Any, devices: int) -> Any:
            return config

        def part(self, checkpoint: Any, *, device: int, devices: int) -> Any:
            def cut(name: str, tensor: Any) -> Any:
                if named[name] == P():
                    return tensor
                rows = tensor.shape[0] // devices
                own_rows = slice(device * rows, (device + 1) * rows)
                return tensor._replace(shape=(rows, *tensor.shape[1:]), read=lambda: tensor.read()[own_rows])

            return replace(
                checkpoint,
                tensors={name: cut(name, tensor_of_name) for name, tensor_of_name in checkpoint.tensors.items()},
            )

        def weights(self, params: Any, config: Any) -> Any:
            def layout(place: Any, tree: Any) -> Any:
                spec = named[place.names[0]] if isinstance(place, Names) else P()
                return jax.tree.map(lambda _: spec, tree)

            return jax.tree.map(layout, array_names(config, params.rope), params)

    return ByRows("tensor", lambda ops: gathered(ops, config), kv_layout=P(), hidden=P())


def stored(checkpoint: Any) -> Any:
    """Remove the record of how codes were made, so that the checkpoint looks like a file with quantized weights."""

    def read(tensor: Any) -> Any:
        return tensor._replace(codes=tensor.codes and tensor.codes._replace(scheme="", source=None))

    return replace(checkpoint, tensors={name: read(tensor) for name, tensor in checkpoint.tensors.items()})


def chosen_for_h200(config: Any, params: Any, rows: int) -> Any:
    """Choose ops as on an H200, and call XLA in place of each kernel.

    Each op raises an error for arguments with shapes for which the table of ops was not built.
    """
    from llamaspec.model.device import HOPPER, Device
    from llamaspec.model.ops.choice import ops_for
    from llamaspec.model.ops.routed import Routed
    from llamaspec.model.ops.table import Ops

    sizes: dict[str, Any] = {"batch": 1, "capacity": rows, "cache_dtype": params.embedding.dtype}
    ops = ops_for("auto", config, params, **sizes, device=Device("gpu", "NVIDIA H200", HOPPER)).ops
    with_xla: Any = [replace(op, op=replace(op.op, kernel=op.op.plain)) if isinstance(op, Routed) else op for op in ops]
    return Ops(*with_xla)


def walked(case: Walk, parallel: Callable | None = None, change: Callable | None = None) -> dict[str, Any]:
    """Run a prompt and one token through the ops of a case.

    Return the first wrong result, and the worst error as a multiple of its bound.
    """
    import numpy as np

    from llamaspec.model.candidates.walking import random_checkpoint
    from llamaspec.model.checkpoints.adapter import adapted
    from llamaspec.model.checkpoints.codes import quantized
    from llamaspec.model.ops.cpu import CPU
    from llamaspec.model.ops.xla import XLA
    from llamaspec.model.parallel.walking import walkable_on
    from llamaspec.model.tensors import tensor_shapes
    from llamaspec.verify.bounds.precision import precision
    from llamaspec.verify.judging.walk import walk, weights
    from tests.support.random_models import random_adapter

    config, kind = configs()[case.model], precision(case.dtype)
    arrays = weights(tensor_shapes(config), seed=0)
    options: dict[str, Any] = {"devices": case.devices, "dtype": kind.dtype, "rows": 6}
    table = {"xla": XLA, "cpu": CPU, "chosen for an H200": chosen_for_h200}[case.table]
    way = way_of(case, config)
    options["sharding"] = way._replace(ops=parallel or way.ops)

    def model(arrays: dict[str, np.ndarray]) -> Any:
        checkpoint, quantize = random_checkpoint(config, arrays), case.quantize
        if case.stored and quantize:
            checkpoint, quantize = stored(quantized(checkpoint, quantize)), None
        if case.adapter:
            checkpoint = adapted(checkpoint, random_adapter(config, parts=("q", "v", "o", "up", "down")))
        return walkable_on(checkpoint, table, **options, quantize=quantize)

    walkable = model(change(arrays, config, case.devices) if change else arrays)
    if change:
        walkable = replace(walkable, exact=model(arrays).exact)
    tokens = [np.array([3, 1, 4, 1, 5], np.int32), np.array([9], np.int32)]
    ratios = []
    for step in walk(walkable, tokens, config=config, unit=kind.unit):
        if not step.ratio <= 1:
            return {"wrong": step.op, "ratio": step.ratio, "steps": len(ratios)}
        ratios.append(step.ratio)
    return {"wrong": None, "ratio": max(ratios), "steps": len(ratios)}


def generated(way: Any, devices: int) -> dict[str, Any]:
    """Generate a sampled and a greedy beginning of a story, and compute logits. Returns texts and logits."""
    from llamaspec.model.llama import load
    from llamaspec.model.options import SamplingOptions

    llama = load("stories", devices=devices, parallel=way, context=64)

    def text(temperature: float) -> str:
        drawn = llama.generate("Once", max_new_tokens=48, seed=7, sampling=SamplingOptions(temperature=temperature))
        return "".join(token.text for token in drawn)

    logits = llama.logits(llama.encode("Once upon a time"))
    return {"drawn": text(0.8), "greedy": text(0), "logits": logits.tolist(), "run": llama.describe_run()}


def gradient(name: str) -> dict[str, Any]:
    """Compare the gradient of a loss on four devices with the gradient on one device.

    Returns the largest error of any tensor, relative to the tensor's largest gradient.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import PartitionSpec as P

    from llamaspec.model.ops.table import Ops
    from llamaspec.model.parallel.partition import mesh
    from llamaspec.model.parallel.share import cut_axis, share
    from llamaspec.model.parallel.tensor import AXIS, tensor_parallel
    from llamaspec.model.tensors import weights
    from llamaspec.training.objectives.supervised import summed_loss
    from llamaspec.training.ops import WHOLE_ATTENTION, remat
    from llamaspec.training.parallel import spread
    from llamaspec.training.scratch import initial_tensors

    devices = 4
    config = replace(configs()["experts" if "experts" in name else "biases, scaled RoPE"], kv_heads=4, vocab=52)
    config = replace(config, layers=1, tied="tensor" not in name)
    tensors = initial_tensors(config, seed=0)
    tensors = {n: a + 0.1 * jax.random.normal(jax.random.key(i), a.shape) for i, (n, a) in enumerate(tensors.items())}
    ids = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab, (devices, 12)), jnp.int32)
    counted = jnp.ones((devices, 12), jnp.float32)
    static: dict[str, Any] = {"dtype": np.dtype(np.float32)}

    def single_device_loss(t):
        return summed_loss(t, ids, counted, config=config, ops=WHOLE_ATTENTION, **static)[0]

    over = mesh(devices)
    cut = {weight.name: cut_axis(weight) for weight in weights(config)}
    layout = {n: P() if axis is None else P(*[None] * axis, AXIS) for n, axis in cut.items()}
    shared = partial(summed_loss, config=share(config, devices), ops=tensor_parallel(WHOLE_ATTENTION), **static)

    def tensor_loss(t):
        on_each = jax.shard_map(
            lambda t: shared(t, ids, counted)[0], mesh=over, in_specs=(layout,), out_specs=P(), check_vma=False
        )
        return on_each(t)

    def inside(loss: Callable, layout: Any, check: bool) -> Any:
        def on_each(t, ids, counted):
            slopes = jax.grad(lambda t: loss(t, ids, counted))(t)
            return jax.tree.map(lambda g: lax.psum(g, AXIS), slopes) if check else slopes

        spread = (layout, P(AXIS) if check else P(), P(AXIS) if check else P())
        run = jax.shard_map(on_each, mesh=over, in_specs=spread, out_specs=layout, check_vma=check)
        return jax.jit(run)(tensors, ids, counted)

    def loss_of(ops: Ops, fsdp: bool) -> Callable:
        across = spread(config, devices=devices, fsdp=fsdp).loss(summed_loss, config=config, ops=ops, **static)
        return lambda t: across(t, ids, counted)[0]

    match name:
        case "data parallel":
            actual = jax.jit(jax.grad(loss_of(WHOLE_ATTENTION, False)))(tensors)
        case "FSDP" | "FSDP with experts":
            actual = jax.jit(jax.grad(loss_of(WHOLE_ATTENTION, True)))(tensors)
        case "FSDP, computed again":
            actual = jax.jit(jax.grad(loss_of(remat(WHOLE_ATTENTION), True)))(tensors)
        case "tensor parallel":
            actual = jax.jit(jax.grad(tensor_loss))(tensors)
        case "tensor parallel, differentiated inside":
            actual = inside(lambda t, ids, counted: shared(t, ids, counted)[0], layout, check=False)
        case _:
            replicated = dict.fromkeys(tensors, P())

            def of_mine(t, ids, counted):
                return summed_loss(t, ids, counted, config=config, ops=WHOLE_ATTENTION, **static)[0]

            actual = inside(of_mine, replicated, check=True)
    expected = _of_one_device(config, tensors, single_device_loss)
    off = max(float(jnp.max(jnp.abs(actual[n] - expected[n])) / jnp.max(jnp.abs(expected[n]))) for n in expected)
    return {"error": off}


def served(devices: int) -> dict[str, Any]:
    """Serve requests one by one, and then all at once with too few pages for all. Two requests use an adapter.

    In the result, `paged` is true if a request was preempted and a different request reused pages of the prefix cache.
    """
    import threading

    from llamaspec.model.candidates.walking import random_checkpoint
    from llamaspec.model.options import RunOptions
    from llamaspec.model.tensors import tensor_shapes
    from llamaspec.serving.loading import load_engine
    from llamaspec.serving.request import Finished, Request
    from llamaspec.verify.judging.walk import weights
    from tests.support.random_models import random_adapter

    config = replace(configs()["broad"], tied=False, context=128)
    checkpoint = random_checkpoint(config, weights(tensor_shapes(config), seed=0))
    adapters = {"one": random_adapter(config, parts=("q", "o", "down"))}
    options = RunOptions(context=128, devices=devices)
    engine = load_engine(checkpoint, options, width=3, cached_tokens=128, adapters=adapters)
    requests = [
        Request(
            tuple(at % 49 + 1 for at in range(length)),
            40,
            **{"temperature": 0.8 * (i % 2), "seed": i, "logprobs": 2, "ignore_eos": True},
            adapter="one" if i > 2 else "",
        )
        for i, length in enumerate((74, 48, 38, 20, 2))  # the first takes two of three pages, the second later, too
    ]

    def answers(some: list[Request]) -> list[Any]:
        events_by_request, ends = [[] for _ in some], [threading.Event() for _ in some]
        with engine._changed:  # the engine plans only when all requests have arrived
            for request, events, end in zip(some, events_by_request, ends, strict=True):

                def take(event: Any, events: list[Any] = events, end: threading.Event = end) -> None:
                    if isinstance(event, Finished):
                        events.append(event.reason)
                        end.set()
                    else:
                        events.extend(zip(event.ids, event.logprobs, event.top_logprobs, strict=True))

                engine.submit(request, take)
        assert all(end.wait(120) for end in ends) and engine.failed is None
        return events_by_request

    singles = [events_by_request for request in requests for events_by_request in answers([request])]
    together = answers(requests)
    stats = engine.stats()
    engine.close()
    paged = stats.preemptions > 0 and stats.cached_tokens > 0
    return {
        "same": singles == together,
        "paged": paged,
        "texts": [[token[0] for token in events_by_request[:-1]] for events_by_request in together],
    }


_gradients: dict[Any, Any] = {}


def _of_one_device(config: Any, tensors: Any, loss: Callable) -> Any:
    import jax

    if config not in _gradients:
        _gradients[config] = jax.jit(jax.grad(loss))(tensors)
    return _gradients[config]


def spread_cache(name: str) -> dict[str, Any]:
    """Compute the logits of a prompt and of two tokens on one device, and on four devices that divide the cache's rows.

    Return the largest difference.
    """
    from unittest.mock import patch

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import PartitionSpec as P

    from llamaspec.model.cache import Cache, LayerCache, empty_cache
    from llamaspec.model.candidates.walking import random_checkpoint
    from llamaspec.model.forward import forward
    from llamaspec.model.ops.xla import XLA
    from llamaspec.model.parallel import context
    from llamaspec.model.parallel.partition import mesh
    from llamaspec.model.parallel.tensor import AXIS
    from llamaspec.model.tensors import tensor_shapes
    from llamaspec.model.weights.loading import load_params
    from llamaspec.verify.judging.walk import weights

    def others_wrap(rows: Any, new: Any, at: Any) -> Any:
        devices, device = lax.axis_size(AXIS), lax.axis_index(AXIS)
        index, sequence = jnp.where(at % devices == device, at // devices, -1), jnp.arange(len(rows))[:, None]
        return rows.at[sequence, :, index].set(new.astype(rows.dtype).swapaxes(1, 2), mode="drop")

    # The last row of a device is in use, except in the case where each device keeps all positions.
    devices, rows = 4, 32 if name == "rows of others kept" else 8
    config = replace(configs()["broad"], layers=2, windows=(None, 3))
    if name == "scaled and capped scores":  # as in Gemma 2; both switches change these logits
        config = replace(config, attention_scale=1.0, attention_cap=1.0)
    checkpoint = random_checkpoint(config, weights(tensor_shapes(config), seed=0))
    dtype = np.dtype(jnp.bfloat16 if name == "bfloat16" else np.float32)
    stored = np.dtype(np.int8) if name == "int8" else dtype
    params = load_params(checkpoint, dtype=dtype, positions=rows)
    ops = context.context_parallel(XLA)
    if name == "rows of others kept":
        ops = ops._replace(norm_qkv=XLA.norm_qkv)
    elif name == "rows of others put at the end":  # as a negative index would

        def norm_qkv(x, layer, cache, positions, **static):
            with patch.object(context, "_own_rows", others_wrap):
                return context.context_parallel(XLA).norm_qkv(x, layer, cache, positions, **static)

        ops = ops._replace(norm_qkv=norm_qkv)
    elif name == "largest scores of each device":
        lax.pmax = lambda x, _: x  # the last case of this process, so the patch may stay
    run_forward = partial(forward, config=config, ops=XLA)
    spread: Any = P(None, None, "devices")
    cache_specs: Any = Cache([LayerCache(spread, spread)] * config.layers, P())  # type: ignore[arg-type]
    run = jax.shard_map(
        partial(forward, config=config, ops=ops),
        mesh=mesh(devices),
        in_specs=(P(), P(), cache_specs),
        out_specs=(P(), cache_specs),
        check_vma=False,
    )
    single_cache = many = empty_cache(config, batch=2, capacity=rows, dtype=stored)
    off, largest = 0.0, 0.0
    for tokens in np.split(np.random.default_rng(0).integers(0, config.vocab, (2, 7)).astype(np.int32), [5, 6], axis=1):
        expected, single_cache = jax.jit(run_forward)(params, tokens, single_cache)
        actual, many = jax.jit(run)(params, tokens, many)
        wrong = jnp.nan_to_num(jnp.abs(actual - expected), nan=jnp.inf)
        off, largest = max(off, float(jnp.max(wrong))), max(largest, float(jnp.max(jnp.abs(expected))))
    return {"error": off / largest}


def switched() -> Mapping[str, Any]:
    """Return models that combine switches of several families."""
    small = replace(configs()["broad"], heads=4, qk_norm=False, windows=None)
    return {
        "Gemma, Granite, SmolLM3": replace(
            small,
            layers=3,
            head_dim=8,
            activation="gelu_tanh",
            post_norms=True,
            windows=(3, None, None),
            rotary_dim=4,
            rotary_layers=(True, True, False),
            local_theta=100.0,
            attention_scale=1.0,
            attention_cap=2.0,
            logit_cap=3.0,
            embedding_scale=2.0,
            residual_scale=0.5,
            logit_divisor=2.0,
        ),
        "Qwen2-MoE": replace(small, experts=4, experts_per_token=2, shared_ffn=24),
        "OLMo 2": replace(small, pre_norms=False, post_norms=True, qk_norm=True, wide_qk_norm=True),
    }


def family_logits(name: str, kind: str, devices: int) -> dict[str, Any]:
    """Compute a prompt's logits on several devices. Returns the largest error, relative to the largest exact logit."""
    import numpy as np

    from llamaspec.model.candidates.walking import random_checkpoint
    from llamaspec.model.running.reference_backend import load_reference_params
    from llamaspec.model.tensors import tensor_shapes
    from llamaspec.reference import llama as reference
    from llamaspec.verify.judging.walk import weights

    config = switched()[name]
    checkpoint = random_checkpoint(config, weights(tensor_shapes(config), seed=0))
    tokens = np.array([3, 1, 4, 1, 5, 9], np.int32)
    actual = logits_on(checkpoint, kind, devices, tokens)
    exact = load_reference_params(checkpoint)
    expected, _ = reference.forward(exact, tokens, reference.empty_cache(config), config=config)
    return {"error": float(np.abs(actual - expected).max() / np.abs(expected).max())}


def logits_on(checkpoint: Any, kind: str, devices: int, tokens: Any) -> Any:
    """Compute the logits of a prompt on several devices."""
    import numpy as np

    from llamaspec.model.forward import forward
    from llamaspec.model.ops.xla import XLA
    from llamaspec.model.parallel.backend import cache_shapes, load_shares
    from llamaspec.model.parallel.partition import Partition, mesh
    from llamaspec.model.parallel.sharding import Parts, sharding_named
    from llamaspec.model.running.programs import Layout
    from llamaspec.model.weights.loading import abstract_params

    way, dtype, rows = sharding_named(kind), np.dtype(np.float32), len(tokens)
    parts, config = Parts(checkpoint, devices, None, way), way.config(checkpoint.config, devices)
    shares = [parts.of(i) for i in range(devices)]
    shapes = abstract_params(config, dtype=dtype, positions=rows, tensors=shares[0].tensors)
    partition = Partition(mesh(devices), way.weights(shapes, config), way.cache(config.layers))
    params = load_shares(shares, partition, dtype=dtype, positions=rows)
    layout = Layout(batch=1, capacity=rows, chunk=0, burst=1, cache_dtype=dtype, devices=way.rows_spread(devices))
    cache = partition.zeros(partition.cache, cache_shapes(layout, config))
    run = partition.jit(partial(forward, config=config, ops=way.ops(XLA))).jitted
    return np.asarray(run(params, tokens[None], cache, np.array([rows], np.int32))[0][0])


def drawn(*, own_key: bool) -> dict[str, Any]:
    """Sample tokens on one device and on four. Returns both lists of tokens.

    `same` says whether all four devices have seen the same tokens. With `own_key`, each device uses a different random
    key, which is a mistake (transformers #36634).
    """
    from contextlib import nullcontext
    from unittest.mock import patch

    import numpy as np
    from jax import lax

    from llamaspec.model import sampling
    from llamaspec.model.candidates.walking import random_checkpoint
    from llamaspec.model.llama import load_backend
    from llamaspec.model.options import RunOptions, SamplingOptions
    from llamaspec.model.parallel.tensor import AXIS
    from llamaspec.model.running.jax_backend import JaxBackend
    from llamaspec.model.tensors import tensor_shapes
    from llamaspec.verify.judging.walk import weights

    def uniform(key: Any, position: Any, right: Callable = sampling.uniform) -> Any:
        return right(key, position + 1000 * lax.axis_index(AXIS))

    config = configs()["broad"]
    checkpoint = random_checkpoint(config, weights(tensor_shapes(config), seed=0))

    def text(devices: int) -> tuple[list[int], list[np.ndarray]]:
        """Sample eight tokens; return the tokens, and the set of seen tokens on each device."""
        backend = load_backend(checkpoint, RunOptions(devices=devices, context=32))
        assert isinstance(backend, JaxBackend)
        options = SamplingOptions(temperature=1.0)
        drawing = backend.begin(3, seen=np.zeros(config.vocab, bool), seed=7, options=options, stops=[])
        tokens, drawing, _ = backend.decode(backend.start(), drawing, steps=8)
        return tokens(), [np.asarray(shard.data) for shard in drawing.text.seen.addressable_shards]

    single, _ = text(1)
    with patch.object(sampling, "uniform", uniform) if own_key else nullcontext():
        tokens, seen = text(4)
    return {"alone": single, "drawn": tokens, "same": all(np.array_equal(draws, seen[0]) for draws in seen)}


_single_device: list[Any] = []


def trained(kind: str) -> dict[str, Any]:
    """Train on two devices, once without a break and once killed and resumed.

    Return the difference between the two results, and how much they differ from training on one device.
    """
    import string
    import tempfile

    import numpy as np

    from llamaspec.model.checkpoints.open import open_checkpoint
    from llamaspec.model.tokenizers.load import load_tokenizer
    from llamaspec.reference.config import Config
    from llamaspec.training.data import Text
    from llamaspec.training.recipe import Recipe
    from llamaspec.training.scratch import train
    from tests.support import tiny_tokenizers

    with tempfile.TemporaryDirectory() as folder:
        text, tokenizer = Path(folder) / "text", Path(folder) / "tokenizer.bin"
        letters = string.ascii_lowercase * 2  # equal lengths after padding, so one program is enough
        text.write_text("\n\n".join(letters[i : i + 20] for i in range(26)))
        tokenizer.write_bytes(tiny_tokenizers.llama2c())
        source = Text(text, load_tokenizer(tokenizer), {tokenizer.name: tokenizer.read_bytes()}, context=64)
    sizes: dict[str, Any] = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 8, "ffn": 32, "context": 64}
    config = Config(**sizes, vocab=source.tokenizer.vocab, eps=1e-5, theta=10_000.0, tied=True)
    recipe = Recipe(config=config, steps=4, batch=3, lr=0.01, warm_up=1)

    def run(out: Path, *, die: bool = False, **options: Any) -> list[float]:
        losses = []

        def report(step: Any) -> None:
            if step.evaluation is None:
                losses.append(step.loss)
            if die and step.step == 3:
                raise KeyboardInterrupt

        try:
            train(recipe, source, out, save_every=2, eval_every=100, report=report, **options)
        except KeyboardInterrupt:
            pass
        return losses

    def weights(out: Path) -> dict[str, np.ndarray]:
        from safetensors.numpy import load_file

        return load_file(sorted(out.glob("step-*.safetensors"))[-1])

    with tempfile.TemporaryDirectory() as folder:
        single, straight, killed = (Path(folder) / name for name in ("alone", "straight", "killed"))
        options: dict[str, Any] = {"devices": 2, "fsdp": kind == "FSDP"}
        if not _single_device:  # one device's training, which both kinds are compared with
            _single_device.extend((run(single), weights(single)))
        (expected, a), losses = _single_device, run(straight, **options)
        run(killed, die=True, **options)
        run(killed, resume=True, **options)
        b, c = weights(straight), weights(killed)
        return {
            "losses": max(abs(x - y) for x, y in zip(expected, losses, strict=True)),
            "weights": max(float(np.abs(a[n] - b[n]).max()) for n in a),
            "same": a.keys() == b.keys() and all(np.array_equal(b[n], c[n]) for n in b),
            "steps": len(losses),
            "opens": open_checkpoint(killed / "model").config == config,
        }


def tuned(method: str) -> dict[str, Any]:
    """Fine-tune for one step along the gradient, on one device and on two.

    The step has three rows, so one device gets a row of padding. Return the largest differences between the reports and
    between the trained weights as multiples of their bounds, and the largest change of a weight.

    Each run is within gamma_n of the exact sums: n counts the additions on the way of a number through every matrix,
    forward and backward. So the runs differ by at most twice as much, and by the roundings of the changed weights. We
    compare weights along a random direction, because gamma_n holds relative to the sum of magnitudes.
    """
    import tempfile
    from unittest.mock import patch

    import numpy as np
    import optax

    from llamaspec.model.checkpoints.open import open_checkpoint
    from llamaspec.model.tokenizers.of_model import tokenizer_of
    from llamaspec.training.objectives.reward import Answer
    from llamaspec.training.tune import TuneRecipe, tune
    from llamaspec.verify.bounds.precision import U
    from llamaspec.verify.bounds.running_error import gamma
    from tests.training.test_tune import write_tiny

    def graded(example: Any, reward: float, scores: list[float]) -> Answer:
        return Answer(example, float(example.ids[-1] % 2), scores)  # a random model draws no right answer

    def weights(path: Path) -> dict[str, np.ndarray]:
        return {name: tensor.read().astype(np.float64) for name, tensor in open_checkpoint(path).tensors.items()}

    answers = {"preference": {"chosen": "yes", "rejected": "never"}, "reward": {"answer": "a"}}
    lines = [{"prompt": f"{i}"} | answers.get(method, {"completion": "say"}) for i in range(20)]
    sizes: dict[str, Any] = {"batch": 1, "group": 3} if method == "reward" else {"batch": 3, "context": 12}
    recipe = TuneRecipe(steps=1, lr=1.0, method=method, answer_tokens=3, **sizes)
    reports: list[Any] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("llamaspec.training.tune.optimizer", lambda **_: optax.sgd(1.0)),
        patch("llamaspec.training.objectives.reward.Answer", graded),
    ):
        checkpoint = open_checkpoint(write_tiny(Path(folder) / "model", layers=1))
        teacher = open_checkpoint(write_tiny(Path(folder) / "teacher", layers=2)) if method == "distill" else None
        data = Path(folder) / "data.jsonl"
        data.write_text("\n".join(map(json.dumps, lines)))
        how: dict[str, Any] = {"base": "tiny", "teacher": teacher, "report": reports.append}
        for devices in (1, 2):
            out = Path(folder) / f"{devices}"
            tune(checkpoint, tokenizer_of(checkpoint, None), None, data, out, recipe, devices=devices, **how)
        before, single, double = (weights(Path(folder) / name) for name in ("model", "1/model", "2/model"))
    config = checkpoint.config
    forward = config.dim + 2 * config.heads * config.head_dim + config.context + config.ffn + config.vocab
    error = 2 * gamma(2 * 2 * forward)
    largest = error * 12 * 4 * np.log(config.vocab)  # 12 tokens of a row, each with up to four times log(vocab)
    numbers = [[r.loss, *r.measures.values(), e.evaluation.loss] for r, e in (reports[:2], reports[2:])]
    ratios, rng = [], np.random.default_rng(5)
    for name, old in before.items():
        direction = rng.normal(size=old.shape)
        allowed = error * np.abs((single[name] - old) * direction) + 2 * U * np.abs(single[name] * direction)
        ratios.append(abs(np.sum((double[name] - single[name]) * direction)) / np.sum(allowed))
    return {
        "reports": max(abs(x - y) for x, y in zip(*numbers, strict=True)) / largest,
        "weights": max(ratios),
        "change": max(float(np.abs(single[name] - before[name]).max()) for name in single),
    }


def command(*arguments: str) -> dict[str, Any]:
    """Run a `llamaspec` command in this process. Returns its exit code, stdout and stderr."""
    from contextlib import redirect_stderr, redirect_stdout
    from io import BytesIO, TextIOWrapper
    from unittest.mock import patch

    from llamaspec import cli

    with redirect_stdout(TextIOWrapper(BytesIO())) as out, redirect_stderr(TextIOWrapper(BytesIO())) as err:
        with patch.object(sys, "argv", ["llamaspec", *arguments]):
            try:
                cli.main()
            except SystemExit as end:
                code = end.code
    for stream in (out, err):
        stream.seek(0)
    return {"code": code or 0, "out": out.read(), "err": err.read()}


def commands(typed: Iterable[tuple[str, ...]]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yield a function per command. The commands share one folder, and a machine profile that is measured briefly."""
    import tempfile

    from llamaspec.benchmarks.suites import multi_device as several
    from llamaspec.model.insight import machine
    from llamaspec.model.insight.shapes import SHAPES
    from llamaspec.model.insight.timing import Effort
    from llamaspec.reference.config import Config

    SHAPES["tiny"] = Config(128, 2, 4, 2, 32, 256, vocab=96, context=128, eps=1e-5, theta=1e4)
    several.SIZES, several.LOOP, several.ROUNDS = (4096, 1 << 20), 2, 1
    machine.SIZES["cpu"] = machine.ArraySizes(1 << 18, 32, Effort(2))
    machine.last_level_cache = lambda: 1
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        os.chdir(folder)
        for arguments in typed:
            yield partial(command, *arguments)


def cases(kind: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yield a function per case of a kind, in the order of the tables above."""
    match kind:
        case "walk" | "more":
            yield from ((lambda case=case: walked(case)) for case in (WALKS if kind == "walk" else MORE))
        case "every":
            yield from ((lambda case=case: walked(case) | {"case": case}) for case in EVERY)
        case "stories":
            yield from (partial(generated, *shared) for shared in SHARED_BY)
        case "gradients":
            yield from ((lambda name=name: gradient(name)) for name in GRADIENTS)
        case "caches":
            yield from ((lambda name=name: spread_cache(name)) for name in SPREAD)
        case "families":
            yield from (partial(family_logits, *case) for case in FAMILIES)
        case "drawn":
            yield from (partial(drawn, own_key=own) for own in (False, True))
        case "trained":
            yield from ((lambda kind=kind: trained(kind)) for kind in TRAINED)
        case "tuned":
            yield from (partial(tuned, method) for method in TUNED)
        case "served":
            yield from (partial(served, devices) for devices in SERVED)
        case "commands":
            yield from commands(COMMANDS.values())
        case "shown":
            yield from commands(documented_commands().values())


if __name__ == "__main__":
    for case in cases(*sys.argv[1:]):
        print(json.dumps(case()), flush=True)
    os._exit(0)  # an XLA thread that wants Python during shutdown sometimes aborts the process
