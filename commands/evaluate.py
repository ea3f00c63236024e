"""`eval`: how well a model predicts a text."""

from __future__ import annotations

import shlex
from os.path import isfile
from typing import Any

import click

from llamaspec.commands.loading import open_with_tokenizer, prepare_jax
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
@click.option("--text", metavar="FILE", help="Let MODEL predict this UTF-8 text, token by token.")
@click.option(
    "--against",
    type=MODEL,
    metavar="MODEL2",
    help="Also print how far MODEL's predictions are from MODEL2's (KL divergence). Both need the same vocabulary.",
)
@click.option(
    "--by-tensor",
    is_flag=True,
    help="With --against: exchange one differing tensor at a time, and print the KL divergence that it causes.",
)
@click.option("--stride", type=int, metavar="N", help="Move the window by N tokens.  [default: half of the context]")
@combined(tokenizer_option, running_options, processes_options, emulate_option, json_option)
def evaluate(
    model: str,
    text: str | None,
    against: str | None,
    by_tensor: bool,
    stride: int | None,
    tokenizer: str | None,
    adapter: str | None,
    as_json: bool,
    **options: Any,
):
    """Measure how well a model predicts a text.

    Prints perplexity and bits per byte. Reads the text in windows of --context tokens, and scores each
    token once. --against MODEL2 also prints the KL divergence between the predictions of the two models.
    This measures, for example, what a quantization scheme costs. MODEL2 runs without --adapter,
    --quantize, --cache and --emulate-activations.

    \b
    llamaspec eval Llama-3.2-1B --text wiki.txt
    llamaspec eval Llama-3.2-1B --quantize q4 --against Llama-3.2-1B --text wiki.txt --by-tensor
    """
    if text is None:
        hint = f"; if {model} is the text: llamaspec eval --text {shlex.quote(model)}" if isfile(model) else ""
        raise click.UsageError(f"eval needs the text that the model predicts: --text FILE{hint}")
    if by_tensor and not against:
        raise click.UsageError("--by-tensor needs --against MODEL2")
    from llamaspec.model.checkpoints.codes import quantized
    from llamaspec.model.insight import evaluation
    from llamaspec.model.insight.evaluation_by_tensor import check_alike, compare_by_tensor, decoded
    from llamaspec.model.insight.evaluation_report import as_json as report_of
    from llamaspec.model.insight.evaluation_report import as_text
    from llamaspec.model.options import RunOptions, choose_context

    checkpoint, _ = open_with_tokenizer(model, tokenizer, adapter)
    base = open_with_tokenizer(against, tokenizer)[0] if against else None
    models = [checkpoint, *([base] if base else [])]
    read = evaluation.text_for(models, text, tokenizer=tokenizer)
    options["context"] = min(choose_context(options["context"], entry.config.context) for entry in models)
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
            base_running = load_backend(base, RunOptions(own_process=True, **options | plain), progress=progress)
            if by_tensor:
                run = quantized(checkpoint, quantize) if quantize else checkpoint
                evaluated, costs = compare_by_tensor(
                    running, base_running, run, base, read, progress=progress, **windows
                )
            else:
                evaluated = evaluation.compare(running, base_running, read, progress=progress, **windows)
        else:
            evaluated = evaluation.evaluate(running, read, progress=progress, **windows)
    request = {"model": model, "text": text, "against": against, "adapter": adapter, **options, **windows}
    report = report_of(evaluated, costs, **request)
    if as_json:
        write_json(report)
    else:
        write(as_text(report))
