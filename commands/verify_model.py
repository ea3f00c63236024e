"""`verify --model`, and the small random models that `verify` checks without a candidate."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from llamaspec.commands.loading import open_model, prepare_jax
from llamaspec.commands.output import write, write_json
from llamaspec.commands.progress import progress_bar

if TYPE_CHECKING:
    from llamaspec.model.candidates.walking import OpsFor
    from llamaspec.model.checkpoints.checkpoint import Checkpoint
    from llamaspec.model.ops.table import Ops
    from llamaspec.verify.campaign import Campaign
    from llamaspec.verify.judging.runner import Report
    from llamaspec.verify.judging.walk import OpError


def verify_model(
    *, model: str, adapter: str | None, kernels: str, dtypes: tuple[str, ...], seed: int, as_json: bool, devices: int,
    parallel: str, **_: Any,
):  # fmt: skip
    """Check each op of a model against the reference, on a prompt of random tokens and two decode steps."""
    from llamaspec.model.candidates.walking import chosen_ops
    from llamaspec.verify.judging.walk import table
    from llamaspec.verify.reports.report import counterexample

    checkpoint = open_model(model, adapter)
    click.echo(f"seed {seed}", err=True)
    wrong = False

    for dtype in dtypes or ("float32",):
        how: dict[str, Any] = {"name": f"{kernels} kernels", "devices": devices, "parallel": parallel}
        steps, report = _walk(checkpoint, chosen_ops(kernels), dtype, seed, **how)
        wrong = wrong or report.outcome == "violated"
        if as_json:
            write_json([step._asdict() for step in steps])
        else:
            write("\n".join([*table(steps), *counterexample(report, None)]) + "\n")
    if wrong:
        sys.exit(1)


def walk_random_models(campaign: Campaign) -> Iterator[tuple[Report, list[str]]]:
    """Check small random models in each dtype: with XLA's ops, with XLA's ops for CPUs, and with our kernels.

    Yields the report on each model, and the lines that describe its counterexample.
    """
    prepare_jax()
    from llamaspec.model.candidates.walking import random_checkpoint, tables
    from llamaspec.model.tensors import tensor_shapes
    from llamaspec.verify.judging.walk import BEYOND, CONFIGS, KERNELS, weights
    from llamaspec.verify.reports.report import counterexample

    models = [(config, name, kernels) for name, config in (CONFIGS | BEYOND).items() for kernels in ("xla", "cpu")]
    for config, name, kernels in [*models, (KERNELS, "heads of 64", "our")]:
        table = tables()[kernels]
        checkpoint = random_checkpoint(config, weights(tensor_shapes(config), seed=campaign.seed))
        for dtype in campaign.dtypes:
            if dtype != "float16":
                with table.context():
                    _, report = _walk(checkpoint, table.ops, dtype, campaign.seed, name=f"{kernels} kernels, {name}")
                yield report, counterexample(report, None)


def _walk(
    checkpoint: Checkpoint, ops: Ops | OpsFor, dtype: str, seed: int, *, name: str, devices: int = 1,
    parallel: str = "tensor",
) -> tuple[list[OpError], Report]:  # fmt: skip
    prepare_jax()
    from llamaspec.model.candidates.walking import walkable
    from llamaspec.verify.bounds.precision import precision
    from llamaspec.verify.judging.walk import prompt, walk_through

    config = checkpoint.config
    rows = sum(map(len, prompt(config, seed=seed)))
    sizes: dict[str, Any] = {"dtype": precision(dtype).dtype, "rows": rows}
    if devices > 1:
        from llamaspec.model.parallel.sharding import sharding_named
        from llamaspec.model.parallel.walking import walkable_on

        model = walkable_on(checkpoint, ops, devices=devices, sharding=sharding_named(parallel), **sizes)
    else:
        model = walkable(checkpoint, ops, **sizes)
    with progress_bar() as progress:
        return walk_through(model, config=config, dtype=dtype, seed=seed, name=name, progress=progress)
