"""Results of several virtual devices, from a process that has eight of them: one JSON line a case on stdout.

    python -m tests.on_devices walk          every case of `WALKS`
    python -m tests.on_devices more          every case of `MORE`
    python -m tests.on_devices mutants       every case of `MUTANTS`
    python -m tests.on_devices gradients     every case of `GRADIENTS`
    python -m tests.on_devices caches        every case of `SPREAD`
    python -m tests.on_devices trained       a training on two devices, killed and resumed, for each kind of `TRAINED`
    python -m tests.on_devices stories       the texts of the built-in model, by each way of `SHARED_BY`
    python -m tests.on_devices commands      code, stdout and stderr of every command of `COMMANDS`, then of `shown`

A case that raises gives its error.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parents[1]
DEVICES = 8


class Walk(NamedTuple):
    """A walk of `verify.walk` over a model that so many devices share."""

    model: str  # of `configs()`
    devices: int
    dtype: str = "float32"
    table: str = "xla"
    quantize: str | None = None
    way: str = "tensor"


WALKS = [
    Walk("broad", 2),
    Walk("broad", 8, "bfloat16"),
    Walk("experts", 4),
    Walk("wide", 2, table="cpu", quantize="q4"),
    Walk("broad", 4, way="context"),
    Walk("even", 4, way="FSDP"),
]
MORE = [
    *(Walk("broad", devices) for devices in (1, 4, 8)),
    Walk("experts", 2, "bfloat16"),
    Walk("experts", 8, "bfloat16", way="context"),
    Walk("wide", 2, "bfloat16", table="cpu", quantize="q4", way="context"),
    Walk("wide", 2, table="cpu"),
    *(Walk("wide", 2, quantize=scheme) for scheme in ("q8", "q8_row", "q4", "nf4")),
    Walk("wide", 2, "bfloat16", table="cpu", quantize="q4"),
    *(
        Walk(name, devices, dtype, table)
        for name in ("biases, scaled RoPE", "7 heads to 1", "2 heads to 1, wide", "experts")
        for devices in (2, 4)
        if devices == 2 or name != "7 heads to 1"
        for dtype in ("float32", "bfloat16")
        for table in ("xla", "cpu")
    ),
]
MUTANTS = {  # the least that the first wrong op is out of bounds by, in the dtypes where it must be
    "a bias added on every device": ("float32", 1000),
    "a residual added on every device": ("float32", 1000),
    "one device's sum instead of all": ("float32", 1000),
    "a sum of bfloat16 in float32": ("float32", 10),
    "a sum of bfloat16 in bfloat16": ("bfloat16", 2),
    "an even cut through q, k and v": ("float32", 1000),
    "a residual of experts added on every device": ("float32", 1000),
    "logits gathered backwards": ("float32", 1000),
    "a kv head of another device": ("float32", 1000),
    "keys and values written by every device": ("float32", 1000),
    "each device's own largest score": ("float32", 1000),
    "a stack gathered in the order of the devices": ("float32", 1000),
}


SHARED_BY = (("tensor", 1), ("tensor", 2), ("tensor", 4), ("context", 4))
GRADIENTS = {  # whether the gradient is that of one device
    "data parallel": True,
    "FSDP": True,
    "FSDP, computed again": True,
    "FSDP with experts": True,
    "tensor parallel": True,
    "data parallel, differentiated inside with checks": False,
    "tensor parallel, differentiated inside": False,
}
SPREAD = {  # caches on four devices, by whether logits are those of one device
    "float32": True,
    "int8": True,
    "bfloat16": True,
    "rows of others kept": False,
    "largest scores of each device": False,
}
TRAINED = ("data parallel", "FSDP")
TINY = ("--shape", "tiny", "--context", "20")  # a shape that only the process of these commands knows
COMMANDS = {  # run one after the other, in one process with one folder of caches
    "plan before": ("inspect", "--plan", "--devices", "2", "--json"),
    "bench of one and two": ("bench", *TINY, "--quantize", "q8", "--suite", "collectives", "--devices", "2"),
    "plan": ("inspect", "--plan", "--devices", "2", "--json"),
    "bench of three": ("bench", *TINY, "--devices", "3"),
    "bench of many sequences": ("bench", *TINY, "--devices", "2", "--batch", "2"),
    "alone": ("generate", "Once", "--parallel", "context"),
    "growth": ("bench", *TINY, "--devices", "2", "--suite", "growth"),
}
EARLY = ("--max-new-tokens", "40")


def shown() -> dict[str, tuple[str, ...]]:
    """Give the commands that docs/parallel.md shows, by their verbs; a text ends early here."""
    (block,) = re.findall(r"^```sh\n(.*?)^```$", (REPOSITORY / "docs/parallel.md").read_text(), re.M | re.S)
    typed = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    return {verb: (verb, *words, *EARLY * (verb == "generate")) for verb, *words in typed}


def results(*arguments: str, devices: int = DEVICES) -> list[dict[str, Any]]:
    """Run this module in a process that has so many devices; an object a case."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.on_devices", *arguments],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def configs() -> Mapping[str, Any]:
    """Models whose shapes make mistakes show."""
    from verify.walk import CONFIGS

    small = replace(CONFIGS["biases, scaled RoPE"], layers=1)
    return {
        # Two kv heads on up to eight devices, a vocabulary that none but one divides, and every kind of weight.
        "broad": replace(small, heads=8, kv_heads=2, head_dim=4, vocab=51, qk_norm=True, windows=(3,), tied=True),
        "even": replace(small, heads=8, kv_heads=4, head_dim=4, vocab=52, tied=True),  # four devices divide all rows
        # Wide enough for groups of 64 columns on each of two devices.
        "wide": replace(small, layers=1, dim=128, heads=4, kv_heads=2, head_dim=32, ffn=256),
        **CONFIGS,
        "experts": replace(CONFIGS["experts"], layers=1),
    }


def way_of(case: Walk, config: Any) -> Any:
    """Find how a case shares its model. FSDP is a way only here: what generates has no use for it."""
    from jax.sharding import PartitionSpec as P

    from model.parallel.gathered import gathered, row_layouts
    from model.parallel.way import Way, way_named
    from model.weights.params import Names, array_names

    if case.way != "FSDP":
        return way_named(case.way)
    import jax

    named = row_layouts(config, case.devices)

    class ByRows(Way):
        """A part of the rows of each matrix on each device, and all of the cache."""

        def config(self, whole: Any, devices: int) -> Any:
            return whole

        def part(self, checkpoint: Any, *, device: int, devices: int) -> Any:
            def cut(name: str, tensor: Any) -> Any:
                if named[name] == P():
                    return tensor
                rows = tensor.shape[0] // devices
                mine = slice(device * rows, (device + 1) * rows)
                return tensor._replace(shape=(rows, *tensor.shape[1:]), read=lambda: tensor.read()[mine])

            return replace(checkpoint, tensors={name: cut(name, one) for name, one in checkpoint.tensors.items()})

        def weights(self, params: Any, config: Any) -> Any:
            def layout(place: Any, held: Any) -> Any:
                spec = named[place.names[0]] if isinstance(place, Names) else P()
                return jax.tree.map(lambda _: spec, held)

            return jax.tree.map(layout, array_names(config, params.rope), params)

    return ByRows("tensor", lambda ops: gathered(ops, config), kept=P(), hidden=P())


def walked(case: Walk, parallel: Callable | None = None, change: Callable | None = None) -> dict[str, Any]:
    """Walk through a prompt and a token; the first wrong result, and the worst ratio of an error to its bound."""
    import numpy as np

    from model.candidates.walking import random_checkpoint
    from model.ops.cpu import CPU
    from model.ops.xla import XLA
    from model.parallel.walking import walkable_on
    from model.tensors import tensor_shapes
    from verify.precision import precision
    from verify.walk import first_wrong, walk, weights

    config, kind = configs()[case.model], precision(case.dtype)
    arrays = weights(tensor_shapes(config), seed=0)
    options: dict[str, Any] = {"devices": case.devices, "dtype": kind.dtype, "rows": 8, "quantize": case.quantize}
    table, way = {"xla": XLA, "cpu": CPU}[case.table], way_of(case, config)
    options["way"] = way._replace(ops=parallel or way.ops)

    def model(arrays: dict[str, np.ndarray]) -> Any:
        checkpoint = random_checkpoint(config, arrays)
        return walkable_on(checkpoint, table, **options)

    made = model(change(arrays, config, case.devices) if change else arrays)
    if change:
        made = replace(made, exact=model(arrays).exact)
    tokens = [np.array([3, 1, 4, 1, 5], np.int32), np.array([9], np.int32)]
    steps = list(walk(made, tokens, config=config, unit=kind.unit))
    wrong = first_wrong(steps)
    worst = max(step.ratio for step in steps)
    return {"wrong": wrong and wrong.op, "ratio": wrong.ratio if wrong else worst, "steps": len(steps)}


def mutant(name: str) -> dict[str, Any]:
    """Walk through a model with a mistake that people make."""
    from unittest.mock import patch

    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    from model.parallel import context, gathered
    from model.parallel.tensor import AXIS, tensor_parallel, total
    from model.tensors import NAMES, row_order

    dtype, _ = MUTANTS[name]
    case = Walk("biases, scaled RoPE", 2, dtype)

    def with_total(other: Callable) -> Callable:
        def make(ops: Any) -> Any:
            added = {op: partial(getattr(ops, op), total=other) for op in ("project_add", "down_add", "moe_add")}
            return tensor_parallel(ops)._replace(**added)

        return make

    def bias_inside(ops: Any) -> Any:
        def project_add(h, layer, x):
            alone = ops.project_add(h, layer, jnp.zeros(x.shape, jnp.float32))  # with the bias
            return (x.astype(jnp.float32) + total(alone)).astype(x.dtype)

        return tensor_parallel(ops)._replace(project_add=project_add)

    def residual_inside(ops: Any) -> Any:
        def down_add(g, layer, x):
            bare = layer._replace(ffn=layer.ffn._replace(down=layer.ffn.down._replace(bias=None)))
            return total(ops.down_add(g, bare, x)) + layer.ffn.down.bias

        return tensor_parallel(ops)._replace(down_add=down_add)

    def residual_of_experts(ops: Any) -> Any:
        return tensor_parallel(ops)._replace(
            moe_add=lambda x, layer, *, config: total(ops.moe_add(x, layer, config=config))
        )

    def backwards(ops: Any) -> Any:
        def norm_logits(x, params, *, config):
            logits = lax.all_gather(ops.norm_logits(x, params, config=config), AXIS)[::-1]
            return jnp.moveaxis(logits, 0, -2).reshape(*x.shape[:-1], -1)[..., : config.vocab]

        return tensor_parallel(ops)._replace(norm_logits=norm_logits)

    def even_cut(arrays: Any, config: Any, devices: int) -> Any:
        """Weights whose right cut gives each device what an even cut of the right [q; k; v] would."""
        changed = dict(arrays)
        for layer in range(config.layers):
            names = [NAMES[part].format(layer=layer) + ".weight" for part in "qkv"]
            stack = np.concatenate([arrays[n] for n in names])[np.argsort(row_order(config, devices)["qkv"])]
            ends = np.cumsum([len(arrays[n]) for n in names])[:-1]
            changed |= dict(zip(names, np.split(stack, ends), strict=True))
        return changed

    def other_head(arrays: Any, config: Any, devices: int) -> Any:
        """Weights whose kv heads lie on each other's devices."""
        names = [NAMES["k"].format(layer=i) + ".weight" for i in range(config.layers)]
        return arrays | {name: np.roll(arrays[name], len(arrays[name]) // 2, axis=0) for name in names}

    def written_by_all(ops: Any) -> Any:
        def everyone(rows, new, at):
            index, sequence = at // lax.axis_size(AXIS), jnp.arange(len(rows))[:, None]
            return rows.at[sequence, :, index].set(new.astype(rows.dtype).swapaxes(1, 2), mode="drop")

        def norm_qkv(*arguments, **static):
            with patch.object(context, "_own_rows", everyone):
                return shared.norm_qkv(*arguments, **static)

        shared = context.context_parallel(ops)
        return shared._replace(norm_qkv=norm_qkv)

    def own_largest(ops: Any) -> Any:
        def attend(*arguments, **static):
            with patch.object(lax, "pmax", lambda x, _: x):
                return context.attend_across(*arguments, **static)

        return context.context_parallel(ops)._replace(attend=attend)

    def in_order(ops: Any) -> Any:
        def rows(part, rows):
            return part if len(part) == sum(rows) else lax.all_gather(part, AXIS, tiled=True)

        def patched(op):
            def call(*arguments, **static):
                with patch.object(gathered, "gathered_rows", rows):
                    return op(*arguments, **static)

            return call

        return ops._make(map(patched, gathered.gathered(ops, configs()["even"])))

    def narrow(y):
        return total(y.astype(jnp.bfloat16)).astype(jnp.float32)

    match name:
        case "a bias added on every device":
            return walked(case, bias_inside)
        case "a residual added on every device":
            return walked(case, residual_inside)
        case "one device's sum instead of all":
            return walked(case, with_total(lambda y: y * lax.axis_size(AXIS)))
        case "a sum of bfloat16 in float32" | "a sum of bfloat16 in bfloat16":
            return walked(case, with_total(narrow))
        case "an even cut through q, k and v":
            return walked(case, change=even_cut)
        case "a residual of experts added on every device":
            return walked(case._replace(model="experts"), residual_of_experts)
        case "logits gathered backwards":
            return walked(case, backwards)
        case "a kv head of another device":
            return walked(case, change=other_head)
        case "keys and values written by every device":
            return walked(Walk("broad", 4, way="context"), written_by_all)
        case "each device's own largest score":
            return walked(Walk("broad", 4, way="context"), own_largest)
        case "a stack gathered in the order of the devices":
            return walked(Walk("even", 4, way="FSDP"), in_order)
    raise ValueError(name)


def told(way: Any, devices: int) -> dict[str, Any]:
    """Tell the beginning of a story, drawn and greedy, and compute logits."""
    from model.llama import load
    from model.options import SamplingOptions

    llama = load("stories", devices=devices, parallel=way, context=64)

    def text(temperature: float) -> str:
        drawn = llama.generate("Once", max_new_tokens=48, seed=7, sampling=SamplingOptions(temperature=temperature))
        return "".join(token.text for token in drawn)

    logits = llama.logits(llama.encode("Once upon a time"))
    return {"drawn": text(0.8), "greedy": text(0), "logits": logits.tolist(), "run": llama.describe_run()}


def gradient(name: str) -> dict[str, Any]:
    """Compare the gradient of a loss on four devices with that on one; errors are shares of its largest number."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import PartitionSpec as P

    from model.ops.table import Ops
    from model.parallel.partition import mesh
    from model.parallel.share import cut_axis, share
    from model.parallel.tensor import AXIS, tensor_parallel
    from model.tensors import weights
    from training.objective import WHOLE, initial_tensors, remat, summed_loss
    from training.parallel import spread

    devices = 4
    config = replace(configs()["experts" if "experts" in name else "biases, scaled RoPE"], kv_heads=4, vocab=52)
    config = replace(config, layers=2, tied="tensor" not in name)
    tensors = initial_tensors(config, seed=0)
    tensors = {n: a + 0.1 * jax.random.normal(jax.random.key(i), a.shape) for i, (n, a) in enumerate(tensors.items())}
    ids = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab, (devices, 12)), jnp.int32)
    counted = jnp.ones((devices, 12), jnp.float32)
    static: dict[str, Any] = {"dtype": np.dtype(np.float32)}

    def alone(t):
        return summed_loss(t, ids, counted, config=config, ops=WHOLE, **static)[0]

    over = mesh(devices)
    cut = {weight.name: cut_axis(weight) for weight in weights(config)}
    layout = {n: P() if axis is None else P(*[None] * axis, AXIS) for n, axis in cut.items()}
    shared = partial(summed_loss, config=share(config, devices), ops=tensor_parallel(WHOLE), **static)

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
            found = jax.jit(jax.grad(loss_of(WHOLE, False)))(tensors)
        case "FSDP" | "FSDP with experts":
            found = jax.jit(jax.grad(loss_of(WHOLE, True)))(tensors)
        case "FSDP, computed again":
            found = jax.jit(jax.grad(loss_of(remat(WHOLE), True)))(tensors)
        case "tensor parallel":
            found = jax.jit(jax.grad(tensor_loss))(tensors)
        case "tensor parallel, differentiated inside":
            found = inside(lambda t, ids, counted: shared(t, ids, counted)[0], layout, check=False)
        case _:
            whole = dict.fromkeys(tensors, P())

            def of_mine(t, ids, counted):
                return summed_loss(t, ids, counted, config=config, ops=WHOLE, **static)[0]

            found = inside(of_mine, whole, check=True)
    due = jax.jit(jax.grad(alone))(tensors)
    off = max(float(jnp.max(jnp.abs(found[n] - due[n])) / jnp.max(jnp.abs(due[n]))) for n in due)
    return {"error": off}


def spread_cache(name: str) -> dict[str, Any]:
    """Compare logits of a prompt and two more tokens, with the cache's rows on four devices, with those of one."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import PartitionSpec as P

    from model.cache import Cache, LayerCache, empty_cache
    from model.candidates.walking import random_checkpoint
    from model.forward import forward
    from model.ops.xla import XLA
    from model.parallel import context
    from model.parallel.partition import mesh
    from model.tensors import tensor_shapes
    from model.weights.params import load_params
    from verify.walk import weights

    devices, rows = 4, 32
    config = replace(configs()["broad"], layers=2, windows=(None, 3))
    checkpoint = random_checkpoint(config, weights(tensor_shapes(config), seed=0))
    dtype = np.dtype(jnp.bfloat16 if name == "bfloat16" else np.float32)
    stored = np.dtype(np.int8) if name == "int8" else dtype
    params = load_params(checkpoint, dtype=dtype, positions=rows)
    ops = context.context_parallel(XLA)
    if name == "rows of others kept":
        ops = ops._replace(norm_qkv=XLA.norm_qkv)
    elif name == "largest scores of each device":
        lax.pmax = lambda x, _: x  # the last case of this process
    whole = partial(forward, config=config, ops=XLA)
    spread: Any = P(None, None, "devices")
    kept: Any = Cache([LayerCache(spread, spread)] * config.layers, P())  # type: ignore[arg-type]
    run = jax.shard_map(
        partial(forward, config=config, ops=ops),
        mesh=mesh(devices),
        in_specs=(P(), P(), kept),
        out_specs=(P(), kept),
        check_vma=False,
    )
    one = many = empty_cache(config, batch=2, capacity=rows, dtype=stored)
    off, largest = 0.0, 0.0
    for tokens in np.split(np.random.default_rng(0).integers(0, config.vocab, (2, 7)).astype(np.int32), [5, 6], axis=1):
        due, one = jax.jit(whole)(params, tokens, one)
        found, many = jax.jit(run)(params, tokens, many)
        wrong = jnp.nan_to_num(jnp.abs(found - due), nan=jnp.inf)
        off, largest = max(off, float(jnp.max(wrong))), max(largest, float(jnp.max(jnp.abs(due))))
    return {"error": off / largest}


def trained(kind: str) -> dict[str, Any]:
    """Train on two devices, and again with a kill and a new start; the differences, also from one device."""
    import tempfile

    import numpy as np

    from model.checkpoints.open import open_checkpoint
    from reference.config import Config
    from training.loop import train
    from training.recipe import Recipe
    from training.stories.source import Stories

    source = Stories()
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
        alone, straight, killed = (Path(folder) / name for name in ("alone", "straight", "killed"))
        options: dict[str, Any] = {"devices": 2, "fsdp": kind == "FSDP"}
        expected, losses = run(alone), run(straight, **options)
        run(killed, die=True, **options)
        run(killed, resume=True, **options)
        a, b, c = weights(alone), weights(straight), weights(killed)
        return {
            "losses": max(abs(x - y) for x, y in zip(expected, losses, strict=True)),
            "weights": max(float(np.abs(a[n] - b[n]).max()) for n in a),
            "same": a.keys() == b.keys() and all(np.array_equal(b[n], c[n]) for n in b),
            "steps": len(losses),
            "opens": open_checkpoint(killed / "model").config == config,
        }


def command(*arguments: str) -> dict[str, Any]:
    """Run a command of `llamaspec` in this process."""
    from contextlib import redirect_stderr, redirect_stdout
    from io import BytesIO, TextIOWrapper
    from unittest.mock import patch

    import cli

    with redirect_stdout(TextIOWrapper(BytesIO())) as out, redirect_stderr(TextIOWrapper(BytesIO())) as err:
        with patch.object(sys, "argv", ["llamaspec", *arguments]):
            try:
                cli.main()
            except SystemExit as end:
                code = end.code
    for stream in (out, err):
        stream.seek(0)
    return {"code": code or 0, "out": out.read(), "err": err.read()}


def commands() -> Iterator[Callable[[], dict[str, Any]]]:
    """Give a function for each of `COMMANDS`, in a folder of their own, on a machine that is measured briefly."""
    import tempfile

    from benchmarks import several
    from model.insight import machine
    from model.insight.shapes import SHAPES
    from model.insight.timing import Effort
    from reference.config import Config

    SHAPES["tiny"] = Config(128, 2, 4, 2, 32, 256, vocab=96, context=128, eps=1e-5, theta=1e4)
    several.SIZES, several.LOOP, several.ROUNDS = (4096, 1 << 20), 2, 1
    machine.SIZES["cpu"] = machine.Sizes(1 << 18, 32, Effort(2))
    machine.last_level_cache = lambda: 1
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        os.chdir(folder)
        for arguments in (*COMMANDS.values(), *shown().values()):
            yield partial(command, *arguments)


def cases(kind: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """Give a function for each case, in the order of the tables above."""
    match kind:
        case "walk" | "more":
            yield from ((lambda case=case: walked(case)) for case in (WALKS if kind == "walk" else MORE))
        case "stories":
            yield from (partial(told, *shared) for shared in SHARED_BY)
        case "gradients":
            yield from ((lambda name=name: gradient(name)) for name in GRADIENTS)
        case "caches":
            yield from ((lambda name=name: spread_cache(name)) for name in SPREAD)
        case "trained":
            yield from ((lambda kind=kind: trained(kind)) for kind in TRAINED)
        case "commands":
            yield from commands()
        case "mutants":
            yield from ((lambda name=name: mutant(name)) for name in MUTANTS)


if __name__ == "__main__":
    for case in cases(*sys.argv[1:]):
        print(json.dumps(case()), flush=True)
