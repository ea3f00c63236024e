"""`logits`: a model's predictions after each token, as a file."""

from __future__ import annotations

from typing import Any

import click

from llamaspec.commands.loading import open_to_run, open_with_tokenizer, parse_ids, prepare_jax
from llamaspec.commands.options import (
    Verb,
    combined,
    emulate_option,
    model_option,
    processes_options,
    running_options,
    tokenizer_option,
)
from llamaspec.commands.output import say
from llamaspec.commands.progress import progress_bar


@click.command(cls=Verb)
@click.option("--tokens", "ids", metavar="IDS", help="Run the model on exactly these comma-separated token ids.")
@click.option("--prompt", metavar="TEXT", help="Run the model on this text, with BOS first if the model expects BOS.")
@click.option(
    "--out", required=True, metavar="FILE.npy", help="Write the logits to this file. An existing file is replaced."
)
@combined(model_option, tokenizer_option, running_options, processes_options, emulate_option)
def logits(
    ids: str | None,
    prompt: str | None,
    out: str,
    model: str,
    tokenizer: str | None,
    adapter: str | None,
    **options: Any,
):
    """Write the logits after each token to a NumPy file.

    The array has the shape [seq, vocab]. Its dtype is float32, or float64 with --backend reference.

    \b
    llamaspec logits --prompt "Once upon a time" --out logits.npy
    """
    if (ids is None) == (prompt is None):
        raise click.UsageError("give either --tokens IDS or --prompt TEXT")
    import numpy as np

    from llamaspec.model.checkpoints.staging import new_file
    from llamaspec.model.options import RunOptions, check_length, choose_context
    from llamaspec.model.tokenizers.tokenizer import encode_text

    if ids is not None:
        checkpoint = open_to_run(model, tokenizer, adapter)
        sequence = parse_ids(ids, checkpoint.config.vocab)
    else:
        assert prompt is not None
        checkpoint, vocabulary = open_with_tokenizer(model, tokenizer, adapter)
        sequence = encode_text(vocabulary, prompt)
    check_length(sequence, choose_context(options["context"], checkpoint.config.context))
    with new_file(out, replace=True) as staged:
        prepare_jax()
        from llamaspec.model.llama import load_backend

        with progress_bar() as progress:
            backend = load_backend(checkpoint, RunOptions(own_process=True, **options), progress=progress)
        rows = backend.logits(sequence)
        with open(staged, "wb") as file:
            np.save(file, rows)
    say(f"wrote {rows.shape[0]} x {rows.shape[1]} {rows.dtype} logits to {out}")
