"""`profile`: the time that each part of a model takes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import click

from llamaspec.commands.loading import prepare_jax
from llamaspec.commands.options import COUNT, MODEL, Verb, default_model, json_option, kernels_option, quantize_option
from llamaspec.commands.output import write, write_json
from llamaspec.commands.progress import progress_bar


@click.command(cls=Verb)
@click.argument("model", type=MODEL, required=False)
@click.option("--shape", metavar="NAME", help="Use random weights in the shape of a published Llama instead of MODEL.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Compute with weights of this dtype.")
@quantize_option
@click.option("--context", type=COUNT, metavar="N", help="Time a prompt of N tokens, and the decode steps after it.")
@kernels_option
@click.option(
    "--trace",
    "trace_file",
    metavar="FILE",
    help="Write a trace for ui.perfetto.dev to FILE. It is compressed if the name ends with .gz.",
)
@json_option
def profile(model: str | None, trace_file: str | None, as_json: bool, **of: Any):
    """Show the time that each op takes, in a prompt and in a decode step.

    `bench` compares the total with the limits of the machine.

    \b
    llamaspec profile Llama-3.2-1B --quantize q4
    llamaspec profile --shape stories-110m --context 1000 --trace trace.json.gz
    """
    if of["shape"] and model:
        raise click.UsageError("give either MODEL or --shape NAME, not both")
    from llamaspec.model.checkpoints.staging import new_file

    with new_file(trace_file, replace=True) if trace_file else nullcontext() as staged:
        prepare_jax()
        from llamaspec.benchmarks.suites.model_profile import as_text
        from llamaspec.benchmarks.suites.model_suite import profile_model
        from llamaspec.model.insight.profile import save

        with progress_bar() as progress:
            report, trace = profile_model(model=model or default_model(), progress=progress, **of)
        if trace_file and staged:
            save(trace, staged, packed=trace_file.endswith(".gz"))
    if as_json:
        write_json(report)
    else:
        write(as_text(report))
