"""`train`: a model from nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from commands.loading import prepare_jax
from commands.options import Verb

if TYPE_CHECKING:
    from training.loop import Progress as TrainingProgress


@click.command(cls=Verb)
@click.option("--out", metavar="DIR", help="Where checkpoints go, and the model at the end, as DIR/model.")
@click.option("--steps", type=int, default=3600, show_default=True)
@click.option("--batch", type=int, default=16, show_default=True, help="Documents a step.")
@click.option("--answers", type=float, default=10.0, show_default=True, help="Importance of answers about stories.")
@click.option("--lr", type=float, default=0.005, show_default=True, help="The highest learning rate.")
@click.option("--dim", type=int, default=128, show_default=True, help="Width of the residual stream.")
@click.option("--layers", type=int, default=10, show_default=True)
@click.option("--heads", type=int, default=4, show_default=True)
@click.option("--kv-heads", type=int, default=2, show_default=True)
@click.option("--head-dim", type=int, default=32, show_default=True)
@click.option("--ffn", type=int, default=256, show_default=True, help="Width inside the feed-forward layers.")
@click.option("--context", type=int, default=1024, show_default=True, help="Tokens at most in a document.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same documents and beginning.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Of the computation; the weights that are trained are float32.",
)
@click.option("--remat", is_flag=True, help="Compute again what the gradient needs: less memory, more time.")
@click.option("--eval-every", type=int, default=400, show_default=True, help="Steps between evaluations.")
@click.option("--save-every", type=int, default=100, show_default=True, help="Steps between checkpoints.")
@click.option("--resume", is_flag=True, help="Go on from DIR's last checkpoint.")
@click.option("--text", metavar="FILE", help="Train on the paragraphs of FILE, instead of the built-in stories.")
@click.option("--tokenizer", help="With --text: tokenizer file or directory.  [default: the stories' own]")
@click.option("--evaluate", metavar="MODEL", help="Only evaluate this model, on held-out documents.")
def train(out: str | None, evaluate: str | None, text: str | None, tokenizer: str | None, **options: Any):
    """Train a model from nothing, on stories that it writes itself or on a text.

    The defaults make the built-in model. Checkpoints are written as it goes; a run that was killed
    ends, with --resume, with the same weights.
    """
    if (out is None) == (evaluate is None):
        raise click.UsageError("give either --out DIR or --evaluate MODEL")
    if tokenizer and not text:
        raise click.UsageError("--tokenizer goes with --text")
    prepare_jax()
    try:
        from training import loop as train_loop
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is missing: pip install 'llamaspec[train]'") from None
    from reference.config import Config

    stories = train_loop.Stories()
    source = stories
    if text:
        from model.tokenizers.load import load_tokenizer

        spelt = load_tokenizer(tokenizer) if tokenizer else stories.tokenizer
        files = train_loop.companions(tokenizer) if tokenizer else stories.files
        source = train_loop.Text(text, spelt, files, context=options["context"])
    if evaluate:
        click.echo(train_loop.evaluate_model(evaluate, source))
        return
    shape = {name: options.pop(name) for name in ("dim", "layers", "heads", "kv_heads", "head_dim", "ffn", "context")}
    running = {name: options.pop(name) for name in ("resume", "eval_every", "save_every")}
    config = Config(**shape, vocab=source.tokenizer.vocab, eps=1e-5, theta=10_000.0, tied=True)
    recipe = train_loop.Recipe(config=config, **options)
    assert out is not None
    with _training_progress(recipe.steps) as report:
        directory = train_loop.train(recipe, source, out, report=report, **running)
    click.echo(f"{directory}: {train_loop.parameters(config):,} parameters", err=True)


@contextmanager
def _training_progress(steps: int) -> Iterator[Callable[[TrainingProgress], object]]:
    """A bar on stderr with loss and tokens/s; where nobody looks, a line now and then. Evaluations are lines."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    terminal = sys.stderr.isatty()
    told = 0.0

    def line(progress: TrainingProgress) -> str:
        return f"step {progress.step}  loss {progress.loss:.4f}  {progress.rate:,.0f} tokens/s"

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not terminal) as bar:
        task = bar.add_task("compiling", total=steps)

        def report(progress: TrainingProgress):
            nonlocal told
            bar.update(task, description=line(progress), completed=progress.step)
            if progress.evaluation:
                bar.console.print(f"{line(progress)}  {progress.seconds:.0f} s  {progress.evaluation}", highlight=False)
            elif not terminal and progress.seconds > told + 30:
                told = progress.seconds
                click.echo(f"{line(progress)}  {progress.seconds:.0f} s", err=True)

        yield report
