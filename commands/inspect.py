"""`inspect`: what is in a checkpoint, and what running it would take."""

from __future__ import annotations

import sys
from typing import Any

import click

from commands.options import BUILT_IN, SCHEMES, Verb, json_option
from commands.output import write, write_json


@click.command(cls=Verb)
@click.argument("model", required=False)
@click.option("--plan", is_flag=True, help="What running it takes, and how fast that can be; nothing is loaded.")
@click.option("--shape", metavar="NAME", help="--plan: a published Llama in the place of MODEL.")
@click.option("--context", type=int, help="--plan: length of a sequence.  [default: the model's, 4096 at most]")
@click.option("--batch", type=click.IntRange(1), default=1, help="--plan: sequences at once.  [default: 1]")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="--plan: of the weights that run.")
@click.option("--quantize", type=click.Choice(SCHEMES), help="--plan: scheme for the matrices.")
@click.option("--cache", type=click.Choice(["int8"]), help="--plan: of keys and values.")
@click.option("--device", metavar="NAME", help="--plan: h200, rtx-4090, …  [default: this machine, measured]")
@json_option
@click.pass_context
def inspect(invocation: click.Context, model: str | None, plan: bool, as_json: bool, **planned: Any):
    """What is in a checkpoint, read from its header: hyperparameters, tensors, and the cost of a token.

    With --plan: memory by part, work for a token, and the tokens a second that a device allows.

    \b
    llamaspec inspect Qwen3-0.6B-Q8_0.gguf --json
    llamaspec inspect Llama-3.2-1B --plan --quantize q4
    llamaspec inspect --plan --shape llama-3.1-8b --device h200 --context 32768 --batch 8
    """
    if plan:
        _plan(model, as_json=as_json, **planned)
        return
    for name in planned:
        if invocation.get_parameter_source(name) != click.core.ParameterSource.DEFAULT:
            raise click.UsageError(f"--{name} goes with --plan")
    from model.checkpoints.open import open_checkpoint
    from model.insight.describe import describe

    description = describe(open_checkpoint(model or BUILT_IN))
    if as_json:
        write_json(description)
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 200)
    for key, value in description.items():
        if key == "config":
            for name, number in value.items():
                console.print(f"  {name:20}{number}", highlight=False)
        elif key != "tensors":
            console.print(f"{key:22}{value:,}" if isinstance(value, int) else f"{key:22}{value}", highlight=False)
    table = Table("tensor", "shape", "dtype", "bytes")
    for tensor in description["tensors"]:
        shape = " x ".join(map(str, tensor["shape"]))
        table.add_row(tensor["name"], shape, tensor["dtype"], f"{tensor['bytes']:,}")
    console.print(table)


def _plan(
    model: str | None, *, shape: str | None, device: str | None, context: int | None, batch: int, as_json: bool,
    **chosen: Any,
):  # fmt: skip
    if shape and model:
        raise click.UsageError("give either MODEL or --shape NAME")
    from benchmarks.model_suite import planned
    from model.insight.plan import as_text

    found = planned(model or BUILT_IN, shape=shape, device=device, context=context, batch=batch, **chosen)
    if as_json:
        write_json(found.as_json())
    else:
        write(as_text(found))
