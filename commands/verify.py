"""`verify`: hold ops to their definitions."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.loading import prepare_jax
from commands.options import Verb, json_option
from commands.output import write, write_json
from commands.progress import progress_bar

if TYPE_CHECKING:
    import numpy as np

    from model.checkpoints.checkpoint import Checkpoint
    from model.ops.table import Ops
    from reference.llama import Params
    from verify.campaign import Campaign, Job
    from verify.runner import Report
    from verify.walk import Model as WalkedModel
    from verify.walk import Step


POSITIVE = click.FloatRange(0, min_open=True)


@click.command(cls=Verb)
@click.argument("names", nargs=-1, metavar="[OP]...")
@click.option(
    "--candidate",
    metavar="MODULE[:FUNCTION]",
    help="What to verify; of a module, the functions called as the ops are.  [default: the ops of this package]",
)
@click.option("--arrays", help="What it is handed: jax, numpy, torch or cupy.  [default: jax]")
@click.option("--dtype", "dtypes", multiple=True, default=["float32"], show_default=True, help="May be repeated.")
@click.option("--device", help="Where its arrays are, in its library's words: cpu, gpu, cuda:1.")
@click.option("--python", default=sys.executable, metavar="PATH", help="The Python that runs it.  [default: this one]")
@click.option("--examples", type=click.IntRange(1), default=200, show_default=True, help="Draws for an op and dtype.")
@click.option("--time-budget", "seconds", type=POSITIVE, default=60.0, show_default=True, help="Seconds, likewise.")
@click.option(
    "--timeout", type=POSITIVE, default=60.0, show_default=True, help="Seconds for a call and its compilation."
)
@click.option("--shapes", type=click.IntRange(1), help="Different shapes at most.  [default: 64 for jax]")
@click.option("--set", "narrowed", multiple=True, metavar="DRAW=A,B", help="Draw from these only: --set dim=128,256.")
@click.option("--seed", type=click.IntRange(0), help="Same seed, same draws.  [default: drawn, and printed]")
@click.option("--strict", is_flag=True, help="What is suspicious counts as violated.")
@click.option("--replay", metavar="FILE", help="Call with the inputs of a counterexample again.")
@click.option("--replays", default=".", show_default=True, metavar="DIR", help="Where counterexamples are written.")
@click.option("--junit", metavar="FILE", help="Write results for a CI system.")
@click.option("--model", metavar="MODEL", help="Walk through a model instead, and name the first op that is wrong.")
@click.option("--kernels", default="auto", show_default=True, help="With --model: which implementation of the ops.")
@click.option("--list", "listing", is_flag=True, help="Print contracts: how to be called, bounds, laws, mutants.")
@click.option("--mutants", is_flag=True, help="Verify wrong implementations: each must be found out.")
@json_option
def verify(names: tuple[str, ...], listing: bool, mutants: bool, **options: Any):
    """Hold ops to the reference, each within a proven bound, on the inputs that break kernels.

    A candidate is called exactly as the reference is: --list shows how. Exits with 0 if all are
    within their bounds and with 1 if not.
    """
    import secrets

    from verify.catalogue import CONTRACTS, contract_for

    if options["seed"] is None:
        options["seed"] = secrets.randbelow(2**32)
    try:
        ops = [contract_for(name).name for name in names] or list(CONTRACTS)
        if listing:
            _list_contracts(ops)
        elif mutants:
            _verify_mutants(ops, seed=options["seed"], as_json=options["as_json"])
        elif options["model"]:
            _verify_model(**options)
        else:
            _verify(ops, named=bool(names), **options)
    except (ImportError, ValueError) as error:
        raise click.UsageError(str(error)) from None


def _list_contracts(ops: list[str]):
    from verify.catalogue import CONTRACTS, IMPLEMENTATIONS
    from verify.report import describe

    for op in ops:
        mutants = [mutant.name for mutant in IMPLEMENTATIONS[op].mutants]
        write("\n".join(describe(CONTRACTS[op], mutants)) + "\n\n")


def _verify_mutants(ops: list[str], *, seed: int, as_json: bool):
    from verify.mutation import row, table, trials

    click.echo(f"seed {seed}", err=True)
    found = []
    for op in ops:
        for trial in trials(op, seed=seed):
            found.append(trial)
            if not as_json:
                by, seconds, examples, op, mutant = row(trial).values()
                write(f"{by:11} {seconds:6} s {examples:5} examples  {op}: {mutant}\n")
    if as_json:
        write_json([row(trial) for trial in found])
    else:
        write("\n".join(["", *table(found)]) + "\n")
    killed = sum(trial.killed for trial in found)
    click.echo(f"{killed} of {len(found)} mutants killed", err=True)
    if killed < len(found):
        sys.exit(1)


def _verify(ops: list[str], *, named: bool, **options: Any):
    from verify.campaign import Campaign, again, choices, run, run_side_by_side
    from verify.catalogue import CONTRACTS
    from verify.report import as_json, as_junit

    candidate, replay, as_json_text = options["candidate"], options["replay"], options["as_json"]
    names = ("device", "python", "examples", "seed", "seconds", "timeout", "shapes", "dtypes")
    campaign = Campaign(
        **{name: options[name] for name in names},
        arrays=options["arrays"] or "jax",
        only=choices(options["narrowed"]),
        folder=Path(options["replays"]),
    )
    jobs = [] if replay else _verify_jobs(ops, candidate, named=named)
    at_once = 1 if candidate else min(len(jobs), len(os.sched_getaffinity(0)), 4)
    if not replay:
        click.echo(f"seed {campaign.seed}", err=True)
    reports = []
    with _verify_progress(len(jobs) if at_once > 1 else campaign.examples) as (progress, aside):
        if replay:
            told = iter([again(Path(replay), campaign, candidate=candidate, arrays=options["arrays"])])
        elif at_once > 1:
            told = run_side_by_side(jobs, campaign, at_once=at_once, progress=progress)
        else:
            told = run(jobs, campaign, progress=progress)
        walks = () if named or candidate or replay else _walk_random_models(campaign)
        for report, lines in itertools.chain(told, walks):
            reports.append(report)
            if not as_json_text:
                with aside():
                    write("\n".join(lines) + "\n")
    if as_json_text:
        write_json(as_json(reports))
    if options["junit"]:
        Path(options["junit"]).write_text(as_junit(reports, CONTRACTS), encoding="utf-8")
    wrong = ("violated", "suspicious") if options["strict"] else ("violated",)
    if any(report.outcome in wrong for report in reports):
        sys.exit(1)


def _verify_jobs(ops: list[str], candidate: str | None, *, named: bool) -> list[Job]:
    """A job for each op and what is verified of it: the candidate, or else all that this package has."""
    from verify.campaign import Job

    if candidate and ":" in candidate:
        if len(ops) > 1:
            raise ValueError("--candidate is one function: name the op that it is, or the module alone for several")
        return [Job(ops[0], candidate)]
    if candidate:
        if not named:
            raise ValueError("--candidate is a module: name the ops that it has")
        return [Job(op, f"{candidate}:{op}") for op in ops]

    from model.candidates.table import CANDIDATES
    from verify.catalogue import IMPLEMENTATIONS

    patient: dict[str, Any] = {"shapes": 4, "timeout": 600.0}  # what is interpreted takes seconds for a new shape
    jobs = []
    for op in ops:
        jobs += [
            Job(op, c.function, dtypes=c.dtypes, only=c.only, share=1 / 4, **(patient if c.kernel else {}))
            for c in CANDIDATES
            if c.op == op
        ]
        if not any(job.op == op for job in jobs):
            right = IMPLEMENTATIONS[op]
            jobs.append(Job(op, right.name, arrays="numpy", only=right.only, share=1 / 4))
    return jobs


def _verify_model(*, model: str, kernels: str, dtypes: tuple[str, ...], seed: int, as_json: bool, **_: Any):
    """Each op of a model beside its definition, on a prompt of random tokens and two more after it."""
    from model.checkpoints.open import open_checkpoint
    from model.running.jax_backend import choose_ops
    from verify.report import counterexample
    from verify.walk import table

    checkpoint = open_checkpoint(model)
    click.echo(f"seed {seed}", err=True)
    wrong = False
    for dtype in dtypes:
        steps, report = _walk(checkpoint, choose_ops(kernels), dtype, seed, name=f"{kernels} kernels")
        wrong = wrong or report.outcome == "violated"
        if as_json:
            write_json([step._asdict() for step in steps])
        else:
            write("\n".join([*table(steps), *counterexample(report, None)]) + "\n")
    if wrong:
        sys.exit(1)


def _walk_random_models(campaign: Campaign) -> Iterator[tuple[Report, list[str]]]:
    """Every op of small models, plain, as a CPU has it, and by kernels, in each dtype that models run in."""
    prepare_jax()
    from model.candidates.kernels import OPS, runnable
    from model.checkpoints.checkpoint import Checkpoint, Tensor, tensor_shapes
    from model.ops.cpu import CPU
    from model.ops.xla import XLA
    from verify.report import counterexample
    from verify.walk import CONFIGS, KERNELS, weights

    tables = {"xla": (XLA, nullcontext), "cpu": (CPU, nullcontext), "our": (OPS, runnable)}
    models = [(config, name, kernels) for name, config in CONFIGS.items() for kernels in ("xla", "cpu")]
    for config, name, kernels in [*models, (KERNELS, "heads of 64", "our")]:
        ops, context = tables[kernels]
        arrays = weights(tensor_shapes(config), seed=campaign.seed)
        tensors = {tensor: Tensor(a.shape, a.dtype, lambda a=a: a) for tensor, a in arrays.items()}
        checkpoint = Checkpoint("random", "memory", config, tensors, bos=None, stops=frozenset())
        for dtype in campaign.dtypes:
            if dtype != "float16":
                with context():
                    _, report = _walk(checkpoint, ops, dtype, campaign.seed, name=f"{kernels} kernels, {name}")
                yield report, counterexample(report, None)


def _walk(checkpoint: Checkpoint, ops: Ops, dtype: str, seed: int, *, name: str) -> tuple[list[Step], Report]:
    from time import monotonic

    prepare_jax()
    import numpy as np

    from verify.precision import precision
    from verify.walk import report, walk

    start, config, wanted = monotonic(), checkpoint.config, precision(dtype)
    prompt = min(24, config.context - 2)
    tokens = np.random.default_rng(seed).integers(0, config.vocab, prompt + 2).astype(np.int32)
    chunks = [tokens[:prompt], tokens[prompt:-1], tokens[-1:]]
    model, exact = _walkable(checkpoint, ops, wanted.dtype, len(tokens))
    steps = []
    with progress_bar() as progress:
        for step in walk(model, exact, chunks, config=config, unit=wanted.unit):
            steps.append(step)
            progress(step.name, (step.layer or 0) / config.layers)
    return steps, report(steps, candidate=name, dtype=dtype, seed=seed, seconds=monotonic() - start)


def _walkable(checkpoint: Checkpoint, table: Ops, dtype: np.dtype, rows: int) -> tuple[WalkedModel, Params]:
    """What `verify.walk` is handed: the model as it runs, and for the reference the weights that it holds."""
    import inspect
    from dataclasses import replace

    import jax
    import numpy as np

    from model.cache import empty_cache
    from model.ops.table import Ops, Positions
    from model.running.reference_backend import load_reference_params
    from model.weights.params import load_params
    from verify.walk import Model

    params = load_params(checkpoint, dtype=dtype, positions=rows)
    held = {
        name: tensor._replace(read=lambda tensor=tensor: tensor.read().astype(dtype))
        for name, tensor in checkpoint.tensors.items()
    }

    def compiled(op: Callable) -> Callable:
        parameters = inspect.signature(op).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        return jax.jit(op, static_argnames=[n for n in ("config", "window") if takes_any or n in parameters])

    def positions(at: np.ndarray) -> Positions:
        return Positions(*map(jax.device_put, (at, *(np.asarray(table)[at] for table in params.rope))))

    def cache(capacity: int) -> list[Any]:
        return list(empty_cache(checkpoint.config, batch=1, capacity=capacity, dtype=dtype).layers)

    ops = Ops(*map(compiled, table))
    return Model(params, ops, cache, positions, jax.device_put), load_reference_params(
        replace(checkpoint, tensors=held)
    )


@contextmanager
def _verify_progress(examples: int) -> Iterator[tuple[Callable[[str], Callable[[int], object]], Callable]]:
    """Bars on stderr, one after the other, and what takes them aside while something is printed.

    Nothing where nobody looks.
    """
    if not sys.stderr.isatty():
        yield lambda stage: lambda done: None, nullcontext
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=examples)

        def begin(stage: str) -> Callable[[int], object]:
            bar.reset(task, description=stage, total=examples)
            return lambda done: bar.update(task, completed=done)

        @contextmanager
        def aside():
            bar.stop()
            yield
            bar.start()

        yield begin, aside
