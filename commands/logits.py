"""`logits`: what a model predicts after each token, as a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from commands.loading import parse_ids, prepare_jax
from commands.options import Verb, combined, emulate_option, model_option, running_options, tokenizer_option
from commands.progress import progress_bar

if TYPE_CHECKING:
    pass


@click.command(cls=Verb)
@click.option("--tokens", "ids", metavar="IDS", help="Comma-separated ids, taken exactly.")
@click.option("--prompt", metavar="TEXT", help="A text, with BOS where the model's convention has it.")
@click.option("--out", required=True, metavar="FILE.npy", help="Where the array goes, replacing what is there.")
@combined(model_option, tokenizer_option, running_options, emulate_option)
def logits(ids: str | None, prompt: str | None, out: str, model: str, tokenizer: str | None, **options: Any):
    """Write what the model predicts after each token.

    A NumPy file, [seq, vocab] in float32 (float64 from the reference).
    """
    if (ids is None) == (prompt is None):
        raise click.UsageError("give either --tokens IDS or --prompt TEXT")
    import numpy as np

    from model.checkpoints.open import open_checkpoint
    from model.checkpoints.staging import new_file
    from model.options import check_length, choose_context
    from model.tokenizers.of_model import tokenizer_of
    from model.tokenizers.tokenizer import encode_text

    checkpoint = open_checkpoint(model)
    if ids is not None:
        sequence = parse_ids(ids, checkpoint.config.vocab)
    else:
        assert prompt is not None
        sequence = encode_text(tokenizer_of(checkpoint, tokenizer), prompt)
    check_length(sequence, choose_context(options["context"], checkpoint.config.context))
    with new_file(out, replace=True) as staged:
        prepare_jax()
        from model.llama import load_backend

        with progress_bar() as progress:
            backend = load_backend(checkpoint, own_process=True, progress=progress, **options)
        rows = backend.logits(sequence)
        with open(staged, "wb") as file:
            np.save(file, rows)
    click.echo(f"{out}: {rows.shape[0]} x {rows.shape[1]} {rows.dtype}", err=True)
