"""`train`: a model from random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from llamaspec.commands.loading import prepare_jax
from llamaspec.commands.options import COUNT, POSITIVE, Verb, devices_of_processes_option, processes_options
from llamaspec.commands.output import say
from llamaspec.commands.progress import progress_bar, training_progress

if TYPE_CHECKING:
    from llamaspec.training.data import Source


@click.command(cls=Verb)
@click.option("--out", metavar="DIR", help="Write checkpoints to DIR, and the model to DIR/model at the end.")
@click.option("--steps", type=COUNT, default=8000, show_default=True, metavar="N", help="Stop after N steps.")
@click.option("--batch", type=COUNT, default=16, show_default=True, metavar="N", help="Train on N documents per step.")
@click.option(
    "--answers",
    type=POSITIVE,
    default=10.0,
    show_default=True,
    help="Weight of answers about stories in the loss. Other text has weight 1.",
)
@click.option("--lr", type=POSITIVE, default=0.005, show_default=True, help="Set the highest learning rate.")
@click.option("--dim", type=COUNT, default=128, show_default=True, help="Set the width of the residual stream.")
@click.option("--layers", type=COUNT, default=10, show_default=True, help="Set the number of layers.")
@click.option("--heads", type=COUNT, default=4, show_default=True, help="Set the number of query heads per layer.")
@click.option(
    "--kv-heads", type=COUNT, default=2, show_default=True, help="Set the number of key and value heads per layer."
)
@click.option("--head-dim", type=COUNT, default=32, show_default=True, help="Set the width of a head.")
@click.option("--ffn", type=COUNT, default=256, show_default=True, help="Set the width inside the feed-forward layers.")
@click.option(
    "--context",
    type=click.IntRange(2),
    default=1024,
    show_default=True,
    metavar="N",
    help="Cut each document after N tokens.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Set the seed that decides the documents and the initial weights.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Compute in this dtype. The trained weights stay in float32.",
)
@click.option(
    "--remat",
    is_flag=True,
    help="Recompute activations for the gradient instead of storing them: less memory, more time.",
)
@click.option("--eval-every", type=COUNT, default=400, show_default=True, metavar="N", help="Evaluate every N steps.")
@click.option(
    "--save-every", type=COUNT, default=100, show_default=True, metavar="N", help="Write a checkpoint every N steps."
)
@devices_of_processes_option
@processes_options
@click.option("--fsdp", is_flag=True, help="With --devices: also shard weights and optimizer state.")
@click.option("--resume", is_flag=True, help="Continue from the last checkpoint in DIR.")
@click.option("--text", metavar="FILE", help="Train on the paragraphs of FILE, instead of the built-in stories.")
@click.option(
    "--tokenizer",
    help="With --text: use the tokenizer in this file or directory.  [default: the tokenizer of the built-in model]",
)
@click.option("--evaluate", metavar="MODEL", help="Do not train; only evaluate MODEL on held-out documents.")
def train(out: str | None, evaluate: str | None, text: str | None, tokenizer: str | None, **options: Any):
    """Train a model from scratch, on your text or on generated stories.

    A grammar writes the stories. The defaults train the built-in model, in three to four hours on two cores or in
    minutes on a GPU. Training writes checkpoints. After a crash, --resume continues and ends with the same weights.
    With several processes, all of them must be able to read DIR.

    \b
    llamaspec train --out run
    llamaspec train --out run --text book.txt --steps 500
    """
    if (out is None) == (evaluate is None):
        raise click.UsageError("give either --out DIR or --evaluate MODEL")
    if tokenizer and not text:
        raise click.UsageError("--tokenizer needs --text FILE")
    if options["fsdp"] and options["devices"] == 1:
        raise click.UsageError("--fsdp needs --devices 2 or more")
    prepare_jax()
    with progress_bar():
        from llamaspec.model.tensors import weight_count
        from llamaspec.training.evaluation import evaluate_model
        from llamaspec.training.recipe import Recipe
        from llamaspec.training.scratch import train as train_model

        source = _source(text, tokenizer, context=options["context"])
        vocab = source.tokenizer.vocab  # for the stories, this line trains the tokenizer in a few seconds
    from llamaspec.reference.config import Config

    if source.eos is None:
        say("the tokenizer has no token that ends a text, so the model will not learn where a text ends")
    if evaluate:
        with progress_bar() as progress:
            evaluation = evaluate_model(evaluate, source, progress=progress)
        click.echo(evaluation)
        return
    shape = {name: options.pop(name) for name in ("dim", "layers", "heads", "kv_heads", "head_dim", "ffn", "context")}
    running = {name: options.pop(name) for name in ("resume", "eval_every", "save_every", "devices", "fsdp")}
    config = Config(**shape, vocab=vocab, eps=1e-5, theta=10_000.0, tied=True)
    recipe = Recipe(config=config, **options)
    assert out is not None
    import jax

    if jax.process_index():  # only the first process reports
        train_model(recipe, source, out, **running)
        return
    with training_progress(recipe.steps) as report:
        directory = train_model(recipe, source, out, report=report, **running)
    say(f"wrote a model of {weight_count(config):,} parameters to {directory}")


def _source(text: str | None, tokenizer: str | None, *, context: int) -> Source:
    """Open the training data: the paragraphs of the file `text`, or the built-in stories if no file is given."""
    from llamaspec.training.data import Text, files_beside
    from llamaspec.training.stories.source import Stories

    stories = Stories()
    if not text:
        return stories
    from llamaspec.model.tokenizers.load import load_tokenizer

    vocabulary = load_tokenizer(tokenizer) if tokenizer else stories.tokenizer
    files = files_beside(tokenizer) if tokenizer else stories.files
    return Text(text, vocabulary, files, context=context)
