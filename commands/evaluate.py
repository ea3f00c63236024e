"""`eval`: how well a model predicts a text."""

from __future__ import annotations

from typing import Any

import click

from llamaspec.commands.loading import prepare_jax
from llamaspec.commands.options import (
    BUILT_IN,
    MODEL,
    Verb,
    combined,
    emulate_option,
    json_option,
    processes_options,
    running_options,
    tokenizer_option,
)
from llamaspec.commands.output import write, write_json
from llamaspec.commands.progress import progress_bar


@click.command("eval", cls=Verb)
@click.argument("model", type=MODEL, default=BUILT_IN)
@click.option("--text", required=True, metavar="FILE", help="Predict this text, token by token; UTF-8.")
@click.option(
    "--against",
    type=MODEL,
    metavar="MODEL2",
    help="Give the KL divergence from this model, too; it has the same vocabulary.",
)
@click.option(
    "--by-tensor", is_flag=True, help="With --against: exchange each tensor that differs alone, and give its cost."
)
@click.option("--stride", type=int, help="Move the window by so many tokens.  [default: half of the context]")
@combined(tokenizer_option, running_options, processes_options, emulate_option, json_option)
def evaluate(
    model: str,
    text: str,
    against: str | None,
    by_tensor: bool,
    stride: int | None,
    tokenizer: str | None,
    as_json: bool,
    **options: Any,
):
    """Measure how well a model predicts a text.

    Prints perplexity and bits per byte. The text is read in windows of --context tokens, and each
    token is scored once. With --against MODEL2, which runs without --quantize, --cache and
    --emulate-activations, it also prints how far the predictions of MODEL are from those of MODEL2:
    the cost of a scheme.

    \b
    llamaspec eval Llama-3.2-1B --text wiki.txt
    llamaspec eval Llama-3.2-1B --quantize q4 --against Llama-3.2-1B --text wiki.txt --by-tensor
    """
    if by_tensor and not against:
        raise click.UsageError("--by-tensor goes with --against")
    from llamaspec.model.checkpoints.codes import quantized
    from llamaspec.model.checkpoints.open import open_checkpoint
    from llamaspec.model.insight import evaluation
    from llamaspec.model.insight.evaluation_by_tensor import check_alike, compare_by_tensor, decoded
    from llamaspec.model.insight.evaluation_report import as_json as report_of
    from llamaspec.model.insight.evaluation_report import as_text
    from llamaspec.model.options import RunOptions, choose_context

    checkpoint = open_checkpoint(model)
    base = open_checkpoint(against) if against else None
    models = [checkpoint, *([base] if base else [])]
    read = evaluation.text_for(models, text, tokenizer=tokenizer)
    options["context"] = min(choose_context(options["context"], one.config.context) for one in models)
    windows = {"context": options["context"], "stride": evaluation.choose_stride(stride, options["context"])}
    costs = None
    if base and by_tensor:
        check_alike(base, checkpoint)
        base = decoded(base)
    prepare_jax()
    from llamaspec.model.llama import load_backend

    with progress_bar() as progress:
        running = load_backend(checkpoint, RunOptions(own_process=True, **options), progress=progress)
        if base:
            quantize = options["quantize"]
            plain: dict[str, Any] = {"quantize": None, "cache": None, "emulate_activations": None}
            beside = load_backend(base, RunOptions(own_process=True, **options | plain), progress=progress)
            if by_tensor:
                run = quantized(checkpoint, quantize) if quantize else checkpoint
                evaluated, costs = compare_by_tensor(running, beside, run, base, read, progress=progress, **windows)
            else:
                evaluated = evaluation.compare(running, beside, read, progress=progress, **windows)
        else:
            evaluated = evaluation.evaluate(running, read, progress=progress, **windows)
    request = {"model": model, "text": text, "against": against, **options, **windows}
    report = report_of(evaluated, costs, **request)
    if as_json:
        write_json(report)
    else:
        write(as_text(report))
