"""`doctor`: a description of this machine, or a diagnosis of a checkpoint."""

from __future__ import annotations

import sys

import click

from llamaspec.commands.loading import prepare_jax
from llamaspec.commands.options import FILE, MODEL, Verb, combined, json_option, tokenizer_option
from llamaspec.commands.output import write, write_json, write_rows
from llamaspec.commands.progress import progress_bar


@click.command(cls=Verb)
@click.argument("model", type=MODEL, required=False)
@click.option(
    "--text", type=FILE, metavar="FILE", help="Measure how well MODEL predicts this text.  [default: a short story]"
)
@combined(tokenizer_option, json_option)
def doctor(model: str | None, text: str | None, tokenizer: str | None, as_json: bool):
    """Diagnose MODEL, or describe this machine and the ops that it runs.

    Without MODEL, it describes this machine and ends with a verdict.

    With MODEL, it reads every weight, opens the tokenizer and renders the chat template. Then it measures
    how well the model predicts a text: first unchanged, then with each repair that wrong conversions
    often need, such as the other pairing of RoPE in q and k, norms minus 1, or another theta, eps or head.
    It reports a repair that makes the text a billion times as likely. Each fault comes with its
    measurement and its repair. The model runs in float64, layer by layer, so large models take minutes.
    The exit status is 1 if a fault was found.

    \b
    llamaspec doctor
    llamaspec doctor Llama-3.2-1B-Instruct
    llamaspec doctor model.gguf --text wiki.txt
    """
    if not model and (text or tokenizer):
        raise click.UsageError("--text and --tokenizer need a MODEL")
    prepare_jax()
    if model:
        from llamaspec.model.insight.checkup import as_text, check_up
        from llamaspec.model.insight.doctor import plain_ops

        with progress_bar() as progress:
            checkup = check_up(model, tokenizer=tokenizer, text=text, progress=progress)
        plain = plain_ops(model)
        if as_json:
            write_json(checkup.as_json())
        else:
            write(as_text(checkup))
            if plain:
                write_rows("plain ops on this GPU", *(f"  {op:14}  {reason}" for op, reason in plain.items()))
        sys.exit(bool(checkup.faults))
    with progress_bar() as progress:
        from llamaspec.model.insight.doctor import examine

        report = examine(progress=progress)
    if as_json:
        write_json(report)
        return
    for section, entries in report.items():
        write_rows(section, *(f"  {name:14}  {value}" for name, value in entries.items()))
